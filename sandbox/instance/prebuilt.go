package instance

import (
	"errors"
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// prebuilt is what of a VM can be made before anything is known of it but its shape: RAM,
// and what KVM has.
type prebuilt struct {
	mem *guestmem.Memory
	vm  *vmm.Prebuilt
}

// queuesAhead are the numbers of queues of the devices that VMs have first: three disks, vsock, rng, balloon and
// network, see Instance.assemble. Where a VM has others, it takes longer to put together and nothing else.
var queuesAhead = []int{1, 1, 1, 3, 1, 4, 2}

// newShell has KVM prepare for a VM with this RAM in the background.
func newShell(mem *guestmem.Memory, vcpus int, tracked bool) (*vmm.Prebuilt, error) {
	return vmm.NewPrebuilt(vmm.PrebuiltConfig{VCPUs: vcpus, Memory: mem, TrackDirty: tracked, Queues: queuesAhead})
}

func (s prebuilt) close() error { return errors.Join(s.vm.Close(), s.mem.Close()) }

// Prebuilt are made ahead of the VMs that will need them, so that a restore finds the part of it done that takes KVM
// longest, and its link to the host if it has one. An empty one takes no memory of the guest's and some 100 KiB of
// KVM's, and 10 bytes for each page of RAM where KVM shadows the guest's page tables; a link takes some 850 KiB of the
// kernel's. The methods may be called from any goroutine.
type Prebuilt struct {
	want  map[spec.Shape]int // without networks
	links int                // how many networks are wanted

	mu       sync.Mutex
	ready    map[spec.Shape][]prebuilt
	networks []*prebuiltNetwork
	// failure is why a network could not be made: a VM that needs one makes it itself.
	failure error
	closed  bool
	// filling serialises Fill.
	filling sync.Mutex
}

// NewPrebuilt keeps so many shells of each shape, once Fill has made them.
func NewPrebuilt(want map[spec.Shape]int) (*Prebuilt, error) {
	out := &Prebuilt{want: map[spec.Shape]int{}, ready: map[spec.Shape][]prebuilt{}}
	for s, n := range want {
		if err := s.Validate(); err != nil {
			return nil, err
		}
		out.want[s.Machine()] += n
		if s.Network {
			out.links += n
		}
	}
	return out, nil
}

// Fill makes the shells that are missing, and returns when they are there. Nothing else
// does: the caller knows when a processor has time for it. It is no error that a network cannot be made.
func (s *Prebuilt) Fill() error {
	s.filling.Lock()
	defer s.filling.Unlock()
	for shape, n := range s.want {
		for s.missing(shape, n) {
			if err := s.add(shape); err != nil {
				return fmt.Errorf("making a machine of %d MiB with %d vCPUs ahead: %w", shape.MemoryMiB, shape.VCPUs, err)
			}
		}
	}
	s.link()
	return nil
}

// link makes the networks that are missing.
func (s *Prebuilt) link() {
	for {
		s.mu.Lock()
		enough := s.closed || len(s.networks) >= s.links
		s.mu.Unlock()
		if enough {
			return
		}
		n, err := newPrebuiltNetwork()
		s.mu.Lock()
		s.failure = err
		if err == nil && !s.closed {
			s.networks = append(s.networks, n)
			n = nil
		}
		s.mu.Unlock()
		if n != nil {
			err = errors.Join(err, n.close())
		}
		if err != nil {
			return
		}
	}
}

// NextNetwork is the id of the network that network returns next; empty if there is none.
func (s *Prebuilt) NextNetwork() string {
	if s == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.networks) == 0 {
		return ""
	}
	return s.networks[len(s.networks)-1].id
}

// network returns a network, or nil; and why there is none if one could not be made.
func (s *Prebuilt) network() (*prebuiltNetwork, error) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.networks) == 0 {
		return nil, s.failure
	}
	last := len(s.networks) - 1
	n := s.networks[last]
	s.networks = s.networks[:last]
	return n, nil
}

func (s *Prebuilt) missing(shape spec.Shape, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && len(s.ready[shape]) < n
}

func (s *Prebuilt) add(shape spec.Shape) error {
	mem, err := guestmem.New(spec.VM{MemoryMiB: shape.MemoryMiB}.Memory())
	if err != nil {
		return err
	}
	vm, err := newShell(mem, shape.VCPUs, trackDirty())
	if err != nil {
		return errors.Join(err, mem.Close())
	}
	sh := prebuilt{mem: mem, vm: vm}
	if err := sh.vm.Wait(); err != nil {
		return errors.Join(err, sh.close())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return sh.close()
	}
	s.ready[shape] = append(s.ready[shape], sh)
	return nil
}

// take returns a shell if there is one; nil has none.
func (s *Prebuilt) take(shape spec.Shape) (prebuilt, bool) {
	if s == nil {
		return prebuilt{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	shape = shape.Machine()
	all := s.ready[shape]
	if len(all) == 0 {
		return prebuilt{}, false
	}
	last := all[len(all)-1]
	all[len(all)-1] = prebuilt{}
	s.ready[shape] = all[:len(all)-1]
	return last, true
}

// Close gives back the shells that nobody has taken. VMs that have taken one keep it.
func (s *Prebuilt) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	var errs []error
	for _, all := range s.ready {
		for _, sh := range all {
			errs = append(errs, sh.close())
		}
	}
	clear(s.ready)
	for _, n := range s.networks {
		errs = append(errs, n.close())
	}
	s.networks = nil
	return errors.Join(errs...)
}

// prebuiltNetwork is what of a VM's link to the host can be made before anything is known of the VM: a TAP device that
// is down, with programs that deny everything. It is called by an id like that of a VM, so that what tidies up after
// killed processes finds it.
type prebuiltNetwork struct {
	id   string
	tap  *tap.Device
	link *link.Reserved
}

func newPrebuiltNetwork() (_ *prebuiltNetwork, err error) {
	s := &prebuiltNetwork{id: spec.NewID()}
	if s.tap, err = tap.Create(tap.Config{Name: hostnet.InterfaceName(s.id), Down: true}); err != nil {
		return nil, err
	}
	if s.link, err = link.Reserve(link.Config{Endpoint: s.id, Interface: s.tap.Name()}); err != nil {
		return nil, errors.Join(err, s.tap.Close())
	}
	return s, nil
}

func (s *prebuiltNetwork) close() error { return errors.Join(s.link.Remove(), s.tap.Close()) }
