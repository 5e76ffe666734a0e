package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Claim implements lease.Cluster.
func (n *Node) Claim(ctx context.Context, name string, may func(spec.Metadata) error) error {
	if err := n.awaitMove(ctx, name); err != nil {
		return err
	}
	return n.claim(ctx, name, may)
}

func (n *Node) claim(ctx context.Context, name string, may func(spec.Metadata) error) error {
	r, err := n.state.Get(name)
	if err == nil && (!n.dir.Shared(name) || r.Phase == state.Running || r.Phase == state.Starting) {
		return nil
	}
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return nil //nolint:nilerr // what uses it says that
	}
	n.want(name)
	unlock, err := n.names.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := n.dir.Claim(name)
	if err != nil {
		return err
	}
	o := holdOptions{may: may}
	if _, err := n.state.Load(name); c == nil && err == nil {
		return nil
	} else if c == nil {
		if o.head, err = n.known(ctx, name, may); err != nil {
			return err
		}
	}
	if _, err = n.hold(ctx, name, o); err != nil {
		return err
	}
	n.want(name)
	return n.extend(n.current()) // the claim was made under it, and renew may be late
}

func (n *Node) want(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for other, at := range n.wanted {
		if time.Since(at) > wantedTime {
			delete(n.wanted, other)
		}
	}
	n.wanted[name] = time.Now()
}

func (n *Node) isWanted(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.wanted[name]) < wantedTime
}

// known returns sandbox.ErrNotFound if the cluster has no sandbox of that name, and what may says of one that it has.
// It begins to read the head.
func (n *Node) known(ctx context.Context, name string, may func(spec.Metadata) error) (*opening, error) {
	f, err := n.exists(ctx, name)
	if err != nil {
		return nil, err
	}
	o := n.open(ctx, f.Head)
	if may == nil {
		return o, nil
	}
	h, err := o.wait()
	if err != nil {
		return nil, err
	}
	d, err := decodeDoc(h, name)
	if err != nil {
		return nil, err
	}
	return o, may(d.Metadata)
}

// exists returns what the ledger has of a sandbox, or sandbox.ErrNotFound.
func (n *Node) exists(ctx context.Context, name string) (*ledger.Family, error) {
	f, err := n.family(ctx, name)
	if errors.Is(err, ledger.ErrNotFound) || err == nil && (f.Deleted || f.Head == "") {
		err = fmt.Errorf("%w: %s: neither this host nor its cluster has it", sandbox.ErrNotFound, name)
	}
	return f, err
}

// opening is a head that is read meanwhile.
type opening struct {
	id   string
	done chan struct{}
	h    *archive.Head
	err  error
}

func (n *Node) open(ctx context.Context, id string) *opening {
	o := &opening{id: id, done: make(chan struct{})}
	n.background.Go(func() {
		defer close(o.done)
		select {
		case n.pulls <- struct{}{}:
			defer func() { <-n.pulls }()
			o.h, o.err = n.head(ctx, id)
		case <-ctx.Done():
			o.err = fmt.Errorf("reading head %.12s: %w", id, context.Cause(ctx))
		}
	})
	return o
}

func (o *opening) wait() (*archive.Head, error) {
	<-o.done
	return o.h, o.err
}

// Publish implements lease.Cluster.
func (n *Node) Publish(ctx context.Context, name string) error {
	unlock, err := n.publishing.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	_, err = n.publishAs(ctx, name, func(r *state.Record) (upload, error) {
		m, err := n.state.Metadata(name)
		if err != nil {
			return upload{}, err
		}
		ahead, err := n.archive.SealFor(m.Owner).Ahead(spec.NewID())
		if err != nil || n.arrivals.get(r.Snapshot) != nil { // its files have no marks yet
			return upload{Ahead: ahead}, err
		}
		heads, err := ahead.Keep(n.state, r.Snapshot, n.keptFiles(name, ahead.Seal()))
		return upload{ahead, heads}, err
	})
	return err
}

// upload is a head that is put.
type upload struct {
	*archive.Ahead
	// keeps are earlier heads that it needs.
	keeps []string
}

