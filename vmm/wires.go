package vmm

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// wires connect KVM and the device in one place: the interrupt line, and a doorbell for each queue by which the
// guest announces new buffers. KVM takes at least 5 microseconds for each, so a prebuilt VM has them ready.
type wires struct {
	irq   *devices.Event
	kicks []*devices.Event
}

// gsiOf and baseOf return the line and the window of the device in a place.
func gsiOf(place int) uint32 { return uint32(firstDeviceGSI + place) }

func baseOf(place int) guestmem.GPA {
	return boot.MMIOBase + guestmem.GPA(place)*boot.MMIOStride
}

// lay gives a place its line, if it has none yet, and adds doorbells until it has as many as queues.
func (w *wires) lay(vm *kvm.VM, place, queues int) error {
	if w.irq == nil {
		irq, err := devices.NewEvent()
		if err != nil {
			return err
		}
		w.irq = irq
		if err := vm.IRQFD(irq.FD(), gsiOf(place)); err != nil {
			return err
		}
	}
	for q := len(w.kicks); q < queues; q++ {
		kick, err := devices.NewEvent()
		if err != nil {
			return err
		}
		w.kicks = append(w.kicks, kick)
		if err := vm.IOEventFD(kick.FD(), uint64(baseOf(place))+mmio.QueueNotify, uint32(q)); err != nil {
			return err
		}
	}
	return nil
}

func (w *wires) close() error {
	var errs []error
	if w.irq != nil {
		errs = append(errs, w.irq.Close())
	}
	for _, k := range w.kicks {
		errs = append(errs, k.Close())
	}
	*w = wires{}
	return errors.Join(errs...)
}

// checkQueues checks that there are not too many places or queues.
func checkQueues(queues []int) error {
	if len(queues) > MaxDevices {
		return fmt.Errorf("%w: queues of %d devices, at most %d", ErrConfig, len(queues), MaxDevices)
	}
	for place, n := range queues {
		if n < 0 || n > mmio.MaxQueues {
			return fmt.Errorf("%w: %d queues in place %d, use 0 to %d", ErrConfig, n, place, mmio.MaxQueues)
		}
	}
	return nil
}

// layAhead makes the wires of the configured places.
func (s *Prebuilt) layAhead() error {
	for place, n := range s.cfg.Queues {
		s.wires = append(s.wires, wires{})
		if err := s.wires[place].lay(s.vm, place, n); err != nil {
			return err
		}
	}
	return nil
}

// takeWires returns the wires of a place for a device with this many queues. It makes what is missing. The prebuilt
// VM keeps surplus doorbells and closes them: a queue that does not exist has no listener, and a write to its
// register has no effect.
func (s *Prebuilt) takeWires(place, queues int) (w wires, err error) {
	if place < len(s.wires) {
		w, s.wires[place] = s.wires[place], wires{}
	}
	if err := w.lay(s.vm, place, queues); err != nil {
		return wires{}, errors.Join(err, w.close())
	}
	if place < len(s.wires) {
		s.wires[place].kicks = w.kicks[queues:]
	}
	w.kicks = w.kicks[:queues:queues]
	return w, nil
}
