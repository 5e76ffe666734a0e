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

// queuesAhead are the queue counts of the devices that VMs have first: three disks, vsock, rng, balloon and
// network, see Instance.assemble. A VM with other devices only takes longer to assemble.
var queuesAhead = []int{1, 1, 1, 3, 1, 4, 2}

// newPrebuiltVM has KVM prepare for a VM with this RAM in the background.
func newPrebuiltVM(mem *guestmem.Memory, vcpus int, tracked bool) (*vmm.Prebuilt, error) {
	return vmm.NewPrebuilt(vmm.PrebuiltConfig{VCPUs: vcpus, Memory: mem, TrackDirty: tracked, Queues: queuesAhead})
}

// Prebuilt is the part of a VM that can be made knowing only its shape: RAM, KVM's part, which takes longest, and
// the link to the host if the shape has one. An empty VM takes no guest memory, some 100 KiB of KVM's, and 10
// bytes for each page of RAM where KVM shadows the guest's page tables. A link takes some 850 KiB of the kernel's
// memory. The methods may be called from any goroutine. A nil Prebuilt has nothing.
type Prebuilt struct {
	shape spec.Shape // without a network

	mu sync.Mutex // guards what follows
	// mem and vm are nil once taken, and so is link.
	mem  *guestmem.Memory
	vm   *vmm.Prebuilt
	link *prebuiltNetwork
	// failure is why there is no link: a VM that needs one makes it itself.
	failure error
}

// PrebuiltOptions are the options of NewPrebuilt.
type PrebuiltOptions struct {
	// NoDirtyLog is that of the VM's Parts.
	NoDirtyLog bool
}

// NewPrebuilt makes a Prebuilt, and returns when it is ready. A link that cannot be made is not an error.
func NewPrebuilt(shape spec.Shape, o PrebuiltOptions) (s *Prebuilt, err error) {
	if err := shape.Validate(); err != nil {
		return nil, err
	}
	s = &Prebuilt{shape: shape.Machine()}
	s.mem, err = guestmem.New(spec.VM{MemoryMiB: shape.MemoryMiB}.Memory())
	if err == nil {
		s.vm, err = newPrebuiltVM(s.mem, shape.VCPUs, !o.NoDirtyLog)
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

// NextNetwork returns the id of the network that network returns next; empty if there is none.
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

// network returns the network, or nil. err is why it could not be made.
func (s *Prebuilt) network() (n *prebuiltNetwork, err error) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n, s.link = s.link, nil
	return n, s.failure
}

// take returns RAM and KVM's part for a VM of a shape; nil if it has none for that shape.
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

// Close releases what was not taken.
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

// prebuiltNetwork is the part of a VM's link to the host that can be made before the VM is known: a TAP device
// that is down, with programs that deny everything. Its id is like that of a VM, so that the cleanup after killed
// processes finds it.
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
