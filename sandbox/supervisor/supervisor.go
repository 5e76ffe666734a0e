package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
)

// Options say what a supervisor does.
type Options struct {
	// Pool is how many processes it keeps ready, as sandbox.PoolOptions.Processes; 0 is none.
	Pool int
	// MaxConns is how many connections it carries at once for one published port; those beyond it wait. 0 is
	// DefaultMaxConns.
	MaxConns int
	// PruneEvery is how often it looks for sandboxes whose time is over, and for sleeps that are not kept any more:
	// fleet.Fleet.Prune. 0 is DefaultPruneEvery, less than 0 never.
	PruneEvery time.Duration
	// Log gets what it does and what goes wrong; nil discards it.
	Log *slog.Logger
}

// DefaultMaxConns is how many connections are carried at once for one published port.
const DefaultMaxConns = 256

// lookEvery is how often it is looked for changes of VMs' records.
const lookEvery = 500 * time.Millisecond

// settleTime is how old a record has to be for its time to tell it from the next: file systems count in steps of
// milliseconds.
const settleTime = 100 * time.Millisecond

// port is one that a VM publishes.
type port struct {
	vm     string
	listen netip.AddrPort
	guest  uint16
}

// supervisor is a Run under way.
type supervisor struct {
	store    *sandbox.Store
	launcher sandbox.Launcher
	o        Options
	log      *slog.Logger

	seen map[string]time.Time // stamps of the records that have been read
	// want are the ports that VMs publish, doors those that are listened at, and refused why one is not.
	want    map[string][]port
	doors   map[port]*door
	refused map[port]string
	carried sync.WaitGroup
}

// Run supervises the VMs of a store until ctx ends, and returns when all that it has begun has ended. A store has one
// supervisor with a pool: another one ends with sandbox.ErrServed.
func Run(ctx context.Context, s *sandbox.Store, l sandbox.Launcher, o Options) (err error) {
	if o.MaxConns < 0 {
		return fmt.Errorf("%w: %d connections at once: use 1 or more", sandbox.ErrSpec, o.MaxConns)
	}
	if o.MaxConns == 0 {
		o.MaxConns = DefaultMaxConns
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := &supervisor{
		store: s, launcher: l, o: o, log: o.Log,
		seen: map[string]time.Time{}, want: map[string][]port{}, doors: map[port]*door{}, refused: map[port]string{},
	}
	if o.Pool > 0 {
		p, err := s.NewPool(l, sandbox.PoolOptions{Processes: o.Pool, Follow: true, Log: o.Log})
		if err != nil {
			return err
		}
		v.launcher = p.Launcher()
		served := make(chan error, 1)
		go func() {
			err := p.Serve(ctx)
			cancel(err)
			served <- err
		}()
		defer func() {
			cancel(nil)
			err = errors.Join(err, <-served, p.Close())
		}()
	}
	if o.PruneEvery >= 0 {
		keeper := v.keep(ctx)
		defer func() {
			cancel(nil)
			<-keeper
		}()
	}
	defer func() {
		for _, d := range v.doors {
			d.close()
		}
		v.carried.Wait()
	}()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		if err := v.look(ctx); err != nil {
			v.log.Warn("looking for VMs failed", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// look reads the records that have changed, and opens and closes doors.
func (v *supervisor) look(ctx context.Context) error {
	stamps, err := v.store.Stamps()
	if err != nil {
		return err
	}
	for name := range v.seen {
		if _, there := stamps[name]; !there {
			delete(v.seen, name)
			delete(v.want, name)
		}
	}
	var errs []error
	for name, stamp := range stamps {
		if v.seen[name].Equal(stamp) {
			continue
		}
		r, err := v.store.Get(name)
		if errors.Is(err, sandbox.ErrNotFound) {
			continue // removed just now
		}
		if time.Since(stamp) > settleTime {
			v.seen[name] = stamp
		}
		if err != nil {
			// Doors that are open stay: the record will be whole again, or go.
			errs = append(errs, err)
			continue
		}
		v.want[name] = published(r.Spec)
	}
	v.open(ctx)
	return errors.Join(errs...)
}

// published are the ports of a VM that can be listened for.
func published(s sandbox.Spec) (ports []port) {
	if s.Policy == nil || s.Network != sandbox.NetworkTAP {
		return nil
	}
	for _, p := range s.Policy.Publish {
		if p.Protocol == netpolicy.TCP {
			ports = append(ports, port{vm: s.Name, listen: p.Listen, guest: p.Port})
		}
	}
	return ports
}

// open opens the doors that are wanted, and closes the others.
func (v *supervisor) open(ctx context.Context) {
	want := map[port]bool{}
	for _, ports := range v.want {
		for _, p := range ports {
			want[p] = true
		}
	}
	for p, d := range v.doors {
		if !want[p] {
			d.close()
			delete(v.doors, p)
			v.log.Info("not listening any more", "vm", p.vm, "at", p.listen, "port", p.guest)
		}
	}
	for p := range v.refused {
		if !want[p] {
			delete(v.refused, p)
		}
	}
	for p := range want {
		if v.doors[p] != nil {
			continue
		}
		d, err := v.openDoor(ctx, p)
		if err != nil {
			// Another VM, or another program, may be there; it may go.
			if v.refused[p] != err.Error() {
				v.log.Warn("a published port is not listened for", "vm", p.vm, "at", p.listen, "error", err)
			}
			v.refused[p] = err.Error()
			continue
		}
		delete(v.refused, p)
		v.doors[p] = d
		v.log.Info("listening", "vm", p.vm, "at", p.listen, "port", p.guest)
	}
}
