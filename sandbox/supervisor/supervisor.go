package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Options configure a supervisor.
type Options struct {
	// Pool is how many processes it keeps ready, as sandbox.PoolOptions.Processes; 0 means no pool.
	Pool int
	// MaxConns is the most connections that it carries at once for one published port; further ones wait. For UDP
	// it is the most senders; datagrams of further senders are dropped. 0 is DefaultMaxConns.
	MaxConns int
	// PruneEvery is how often it looks for expired sandboxes and for sleeps that are no longer kept:
	// fleet.Fleet.Prune. 0 is DefaultPruneEvery, less than 0 never.
	PruneEvery time.Duration
	// Webhooks are the receivers of events; at most events.MaxWebhooks.
	Webhooks []events.Webhook
	// Counters, if not nil, are incremented by the supervisor.
	Counters *Counters
	// Log gets actions and errors; nil discards them.
	Log *slog.Logger
	// Activated, if not nil, is called for each delivered connection, and for each delivered packet to a VM's own
	// address that woke the VM. It is called from many goroutines, and it delays whoever activated the VM.
	Activated func(Activation)
}

// Activation is the delivery of a connection to a published port, or of a packet to the address of a sleeping VM.
type Activation struct {
	VM string
	// By is ByConnection or ByPacket.
	By string
	// Came is when the supervisor got it, Awake when the VM was awake and held, and Delivered when the guest had
	// accepted the connection or its device the packet.
	Came, Awake, Delivered time.Time
}

// What activates a VM.
const (
	ByConnection = "connection"
	ByPacket     = "packet"
)

// DefaultMaxConns is the most connections that are carried at once for one published port.
const DefaultMaxConns = 256

// lookEvery is how often the supervisor looks for changes of VMs' records.
const lookEvery = 500 * time.Millisecond

// settleTime is the age at which the time of a record tells it from its next version: file systems count in steps
// of milliseconds.
const settleTime = 100 * time.Millisecond

const (
	// wakeTime is how long a connection or packet is held for a VM that wakes.
	wakeTime = time.Minute
)

// port is a port that a VM publishes.
type port struct {
	vm       string
	listen   netip.AddrPort
	guest    uint16
	protocol netpolicy.Protocol // TCP or UDP
}

// supervisor is the state of a Run.
type supervisor struct {
	host *sandbox.Host // has the Launcher that starts VMs
	o    Options
	log  *slog.Logger

	stamps noticed[map[string]string]
	seen   map[string]string // stamps of the records that have been read
	pids   map[string]int    // processes of the VMs that ran then
	// want are the ports that VMs publish, listeners the open ones, and refused why a port could not be opened.
	want      map[string][]port
	listeners map[port]closer
	refused   map[port]string
	carried   sync.WaitGroup

	// guarded are the VMs that packets may wake, waker wakes them, and device receives the packets. Both are nil
	// until there is such a VM. wakerFailed is the error that prevented them.
	guarded     map[string]guarded
	waker       *packetWaker
	device      *wakerDevice
	wakerFailed string
}

