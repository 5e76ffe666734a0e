package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// The gate is the device to which the addresses of agents lead that sleep. What is held there is put on the agent's own
// device when it is awake, and then looks as if the host had made it. So the gate gets only packets whose source is
// the sender's own (GuardGate), and says so by a mark (GateMark).

// GuardGate keeps packets from a gate, a device without a link layer in this network namespace, whose source is one of
// the host's or in a range of agents, and which have not come from there. It holds as long as the device.
func GuardGate(device netlink.Link, agents, agents6 netip.Prefix) error {
	if !agents.Addr().Is4() || !agents6.Addr().Is6() || agents6.Bits() != 64 {
		return fmt.Errorf("%w: ranges of agents: %v, %v", netpolicy.ErrIdentity, agents, agents6)
	}
	spec, err := bpf.LoadAgent()
	if err != nil {
		return fmt.Errorf("reading the eBPF objects: %w", err)
	}
	a4, a6 := agents.Masked().Addr().As4(), agents6.Masked().Addr().As16()
	for name, value := range map[string]any{
		"range4": binary.NativeEndian.Uint32(a4[:]),
		"mask4":  binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-agents.Bits()))),
		"range6": [2]uint32{binary.NativeEndian.Uint32(a6[:]), binary.NativeEndian.Uint32(a6[4:])},
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("preparing the eBPF objects: %w", err)
		}
	}
	var o struct {
		ToGate *ebpf.Program `ebpf:"to_gate"`
	}
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		return fmt.Errorf("loading the gate's eBPF program: %w: %w", ErrKernel, err)
	}
	defer o.ToGate.Close()
	index := device.Attrs().Index
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscReplace(qdisc); err != nil {
		return fmt.Errorf("adding a clsact qdisc to %q: %w", device.Attrs().Name, err)
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: filterPrio,
		},
		Fd: o.ToGate.FD(), Name: filterName, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("adding a filter to %q: %w", device.Attrs().Name, err)
	}
	return nil
}

// GateMark is the mark of a socket (socket(7), SO_MARK) whose frames the programs of agents take for packets that came
// by a guarded gate. It is that of this version's programs, once an agent has them; before that it is os.ErrNotExist.
// Empty is DefaultRoot.
func GateMark(root string) (uint32, error) {
	dir := programsDir(Config{Root: root}.root(), digest())
	text, err := os.Readlink(filepath.Join(dir, pinReady))
	if err != nil {
		return 0, fmt.Errorf("looking for the mark of the gate: %w", err)
	}
	_, word, _ := strings.Cut(text, "/")
	answers, err := strconv.ParseUint(word, 10, 32)
	if err != nil || answers == 0 {
		return 0, fmt.Errorf("looking for the mark of the gate: %w", errors.Join(err, os.ErrNotExist))
	}
	return ^uint32(answers), nil
}
