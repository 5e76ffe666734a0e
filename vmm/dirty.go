package vmm

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ErrNotTracked says that a machine was made without PrebuiltConfig.TrackDirty.
var ErrNotTracked = errors.New("the machine does not track which pages change")

// logWords is the part of a bitmap over all of RAM that is about one slot. Slots
// begin at multiples of 64 pages: the second, if there is one, at HoleStart.
func logWords(set *guestmem.PageSet, s guestmem.Slot) []uint64 {
	first := s.Offset / guestmem.PageSize / 64
	return set.Words()[first : first+(s.Size/guestmem.PageSize+63)/64]
}

// TakeDirty returns the pages of RAM that may have changed since the last call, or
// since New: what the guest, KVM on its behalf, and the VMM with its devices have
// written, and what the balloon has given away. Pages that a pager has filled are
// not in it for that. From then on they count as unchanged; MarkDirty takes that
// back.
//
// A page may be in the set without having changed: on most hosts KVM lets a guest
// write to a page that it has read, and counts it as changed from then on.
//
// The machine must be paused, or TakeDirty fails with ErrNotPaused. Call it after
// Export: reading the state of a vCPU may make KVM write to the guest's RAM. It
// fails with ErrNotTracked without PrebuiltConfig.TrackDirty. A call that fails loses
// nothing.
//
// Its time follows the number of changed pages, but for reading two bits for each
// page of RAM (api.rst 4.8, 4.117).
func (m *Machine) TakeDirty() (*guestmem.PageSet, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return nil, fmt.Errorf("asking which pages have changed: %w: set Config.TrackDirty", ErrNotTracked)
	case m.state != paused:
		return nil, fmt.Errorf("asking which pages have changed: %w", ErrNotPaused)
	}
	return m.takeDirty()
}

// TakeDirtyRunning is TakeDirty for a machine that may be running, for whoever copies
// RAM ahead of a capture. A page that changes while it is called may be in this set, in
// the next, or in both, and what is written to a page of this set before the call has
// returned can be read from RAM afterwards. So a copy of RAM that is begun then lacks
// nothing but pages of the next set. It fails like TakeDirty, but for ErrNotPaused.
func (m *Machine) TakeDirtyRunning() (*guestmem.PageSet, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return nil, fmt.Errorf("asking which pages have changed: %w: set Config.TrackDirty", ErrNotTracked)
	case m.state == closed:
		return nil, fmt.Errorf("asking which pages have changed: %w", ErrEnded)
	}
	return m.takeDirty()
}

func (m *Machine) takeDirty() (*guestmem.PageSet, error) {
	set := guestmem.NewPageSet(m.mem.Size() / guestmem.PageSize)
	err := m.readLog(set)
	if err == nil {
		for i, s := range m.mem.Slots() {
			pages := s.Size / guestmem.PageSize
			if err = m.vm.ClearDirtyLog(uint32(i), 0, uint32(pages), logWords(set, s)); err != nil {
				break
			}
		}
	}
	if err != nil {
		m.mem.MarkDirty(set)
		return nil, fmt.Errorf("asking which pages have changed: %w", err)
	}
	// What the VMM writes is marked after it has been written, so a mark that is
	// taken here is of bytes that are there.
	m.mem.DrainDirty(set)
	return set, nil
}

func (m *Machine) readLog(set *guestmem.PageSet) error {
	for i, s := range m.mem.Slots() {
		if err := m.vm.DirtyLog(uint32(i), logWords(set, s)); err != nil {
			return err
		}
	}
	return nil
}

// CountDirty is how many pages the guest has changed since the last TakeDirty, as
// far as KVM knows, for an estimate while it runs. What the VMM has written is not
// in it. It fails with ErrNotTracked like TakeDirty.
func (m *Machine) CountDirty() (uint64, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return 0, fmt.Errorf("counting changed pages: %w: set Config.TrackDirty", ErrNotTracked)
	case m.state == closed:
		return 0, fmt.Errorf("counting changed pages: %w", ErrEnded)
	}
	set := guestmem.NewPageSet(m.mem.Size() / guestmem.PageSize)
	if err := m.readLog(set); err != nil {
		return 0, fmt.Errorf("counting changed pages: %w", err)
	}
	return set.Len(), nil
}

// MarkDirty makes the pages of a set that TakeDirty has returned count as changed
// again. Whoever took it and could not save them calls it, or the next snapshot lacks
// them. It may be called whether the machine runs or not.
func (m *Machine) MarkDirty(set *guestmem.PageSet) { m.mem.MarkDirty(set) }
