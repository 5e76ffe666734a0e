package network

import (
	"net"
	"os"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
)

func TestPrebuilt_link_is_there_until_it_is_taken_or_closed(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	for _, taken := range []bool{true, false} {
		p := NewPrebuilt()
		defer p.Close()
		made := p.link
		if made == nil {
			t.Fatalf("no link: %v", p.failure)
		}
		i, err := net.InterfaceByName(hostnet.InterfaceName(made.id))
		if err != nil || i.Flags&net.FlagUp != 0 {
			t.Errorf("the device of a link: %+v, %v", i, err)
		}
		if taken {
			// The VM gets the link of the id in its record.
			id := p.ID()
			if n, err := p.take(); err != nil || n != made || n.id != id {
				t.Fatalf("got %+v, %v, want %s", n, err, id)
			}
			defer made.close()
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		names, err := link.Endpoints("")
		if there := slices.Contains(names, made.id); err != nil || there != taken {
			t.Errorf("after Close, taken %t: the link is there: %t, %v", taken, there, err)
		}
		if _, err := net.InterfaceByName(hostnet.InterfaceName(made.id)); (err == nil) != taken {
			t.Errorf("after Close, taken %t: its device: %v", taken, err)
		}
		if n, err := p.take(); n != nil || err != nil || p.ID() != "" {
			t.Errorf("a link after Close: %v, %v", n, err)
		}
	}
}

func TestPrebuilt_that_is_nil_has_no_link(t *testing.T) {
	t.Parallel()
	var p *Prebuilt
	if n, err := p.take(); n != nil || err != nil || p.ID() != "" {
		t.Errorf("got %v, %v", n, err)
	}
}
