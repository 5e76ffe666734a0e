package vmm

import (
	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FirstPages returns the pages of RAM that a restored machine's start touches before its guest runs: disks look at
// their queues. They are linear page numbers, as in package guestmem. They serve early loading: they may be too
// many or too few, and repeat. Prebuilt.Load loads the pages that KVM itself needs. The machine must be paused.
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
