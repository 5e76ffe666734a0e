package vmm

import (
	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FirstPages are the pages of RAM that starting the restored machine takes before its guest runs: disks look at their
// queues. They are linear page numbers, as package guestmem counts them. It is for loading them early: they may be too
// many or too few, and repeat. What KVM itself wants, Prebuilt.Load loads. The machine must be paused.
func (m *Machine) FirstPages() []uint64 {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != paused {
		return nil
	}
	var pages []uint64
	add := func(gpa guestmem.GPA) {
		if offset, err := m.mem.Linear(gpa); err == nil {
			pages = append(pages, offset/guestmem.PageSize)
		}
	}
	for _, t := range m.virtio {
		if t.Device().ID() != devices.IDBlock {
			continue
		}
		for _, q := range t.Layouts() {
			add(q.Avail)
			add(q.Used)
		}
	}
	return pages
}
