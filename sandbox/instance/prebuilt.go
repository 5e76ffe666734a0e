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

// queuesAhead are the numbers of queues of the devices that VMs have first: three disks, vsock, rng, balloon and
// network, see Instance.assemble. Where a VM has others, it takes longer to put together and nothing else.
var queuesAhead = []int{1, 1, 1, 3, 1, 4, 2}

// newPrebuiltVM has KVM prepare for a VM with this RAM in the background.
func newPrebuiltVM(mem *guestmem.Memory, vcpus int, tracked bool) (*vmm.Prebuilt, error) {
	return vmm.NewPrebuilt(vmm.PrebuiltConfig{VCPUs: vcpus, Memory: mem, TrackDirty: tracked, Queues: queuesAhead})
}

// Prebuilt is what of a VM can be made before anything is known of it but its shape: RAM, what KVM has, which takes
// longest, and the link to the host if it has one. An empty VM takes no memory of the guest's and some 100 KiB of
// KVM's, and 10 bytes for each page of RAM where KVM shadows the guest's page tables; a link takes some 850 KiB of the
// kernel's. The methods may be called from any goroutine; a nil one has nothing.
type Prebuilt struct {
	shape spec.Shape // without a network

	mu sync.Mutex // guards what follows
	// mem and vm are nil once they were taken, and so is link.
	mem  *guestmem.Memory
	vm   *vmm.Prebuilt
	link *prebuiltNetwork
	// failure is why there is no link: a VM that needs one makes it itself.
	failure error
}

// NewPrebuilt makes it, and returns when it is there. It is no error that the link cannot be made.
func NewPrebuilt(shape spec.Shape) (s *Prebuilt, err error) {
	if err := shape.Validate(); err != nil {
		return nil, err
	}
	s = &Prebuilt{shape: shape.Machine()}
	s.mem, err = guestmem.New(spec.VM{MemoryMiB: shape.MemoryMiB}.Memory())
	if err == nil {
		s.vm, err = newPrebuiltVM(s.mem, shape.VCPUs, trackDirty())
	}
	if err == nil {
		err = s.vm.Wait()
	}
	if err != nil {
		err = fmt.Errorf("making a machine of %d MiB with %d vCPUs ahead: %w", shape.MemoryMiB, shape.VCPUs, err)
		return nil, errors.Join(err, s.Close())
	}
	if shape.Network {
		s.link, s.failure = newPrebuiltNetwork()
	}
	return s, nil
}

// NextNetwork is the id of the network that network returns; empty if there is none.
func (s *Prebuilt) NextNetwork() string {
	if s == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == nil {
		return ""
	}
	return s.link.id
}

// network returns the network, or nil; and why there is none if it could not be made.
func (s *Prebuilt) network() (n *prebuiltNetwork, err error) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n, s.link = s.link, nil
	return n, s.failure
}

// take returns RAM, and what KVM has, for a VM of a shape; nil if that is not there.
func (s *Prebuilt) take(shape spec.Shape) (mem *guestmem.Memory, vm *vmm.Prebuilt) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if shape.Machine() == s.shape {
		mem, s.mem, vm, s.vm = s.mem, nil, s.vm, nil
	}
	return mem, vm
}

// Close gives back what nobody has taken.
func (s *Prebuilt) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.vm != nil {
		errs = append(errs, s.vm.Close())
	}
	if s.mem != nil {
		errs = append(errs, s.mem.Close())
	}
	if s.link != nil {
		errs = append(errs, s.link.close())
	}
	s.vm, s.mem, s.link = nil, nil, nil
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
