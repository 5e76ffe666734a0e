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

func TestShells_have_links_to_the_host_for_shapes_with_a_network(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/dev/kvm"); err != nil || os.Geteuid() != 0 {
		t.Skipf("this host cannot run VMs with a network: %v, user %d", err, os.Geteuid())
	}
	with := spec.Shape{MemoryMiB: 128, VCPUs: 1, Network: true}
	s, err := NewPrebuilt(map[spec.Shape]int{with: 2, with.Machine(): 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Fill(); err != nil {
		t.Fatal(err)
	}
	made := slices.Clone(s.networks)
	if len(made) != 2 || len(s.ready[with.Machine()]) != 3 {
		t.Fatalf("%d links and %d machines, want 2 and 3: %v", len(made), len(s.ready[with.Machine()]), s.failure)
	}
	for _, n := range made {
		i, err := net.InterfaceByName(hostnet.InterfaceName(n.id))
		if err != nil || i.Flags&net.FlagUp != 0 {
			t.Errorf("the device of a link: %+v, %v", i, err)
		}
	}
	// What a record says is what its VM gets.
	id := s.NextNetwork()
	taken, err := s.network()
	if err != nil || taken == nil || taken.id != id {
		t.Fatalf("got %+v, %v, want %s", taken, err, id)
	}
	defer taken.close()
	for _, shape := range []spec.Shape{with, with.Machine(), with} {
		sh, ok := s.take(shape)
		if !ok {
			t.Fatalf("no machine for %+v", shape)
		}
		defer sh.close()
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	names, err := link.Endpoints("")
	if err != nil || !slices.Contains(names, taken.id) {
		t.Errorf("the link that was taken has gone: %v, %v", names, err)
	}
	for _, n := range made {
		if n == taken {
			continue
		}
		if _, err := net.InterfaceByName(hostnet.InterfaceName(n.id)); err == nil || slices.Contains(names, n.id) {
			t.Errorf("a link that nobody has taken is left")
		}
	}
	if n, err := s.network(); n != nil || err != nil || s.NextNetwork() != "" {
		t.Errorf("a link after Close: %v, %v", n, err)
	}
}

func TestShells_none_have_no_link(t *testing.T) {
	t.Parallel()
	var s *Prebuilt
	if n, err := s.network(); n != nil || err != nil || s.NextNetwork() != "" {
		t.Errorf("got %v, %v", n, err)
	}
}
