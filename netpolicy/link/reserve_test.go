package link_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"

	. "github.com/drowse-vm/drowse/netpolicy/link"
)

func reserve(t *testing.T, cfg Config) *Reserved {
	t.Helper()
	r, err := Reserve(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReserved_denies_everything_and_then_what_its_policy_denies(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	allowed, denied := listenHost(t, "udp", "0.0.0.0:7"), listenHost(t, "udp", "0.0.0.0:8")
	r := reserve(t, Config{Endpoint: "a1", Interface: "tap0", Root: root})
	// The runtime does not raise the device before it has a policy. This test does.
	nl, err := netlink.LinkByName("tap0")
	if err != nil {
		t.Fatal(err)
	}
	gateway, err := netlink.ParseAddr(wire.Gateway4.String() + "/30")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(netlink.AddrAdd(nl, gateway), netlink.LinkSetUp(nl)); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
	if waiting(t, allowed) {
		t.Error("a packet has passed before there was a policy")
	}
	if err := netlink.LinkSetDown(nl); err != nil {
		t.Fatal(err)
	}
	l, err := r.Attach([]string{"web"}, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	defer remove(t, l)
	if err := l.Up(endpoint); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(wire.Gateway4, 17, udp(5000, 8, 1)))
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
	if _, _, err := allowed.ReadFromUDPAddrPort(make([]byte, 1)); err != nil || waiting(t, denied) {
		t.Errorf("its policy does not hold: %v", err)
	}
	if err := l.SetTags([]string{"db"}); err != nil {
		t.Errorf("others do not know it: %v", err)
	}
}

func TestReserved_gets_the_table_of_flows_that_its_policy_asks_for(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	tap := newTAP(t, "tap0")
	c := listenHost(t, "udp", "0.0.0.0:7")
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	l, err := reserve(t, cfg).Attach(nil, compile(t, hostUDP+"flows: 2048\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Up(endpoint); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
	_, from, err := c.ReadFromUDPAddrPort(make([]byte, 1))
	if err != nil {
		t.Fatal(err)
	}
	m := l.Flows()
	key := make([]byte, m.KeySize())
	if err := m.NextKey(nil, &key); err != nil || m.MaxEntries() != 2048 {
		t.Errorf("the table has room for %d flows, and the first is %x, %v", m.MaxEntries(), key, err)
	}
	// The flow in the table lets an answer pass.
	if _, err := c.WriteToUDPAddrPort([]byte{2}, from); err != nil {
		t.Fatal(err)
	}
	tap.receive(0x0800, 17)
	remove(t, l)
}

func TestReserved_of_a_dead_process_is_removed_like_a_link(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	for _, gone := range []bool{false, true} {
		f, err := openTAP("tap0", false)
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
		r := reserve(t, cfg)
		if err := Remove(cfg); !errors.Is(err, ErrBusy) {
			t.Errorf("one of a process that is there: %v, want ErrBusy", err)
		}
		if err := r.Abandon(); err != nil {
			t.Fatal(err)
		}
		if gone {
			f.Close()
		}
		if err := Remove(cfg); err != nil {
			t.Error(err)
		}
		if used, err := SlotsUsed(root); err != nil || used {
			t.Errorf("slots are left in use: %v, %v", used, err)
		}
		f.Close()
	}
}

func TestReserved_that_was_tidied_away_fails_and_the_device_can_be_used(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, root string) error{
		"its pins":             func(t *testing.T, root string) error { return os.RemoveAll(filepath.Join(root, "a1")) },
		"what endpoints share": func(t *testing.T, root string) error { return os.RemoveAll(programsOf(t, root)) },
		"that all is there":    func(t *testing.T, root string) error { return os.Remove(filepath.Join(programsOf(t, root), "ready")) },
		"that it has a place":  func(t *testing.T, root string) error { return removeAll(filepath.Join(programsOf(t, root), "slot-*")) },
	} {
		t.Run(name, func(t *testing.T) {
			ownNamespace(t)
			root := testRoot(t)
			tap := newTAP(t, "tap0")
			c := listenHost(t, "udp", "0.0.0.0:7")
			cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
			r := reserve(t, cfg)
			if err := spoil(t, root); err != nil {
				t.Fatal(err)
			}
			// Another process has had the programs loaded anew.
			if _, _, err := LoadShared(root); err != nil {
				t.Fatal(err)
			}
			if l, err := r.Attach(nil, compile(t, hostUDP)); err == nil {
				t.Error("a policy was put where nobody finds it")
				remove(t, l)
			}
			l, err := Attach(cfg, compile(t, hostUDP))
			if err != nil {
				t.Fatal(err)
			}
			defer remove(t, l)
			if err := l.Up(endpoint); err != nil {
				t.Fatal(err)
			}
			tap.send(sent(wire.Gateway4, 17, udp(5000, 7, 1)))
			if _, _, err := c.ReadFromUDPAddrPort(make([]byte, 1)); err != nil {
				t.Error(err)
			}
		})
	}
}

// remove removes a Link.
func remove(t *testing.T, l *Link) {
	t.Helper()
	if err := l.Remove(); err != nil {
		t.Error(err)
	}
}

func removeAll(pattern string) error {
	names, err := filepath.Glob(pattern)
	for _, n := range names {
		err = errors.Join(err, os.Remove(n))
	}
	return err
}
