package sandbox

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func tempStore(t *testing.T) *Store {
	t.Helper()
	return &Store{statetest.TempStore(t)}
}

func withMetadata(t *testing.T, s *Store, name string, phase state.Phase, m *state.Metadata) *state.Record {
	t.Helper()
	return statetest.WithMetadata(t, s.Store, name, phase, m)
}

func snapshotOf(t *testing.T, s *Store, r *state.Record, kind string, at time.Time) string {
	t.Helper()
	return statetest.SnapshotOf(t, s.Store, r, kind, at)
}

func sleepingVM(t *testing.T, s *Store, name string, layers int) *state.Record {
	t.Helper()
	return statetest.SleepingVM(t, s.Store, name, layers)
}

func diskSnapshotOf(t *testing.T, s *Store, r *state.Record, kind string) string {
	t.Helper()
	return statetest.DiskSnapshotOf(t, s.Store, r, kind)
}

func wantLayers(t *testing.T, s *Store, want bool, layers ...string) {
	t.Helper()
	statetest.WantLayers(t, s.Store, want, layers...)
}

func wantTold(t *testing.T, s *Store, want ...events.Type) events.Event {
	t.Helper()
	return statetest.WantTold(t, s.Store, want...)
}

func told(t *testing.T, s *Store) ([]events.Type, events.Event) {
	t.Helper()
	return statetest.Told(t, s.Store)
}

// noGrace has sweeps delete what is of today.
func noGrace(t *testing.T) {
	t.Helper()
	t.Cleanup(state.SetGraceTime(0))
}
