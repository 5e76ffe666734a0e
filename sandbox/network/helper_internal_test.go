package network

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// What the test's program is started as: root's helper, and a user with a VM.
const (
	asHelper = "helper"
	asUser   = "user"
	userID   = 1000
)

// unitRights are those of contrib/systemd/drowse-net.service.
var unitRights = []int{unix.CAP_NET_ADMIN, unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_BIND_SERVICE}

// keepUnitRights starts this program again with those rights alone.
func keepUnitRights() error {
	if os.Getenv("DROWSE_TEST_RIGHTS") != "" {
		return nil
	}
	runtime.LockOSThread()
	for c := range unix.CAP_LAST_CAP + 1 {
		if !slices.Contains(unitRights, c) {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
				return err
			}
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, append(os.Environ(), "DROWSE_TEST_RIGHTS=few"))
}

func helpUntilKilled(socket string) error {
	if err := keepUnitRights(); err != nil {
		return err
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&head, &caps[0]); err != nil || caps[0].Effective&(1<<unix.CAP_SYS_ADMIN|1<<unix.CAP_DAC_OVERRIDE|1<<unix.CAP_SETUID) != 0 {
		return fmt.Errorf("it has the rights %#x: %w", caps, err)
	}
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	most, err := Maximum("/nonexistent")
	if err != nil {
		return err
	}
	h := &Helper{Maximum: most}
	return h.Serve(context.Background(), ln, func() { fmt.Println("ready") })
}

// userDid is an answer of a user's process.
type userDid struct {
	TAP      string
	Address  netip.Addr
	Received string // where a packet came from; empty if none came
	Flows    []netpolicy.FlowRecord
	Events   int
	Egress   uint64
	Err      string
}

// actAsUser has the network of a VM, and does what the lines say.
func actAsUser(in io.Reader, out io.Writer) error {
	if os.Geteuid() != userID {
		return fmt.Errorf("this is user %d", os.Geteuid())
	}
	n, err := New(Config{Name: "a", ID: spec.NewID()})
	if err != nil {
		return err
	}
	answer := json.NewEncoder(out)
	if err := n.Wait(context.Background()); err != nil {
		return errors.Join(err, n.Close())
	}
	if err := answer.Encode(userDid{TAP: n.Info().TAP, Address: n.Info().Address}); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var did userDid
		what, rest, _ := strings.Cut(lines.Text(), " ")
		switch what {
		case "policy":
			p, err := netpolicy.Parse([]byte(rest))
			if err == nil {
				err = n.SetPolicy(p)
			}
			if err != nil {
				did.Err = err.Error()
			}
		case "send": // FROM TO
			from, to, _ := strings.Cut(rest, " ")
			did.Received = deliver(n, netip.MustParseAddr(from), netip.MustParseAddrPort(to))
		case "look":
			err := n.Flows(context.Background(), false, func(r []netpolicy.FlowRecord) error {
				did.Flows = append(did.Flows, r...)
				return nil
			})
			st, err2 := n.Stats()
			if err = errors.Join(err, err2); err != nil {
				did.Err = err.Error()
			}
			recent, _, _ := n.RecentEvents(false)
			did.Events, did.Egress = len(recent), st.Egress.Bytes
		case "rights":
			did.Err = mischief(n).Error()
		}
		if err := answer.Encode(did); err != nil {
			return err
		}
	}
	return n.Close()
}

// mischief does to its own device what the kernel lets the holder of a descriptor do.
func mischief(n *Network) error {
	if err := unix.IoctlSetInt(n.tap.FD(), unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("persist: %w", err)
	}
	nl, err := netlink.LinkByName(n.tapName())
	if err != nil {
		return err
	}
	if err := netlink.LinkSetDown(nl); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("a user may change the device: %w", err)
	}
	return errors.New("none")
}

// deliver sends a datagram by the TAP device, as the guest does, and returns where it came from at a socket of the
// host.
func deliver(n *Network, from netip.Addr, to netip.AddrPort) string {
	pc, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(to))
	if err != nil {
		return err.Error()
	}
	defer pc.Close()
	if _, err := unix.Write(n.TAP().FD(), datagram(from, to)); err != nil {
		return err.Error()
	}
	// What passes does so within the write. What does not never comes.
	_ = pc.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	b := make([]byte, 64)
	_, at, err := pc.ReadFromUDPAddrPort(b)
	if err != nil {
		return ""
	}
	return at.Addr().String()
}

// datagram is a frame of the guest, with the header of virtio.
func datagram(from netip.Addr, to netip.AddrPort) []byte {
	const virtio, eth, ip, udp = 12, 14, 20, 8
	f := make([]byte, virtio+eth+ip+udp+5)
	e := f[virtio:]
	copy(e, netpolicy.TheWire.GatewayMAC[:])
	copy(e[6:], netpolicy.TheWire.GuestMAC[:])
	binary.BigEndian.PutUint16(e[12:], unix.ETH_P_IP)
	h := e[eth:]
	h[0], h[8], h[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(h[2:], uint16(len(h)))
	src, dst := from.As4(), to.Addr().As4()
	copy(h[12:], src[:])
	copy(h[16:], dst[:])
	var sum uint32
	for i := 0; i < ip; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
	binary.BigEndian.PutUint16(h[ip:], 40000)
	binary.BigEndian.PutUint16(h[ip+2:], to.Port())
	binary.BigEndian.PutUint16(h[ip+4:], udp+5)
	copy(h[ip+udp:], "hello")
	return f
}

// child is a started program.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	ended bool
}

