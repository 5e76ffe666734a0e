// Package cluster lets hosts share sandboxes through a store of objects, without a server: each can wake what sleeps in
// the store, and one at a time runs a sandbox.
//
// A Node is a host's part in it. It has a session with the ledger (sandbox/archive/ledger), under which it claims
// sandboxes, and writes until when that lasts to a file that each VM's process reads (sandbox/lease). A sandbox is
// shared from its first Publish on: then it sleeps in an archive, and no host holds it. A use claims it, pulls what
// this host lacks, and runs it; after its sleep it is published again, and given up.
//
// What is promised is in docs/adr/0061.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/arrival"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Options are those of Join.
type Options struct {
	// Store is where the hosts meet. Whoever can write to it can run anything on each of them.
	Store blob.Store
	// Name is this host's, which no other has: letters, digits, '.', '_' and '-'.
	Name string
	// All shares each sandbox of this host when it falls asleep, if it can be shared.
	All bool
	// Address and Key are where other hosts reach this one, and what they find there: peer.Listen, peer.Identity. Without
	// them, others refuse what is asked for a sandbox that this host has.
	Address, Key string
	// TTL is after how long without a sign of life others may claim what this host has: see ledger.Options.
	TTL time.Duration
	// Log gets what becomes of sandboxes; nil discards it.
	Log *slog.Logger
}

const (
	lookEvery  = time.Second // for sandboxes that have fallen asleep
	retryAfter = 5 * time.Second
	leaveTime  = 10 * time.Second
	// wantedTime is for how long a sandbox that was claimed to run is not given up because it sleeps.
	wantedTime = 3 * time.Second
	// publishers is how many sandboxes are published at once.
	publishers = 2
	// sweepEvery is how often a node looks for heads that nobody needs, and sweepAge how old these must be.
	sweepEvery = 6 * time.Hour
	sweepAge   = 24 * time.Hour
	// tidyEvery is how often a node looks for snapshots of moves that have failed.
	tidyEvery = 10 * time.Second
	// maxLooks is how many claims of sandboxes that this host does not have it makes at once.
	maxLooks = 8
)

// Node is a host's part in a cluster. It implements lease.Cluster, for sandbox.Host.
type Node struct {
	host    *sandbox.Host
	state   *state.Store
	store   blob.Store
	ledger  *ledger.Ledger
	archive *archive.Archive
	dir     lease.Dir
	o       Options
	log     *slog.Logger
	lock    interface{ Close() error }
	pulls   chan struct{} // maxLooks places
	reads   chan struct{} // maxReads places

	names, publishing keyed
	arrivals          arrivals
	near              *near

	// background is what life lets run: collects, arrivals.
	background sync.WaitGroup
	life       context.Context
	end        context.CancelFunc

	leasing sync.Mutex // held while the lease is written
	mu      sync.Mutex // guards what follows
	session *ledger.Session
	claims  map[string]*ledger.Claim
	wanted  map[string]time.Time // when a sandbox was last claimed to run
	moves   map[string]*move     // from this host
	hosts   *peer.Peers          // nil until Reach
	peers   known[ledger.Host]
	places  known[string] // the other hosts that have sandboxes
}

// keyed is a lock for each name.
type keyed struct {
	mu   sync.Mutex
	held map[string]chan struct{}
}

func (k *keyed) lock(ctx context.Context, name string) (unlock func(), err error) {
	for {
		k.mu.Lock()
		busy := k.held[name]
		if busy == nil {
			if k.held == nil {
				k.held = map[string]chan struct{}{}
			}
			done := make(chan struct{})
			k.held[name] = done
			k.mu.Unlock()
			return func() {
				k.mu.Lock()
				delete(k.held, name)
				k.mu.Unlock()
				close(done)
			}, nil
		}
		k.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for another use of %s: %w", name, context.Cause(ctx))
		}
	}
}

