package state

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Portable returns what another host needs to know of a VM that sleeps, besides its snapshot and metadata.
func (r *Record) Portable() *Record {
	p := &Record{
		Version: RecordVersion, ID: r.ID, Spec: r.Spec, Created: r.Created, Phase: Asleep, Snapshot: r.Snapshot,
		Fork: r.Fork, Lineage: r.Lineage, TrustedCA: r.TrustedCA, Secrets: r.Secrets, Awake: r.Awake,
	}
	for _, sl := range r.Sleeps {
		if sl.Snapshot == r.Snapshot {
			p.Sleeps = []SleepRecord{sl}
		}
	}
	return p
}

// Adopted returns the record of a VM that comes from another host: r is what Portable returned there.
func (r *Record) Adopted(want spec.VM, boot BootFiles, m *snapshot.Manifest, lastLayer int, l spec.Metadata) (*Record, error) {
	a := r.Portable()
	a.Spec, a.Boot, a.Disk, a.Snapshot, a.NextLayer, a.metadata = want, boot, SnapshotStack(m), m.ID, lastLayer, &l
	return a, l.Check()
}

// LastLayer returns the highest number of a layer here that a VM has written.
func (s *Store) LastLayer(id string) (last int, err error) {
	entries, err := os.ReadDir(s.LayerDir())
	if err != nil {
		return 0, fmt.Errorf("looking for layers: %w", err)
	}
	for _, e := range entries {
		if number, ours := strings.CutPrefix(e.Name(), id+"-"); ours {
			if n, err := strconv.Atoi(number); err == nil {
				last = max(last, n)
			}
		}
	}
	return last, nil
}
