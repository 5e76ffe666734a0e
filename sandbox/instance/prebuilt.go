package instance

import (
	"errors"
	"fmt"
	"sync"

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

// Prebuilt is the part of a VM that can be made knowing only its shape: RAM, and KVM's part, which takes longest. An
// empty VM takes no guest memory, some 100 KiB of KVM's, and 10 bytes for each page of RAM where KVM shadows the
// guest's page tables. The methods may be called from any goroutine. A nil Prebuilt has nothing.
type Prebuilt struct {
	shape spec.Shape // without a network

	mu sync.Mutex // guards what follows
	// mem and vm are nil once taken.
	mem *guestmem.Memory
	vm  *vmm.Prebuilt
}

// PrebuiltOptions are the options of NewPrebuilt.
type PrebuiltOptions struct {
	// NoDirtyLog is that of the VM's Parts.
	NoDirtyLog bool
}

// NewPrebuilt makes a Prebuilt, and returns when it is ready.
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
	return s, nil
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
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.vm != nil {
		errs = append(errs, s.vm.Close())
	}
	if s.mem != nil {
		errs = append(errs, s.mem.Close())
	}
	s.vm, s.mem = nil, nil
	return errors.Join(errs...)
}
