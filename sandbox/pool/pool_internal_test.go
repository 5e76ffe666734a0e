package pool

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestLaunch_takes_another_process_only_where_nobody_has_the_order(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		standby string // what the pool's process does once it is ready
		again   bool   // whether another process gets the order
	}{
		"it ends at once":                     {"exit 1", true},
		"it ends with the order on its way":   {"sleep 0.1; exit 1", true},
		"it ends after it has read the order": {"dd bs=65536 count=1 <&3 >/dev/null 2>&1; exit 1", true},
		// It reports first: the report is lost as soon as a prebuilt VM has read the order.
		"it ends after it has taken the order": {"printf taken >&3; dd bs=65536 count=1 <&3 >/dev/null 2>&1; exit 1", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := state.OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			lock, err := s.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: state.Starting})
			if err != nil {
				t.Fatal(err)
			}
			lock.Release()
			script := `case "$*" in *--standby*) printf ready >&3; ` + tc.standby + `;; *) echo '{"name":"a","faults":7}' >&3;; esac`
			l := Launcher{Command: []string{"/bin/sh", "-c", script, "sh"}}
			p, err := New(s, l, Options{Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 256, VCPUs: 1}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			rep, err := Start(t.Context(), s, p.Launcher(), spec.VM{Name: "a"}.Shape(), control.Order{Name: "a", Snapshot: "x"})
			switch {
			case tc.again && (err != nil || rep.Faults != 7):
				t.Errorf("got %+v, %v, want the report of another process", rep, err)
			case !tc.again && (!errors.Is(err, spec.ErrCrashed) || strings.Contains(err.Error(), "order")):
				t.Errorf("got %+v, %v, want ErrCrashed", rep, err)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestPool_gives_the_process_that_fits_best(t *testing.T) {
	small, linked := spec.Shape{MemoryMiB: 256, VCPUs: 1}, spec.Shape{MemoryMiB: 256, VCPUs: 1, Network: true}
	large, largeLinked := spec.Shape{MemoryMiB: 512, VCPUs: 1}, spec.Shape{MemoryMiB: 512, VCPUs: 1, Network: true}
	for name, tc := range map[string]struct {
		ready      []spec.Shape
		want, gets spec.Shape
	}{
		"the same":                            {[]spec.Shape{large, linked, small, largeLinked}, linked, linked},
		"the same machine, with a network":    {[]spec.Shape{large, linked, largeLinked}, small, linked},
		"the same machine, without a network": {[]spec.Shape{largeLinked, small, largeLinked}, linked, small},
		"another machine: the one made last":  {[]spec.Shape{small, linked}, large, linked},
		"the same, of two with that machine":  {[]spec.Shape{linked, small}, small, small},
	} {
		t.Run(name, func(t *testing.T) {
			p := &Pool{}
			for _, s := range tc.ready {
				p.ready = append(p.ready, &standby{shape: s})
			}
			got := p.pop(tc.want)
			if got == nil || got.shape != tc.gets || len(p.ready) != len(tc.ready)-1 || slices.Contains(p.ready, got) {
				t.Errorf("got %+v, want %+v; %d are left", got, tc.gets, len(p.ready))
			}
		})
	}
}