// begin starts this program in the thread's network namespace.
func begin(t *testing.T, socket string, uid uint32, args ...string) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.Command("/proc/self/exe", args...)}
	c.cmd.Stderr, c.cmd.Dir = os.Stderr, "/"
	c.cmd.Env = append(os.Environ(), hostnet.HelperEnv+"="+socket)
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	if c.ended {
		return
	}
	c.ended = true
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

func (c *child) line() string {
	c.t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("a process says no more: %v", err)
	}
	return s
}

func (c *child) did(order string) (d userDid) {
	c.t.Helper()
	if order != "" {
		if _, err := io.WriteString(c.in, order+"\n"); err != nil {
			c.t.Fatal(err)
		}
	}
	if err := json.Unmarshal([]byte(c.line()), &d); err != nil {
		c.t.Fatal(err)
	}
	return d
}

// ownNamespace gives the test's thread a network namespace with an address, and a socket's name there.
func ownNamespace(t *testing.T) (socket string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	if err := link.Preload(""); err != nil { // which mounts the BPF file system, as systemd does
		t.Fatal(err)
	}
	runtime.LockOSThread() // for good: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet("192.0.2.9/32")}))
	}
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("@drowse-test-%d", os.Getpid())
}

func ipNet(s string) *net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return &net.IPNet{IP: ip, Mask: n.Mask}
}

// helperLeft returns what there is of links of helpers in the thread's namespace, and of an address.
func helperLeft(t *testing.T, tap string, address netip.Addr) (out []string) {
	t.Helper()
	if _, err := netlink.LinkByName(tap); err == nil {
		out = append(out, "TAP device "+tap)
	}
	users, _ := os.ReadDir(HelperRoot)
	for _, u := range users {
		names, err := link.Endpoints(filepath.Join(HelperRoot, u.Name()))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			out = append(out, "pins "+n)
		}
	}
	if _, err := os.Stat(filepath.Join(hostnet.DefaultDir, address.String())); err == nil {
		out = append(out, "address "+address.String())
	}
	return out
}

// awaitNothing waits until nothing is left.
func awaitNothing(t *testing.T, tap string, address netip.Addr) {
	t.Helper()
	var left []string
	for range 500 {
		if left = helperLeft(t, tap, address); len(left) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("left: %v", left)
}

const openHost = `policy {rules: [{name: web, direction: egress, verdict: allow, groups: [host], protocols: [udp], ports: [7000]}], flows: 128}`

func TestHelper_lets_a_user_have_a_network_with_his_policy_and_leaves_nothing_of_either_when_killed(t *testing.T) {
	socket := ownNamespace(t)
	h := begin(t, socket, 0, asHelper, socket)
	h.line()
	u := begin(t, socket, userID, asUser)
	is := u.did("")
	if !is.Address.IsValid() || !strings.HasPrefix(is.TAP, helperPrefix) {
		t.Fatalf("he has %+v", is)
	}
	guest, open, shut := netpolicy.TheWire.Guest4.String(), "192.0.2.9:7000", "192.0.2.9:7001"
	if d := u.did("send " + guest + " " + open); d.Received != "" {
		t.Errorf("without a policy a packet passes: %+v", d)
	}
	if d := u.did(openHost); d.Err != "" {
		t.Fatal(d.Err)
	}
	if d := u.did("send " + guest + " " + open); d.Received != is.Address.String() {
		t.Errorf("what the policy allows comes from %q, want %v", d.Received, is.Address)
	}
	if d := u.did("send " + guest + " " + shut); d.Received != "" {
		t.Errorf("what the policy denies comes from %q", d.Received)
	}
	for _, forged := range []string{is.Address.Next().String(), "192.0.2.9", "127.0.0.1", "198.51.100.7"} {
		if d := u.did("send " + forged + " " + open); d.Received != "" && d.Received != is.Address.String() {
			t.Errorf("a packet from %s comes from %q", forged, d.Received)
		}
	}
	d := u.did("look")
	passed := false
	for _, f := range d.Flows {
		passed = passed || f.Verdict == netpolicy.Allow && f.Rule == "web" && f.PeerPort == 7000
	}
	if !passed || d.Events == 0 || d.Egress == 0 || d.Err != "" {
		t.Errorf("he sees %+v", d)
	}
	if d := u.did("policy {}"); d.Err != "" {
		t.Fatal(d.Err)
	}
	if d := u.did("send " + guest + " " + open); d.Received != "" {
		t.Errorf("after the policy was taken back a packet passes: %+v", d)
	}
	if d := u.did("policy {flows: 65536}"); !strings.Contains(d.Err, "at most") {
		t.Errorf("a policy that takes much memory: %q", d.Err)
	}
	if d := u.did("rights"); d.Err != "none" {
		t.Error(d.Err)
	}
	u.kill()
	awaitNothing(t, is.TAP, is.Address)

	u = begin(t, socket, userID, asUser)
	is = u.did("")
	if d := u.did(openHost); d.Err != "" {
		t.Fatal(d.Err)
	}
	h.kill()
	// The user's process lives, and holds the device.
	h = begin(t, socket, 0, asHelper, socket)
	h.line()
	awaitNothing(t, is.TAP, is.Address)
	u.kill()
	u = begin(t, socket, userID, asUser)
	is = u.did("")
	if err := u.in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := u.cmd.Wait(); err != nil {
		t.Errorf("the end of a network: %v", err)
	}
	u.ended = true
	awaitNothing(t, is.TAP, is.Address)
}
