package instance

import (
	"net"
	"os"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestPrebuiltVMs_have_links_to_the_host_for_shapes_with_a_network(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/dev/kvm"); err != nil || os.Geteuid() != 0 {
		t.Skipf("this host cannot run VMs with a network: %v, user %d", err, os.Geteuid())
	}
	with := spec.Shape{MemoryMiB: 128, VCPUs: 1, Network: true}
	for _, taken := range []bool{true, false} {
		s, err := NewPrebuilt(with, PrebuiltOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		made := s.link
		if made == nil {
			t.Fatalf("no link: %v", s.failure)
		}
		i, err := net.InterfaceByName(hostnet.InterfaceName(made.id))
		if err != nil || i.Flags&net.FlagUp != 0 {
			t.Errorf("the device of a link: %+v, %v", i, err)
		}
		if mem, vm := s.take(spec.Shape{MemoryMiB: 256, VCPUs: 1}); mem != nil || vm != nil {
			t.Error("a VM of another shape has taken it")
		}
		if taken {
			// The VM gets the link of the id in its record. A VM without a network can take the machine as well.
			id := s.NextNetwork()
			if n, err := s.network(); err != nil || n != made || n.id != id {
				t.Fatalf("got %+v, %v, want %s", n, err, id)
			}
			defer made.close()
			mem, vm := s.take(with.Machine())
			if mem == nil || vm == nil {
				t.Fatal("there is no machine")
			}
			defer mem.Close()
			defer vm.Close()
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		names, err := link.Endpoints("")
		if there := slices.Contains(names, made.id); err != nil || there != taken {
			t.Errorf("after Close, taken %t: the link is there: %t, %v", taken, there, err)
		}
		if _, err := net.InterfaceByName(hostnet.InterfaceName(made.id)); (err == nil) != taken {
			t.Errorf("after Close, taken %t: its device: %v", taken, err)
		}
		if n, err := s.network(); n != nil || err != nil || s.NextNetwork() != "" {
			t.Errorf("a link after Close: %v, %v", n, err)
		}
	}
}

func TestPrebuiltVMs_none_have_no_link(t *testing.T) {
	t.Parallel()
	var s *Prebuilt
	if n, err := s.network(); n != nil || err != nil || s.NextNetwork() != "" {
		t.Errorf("got %v, %v", n, err)
	}
}
