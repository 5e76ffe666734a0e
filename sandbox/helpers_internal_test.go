package sandbox

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func tempStore(t *testing.T) *Host {
	t.Helper()
	return &Host{State: statetest.TempStore(t)}
}

func withMetadata(t *testing.T, s *Host, name string, phase state.Phase, m *spec.Metadata) *state.Record {
	t.Helper()
	return statetest.WithMetadata(t, s.State, name, phase, m)
}

func snapshotOf(t *testing.T, s *Host, r *state.Record, kind string, at time.Time) string {
	t.Helper()
	return statetest.SnapshotOf(t, s.State, r, kind, at)
}

func sleepingVM(t *testing.T, s *Host, name string, layers int) *state.Record {
	t.Helper()
	return statetest.SleepingVM(t, s.State, name, layers)
}

func diskSnapshotOf(t *testing.T, s *Host, r *state.Record, kind string) string {
	t.Helper()
	return statetest.DiskSnapshotOf(t, s.State, r, kind)
}

func wantLayers(t *testing.T, s *Host, want bool, layers ...string) {
	t.Helper()
	statetest.WantLayers(t, s.State, want, layers...)
}

func wantTold(t *testing.T, s *Host, want ...events.Type) events.Event {
	t.Helper()
	return statetest.WantTold(t, s.State, want...)
}

func told(t *testing.T, s *Host) ([]events.Type, events.Event) {
	t.Helper()
	return statetest.Told(t, s.State)
}
