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

// Options say what a supervisor does.
type Options struct {
	// Pool is how many processes it keeps ready, as sandbox.PoolOptions.Processes; 0 is none.
	Pool int
	// MaxConns is how many connections it carries at once for one published port; those beyond it wait. Of UDP, it is
	// how many senders; datagrams of those beyond it are dropped. 0 is DefaultMaxConns.
	MaxConns int
	// PruneEvery is how often it looks for sandboxes whose time is over, and for sleeps that are not kept any more:
	// fleet.Fleet.Prune. 0 is DefaultPruneEvery, less than 0 never.
	PruneEvery time.Duration
	// Webhooks are where it sends events; at most events.MaxWebhooks.
	Webhooks []events.Webhook
	// Counters, if not nil, are counted up.
	Counters *Counters
	// Log gets what it does and what goes wrong; nil discards it.
	Log *slog.Logger
	// Activated, if it is not nil, is told of each connection, and of each packet to a VM's own address that woke it,
	// when it was delivered. It is called from many goroutines, and what it takes whoever activated the VM waits for.
	Activated func(Activation)
}

// Activation is what became of a connection to a published port, or of a packet to the address of a VM that slept.
type Activation struct {
	VM string
	// By is ByConnection or ByPacket.
	By string
	// Came is when the supervisor had it, Awake when the VM was awake and held so, and Delivered when the guest had
	// accepted the connection, or its device the packet.
	Came, Awake, Delivered time.Time
}

// What activates a VM.
const (
	ByConnection = "connection"
	ByPacket     = "packet"
)

// DefaultMaxConns is how many connections are carried at once for one published port.
const DefaultMaxConns = 256

// lookEvery is how often it is looked for changes of VMs' records.
const lookEvery = 500 * time.Millisecond

// settleTime is how old a record has to be for its time to tell it from the next: file systems count in steps of
// milliseconds.
const settleTime = 100 * time.Millisecond

const (
	// wakeTime is how long a connection or packet is held for a VM that wakes.
	wakeTime = time.Minute
)

// port is one that a VM publishes.
type port struct {
	vm       string
	listen   netip.AddrPort
	guest    uint16
	protocol netpolicy.Protocol // TCP or UDP
}

// supervisor is a Run under way.
type supervisor struct {
	host *sandbox.Host // with what starts VMs
	o    Options
	log  *slog.Logger

	stamps noticed[map[string]string]
	seen   map[string]string // stamps of the records that have been read
	pids   map[string]int    // processes of the VMs that ran then
	// want are the ports that VMs publish, listeners those that are listened at, and refused why one is not.
	want      map[string][]port
	listeners map[port]closer
	refused   map[port]string
	carried   sync.WaitGroup

	// guarded are the VMs that packets may wake, waker is who does it, and device where they come; nil until there is
	// such a VM. wakerFailed is why there is none.
	guarded     map[string]guarded
	waker       *packetWaker
	device      *wakerDevice
	wakerFailed string
}

// Run supervises the VMs of a store until ctx ends, and returns when all that it has begun has ended. A store has one
// supervisor with a pool: another one ends with spec.ErrServed.
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
			// Listeners that are open stay: the record will be whole again, or go.
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

// ended says whether the process of a VM is gone that its record names: a process that is killed does not write that
// down, and whoever reads the record then does (state.Store.Get).
func (v *supervisor) ended(name string) bool {
	pid := v.pids[name]
	return pid > 0 && errors.Is(unix.Kill(pid, 0), unix.ESRCH)
}

// published are the ports of a VM that can be listened for.
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
			// Another VM, or another program, may be there; it may go.
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

// awake sees to it that a VM is awake and stays so until the hold is released.
func (v *supervisor) awake(ctx context.Context, name string) (*sandbox.WakeLock, *spec.NetworkInfo, error) {
	hold, err := v.host.Sandbox(name).WakeWithLock(ctx)
	if err != nil {
		return nil, nil, err
	}
	n := hold.Network()
	if n == nil { // the VM's process is one of an older drowse
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

// guardedOf is what the packet waker has to know of a VM, if a packet may wake it: if it sleeps, or is about to.
func (v *supervisor) guardedOf(r *state.Record) (vm guarded, ok bool) {
	if r.Spec.Network != spec.NetworkTAP {
		return vm, false
	}
	switch {
	case r.Phase == state.Asleep, r.Phase == state.Running:
	case r.Phase == state.Starting && r.Snapshot != "":
		// It wakes, and may sleep again before it is looked at once more.
	default:
		return vm, false
	}
	in, err := hostnet.Range()
	if err != nil {
		return vm, false // its process says so
	}
	vm = guarded{name: r.Spec.Name, address4: hostnet.First(in, r.ID), policy: r.Spec.Policy, tags: r.Spec.Tags}
	if r.Spec.IPv6 {
		if in6, err := hostnet.Range6(); err == nil {
			vm.address6, _ = hostnet.Address6(in6, vm.address4) // if it fails, the VM does not wake either
		}
	}
	return vm, true
}

// openPacketWaker has the addresses of guarded VMs lead to the packet waker.
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
			// As long as it is the same, once.
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
		v.waker = g
		v.carried.Go(func() {
			// Or the first VM that wakes after a start of the host waits for it.
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