// Join makes a host one of a cluster. If another process was this host's node before, it goes on with its session, so
// that what runs runs on. Run must follow. A host has one node: a second one gets spec.ErrServed.
func Join(ctx context.Context, h *sandbox.Host, o Options) (*Node, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	l, err := ledger.Open(blob.Hosts(o.Store), ledger.Options{TTL: o.TTL, Address: o.Address, Key: o.Key})
	if err != nil {
		return nil, err
	}
	if o.TTL == 0 {
		o.TTL = ledger.DefaultTTL
	}
	n := &Node{
		host: h, state: h.State, store: o.Store, ledger: l, moves: map[string]*move{}, dir: lease.In(h.State.Dir()), o: o, log: o.Log,
		pulls: make(chan struct{}, maxLooks), wanted: map[string]time.Time{},
		arrivals: arrivals{line: archive.NewLine(), all: map[string]*arriving{}},
		reads:    make(chan struct{}, maxReads), peers: known[ledger.Host]{}, places: known[string]{},
	}
	if err := n.dir.Make(); err != nil {
		return nil, err
	}
	f, err := n.dir.Lock()
	if errors.Is(err, osfile.ErrLocked) {
		return nil, fmt.Errorf("%w: being the node of %s", spec.ErrServed, h.State.Dir())
	}
	if err != nil {
		return nil, err
	}
	n.lock = f
	n.near, err = openNear(n.dir.Near())
	if err == nil {
		n.archive = archive.Open(nearStore{o.Store, n.near})
		err = n.join(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	n.life, n.end = context.WithCancel(context.WithoutCancel(ctx))
	if err := n.goOn(); err != nil {
		n.end()
		n.background.Wait()
		n.current().Close()
		return nil, errors.Join(fmt.Errorf("going on to get memory and disk from the cluster: %w", err), f.Close())
	}
	n.background.Go(n.tidyAhead)
	n.background.Go(func() {
		if err := arrival.Serve(n.life, n.state.Dir(), n.answer); err != nil {
			n.log.Error("no VM can run before all of its memory and disk is here", "error", err)
		}
	})
	return n, nil
}

// join begins a session, or goes on with the last one.
func (n *Node) join(ctx context.Context) error {
	was, err := n.dir.Node()
	if err != nil {
		return err
	}
	id, err := n.id(ctx)
	if err != nil {
		return fmt.Errorf("joining the cluster: %w", err)
	}
	if was.Cluster != "" && was.Cluster != id {
		return fmt.Errorf("%w: joining the cluster: this host has shared sandboxes in another store: use that one, or another state directory", spec.ErrInvalid)
	}
	place := n.dir.Place()
	if was.Name != n.o.Name || was.Place != place || place == "" {
		// After a boot nothing runs, and a copy of the directory must not take the session of the one that it was made of.
		was.Session = ""
	}
	s, err := n.ledger.Join(ctx, n.o.Name, was.Session)
	if err != nil {
		return fmt.Errorf("joining the cluster: %w", err)
	}
	if err := n.dir.SetNode(lease.Node{Name: n.o.Name, Session: s.Incarnation(), Place: place, Cluster: id}); err != nil {
		return errors.Join(err, s.Leave(ctx))
	}
	n.mu.Lock()
	n.session, n.claims = s, map[string]*ledger.Claim{}
	n.mu.Unlock()
	return n.extend(s)
}

// idKey is the object that tells a cluster's store from others.
const idKey = "cluster"

// idRE is what rand.Text returns.
var idRE = lazyregexp.New(`^[A-Z2-7]{26,64}$`)

// id returns the id of the cluster, which its first host gives it.
func (n *Node) id(ctx context.Context) (string, error) {
	const tries, size = 3, 16 << 10 // more than an id: it may be sealed
	for try := 1; ; try++ {
		id, _, err := blob.Hosts(n.store).Load(ctx, idKey, size)
		if errors.Is(err, blob.ErrNotFound) {
			fresh := rand.Text()
			if _, err = n.store.Swap(ctx, idKey, "", []byte(fresh)); err == nil {
				return fresh, nil
			}
		} else if err == nil {
			if !idRE.MatchString(string(id)) {
				return "", fmt.Errorf("%w: %s is not the id of a cluster: if the other hosts encrypt, name their file of keys in the bucket's URL", blob.ErrNoKey, idKey)
			}
			return string(id), nil
		}
		if try == tries || ctx.Err() != nil {
			return "", err
		}
	}
}

// extend writes the lease, which never goes back.
func (n *Node) extend(s *ledger.Session) error {
	n.leasing.Lock()
	defer n.leasing.Unlock()
	return n.dir.SetLease(lease.Lease{Session: s.Incarnation(), Boot: lease.Boot(), Until: s.Deadline(), TTL: n.o.TTL})
}

func (n *Node) current() *ledger.Session {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.session
}

// claim returns a claim that this process holds, or nil.
func (n *Node) claimed(name string) *ledger.Claim {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.claims[name]
	if c != nil && c.Err() != nil {
		delete(n.claims, name)
		return nil
	}
	return c
}

func (n *Node) setClaimed(name string, c *ledger.Claim) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c == nil {
		delete(n.claims, name)
	} else {
		n.claims[name] = c
	}
}

// Run renews the session and publishes sandboxes that fall asleep, until ctx ends. Then it leaves, if this host holds
// nothing: else it keeps its session for a next process, while that lasts.
func (n *Node) Run(ctx context.Context) error {
	group, run := errgroup.WithContext(ctx)
	group.Go(func() error { return n.renew(run) })
	group.Go(func() error { return n.look(run) })
	err := group.Wait()
	return errors.Join(err, n.leave(context.WithoutCancel(ctx)))
}

func (n *Node) leave(ctx context.Context) error {
	n.settleArrivals(ctx)
	n.mu.Lock()
	n.end() // nothing begins in the background after it
	n.mu.Unlock()
	n.background.Wait()
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	holds := false
	names, err := n.dir.Names()
	for _, name := range names {
		c, cerr := n.dir.Claim(name)
		holds = holds || cerr != nil || c != nil && (c.Held || c.Claiming)
	}
	s := n.current()
	if holds || err != nil {
		s.Close()
	} else {
		err = s.Leave(ctx)
	}
	return errors.Join(err, n.lock.Close())
}

// renew writes each new end of the session to the lease, and begins another session when one is lost.
func (n *Node) renew(ctx context.Context) error {
	tick := time.NewTicker(min(n.o.TTL/30, time.Second))
	defer tick.Stop()
	var written time.Duration
	for {
		s := n.current()
		if until := s.Deadline(); s.Err() == nil && until != written {
			if err := n.extend(s); err != nil {
				n.log.Error("the lease is not renewed", "error", err)
			} else {
				written = until
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-s.Lost():
			n.log.Warn("the session with the cluster is lost: sandboxes that it has claimed go to sleep", "host", n.o.Name)
			s.Close()
			for err := n.join(ctx); err != nil; err = n.join(ctx) {
				if ctx.Err() != nil {
					return nil
				}
				n.log.Warn("joining the cluster again", "error", err)
				if wait.For(ctx, min(retryAfter, n.o.TTL)) != nil {
					return nil
				}
			}
			n.log.Info("joined the cluster again", "host", n.o.Name)
		}
	}
}

// look finds what is to be published or given up, and has that done.
func (n *Node) look(ctx context.Context) error {
	var work errgroup.Group
	work.SetLimit(publishers)
	defer func() { _ = work.Wait() }()
	var mu sync.Mutex // guards seen and retry
	seen, retry := map[string]string{}, map[string]time.Time{}
	swept, tidied := time.Now(), time.Now()
	for wait.For(ctx, min(lookEvery, n.o.TTL/10)) == nil {
		mu.Lock()
		due, err := n.due(seen)
		if err != nil {
			n.log.Warn("looking for sandboxes to publish", "error", err)
		}
		for name := range due {
			if time.Now().Before(retry[name]) {
				delete(due, name)
			}
		}
		mu.Unlock()
		for name, stamp := range due {
			if !work.TryGo(func() error {
				err := n.settle(ctx, name)
				mu.Lock()
				defer mu.Unlock()
				delete(retry, name)
				switch {
				case ctx.Err() != nil:
				case err == nil:
					seen[name] = stamp
				default:
					n.log.Warn("publishing a sandbox", "sandbox", name, "error", err)
					if errors.Is(err, spec.ErrInvalid) || errors.Is(err, spec.ErrExists) || errors.Is(err, spec.ErrElsewhere) {
						seen[name] = stamp // until something changes
					} else {
						retry[name] = time.Now().Add(min(retryAfter, n.o.TTL))
					}
				}
				return nil
			}) {
				break
			}
		}
		n.near.tidy(time.Now())
		if time.Since(tidied) > tidyEvery {
			tidied = time.Now()
			n.tidyAhead()
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			if err := n.sweep(ctx); err != nil && ctx.Err() == nil {
				n.log.Warn("looking for heads that nobody needs", "error", err)
			}
		}
	}
	return nil
}

// due returns the sandboxes of which something may have to be done, with stamps of their files. seen has the stamps of
// those that are as they should be.
func (n *Node) due(seen map[string]string) (due map[string]string, err error) {
	due = map[string]string{}
	stamps, err := n.state.FileStamps()
	names, err2 := n.dir.Names()
	shared := make(map[string]bool, len(names))
	for _, name := range names {
		shared[name] = true
		if _, here := stamps[name]; !here {
			due[name] = ""
		}
	}
	for name, stamp := range stamps {
		if !shared[name] && !n.o.All {
			continue
		}
		c, err := n.dir.Claim(name)
		switch {
		case err != nil:
			continue
		case c != nil && (c.Claiming || c.Held):
		case stamp != "" && seen[name] == stamp:
			continue
		}
		due[name] = stamp
	}
	for name := range seen {
		if _, here := stamps[name]; !here {
			delete(seen, name)
		}
	}
	return due, errors.Join(err, err2)
}

// settle makes true what the files of a sandbox say, as far as it can: one that sleeps is published and given up, one
// that runs and whose claim is not this process's is claimed anew.
func (n *Node) settle(ctx context.Context, name string) error {
	r, err := n.state.Get(name)
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return n.forget(ctx, name)
	case err != nil:
		return err
	case r.Phase == state.Asleep:
		if c, err := n.dir.Claim(name); err != nil || c == nil && n.unfit(r) != nil || n.isWanted(name) {
			return err
		}
		return n.Publish(ctx, name)
	}
	c, err := n.dir.Claim(name)
	if err != nil || c == nil || n.claimed(name) != nil || !c.Held && !c.Claiming {
		return err
	}
	unlock, err := n.names.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err = n.hold(ctx, name, holdOptions{here: true}); errors.Is(err, errNotNeeded) || errors.Is(err, spec.ErrElsewhere) {
		err = nil
	}
	return err
}

// PublishAll publishes the shared sandboxes that sleep, before a host ends.
func (n *Node) PublishAll(ctx context.Context) error {
	due, err := n.due(map[string]string{})
	errs := []error{err}
	for name := range due {
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		errs = append(errs, n.settle(ctx, name))
	}
	return errors.Join(errs...)
}

// forget gives up what this host may hold of a sandbox that it does not have.
func (n *Node) forget(ctx context.Context, name string) error {
	unlock, err := n.names.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := n.state.Load(name); !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	c, err := n.dir.Claim(name)
	if err != nil || c == nil {
		return err
	}
	if c.Held || c.Claiming {
		claim := n.claimed(name)
		if claim == nil {
			claim, err = n.current().Claim(ctx, name)
		}
		var held *ledger.HeldError
		switch {
		case err == nil:
			n.setClaimed(name, nil)
			if err := claim.Release(ctx); err != nil {
				return err
			}
		case errors.As(err, &held), errors.Is(err, ledger.ErrDeleted):
		default:
			return err
		}
	}
	return n.dir.SetClaim(name, nil)
}

// sweep removes heads that no sandbox needs: those that a host has put although it had lost its claim. It asks the
// ledger of each that it finds, after it has found it.
func (n *Node) sweep(ctx context.Context) error {
	now, err := n.archive.Now(ctx)
	if err != nil {
		return err
	}
	var old []string
	if err := n.store.List(ctx, string(archive.Heads)+"/", func(i blob.Info) error {
		if now.Sub(i.Changed) > sweepAge {
			old = append(old, i.Key[len(archive.Heads)+1:])
		}
		return nil
	}); err != nil {
		return err
	}
	var errs []error
	for _, id := range old {
		err := n.sweepHead(ctx, id)
		if err != nil && ctx.Err() != nil {
			return err
		}
		// A host that has the key does it.
		if err != nil && !errors.Is(err, blob.ErrNoKey) && len(errs) < maxFailures {
			errs = append(errs, err)
		}
	}
	_, err = n.archive.Sweep(ctx)
	return errors.Join(append(errs, err)...)
}

// maxFailures is how many heads that cannot be read are told of.
const maxFailures = 8

// sweepHead removes a head unless its sandbox needs it.
func (n *Node) sweepHead(ctx context.Context, id string) error {
	h, err := n.archive.Get(ctx, archive.Heads, id)
	if errors.Is(err, archive.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	f, err := n.ledger.Family(ctx, h.Name)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) {
		return err
	}
	if err == nil && hasSnapshot(f, id) {
		return nil
	}
	return n.archive.RemoveHead(ctx, id)
}

var _ lease.Cluster = (*Node)(nil)
