package netpolicy_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// attachOne attaches an agent to a device of its own, without raising it.
func attachOne(t *testing.T, root, name string) (*Link, LinkConfig) {
	t.Helper()
	newTAP(t, name)
	cfg := LinkConfig{Agent: name, Interface: name, Root: root}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	return l, cfg
}

// programsOf is the directory of the programs that agents share, of which there is one.
func programsOf(t *testing.T, root string) string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(root, "_programs-*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("directories of programs: %v, %v", dirs, err)
	}
	return dirs[0]
}

func programID(t *testing.T, calls string) (id uint32) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(calls, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Lookup(uint32(0), &id); err != nil {
		t.Fatal(err)
	}
	return id
}

func TestAttach_second_agent_shares_the_programs_and_nothing_else(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	a, _ := attachOne(t, root, "a1")
	first := programID(t, filepath.Join(root, "a1", "calls"))
	b, _ := attachOne(t, root, "b1")
	if second := programID(t, filepath.Join(root, "b1", "calls")); second != first {
		t.Errorf("programs %d and %d, want the same", first, second)
	}
	slots := map[string]bool{}
	for _, n := range []string{"a1", "b1"} {
		s, err := os.Readlink(filepath.Join(root, n, "slot"))
		if err != nil {
			t.Fatal(err)
		}
		slots[s] = true
	}
	if len(slots) != 2 {
		t.Errorf("slots %v, want two", slots)
	}
	// A swap of one is none of the other's.
	if err := a.Up(agent); err != nil {
		t.Fatal(err)
	}
	if err := b.Swap(compile(t, "")); err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Link{a, b} {
		if err := l.Remove(); err != nil {
			t.Error(err)
		}
	}
	// The programs stay for the next one, without slots.
	left, err := filepath.Glob(filepath.Join(programsOf(t, root), "slot-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("slots left: %v, %v", left, err)
	}
}

// The pins of the shared programs are only where new agents find them.
func TestLink_without_the_shared_pins_judges_as_before(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, cfg := attach(t, "tap0", hostUDP)
	shared := programsOf(t, cfg.Root)
	c := listenHost(t, "udp", "172.31.255.1:7")
	pass := func(what string) {
		t.Helper()
		tap.send(sent(wire.Gateway4, 17, udp(5000, 8, []byte("denied")...)))
		tap.send(sent(wire.Gateway4, 17, udp(5000, 7, []byte(what)...)))
		b := make([]byte, 100)
		n, _, err := c.ReadFromUDPAddrPort(b)
		if err != nil || string(b[:n]) != what {
			t.Fatalf("host got %q: %v, want %q", b[:n], err, what)
		}
	}
	pass("before")
	if err := os.RemoveAll(shared); err != nil {
		t.Fatal(err)
	}
	pass("after")
	if err := l.Swap(compile(t, hostUDP)); err != nil {
		t.Error(err)
	}
	pass("swapped")
	newTAP(t, "tap1")
	m, err := Attach(LinkConfig{Agent: "a2", Interface: "tap1", Root: cfg.Root}, compile(t, ""))
	if err != nil {
		t.Fatal(err)
	}
	pass("beside another")
	if err := m.Remove(); err != nil {
		t.Error(err)
	}
	if n := count(t, l, Egress, ReasonDefault); n != 4 {
		t.Errorf("%d denied, want 4: %s", n, counters(l))
	}
}

// The kernel empties the map of calls when neither a process nor a pin has it.
func TestLink_without_any_pin_and_process_denies(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	cfg := LinkConfig{Agent: "a1", Interface: "tap0", Root: root}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Up(agent); err != nil {
		t.Fatal(err)
	}
	c := listenHost(t, "udp", "172.31.255.1:7")
	send := func() { tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1))) }
	send()
	b := make([]byte, 100)
	if _, _, err := c.ReadFromUDPAddrPort(b); err != nil {
		t.Fatal(err)
	}
	nl, err := netlink.LinkByName("tap0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(root, "a1"), programsOf(t, root)} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel hands a frame to the socket before the write of it returns; but it empties
	// the map some time later, and until then the policy decides.
	for end := time.Now().Add(time.Minute); ; {
		send()
		if !waiting(t, c) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("frames still pass")
		}
	}
	for range 50 {
		send()
		if waiting(t, c) {
			t.Fatal("a frame has passed")
		}
	}
	if err := netlink.LinkSetDown(nl); err != nil {
		t.Fatal(err)
	}
}

