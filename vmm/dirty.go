package vmm

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ErrNotTracked says that a machine was made without PrebuiltConfig.TrackDirty.
var ErrNotTracked = errors.New("the machine does not track which pages change")

// logWords returns the words of a bitmap over all of RAM that belong to one slot. Slots begin at multiples of 64
// pages: the second, if there is one, at HoleStart.
func logWords(set *guestmem.PageSet, s guestmem.Slot) []uint64 {
	first := s.Offset / guestmem.PageSize / 64
	return set.Words()[first : first+(s.Size/guestmem.PageSize+63)/64]
}

// TakeDirty returns the pages of RAM that may have changed since the last call, or since NewPrebuilt: pages that
// the guest, KVM on its behalf, and the VMM with its devices have written, and pages that the balloon has given
// away. A page does not belong to the set just because a pager has filled it. TakeDirty marks the pages as
// unchanged; MarkDirty takes that back.
//
// A page in the set may be unchanged: on most hosts KVM lets a guest write to a page that it has read, and counts
// it as changed from then on.
//
// The machine must be paused, or TakeDirty fails with ErrNotPaused. Call it after Export: reading the state of a
// vCPU may make KVM write to the guest's RAM. It fails with ErrNotTracked without PrebuiltConfig.TrackDirty. A
// failed call loses no pages.
//
// TakeDirty takes time in proportion to the number of changed pages, plus reading two bits for each page of RAM
// (api.rst 4.8, 4.117).
func (m *Machine) TakeDirty() (*guestmem.PageSet, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return nil, fmt.Errorf("asking which pages have changed: %w: set PrebuiltConfig.TrackDirty", ErrNotTracked)
	case m.state != paused:
		return nil, fmt.Errorf("asking which pages have changed: %w", ErrNotPaused)
	}
	return m.takeDirty()
}

// TakeDirtyRunning is TakeDirty for a machine that may be running. Use it to copy RAM ahead of a capture. A page
// that changes during the call may be in this set, in the next, or in both. What was written to a page of this set
// before the call returned can be read from RAM afterwards, so a copy that begins then lacks only pages of the next
// set. It fails like TakeDirty, but not with ErrNotPaused. It fails with ErrEnded on a closed machine.
func (m *Machine) TakeDirtyRunning() (*guestmem.PageSet, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return nil, fmt.Errorf("asking which pages have changed: %w: set PrebuiltConfig.TrackDirty", ErrNotTracked)
	case m.state == closed:
		return nil, fmt.Errorf("asking which pages have changed: %w", ErrEnded)
	}
	return m.takeDirty()
}

func (m *Machine) takeDirty() (*guestmem.PageSet, error) {
	m.taken = true
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
	// The VMM marks a page after it has written to it, so the bytes behind a mark taken here are in RAM.
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

// CountDirty returns how many pages the guest has changed since the last TakeDirty, as far as KVM knows. It is an
// estimate that works while the machine runs, and leaves out what the VMM has written. It fails with ErrNotTracked
// like TakeDirty.
func (m *Machine) CountDirty() (uint64, error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty:
		return 0, fmt.Errorf("counting changed pages: %w: set PrebuiltConfig.TrackDirty", ErrNotTracked)
	case m.state == closed:
		return 0, fmt.Errorf("counting changed pages: %w", ErrEnded)
	}
	set := guestmem.NewPageSet(m.mem.Size() / guestmem.PageSize)
	if err := m.readLog(set); err != nil {
		return 0, fmt.Errorf("counting changed pages: %w", err)
	}
	return set.Len(), nil
}

// DirtyTaken reports whether changes were counted anew since the machine was restored, by TakeDirty.
func (m *Machine) DirtyTaken() bool {
	m.life.Lock()
	defer m.life.Unlock()
	return m.taken
}

// Evict gives pages back to the host that have not changed since the machine was restored, and that a lazy restore
// brings again when they are touched. It returns how many. The machine must be paused, or Evict fails with
// ErrNotPaused. After TakeDirty it does nothing: what has changed since the restore is not known any more.
func (m *Machine) Evict() (pages uint64, err error) {
	m.life.Lock()
	defer m.life.Unlock()
	switch {
	case !m.prebuilt.cfg.TrackDirty || m.taken:
		return 0, nil
	case m.state != paused:
		return 0, fmt.Errorf("giving unchanged pages back: %w", ErrNotPaused)
	}
	changed := guestmem.NewPageSet(m.mem.Size() / guestmem.PageSize)
	if err := m.readLog(changed); err != nil {
		return 0, fmt.Errorf("giving unchanged pages back: %w", err)
	}
	return m.mem.Evict(changed)
}

// MarkDirty marks the pages of a set from TakeDirty as changed again. A caller that took the set and could not save
// the pages must call it, or the next snapshot lacks them. The machine may be running.
func (m *Machine) MarkDirty(set *guestmem.PageSet) { m.mem.MarkDirty(set) }