// Run supervises the VMs of a store until ctx ends, and returns when all that it began has ended. A store has one
// supervisor with a pool: a second one returns spec.ErrServed.
func Run(ctx context.Context, s *sandbox.Host, l pool.Launcher, o Options) (err error) {
	if o.MaxConns < 0 {
		return fmt.Errorf("%w: %d connections at once: use 1 or more", sandbox.ErrSpec, o.MaxConns)
	}
	if o.MaxConns == 0 {
		o.MaxConns = DefaultMaxConns
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Counters == nil {
		o.Counters = &Counters{}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := &supervisor{
		host: s.With(l), o: o, log: o.Log,
		seen: map[string]string{}, pids: map[string]int{}, want: map[string][]port{}, listeners: map[port]closer{}, refused: map[port]string{}, guarded: map[string]guarded{},
	}
	watch, err := newNotice(filepath.Join(s.State.Dir(), "vms"))
	if err != nil {
		o.Log.Warn("all VMs are looked at again and again", "cause", err)
	} else {
		defer watch.close()
	}
	v.stamps = noticed[map[string]string]{read: s.State.FileStamps, n: watch}
	if o.Pool > 0 {
		p, err := pool.New(s.State, l, pool.Options{Processes: o.Pool, Follow: true, Log: o.Log})
		if err != nil {
			return err
		}
		v.host = s.With(p.Launcher())
		o.Counters.pool.Store(p)
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
	if len(o.Webhooks) > 0 {
		delivered := make(chan error, 1)
		go func() {
			err := events.DeliverAll(ctx, s.State.Events(), filepath.Join(s.State.Dir(), "webhooks"), o.Webhooks, o.Log)
			if err != nil {
				cancel(err)
			}
			delivered <- err
		}()
		defer func() {
			cancel(nil)
			err = errors.Join(err, <-delivered)
		}()
	}
	timed := newTimers(launchedVMs{s.State, v.host, &noticed[map[string]string]{read: s.State.FileStamps, n: watch}}, v.log.Warn)
	timing := make(chan struct{})
	go func() {
		defer close(timing)
		timed.run(ctx)
	}()
	defer func() {
		cancel(nil)
		<-timing
	}()
	templates := v.makeTemplates(ctx)
	defer func() {
		cancel(nil)
		<-templates
	}()
	if o.PruneEvery >= 0 {
		keeper := v.keep(ctx)
		defer func() {
			cancel(nil)
			<-keeper
		}()
	}
	defer func() {
		for _, d := range v.listeners {
			d.close()
		}
		if v.device != nil {
			err = errors.Join(err, v.device.close())
		}
		v.carried.Wait()
		if v.waker != nil {
			cancel(nil)
			v.waker.bringing.Wait()
		}
	}()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		if err := v.look(ctx); err != nil {
			v.log.Warn("looking for VMs failed", "error", err)
		}
		o.Counters.round.Store(time.Now().UnixNano())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// look reads the records that have changed, and opens and closes listeners.
func (v *supervisor) look(ctx context.Context) error {
	stamps, err := v.stamps.get()
	if err != nil {
		return err
	}
	for name := range v.seen {
		if _, there := stamps[name]; !there {
			delete(v.seen, name)
			delete(v.pids, name)
			delete(v.want, name)
			delete(v.guarded, name)
		}
	}
	var errs []error
	for name, stamp := range stamps {
		if stamp != "" && v.seen[name] == stamp && !v.ended(name) {
			continue
		}
		r, err := v.host.State.Get(name)
		if errors.Is(err, sandbox.ErrNotFound) {
			continue // removed just now
		}
		v.seen[name] = stamp
		if err != nil {
			// Open listeners stay: the record will become readable again, or disappear.
			errs = append(errs, err)
			continue
		}
		delete(v.pids, name)
		if r.PID > 0 && (r.Phase == state.Running || r.Phase == state.Starting) {
			v.pids[name] = r.PID
		}
		v.want[name] = published(r.Spec)
		if vm, ok := v.guardedOf(r); ok {
			v.guarded[name] = vm
		} else {
			delete(v.guarded, name)
		}
	}
	v.open(ctx)
	errs = append(errs, v.openPacketWaker(ctx))
	return errors.Join(errs...)
}

// ended reports whether the process that a VM's record names is gone. A killed process cannot record its end; the
// next reader of the record does (state.Store.Get).
func (v *supervisor) ended(name string) bool {
	pid := v.pids[name]
	return pid > 0 && errors.Is(unix.Kill(pid, 0), unix.ESRCH)
}

// published returns the ports of a VM that the host can listen on.
func published(s sandbox.Spec) (ports []port) {
	if s.Policy == nil || s.Network != spec.NetworkTAP {
		return nil
	}
	for _, p := range s.Policy.Publish {
		ports = append(ports, port{vm: s.Name, listen: p.Listen, guest: p.Port, protocol: p.Protocol})
	}
	return ports
}

// open opens the listeners that are wanted, and closes the others.
func (v *supervisor) open(ctx context.Context) {
	want := map[port]bool{}
	for _, ports := range v.want {
		for _, p := range ports {
			want[p] = true
		}
	}
	for p, d := range v.listeners {
		if !want[p] {
			d.close()
			delete(v.listeners, p)
			v.log.Info("not listening any more", "vm", p.vm, "at", p.listen, "protocol", p.protocol, "port", p.guest)
		}
	}
	for p := range v.refused {
		if !want[p] {
			delete(v.refused, p)
		}
	}
	for p := range want {
		if v.listeners[p] != nil {
			continue
		}
		d, err := v.listenTCP(ctx, p)
		if err != nil {
			// Another VM or program may use the address; it may release it.
			if v.refused[p] != err.Error() {
				v.log.Warn("a published port is not listened for", "vm", p.vm, "at", p.listen, "protocol", p.protocol, "error", err)
			}
			v.refused[p] = err.Error()
			continue
		}
		delete(v.refused, p)
		v.listeners[p] = d
		v.log.Info("listening", "vm", p.vm, "at", p.listen, "protocol", p.protocol, "port", p.guest)
	}
}

// awake wakes a VM if it sleeps, and keeps it awake until the hold is released.
func (v *supervisor) awake(ctx context.Context, name string) (*sandbox.WakeLock, *spec.NetworkInfo, error) {
	hold, err := v.host.Sandbox(name).WakeWithLock(ctx)
	if err != nil {
		return nil, nil, err
	}
	n := hold.Network()
	if n == nil { // the VM's process is of an older drowse
		var info control.Info
		if info, err = v.host.Sandbox(name).Info(ctx); err == nil {
			n = info.Network
		}
	}
	if err == nil && (n == nil || !n.Address.IsValid()) {
		err = fmt.Errorf("VM %s has no network", name)
	}
	if err != nil {
		hold.Release()
		return nil, nil, err
	}
	return hold, n, nil
}

// guardedOf returns what the packet waker needs to know of a VM that a packet may wake: it sleeps, or may soon.
func (v *supervisor) guardedOf(r *state.Record) (vm guarded, ok bool) {
	if r.Spec.Network != spec.NetworkTAP {
		return vm, false
	}
	switch {
	case r.Phase == state.Asleep, r.Phase == state.Running:
	case r.Phase == state.Starting && r.Snapshot != "":
		// It wakes, and may sleep again before the next look.
	default:
		return vm, false
	}
	in, err := hostnet.Range()
	if err != nil {
		return vm, false // its process reports it
	}
	vm = guarded{name: r.Spec.Name, address4: hostnet.First(in, r.ID), policy: r.Spec.Policy, tags: r.Spec.Tags}
	if r.Spec.IPv6 {
		if in6, err := hostnet.Range6(); err == nil {
			vm.address6, _ = hostnet.Address6(in6, vm.address4) // if it fails, the VM does not wake either
		}
	}
	return vm, true
}

// openPacketWaker routes the addresses of guarded VMs to the packet waker.
func (v *supervisor) openPacketWaker(ctx context.Context) error {
	if v.waker == nil {
		if len(v.guarded) == 0 {
			return nil
		}
		agents, err := hostnet.Range()
		if err != nil {
			return err
		}
		agents6, err := hostnet.Range6()
		if err != nil {
			return err
		}
		d, err := openWakerDevice(agents, agents6)
		if err != nil {
			// The same error is reported once.
			if v.wakerFailed == err.Error() {
				return nil
			}
			v.wakerFailed = err.Error()
			return fmt.Errorf("packets wake no VM: %w", err)
		}
		v.device = d
		g := &packetWaker{log: v.log, counters: v.o.Counters, activated: v.o.Activated, send: d.send, now: time.Now, resting: map[netip.Addr]*resting{}, agents: agents, agents6: agents6}
		g.wake = func(ctx context.Context, name string) (hold, *spec.NetworkInfo, error) {
			h, info, err := v.awake(events.WithCause(ctx, events.Packet), name)
			if err != nil {
				return nil, nil, err
			}
			return h, info, nil
		}
		g.look() // before the first packet
		v.waker = g
		v.carried.Go(func() { hostnet.Watch(ctx, v.log, g.look) })
		v.carried.Go(func() {
			// Otherwise the first VM that wakes after a start of the host waits for it.
			if err := link.Preload(""); err != nil {
				v.log.Warn("the programs of policies are not loaded ahead", "error", err)
			}
		})
		v.carried.Go(func() {
			if err := g.read(ctx, d.file); err != nil {
				v.log.Error("packets wake no VM any more", "error", err)
			}
		})
	}
	v.waker.guard(v.guarded)
	return v.device.lead(v.waker.addresses())
}
