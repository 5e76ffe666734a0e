package link_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// attachOne attaches an endpoint to a new device, and does not raise it.
func attachOne(t *testing.T, root, name string) (*Link, Config) {
	t.Helper()
	newTAP(t, name)
	cfg := Config{Endpoint: name, Interface: name, Root: root}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	return l, cfg
}

// programsOf returns the directory of the shared programs. There must be exactly one.
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

func TestAttach_second_endpoint_shares_the_programs_and_nothing_else(t *testing.T) {
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
	// A swap of one does not affect the other.
	if err := a.Up(endpoint); err != nil {
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
	// The programs stay for the next endpoint, without slots.
	left, err := filepath.Glob(filepath.Join(programsOf(t, root), "slot-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("slots left: %v, %v", left, err)
	}
}

// The shared programs' pins serve only new endpoints.
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
	m, err := Attach(Config{Endpoint: "a2", Interface: "tap1", Root: cfg.Root}, compile(t, ""))
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

// The kernel empties the map of calls when no process and no pin holds it.
func TestLink_without_any_pin_and_process_denies(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Up(endpoint); err != nil {
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
	// The kernel hands a frame to the socket before the write of the frame returns. But it empties the map some time
	// later, and until then the policy decides.
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

// waiting takes a datagram and reports whether there was one.
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

func TestAttach_slot_of_a_dead_endpoint_is_taken_and_not_mixed_up(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	a, _ := attachOne(t, root, "a1")
	shared := programsOf(t, root)
	slot, err := os.Readlink(filepath.Join(root, "a1", "slot"))
	if err != nil {
		t.Fatal(err)
	}
	n := strings.Split(slot, "/")[1]
	// The endpoint's directory is gone, but its slot was not given back.
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(root, "a1")); err != nil {
		t.Fatal(err)
	}
	if used, err := SlotsUsed(root); err != nil || used {
		t.Errorf("slots of dead endpoints count as used: %v, %v", used, err)
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
	// The next endpoint that begins there gets another slot.
	other, err := TakeSlot(root, "c1", slotNumber)
	if err != nil || other == slotNumber {
		t.Errorf("slot %d was given twice: %v", other, err)
	}
	for _, name := range []string{"b1", "c1"} {
		if err := Remove(Config{Endpoint: name, Interface: "none0", Root: root}); err != nil {
			t.Error(err)
		}
	}
	if owner, err := os.Readlink(filepath.Join(shared, "slot-"+n)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("slot of %s is left: %v", owner, err)
	}
}

// A table in the wrong slot counts for no endpoint.
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
	// Sweep removes the programs of an unused version, but not those in use.
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
	here := programsOf(t, root)
	if _, err := os.Stat(here); err != nil {
		t.Errorf("programs in use were removed: %v", err)
	}
	if err := c.Remove(); err != nil {
		t.Fatal(err)
	}
	// SweepOld keeps this version's programs for the next endpoint. Sweep removes them too.
	if err := os.Mkdir(old, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := SweepOld(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(here); err != nil {
		t.Errorf("programs of this version, which nobody uses: %v, want them kept", err)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("programs of another version: %v, want them removed", err)
	}
	if err := Sweep(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(here); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("programs that nobody uses: %v, want them removed", err)
	}
}

func TestPreload_endpoint_that_comes_next_finds_the_programs(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	for range 2 { // the second call changes nothing
		if err := Preload(root); err != nil {
			t.Fatal(err)
		}
	}
	first := programID(t, filepath.Join(programsOf(t, root), "calls"))
	a, _ := attachOne(t, root, "a1")
	if id := programID(t, filepath.Join(root, "a1", "calls")); id != first {
		t.Errorf("the endpoint has program %d, and %d was loaded before it", id, first)
	}
	if err := a.Remove(); err != nil {
		t.Fatal(err)
	}
}

// programsOf2 is programsOf if another version's programs are there as well.
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
	if _, err := Attach(Config{Endpoint: "a1", Interface: "tap0", Root: root}, compile(t, "")); err == nil {
		t.Error("a root that anybody can write to was taken")
	}
	if err := os.Chmod(root, 0o700); err != nil {
		t.Error(err)
	}
	nl, err := netlink.LinkByName("tap0")
	if err != nil || nl.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("the interface: %v, %v, want it down", nl, err)
	}
}

func TestLoadShared_by_many_at_the_same_moment_gives_all_the_same(t *testing.T) {
	root := testRoot(t)
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	const many = 8
	type result struct {
		id     uint32
		loaded bool
		err    error
	}
	results := make(chan result, many)
	for range many {
		go func() {
			id, loaded, err := LoadShared(root)
			results <- result{id: id, loaded: loaded, err: err}
		}()
	}
	ids, loads := map[uint32]bool{}, 0
	for range many {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
		}
		ids[r.id] = true
		if r.loaded {
			loads++
		}
	}
	if len(ids) != 1 || loads != 1 {
		t.Errorf("programs %v, loaded %d times, want one of them, once", ids, loads)
	}
}

// LoadShared does not use the pins of a process that died between two of them, or an object that another process put
// in the place of a pin.
func TestLoadShared_pin_that_is_missing_or_wrong_gives_new_programs(t *testing.T) {
	root := testRoot(t)
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	last, _, err := LoadShared(root)
	if err != nil {
		t.Fatal(err)
	}
	shared := programsOf(t, root)
	other := func(kind ebpf.MapType, entries, value uint32) func(string) error {
		return func(pin string) error {
			spec := &ebpf.MapSpec{Type: kind, KeySize: 4, ValueSize: value, MaxEntries: entries}
			if kind == ebpf.ArrayOfMaps {
				spec.InnerMap = &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
			}
			m, err := ebpf.NewMap(spec)
			if err != nil {
				return err
			}
			return errors.Join(os.Remove(pin), m.Pin(pin), m.Close())
		}
	}
	tests := []struct {
		what, pin string
		do        func(string) error
	}{
		{"no sign that all is there", "ready", os.Remove},
		{"no calls", "calls", os.Remove},
		{"no tables", "policies", os.Remove},
		{"no use of limits", "usages", os.Remove},
		{"no flows", "flows", os.Remove},
		{"no pinned names", "pins", os.Remove},
		{"no counters", "counters", os.Remove},
		{"no events", "events", os.Remove},
		{"calls of nothing", "calls", other(ebpf.ProgramArray, 2, 4)},
		{"tables that are none", "policies", other(ebpf.Array, 2*MaxEndpoints, 4)},
		{"fewer tables", "policies", other(ebpf.ArrayOfMaps, MaxEndpoints, 4)},
		{"use of fewer limits", "usages", other(ebpf.Array, MaxEndpoints, 64)},
	}
	for _, tt := range tests {
		t.Run(tt.what, func(t *testing.T) {
			pin := filepath.Join(shared, tt.pin)
			back := keepPin(t, pin)
			if err := tt.do(pin); err != nil {
				t.Fatal(err)
			}
			if there, err := HasShared(root); there || err != nil {
				t.Errorf("they are taken for whole: %v", err)
			}
			back()
			if there, err := HasShared(root); !there || err != nil {
				t.Errorf("with what was there, they are not: %v", err)
			}
		})
	}
	if err := os.Remove(filepath.Join(shared, "calls")); err != nil {
		t.Fatal(err)
	}
	id, loaded, err := LoadShared(root)
	if err != nil || !loaded || id == last {
		t.Errorf("program %d after %d, loaded %v: %v", id, last, loaded, err)
	}
	again, loaded, err := LoadShared(root)
	if err != nil || loaded || again != id {
		t.Errorf("the next one got program %d, want %d; loaded %v: %v", again, id, loaded, err)
	}
}

// keepPin returns what puts back what is there now.
func keepPin(t *testing.T, pin string) (back func()) {
	t.Helper()
	if to, err := os.Readlink(pin); err == nil {
		return func() {
			t.Helper()
			if err := os.Symlink(to, pin); err != nil {
				t.Fatal(err)
			}
		}
	}
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if err := errors.Join(m.Unpin(), m.Pin(pin), m.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAttach_over_what_a_dead_process_has_not_finished(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	c := listenHost(t, "udp", "0.0.0.0:7")
	denied := listenHost(t, "udp", "0.0.0.0:8")
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	complete := []string{"slot", "calls"}
	for n := range complete {
		l, err := Attach(cfg, compile(t, hostUDP))
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Up(endpoint); err != nil {
			t.Fatal(err)
		}
		tap.send(sent(wire.Gateway4, 17, udp(5000, 8, 1)))
		tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
		if _, _, err := c.ReadFromUDPAddrPort(make([]byte, 1)); err != nil || waiting(t, denied) {
			t.Errorf("over %v the policy does not hold: %v", complete[:max(0, n-1)], err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		// The next process finds the device down, as a new device is.
		nl, err := netlink.LinkByName("tap0")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetDown(nl); err != nil {
			t.Fatal(err)
		}
		for _, pin := range complete[n:] {
			if err := os.Remove(filepath.Join(root, "a1", pin)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := Remove(cfg); err != nil {
		t.Fatal(err)
	}
	if used, err := SlotsUsed(root); err != nil || used {
		t.Errorf("slots are left in use: %v, %v", used, err)
	}
}

// A process may be killed at any moment of attaching an endpoint. Its device is then down, or behind the whole
// policy.
func TestAttach_killed_at_any_moment_leaves_no_open_device(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	t.Cleanup(func() {
		if nl, err := netlink.LinkByName("tap0"); err == nil {
			netlink.LinkDel(nl)
		}
	})
	denied := listenHost(t, "udp", "0.0.0.0:8")
	states := map[string]int{}
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, _, err := LoadShared(root); err != nil { // slow by itself
		t.Fatal(err)
	}
	for n := range 24 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), helperEnv+"="+root, beginEnv+"=1")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 6)); err != nil {
			cmd.Process.Kill()
			t.Fatalf("helper: %v, %v", err, cmd.Wait())
		}
		time.Sleep(time.Duration(n) * time.Millisecond) // the exact moment does not matter
		cmd.Process.Kill()
		cmd.Wait()
		tap := newTAP(t, "tap0")
		nl, err := netlink.LinkByName("tap0")
		if err != nil {
			t.Fatal(err)
		}
		up := nl.Attrs().Flags&net.FlagUp != 0
		states[fmt.Sprintf("up %v", up)]++
		if up {
			tap.send(sent(wire.Gateway4, 17, udp(5000, 8, 1)))
			if waiting(t, denied) {
				t.Fatalf("killed at moment %d: a frame that the policy denies has passed", n)
			}
			if _, err := CountersOn("tap0"); err != nil {
				t.Fatalf("killed at moment %d: the device is up, and its programs: %v", n, err)
			}
		}
		if err := Remove(cfg); err != nil {
			t.Fatalf("killed at moment %d: %v", n, err)
		}
		if nl, err = netlink.LinkByName("tap0"); err != nil || nl.Attrs().Flags&net.FlagUp != 0 {
			t.Fatalf("killed at moment %d: after removal: %v, %v", n, nl, err)
		}
		tap.file.Close()
		if err := netlink.LinkDel(nl); err != nil {
			t.Fatal(err)
		}
		if used, err := SlotsUsed(root); err != nil || used {
			t.Fatalf("killed at moment %d: slots are left in use: %v, %v", n, used, err)
		}
	}
	t.Log(states)
}

// Another process removes the pins of a live endpoint, and another endpoint gets its slot.
func TestLink_swap_after_its_slot_was_given_away_gives_an_error(t *testing.T) {
	for swaps := range 3 { // so that each table is in force once, and the other one exists or not
		t.Run(fmt.Sprintf("%d swaps before", swaps), func(t *testing.T) { swapAfterItsSlotWasGivenAway(t, swaps) })
	}
}

func swapAfterItsSlotWasGivenAway(t *testing.T, swaps int) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Up(endpoint); err != nil {
		t.Fatal(err)
	}
	for range swaps {
		if err := l.Swap(compile(t, hostUDP)); err != nil {
			t.Fatal(err)
		}
	}
	c := listenHost(t, "udp", "0.0.0.0:7")
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
	if _, _, err := c.ReadFromUDPAddrPort(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	text, err := os.Readlink(filepath.Join(root, "a1", "slot"))
	if err != nil {
		t.Fatal(err)
	}
	var slot uint32
	if _, err := fmt.Sscan(strings.Split(text, "/")[1], &slot); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(root, "a1")); err != nil {
		t.Fatal(err)
	}
	if err := Occupy(root, "b1", slot, compile(t, `default: {egress: allow}`)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
		tap.send(sent(wire.Gateway4, 17, udp(5001, 7, 1)))
		if waiting(t, c) {
			t.Error("a frame has passed by another's table")
		}
		if err := l.Swap(compile(t, hostUDP)); !errors.Is(err, ErrGone) {
			t.Errorf("swap: %v, want ErrGone", err)
		}
	}
	if err := l.Remove(); err != nil {
		t.Error(err)
	}
	// The other endpoint's objects have stayed.
	if used, err := SlotsUsed(root); err != nil || !used {
		t.Errorf("the slot's new endpoint has lost it: %v", err)
	}
	if err := Remove(Config{Endpoint: "b1", Interface: "none0", Root: root}); err != nil {
		t.Error(err)
	}
}

func TestAttach_leaves_programs_of_another_version_to_those_who_use_them(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	old := filepath.Join(root, "_programs-old")
	for _, dir := range []string{old, filepath.Join(root, "_programs-locked"), filepath.Join(root, "o1")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("old/5/9", filepath.Join(root, "o1", "slot")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("o1", filepath.Join(old, "slot-5")); err != nil {
		t.Fatal(err)
	}
	// A version whose first endpoint is about to come.
	lock, err := os.Open(filepath.Join(root, "_programs-locked"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	l, _ := attachOne(t, root, "a1")
	if err := Sweep(root); err != nil {
		t.Error(err)
	}
	for _, dir := range []string{old, lock.Name()} {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("programs in use were removed: %v", err)
		}
	}
	if err := l.Remove(); err != nil {
		t.Error(err)
	}
	if err := Remove(Config{Endpoint: "o1", Interface: "none0", Root: root}); err != nil {
		t.Error(err)
	}
	lock.Close()
	if err := Sweep(root); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(root, "*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Another user's root of pins could lead anywhere.
func TestSweepAndRemove_root_of_somebody_else_gives_an_error(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	l, _ := attachOne(t, root, "a1")
	if err := l.Remove(); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	trap := root + "-trap"
	t.Cleanup(func() { os.RemoveAll(trap) })
	if err := os.Mkdir(trap, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"_programs-x", "a1"} {
		if err := os.Symlink(filepath.Dir(precious), filepath.Join(trap, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(trap, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"Sweep":     Sweep(trap),
		"Remove":    Remove(Config{Endpoint: "a1", Interface: "none0", Root: trap}),
		"Endpoints": func() error { _, err := Endpoints(trap); return err }(),
	} {
		if !errors.Is(err, ErrRoot) {
			t.Errorf("%s: %v, want ErrRoot", what, err)
		}
	}
	// Sweep and Remove do not follow links in the caller's own root either.
	if err := os.Chown(trap, os.Getuid(), os.Getgid()); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(trap); err != nil {
		t.Error(err)
	}
	if err := Remove(Config{Endpoint: "a1", Interface: "none0", Root: trap}); err == nil {
		t.Error("a link was taken for an endpoint's directory")
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}
