package hostnet

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/netpolicy"
)

func TestWatch_looks_once_and_after_each_address_of_the_host_but_not_after_a_gateway_of_a_VM(t *testing.T) {
	ownNamespace(t)
	h, err := netlink.NewHandle() // of this namespace, for any thread
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	add := func(text string) {
		a, err := netlink.ParseAddr(text)
		if err == nil {
			err = h.AddrAdd(lo, a)
		}
		if err != nil {
			t.Errorf("adding %s: %v", text, err)
		}
	}
	has := func(want string) bool {
		all, err := h.AddrList(lo, netlink.FAMILY_V4)
		if err != nil {
			t.Error(err)
		}
		for _, a := range all {
			if a.IP.String() == want {
				return true
			}
		}
		return false
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	looks := 0
	Watch(ctx, slog.New(slog.DiscardHandler), func() {
		switch looks++; looks {
		case 1:
			add("192.0.2.1/32")
		case 2:
			if !has("192.0.2.1") {
				t.Error("a second look without a change")
			}
			add(netip.PrefixFrom(netpolicy.TheWire.Gateway4, 32).String())
			time.AfterFunc(100*time.Millisecond, func() { add("192.0.2.2/32") })
		case 3:
			if !has("192.0.2.2") {
				t.Error("a look after a gateway of a VM has come")
			}
			cancel()
		}
	})
	if looks != 3 {
		t.Errorf("%d looks, want 3", looks)
	}
}