// publishAs is Publish of what begin returns. The caller has its lock in n.publishing. It returns how many bytes the
// store has got meanwhile.
func (n *Node) publishAs(ctx context.Context, name string, begin func(*state.Record) (upload, error)) (stored int64, err error) {
	stored, err = n.publish(ctx, name, begin)
	if err != nil {
		err = fmt.Errorf("publishing %s: %w", name, err)
	}
	return stored, err
}

func (n *Node) publish(ctx context.Context, name string, begin func(*state.Record) (upload, error)) (stored int64, err error) {
	unlock, err := n.names.lock(ctx, name)
	if err != nil {
		return stored, err
	}
	unlock = sync.OnceFunc(unlock)
	defer func() { unlock() }()
	r, err := n.state.Get(name)
	if err == nil {
		err = n.unfit(r)
	}
	if err != nil {
		return stored, err
	}
	if r.Phase != state.Asleep {
		return stored, fmt.Errorf("%w: it is %s, and only what sleeps is published", sandbox.ErrRunning, r.Phase)
	}
	doc, sum, err := n.doc(r)
	if err != nil {
		return stored, err
	}
	if c, err := n.dir.Claim(name); err != nil || c != nil && !c.Held && !c.Claiming && isHead(c, r, sum) {
		return stored, err
	}
	claim, err := n.hold(ctx, name, holdOptions{here: true})
	if errors.Is(err, errNotNeeded) {
		err = fmt.Errorf("%w: it has gone on on another host, and what this one has is not published: its next use here sets that aside", spec.ErrElsewhere)
	}
	if err != nil {
		return stored, err
	}
	c, err := n.dir.Claim(name)
	if err != nil {
		return stored, err
	}
	if isHead(c, r, sum) {
		return stored, n.giveUp(ctx, name, claim)
	}
	up, err := begin(r)
	if err == nil {
		err = intend(ctx, claim, &up)
	}
	if err != nil {
		return stored, err
	}
	head := up.ID()
	unlock() // it may be woken meanwhile
	begun := time.Now()
	stored, kept, err := n.push(ctx, r, up, doc)
	if err != nil {
		// The snapshot may be gone, since the sandbox has slept again.
		n.discard(name, head)
		return stored, err
	}
	relock, err := n.names.lock(ctx, name)
	if err != nil {
		return stored, err
	}
	unlock = relock
	if n.claimed(name) != claim {
		return stored, fmt.Errorf("%w: %s: it was lost meanwhile", spec.ErrUnclaimed, name)
	}
	commit := func(release bool) error {
		now, err := n.dir.Claim(name)
		if err != nil {
			return err
		}
		if now == nil {
			now = &lease.Claim{}
		}
		if now.Head, now.Snapshot, now.Sum = head, r.Snapshot, sum; release {
			now.Held, now.Claiming = false, true
		}
		if err := n.dir.SetClaim(name, now); err != nil {
			return err
		}
		if err := claim.Commit(ctx, head, release); err != nil {
			return err
		}
		n.keepFiles(name, up.Seal(), kept)
		if !release {
			return nil
		}
		n.setClaimed(name, nil)
		now.Claiming = false
		return n.dir.SetClaim(name, now)
	}
	err = n.rested(ctx, name, func(now *state.Record) error {
		if now == nil || now.Phase != state.Asleep || now.Snapshot != r.Snapshot {
			return sandbox.ErrRunning
		}
		if _, again, err := n.doc(now); err != nil || again != sum {
			return errors.Join(err, sandbox.ErrRunning)
		}
		return commit(true)
	})
	if errors.Is(err, sandbox.ErrRunning) {
		if err := commit(false); err != nil {
			return stored, err
		}
		err = fmt.Errorf("%w: %s was woken or changed meanwhile, and is published as it was before", sandbox.ErrRunning, name)
	}
	if err == nil {
		n.log.Info("published", "sandbox", name, "snapshot", r.Snapshot, "bytes", stored, "kept_heads", len(up.keeps), "ms", time.Since(begun).Milliseconds())
	}
	n.collectSoon(name)
	return stored, err
}

// isHead reports whether a sandbox that sleeps is as it was last published or pulled.
func isHead(c *lease.Claim, r *state.Record, sum string) bool {
	return c.Head != "" && c.Snapshot == r.Snapshot && c.Sum == sum
}

