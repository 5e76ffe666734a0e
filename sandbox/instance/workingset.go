package instance

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// workingSet is the pages that restoring a machine takes and those that its guest needed first after its last resume.
// A snapshot stores it among the states of its parts, and the next resume loads the pages before they fault. The format
// is the number of hot pages and the numbers of all pages, 4 bytes each, little-endian, in the order in which they were
// needed.
type workingSet struct {
	pages []uint64
	hot   int // how many of them, the first ones, were needed before the guest was ready; 0 if no resume has recorded it
}

const (
	workingSetName    = "working-set"
	workingSetKind    = "drowse-working-set"
	workingSetVersion = 2
	// withoutHot is the version without the number of hot pages.
	withoutHot = 1
)

// newWorkingSet returns the pages that restoring the machine takes and those that the pager, if any, has recorded.
func newWorkingSet(first []uint64, p *pager.Pager) (s workingSet) {
	var recorded []uint64
	hot := 0
	if p != nil {
		recorded, hot = p.WorkingSet()
	}
	seen := map[uint64]bool{}
	for i, page := range slices.Concat(first, recorded) {
		if seen[page] || len(s.pages) == pager.MaxRecordPages {
			continue
		}
		seen[page] = true
		s.pages = append(s.pages, page)
		if p != nil && i < len(first)+hot && len(s.pages) <= snapshot.MaxHot {
			s.hot = len(s.pages)
		}
	}
	return s
}

// payload returns the working set as a snapshot stores it.
func (s workingSet) payload() snapshot.Payload {
	data := make([]byte, 0, 4*(1+len(s.pages)))
	data = binary.LittleEndian.AppendUint32(data, uint32(s.hot))
	for _, page := range s.pages {
		data = binary.LittleEndian.AppendUint32(data, uint32(page))
	}
	return snapshot.Payload{Name: workingSetName, Kind: workingSetKind, Version: workingSetVersion, Data: data}
}

// takeWorkingSet separates the working set from the states of a machine. It is only a hint: another version is
// ignored, and the pager ignores numbers that make no sense.
func takeWorkingSet(all []snapshot.Payload) (s workingSet, states []snapshot.Payload, err error) {
	for _, p := range all {
		if p.Kind != workingSetKind {
			states = append(states, p)
			continue
		}
		if p.Version != workingSetVersion && p.Version != withoutHot {
			continue
		}
		if s.pages != nil || len(p.Data)%4 != 0 || len(p.Data)/4 > 1+pager.MaxRecordPages {
			return workingSet{}, nil, fmt.Errorf("the working set: %w: %d bytes", snapshot.ErrCorrupt, len(p.Data))
		}
		s.pages = make([]uint64, 0, len(p.Data)/4)
		for b := p.Data; len(b) > 0; b = b[4:] {
			s.pages = append(s.pages, uint64(binary.LittleEndian.Uint32(b)))
		}
		if p.Version == workingSetVersion && len(s.pages) > 0 {
			s.hot, s.pages = int(min(s.pages[0], snapshot.MaxHot)), s.pages[1:]
		}
	}
	return s, states, nil
}

// HotPages returns the pages of a snapshot that its guest needs to be ready, and further ones that it needs soon after.
func HotPages(all []snapshot.Payload) (hot, soon []uint64, err error) {
	s, _, err := takeWorkingSet(all)
	n := min(s.hot, len(s.pages))
	return s.pages[:n], s.pages[n:], err
}
