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

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// The addresses of sleeping endpoints are routed to the packet waker's device. The packet waker holds packets there and
// puts them on the endpoint's own device once it is awake, as if the host had made them. So the device takes only
// packets whose source is the sender's own (GuardWaker), and the packet waker marks its packets (WakerMark).

// GuardWaker guards the packet waker's device, which has no link layer and is in this network namespace. The guard
// drops packets whose source is one of the host's addresses or in a range of endpoints, but which did not come
// from there. It lasts as long as the device.
func GuardWaker(device netlink.Link, endpoints, endpoints6 netip.Prefix) error {
	if !endpoints.Addr().Is4() || !endpoints6.Addr().Is6() || endpoints6.Bits() != 64 {
		return fmt.Errorf("%w: ranges of endpoints: %v, %v", netpolicy.ErrIdentity, endpoints, endpoints6)
	}
	spec, err := bpf.LoadEndpoint()
	if err != nil {
		return fmt.Errorf("reading the eBPF objects: %w", err)
	}
	a4, a6 := endpoints.Masked().Addr().As4(), endpoints6.Masked().Addr().As16()
	for name, value := range map[string]any{
		"range4": binary.NativeEndian.Uint32(a4[:]),
		"mask4":  binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-endpoints.Bits()))),
		"range6": [2]uint32{binary.NativeEndian.Uint32(a6[:]), binary.NativeEndian.Uint32(a6[4:])},
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("preparing the eBPF objects: %w", err)
		}
	}
	var o struct {
		ToWaker *ebpf.Program `ebpf:"to_waker"`
	}
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		return fmt.Errorf("loading the packet waker's eBPF program: %w: %w", ErrKernel, err)
	}
	defer o.ToWaker.Close()
	return addFilters(device, map[uint32]*ebpf.Program{netlink.HANDLE_MIN_EGRESS: o.ToWaker})
}

// WakerMark returns the mark of a socket (socket(7), SO_MARK) whose frames the programs of endpoints accept as
// packets that came by a guarded packet waker's device. It is the mark of this version's programs. WakerMark fails
// with os.ErrNotExist until an endpoint or Preload has loaded them. An empty root is DefaultRoot.
func WakerMark(root string) (uint32, error) {
	dir := programsDir(Config{Root: root}.root(), digest())
	text, err := os.Readlink(filepath.Join(dir, pinReady))
	if err != nil {
		return 0, fmt.Errorf("looking for the mark of the packet waker: %w", err)
	}
	_, word, _ := strings.Cut(text, "/")
	answers, err := strconv.ParseUint(word, 10, 32)
	if err != nil || answers == 0 {
		return 0, fmt.Errorf("looking for the mark of the packet waker: %w", errors.Join(err, os.ErrNotExist))
	}
	return ^uint32(answers), nil
}