// intend registers a head. What it was to keep may be gone already: then that is put again.
func intend(ctx context.Context, claim *ledger.Claim, up *upload) error {
	err := claim.Intend(ctx, up.ID(), ledger.Needs{Fresh: []string{up.ID()}, Reused: up.keeps})
	var gone *ledger.CondemnedError
	if !errors.As(err, &gone) {
		return err
	}
	up.Forget(gone.Uploads)
	up.keeps = slices.DeleteFunc(up.keeps, func(id string) bool { return slices.Contains(gone.Uploads, id) })
	return claim.Intend(ctx, up.ID(), ledger.Needs{Fresh: []string{up.ID()}, Reused: up.keeps})
}

func (n *Node) push(ctx context.Context, r *state.Record, up upload, doc []byte) (stored int64, kept []archive.Kept, err error) {
	if err := n.awaitWhole(ctx, r.Snapshot); err != nil {
		return 0, nil, err
	}
	m, err := n.state.Manifest(r.Snapshot)
	if err != nil {
		return 0, nil, err
	}
	i := archive.Info{Name: r.Spec.Name, Image: m.Image, Created: time.Unix(0, m.CreatedUnixNano).UTC()}
	_, stored, kept, err = up.PushHead(ctx, n.state, i, r.Snapshot, doc)
	return stored, kept, err
}

// discard gives up an attempt to publish.
func (n *Node) discard(name, head string) {
	n.background.Go(func() {
		err := n.ledger.Remove(n.life, name, head)
		if err == nil {
			err = n.collect(n.life, name)
		}
		if err != nil {
			n.log.Warn("what is left of a publication stays until its claim ends", "sandbox", name, "error", err)
		}
	})
}

// collectTime bounds the removal of what a sandbox does not need any more. What it does not get to, the next one does.
const collectTime = 5 * time.Minute

// collectSoon removes the heads that a sandbox had before, in the background.
func (n *Node) collectSoon(name string) {
	n.background.Go(func() {
		ctx, cancel := context.WithTimeout(n.life, collectTime)
		defer cancel()
		if err := n.collect(ctx, name); err != nil {
			n.log.Warn("removing what a sandbox slept in before", "sandbox", name, "error", err)
		}
	})
}

func (n *Node) collect(ctx context.Context, name string) error {
	return n.ledger.Collect(ctx, name, n.archive.RemoveHead)
}

// Delete implements lease.Cluster.
func (n *Node) Delete(ctx context.Context, name string) (shared bool, freed spec.Freed, err error) {
	if err := n.awaitMove(ctx, name); err != nil {
		return false, freed, err
	}
	unlock, err := n.names.lock(ctx, name)
	if err != nil {
		return false, freed, err
	}
	defer unlock()
	was, err := n.dir.Claim(name)
	if err != nil {
		return true, freed, err
	}
	r, rerr := n.state.Get(name)
	switch {
	case was == nil && !errors.Is(rerr, sandbox.ErrNotFound):
		return false, freed, nil
	case was == nil:
		if _, err := n.exists(ctx, name); err != nil {
			return true, freed, err
		}
	case rerr == nil && (r.Phase == state.Running || r.Phase == state.Starting):
		return true, freed, fmt.Errorf("%w: %s: put it to sleep, stop it, or use --force", sandbox.ErrRunning, name)
	}
	fail := func(err error) (bool, spec.Freed, error) {
		return true, freed, fmt.Errorf("removing %s: %w", name, err)
	}
	now := lease.Claim{}
	if was != nil {
		now = *was
	}
	now.Claiming = true
	if err := n.dir.SetClaim(name, &now); err != nil {
		return fail(err)
	}
	claim := n.claimed(name)
	if claim == nil {
		claim, err = n.current().Claim(ctx, name)
	}
	switch {
	case err == nil:
		n.setClaimed(name, claim)
		if err := claim.Delete(ctx); err != nil {
			return fail(err)
		}
		n.setClaimed(name, nil)
	case errors.Is(err, ledger.ErrDeleted):
	default:
		return fail(n.refused(ctx, name, was, err))
	}
	n.collectSoon(name)
	if was != nil {
		if err := n.dropArrival(was.Snapshot); err != nil {
			return fail(err)
		}
	}
	if rerr == nil || errors.Is(rerr, spec.ErrRecord) {
		if freed, err = n.state.Remove(ctx, name, true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return fail(err)
		}
	}
	return true, freed, n.dir.SetClaim(name, nil)
}