// waiting takes a datagram if there is one.
func waiting(t *testing.T, c *net.UDPConn) bool {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	got := false
	if err := raw.Control(func(fd uintptr) {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 100), unix.MSG_DONTWAIT)
		got = err == nil
	}); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestAttach_slot_of_a_dead_agent_is_taken_and_not_mixed_up(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	a, _ := attachOne(t, root, "a1")
	shared := programsOf(t, root)
	slot, err := os.Readlink(filepath.Join(root, "a1", "slot"))
	if err != nil {
		t.Fatal(err)
	}
	n := strings.Split(slot, "/")[1]
	// Its directory is gone, but nobody has given the slot back.
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(root, "a1")); err != nil {
		t.Fatal(err)
	}
	if used, err := SlotsUsed(root); err != nil || used {
		t.Errorf("slots of dead agents count as used: %v, %v", used, err)
	}
	var slotNumber uint32
	fmt.Sscan(n, &slotNumber)
	at, err := TakeSlot(root, "b1", slotNumber)
	if err != nil {
		t.Fatal(err)
	}
	if at != slotNumber {
		t.Errorf("slot %d, want %d", at, slotNumber)
	}
	// The next one who begins there gets another.
	other, err := TakeSlot(root, "c1", slotNumber)
	if err != nil || other == slotNumber {
		t.Errorf("slot %d was given twice: %v", other, err)
	}
	for _, name := range []string{"b1", "c1"} {
		if err := Remove(LinkConfig{Agent: name, Interface: "none0", Root: root}); err != nil {
			t.Error(err)
		}
	}
	if owner, err := os.Readlink(filepath.Join(shared, "slot-"+n)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("slot of %s is left: %v", owner, err)
	}
}

// A table in the wrong slot is nobody's.
func TestPrograms_table_of_another_claim_denies(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.Install(compile(t, `default: {egress: allow}`)); err != nil {
		t.Fatal(err)
	}
	f := sent(peer4, 17, udp(4000, 443, 1))
	if r, err := e.Run(Egress, f, 0); err != nil || r.Verdict != Allow {
		t.Fatalf("%s by %s, %v", r.Verdict, r.Reason, err)
	}
	if err := e.InstallFor(compile(t, `default: {egress: allow}`), 78); err != nil {
		t.Fatal(err)
	}
	if r, err := e.Run(Egress, f, 0); err != nil || r.Action == 0 || r.Reason != ReasonNoPolicy {
		t.Errorf("%s by %s, %v, want a denial", r.Verdict, r.Reason, err)
	}
}

func TestAttach_incomplete_programs_are_loaded_again(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	a, _ := attachOne(t, root, "a1")
	first := programID(t, filepath.Join(root, "a1", "calls"))
	if err := a.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(programsOf(t, root), "ready")); err != nil {
		t.Fatal(err)
	}
	b, _ := attachOne(t, root, "b1")
	if again := programID(t, filepath.Join(root, "b1", "calls")); again == first {
		t.Error("what was not complete was used")
	}
	if err := b.Remove(); err != nil {
		t.Fatal(err)
	}
	// Those of a version that nobody uses are removed, those in use are not.
	old := filepath.Join(root, "_programs-old")
	if err := os.Mkdir(old, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(programsOf2(t, root), "ready")); err != nil {
		t.Fatal(err)
	}
	c, _ := attachOne(t, root, "c1")
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("programs of another version are left: %v", err)
	}
	if err := Sweep(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(programsOf(t, root)); err != nil {
		t.Errorf("programs in use were removed: %v", err)
	}
	if err := c.Remove(); err != nil {
		t.Fatal(err)
	}
}

// programsOf2 is programsOf beside another version's.
func programsOf2(t *testing.T, root string) string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(root, "_programs-*", "ready"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("programs that are ready: %v, %v", dirs, err)
	}
	return filepath.Dir(dirs[0])
}

func TestAttach_root_that_others_can_write_to_gives_an_error(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(root, 0o777); err != nil {
		t.Fatal(err)
	}
	newTAP(t, "tap0")
	if _, err := Attach(LinkConfig{Agent: "a1", Interface: "tap0", Root: root}, compile(t, "")); err == nil {
		t.Error("a root that anybody can write to was taken")
	}
	nl, err := netlink.LinkByName("tap0")
	if err != nil || nl.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("the interface: %v, %v, want it down", nl, err)
	}
}
