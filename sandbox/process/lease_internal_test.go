package process

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// still is a VM that can be frozen, or not.
type still struct {
	frozen atomic.Int32
	fails  bool
}

func (s *still) Freeze(string) error {
	s.frozen.Add(1)
	if s.fails {
		return errors.New("it does not stand still")
	}
	return nil
}

func (s *still) Thaw(string) { s.frozen.Add(-1) }

// A VM whose memory is on its way cannot sleep before its lease ends. It stands still then, and goes on with a new one.
func TestLease_that_ends_freezes_a_VM_whose_memory_is_on_its_way_and_ends_others(t *testing.T) {
	const ttl = 500 * time.Millisecond
	for name, c := range map[string]struct {
		arrives, freezes bool
		renewed          bool
	}{
		"it arrives, and the lease comes back":        {true, true, true},
		"it arrives, and the lease does not":          {true, true, false},
		"it arrives, and cannot be frozen":            {true, false, true},
		"it is all there, and could have been asleep": {false, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, err := state.OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			dir := lease.In(store.Dir())
			renew := func() {
				t.Helper()
				if err := dir.SetLease(lease.Lease{Session: "s", Boot: lease.Boot(), Until: lease.Now() + ttl, TTL: ttl}); err != nil {
					t.Error(err)
				}
			}
			if err := dir.Make(); err != nil {
				t.Fatal(err)
			}
			if err := dir.SetClaim("box", &lease.Claim{Held: true, Session: "s", Fence: 1}); err != nil {
				t.Fatal(err)
			}
			renew()
			p := &process{store: store, r: &state.Record{Spec: spec.VM{Name: "box"}}, log: slog.New(slog.DiscardHandler)}
			leased, _, release, err := p.leased(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			v := &still{fails: !c.freezes}
			if c.arrives {
				p.arriving = &arriving{over: make(chan struct{})}
			}
			var f freezer = v
			p.freezer.Store(&f)
			if !c.arrives || !c.freezes {
				<-leased.Done()
				if err := context.Cause(leased); !errors.Is(err, spec.ErrUnclaimed) {
					t.Error(err)
				}
				return
			}
			until := func(frozen int32) {
				t.Helper()
				for end := time.Now().Add(time.Minute); v.frozen.Load() != frozen; time.Sleep(time.Millisecond) {
					if time.Now().After(end) || leased.Err() != nil {
						t.Fatalf("frozen %d, %v", v.frozen.Load(), context.Cause(leased))
					}
				}
			}
			until(1)
			if !c.renewed {
				<-leased.Done()
				if v.frozen.Load() != 1 {
					t.Error("it went on before its end")
				}
				return
			}
			for range 3 { // it is frozen as often as the lease ends
				renew()
				until(0)
				until(1)
			}
		})
	}
}
