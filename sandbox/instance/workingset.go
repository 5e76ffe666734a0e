package instance

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// A snapshot stores, among the states of its parts, the pages that restoring a machine takes and the pages that
// its guest needed first after its last resume. The next resume loads them before they fault. The format is page
// numbers of 4 bytes, little-endian, in the order in which they were needed.
const (
	workingSetName    = "working-set"
	workingSetKind    = "drowse-working-set"
	workingSetVersion = 1
)

// workingSet returns the payload with the pages that restoring the machine takes and those that the pager, if any,
// has recorded; false if there are none.
func workingSet(first []uint64, p *pager.Pager) (snapshot.Payload, bool) {
	var recorded []uint64
	if p != nil {
		recorded = p.WorkingSet()
	}
	var pages []uint64
	seen := map[uint64]bool{}
	for _, page := range slices.Concat(first, recorded) {
		if !seen[page] && len(pages) < pager.MaxRecordPages {
			seen[page] = true
			pages = append(pages, page)
		}
	}
	data := make([]byte, 0, 4*len(pages))
	for _, page := range pages {
		data = binary.LittleEndian.AppendUint32(data, uint32(page))
	}
	return snapshot.Payload{Name: workingSetName, Kind: workingSetKind, Version: workingSetVersion, Data: data}, len(data) > 0
}

// takeWorkingSet separates the working set from the states of a machine. It is only a hint: another version is
// ignored, and the pager ignores numbers that make no sense.
func takeWorkingSet(all []snapshot.Payload) (pages []uint64, states []snapshot.Payload, err error) {
	for _, p := range all {
		if p.Kind != workingSetKind {
			states = append(states, p)
			continue
		}
		if p.Version != workingSetVersion {
			continue
		}
		if pages != nil || len(p.Data)%4 != 0 || len(p.Data)/4 > pager.MaxRecordPages {
			return nil, nil, fmt.Errorf("the working set: %w: %d bytes", snapshot.ErrCorrupt, len(p.Data))
		}
		pages = make([]uint64, 0, len(p.Data)/4)
		for b := p.Data; len(b) > 0; b = b[4:] {
			pages = append(pages, uint64(binary.LittleEndian.Uint32(b)))
		}
	}
	return pages, states, nil
}
