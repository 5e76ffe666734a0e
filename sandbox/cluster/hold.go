package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// headVersion goes up with each incompatible change of headDoc.
const headVersion = 1

// headDoc is what a head says of its sandbox, besides the snapshot.
type headDoc struct {
	Version  int           `json:"version"`
	Record   *state.Record `json:"record"`
	Metadata spec.Metadata `json:"metadata"`
}

// doc returns what others are to know of a sandbox that sleeps, and its SHA-256.
func (n *Node) doc(r *state.Record) (doc []byte, sum string, err error) {
	m, err := n.state.Metadata(r.Spec.Name)
	if err != nil {
		return nil, "", err
	}
	doc, err = json.Marshal(headDoc{headVersion, r.Portable(), m})
	h := sha256.Sum256(doc)
	return doc, hex.EncodeToString(h[:]), err
}

// head opens a head.
func (n *Node) head(ctx context.Context, id string) (*archive.Head, error) {
	h, err := n.archive.Head(ctx, id)
	if errors.Is(err, blob.ErrNoKey) {
		err = fmt.Errorf("%w: %w", spec.ErrNoKey, err)
	}
	return h, err
}

func decodeDoc(h *archive.Head, name string) (d headDoc, err error) {
	if err := json.Unmarshal(h.Doc, &d); err != nil {
		return d, fmt.Errorf("%w: what a head says of its sandbox: %w", archive.ErrCorrupt, err)
	}
	if d.Version != headVersion || d.Record == nil || d.Record.Version != state.RecordVersion {
		return d, fmt.Errorf("%w: the head of %s is of another version: use the drowse that has written it", archive.ErrCorrupt, name)
	}
	if d.Record.Spec.Name != name || !state.IDPattern.MatchString(d.Record.ID) || !state.IDPattern.MatchString(d.Record.Snapshot) {
		return d, fmt.Errorf("%w: the head of %s is of %.64q", archive.ErrCorrupt, name, d.Record.Spec.Name)
	}
	if is := h.SealedFor(); is != "" && is != d.Metadata.Owner {
		return d, fmt.Errorf("%w: the head of %s is sealed for another owner than the sandbox's", archive.ErrCorrupt, name)
	}
	return d, fits(d.Record.Spec, d.Metadata)
}

// unfit returns why a sandbox cannot be shared.
func (n *Node) unfit(r *state.Record) error {
	m, err := n.state.Metadata(r.Spec.Name)
	if err != nil {
		return err
	}
	return fits(r.Spec, m)
}

// fits returns an error if a sandbox needs what other hosts do not have.
func fits(s spec.VM, m spec.Metadata) error {
	why := ""
	switch {
	case len(s.Shares) > 0:
		why = "it has a directory of its host"
	case len(s.Volumes) > 0:
		why = "it has volumes of its host"
	case m.Rotate != (spec.Rotation{}):
		why = "it begins anew from a snapshot of its host"
	case m.Owner == spec.TemplateOwner:
		why = "it is a template"
	}
	if why == "" {
		return nil
	}
	return fmt.Errorf("%w: %s cannot be shared with other hosts: %s", spec.ErrInvalid, s.Name, why)
}

type holdOptions struct {
	// here means that one that is not here as it was last is not needed: hold gives it up, and returns errNotNeeded.
	here bool
	// may is asked before a sandbox is pulled that is not here.
	may func(spec.Metadata) error
	// head is perhaps the head that it has, which is read while it is claimed; it may be nil.
	head *opening
}

// hold claims a sandbox, unless this process has, and makes what is here of it what it was last. The caller has its
// lock in n.names. What the sandbox's files say is durable before it is true:
//
//   - Claiming, before a claim may reach the ledger;
//   - Held, after what is here is the newest, and before it may run;
//   - not Held, before the claim is given up.
func (n *Node) hold(ctx context.Context, name string, o holdOptions) (*ledger.Claim, error) {
	was, err := n.dir.Claim(name)
	if err != nil {
		return nil, err
	}
	if c := n.claimed(name); c != nil {
		if was != nil && was.Held && !was.Claiming {
			return c, nil
		}
		// What became of it is not known.
		if err := c.Release(ctx); err != nil {
			return nil, err
		}
		n.setClaimed(name, nil)
	}
	now := lease.Claim{}
	if was != nil {
		now = *was
	}
	now.Claiming = true
	create, err := n.begin(ctx, name, was, &now)
	if err != nil {
		return nil, err
	}
	s := n.current()
	var c *ledger.Claim
	if create {
		c, err = s.Create(ctx, name)
	} else {
		c, err = s.Claim(ctx, name)
	}
	if err != nil && create {
		// What was never shared is this host's alone, whatever becomes of the claim: others see no head.
		was = nil
		err = errors.Join(err, n.dir.SetClaim(name, nil))
	}
	if err != nil {
		return nil, n.refused(ctx, name, was, err)
	}
	n.setClaimed(name, c)
	if create {
		now.Claiming, now.Held, now.Session, now.Fence = false, true, s.Incarnation(), c.Fence()
		return c, n.dir.SetClaim(name, &now)
	}
	if err := n.bring(ctx, name, c, &now, o); err != nil {
		return nil, errors.Join(err, n.giveUp(ctx, name, c))
	}
	now.Claiming, now.Held, now.Session, now.Fence = false, true, s.Incarnation(), c.Fence()
	return c, n.dir.SetClaim(name, &now)
}

// begin notes that a sandbox is about to be claimed. It reports whether it is to become a shared one, which is refused
// unless it sleeps: from then on its process asks for a lease.
func (n *Node) begin(ctx context.Context, name string, was, now *lease.Claim) (create bool, err error) {
	if was != nil && (was.Fence != 0 || was.Head != "") {
		return false, n.dir.SetClaim(name, now)
	}
	err = n.rested(ctx, name, func(r *state.Record) error {
		if create = r != nil; create && r.Phase != state.Asleep {
			return fmt.Errorf("%w: %s is %s: only a sandbox that sleeps can be shared", sandbox.ErrRunning, name, r.Phase)
		}
		return n.dir.SetClaim(name, now)
	})
	return create, err
}

var errNotNeeded = errors.New("it is not needed here")

// refused returns why a sandbox cannot be claimed, and notes what is known by that.
func (n *Node) refused(ctx context.Context, name string, was *lease.Claim, err error) error {
	var held *ledger.HeldError
	switch {
	case errors.As(err, &held):
		err = fmt.Errorf("%w: %s is on %s: ask that host, or put it to sleep there", spec.ErrElsewhere, name, held.Host)
		if held.Host == n.o.Name {
			// An earlier session of this host, which nobody has ended yet.
			err = fmt.Errorf("%w: %s: an earlier session of this host has it: try again in %v", spec.ErrElsewhere, name, held.Wait.Round(time.Second))
		}
	case errors.Is(err, ledger.ErrExists):
		err = fmt.Errorf("%w: the cluster has another sandbox called %s: rename this one", spec.ErrExists, name)
	case errors.Is(err, ledger.ErrDeleted):
		if _, lerr := n.state.Load(name); was != nil && lerr == nil {
			n.log.Info("it was deleted on another host", "sandbox", name)
			if err := n.stop(ctx, name); err != nil {
				return err
			}
			if err := n.dropArrival(was.Snapshot); err != nil {
				return err
			}
			if _, err := n.state.Remove(ctx, name, true); err != nil {
				return err
			}
		}
		return errors.Join(fmt.Errorf("%w: %s: it was deleted", sandbox.ErrNotFound, name), n.dir.SetClaim(name, nil))
	default:
		return err // it may be claimed: settle looks again
	}
	if was == nil {
		return errors.Join(err, n.dir.SetClaim(name, nil))
	}
	if was.Held {
		if err := n.stop(ctx, name); err != nil {
			return err
		}
	}
	return errors.Join(err, n.rested(ctx, name, func(*state.Record) error {
		now := *was
		now.Held, now.Claiming = false, false
		return n.dir.SetClaim(name, &now)
	}))
}

// stop ends a sandbox that this host may not run any more, if it has not ended itself.
func (n *Node) stop(ctx context.Context, name string) error {
	r, err := n.state.Get(name)
	if err != nil || r.Phase != state.Running && r.Phase != state.Starting {
		return notFoundIsNil(err)
	}
	n.log.Warn("another host has claimed it: it is stopped here", "sandbox", name)
	return n.host.Sandbox(name).Kill(ctx)
}

func notFoundIsNil(err error) error {
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}

// rested does something while a sandbox does not run. r is nil if there is none here.
func (n *Node) rested(ctx context.Context, name string, do func(r *state.Record) error) error {
	l, err := n.state.LockSoon(ctx, name)
	if errors.Is(err, sandbox.ErrNotFound) {
		return do(nil)
	}
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := n.state.Load(name)
	if errors.Is(err, sandbox.ErrNotFound) {
		return do(nil)
	}
	if err != nil {
		return err
	}
	return do(r)
}

// giveUp releases a claim on a sandbox that does not run.
func (n *Node) giveUp(ctx context.Context, name string, c *ledger.Claim) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	return n.rested(ctx, name, func(r *state.Record) error {
		n.setClaimed(name, nil)
		now, err := n.dir.Claim(name)
		if err != nil || now == nil {
			return errors.Join(err, c.Release(ctx))
		}
		now.Held, now.Claiming = false, true
		if err := n.dir.SetClaim(name, now); err != nil {
			return err
		}
		if err := c.Release(ctx); err != nil {
			return err // the session tries on
		}
		if now.Claiming = false; r == nil {
			now = nil
		}
		return n.dir.SetClaim(name, now)
	})
}

// bring makes what is here of a sandbox that was just claimed the newest there is. now is what its file will say.
func (n *Node) bring(ctx context.Context, name string, c *ledger.Claim, now *lease.Claim, o holdOptions) error {
	r, err := n.state.Get(name)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	// Memory that was on its way may have been lost.
	here := r != nil && (r.Phase != state.Asleep || r.Snapshot != now.Snapshot || n.isHere(r.Snapshot))
	switch {
	case here && c.Follows(now.Fence):
		// Nobody else has had it since: what is here is what it was last, also if it was never published.
		return nil
	case here && r.Phase == state.Asleep && now.Head != "" && now.Head == c.Head() && r.Snapshot == now.Snapshot:
		if _, sum, err := n.doc(r); err == nil && sum == now.Sum {
			return nil
		}
	}
	if o.here {
		return errors.Join(errNotNeeded, n.stop(ctx, name))
	}
	if c.Head() == "" {
		// Its first publication was never finished.
		return fmt.Errorf("%w: %s", sandbox.ErrNotFound, name)
	}
	return n.pull(ctx, name, c, now, r, o)
}

// pull makes a sandbox here as it sleeps in its head, in place of what is here of it.
func (n *Node) pull(ctx context.Context, name string, c *ledger.Claim, now *lease.Claim, r *state.Record, o holdOptions) error {
	if o.head == nil || o.head.id != c.Head() {
		o.head = n.open(ctx, c.Head())
	}
	h, err := o.head.wait()
	select {
	case n.pulls <- struct{}{}:
		defer func() { <-n.pulls }()
	case <-ctx.Done():
		err = errors.Join(err, context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("getting %s from the cluster: %w", name, err)
	}
	d, err := decodeDoc(h, name)
	if err != nil {
		return err
	}
	if o.may != nil {
		if err := o.may(d.Metadata); err != nil {
			return err
		}
	}
	kept := false
	if !n.state.IsThere(d.Record.Snapshot) {
		if err := n.arrive(ctx, name, c.Head(), d.Record.Snapshot, h); err != nil {
			return fmt.Errorf("getting %s from the cluster: %w", name, err)
		}
	} else if kept, err = n.state.Keep(ctx, d.Record.Snapshot); err != nil { // else it goes with its old record
		return err
	}
	if err := c.Err(); err != nil {
		return err
	}
	// Before there is a record: it is not one that is yet to be shared.
	was := *now
	now.Head, now.Snapshot, now.Sum = c.Head(), d.Record.Snapshot, ""
	if err := n.dir.SetClaim(name, now); err != nil {
		return err
	}
	if r != nil {
		if err := n.setAside(ctx, r, &was, d.Record.Snapshot); err != nil {
			return err
		}
	}
	if _, err := n.host.Clone(ctx, d.Record.Snapshot, sandbox.CloneOptions{Moved: d.Record, Metadata: &d.Metadata}); err != nil {
		return fmt.Errorf("getting %s from the cluster: %w", name, err)
	}
	if kept {
		// Somebody has imported or tagged it.
	} else if err := n.state.Unkeep(ctx, d.Record.Snapshot); err != nil {
		n.log.Warn("the snapshot of a sandbox of the cluster stays", "sandbox", name, "error", err)
	}
	if r, err = n.state.Get(name); err != nil {
		return err
	}
	_, sum, err := n.doc(r)
	now.Sum = sum
	n.log.Info("got from the cluster", "sandbox", name, "snapshot", r.Snapshot)
	return err
}

// setAsideTag is that of snapshots that were never published, of sandboxes that went on elsewhere.
const setAsideTag = "set-aside"

// setAside removes what is here of a sandbox that has gone on on another host. What nobody else has stays as a
// snapshot. It will sleep in next.
func (n *Node) setAside(ctx context.Context, r *state.Record, was *lease.Claim, next string) error {
	name := r.Spec.Name
	if err := n.stop(ctx, name); err != nil {
		return err
	}
	if r.Snapshot != next {
		if err := n.dropArrival(r.Snapshot); err != nil {
			return err
		}
	}
	if r.Snapshot != "" && r.Snapshot != was.Snapshot && n.state.IsThere(r.Snapshot) {
		if _, err := n.state.TagSnapshot(r.Snapshot, []string{setAsideTag}); err != nil {
			return err
		}
		n.log.Warn("it has gone on on another host: what this one has is kept as a snapshot", "sandbox", name, "snapshot", r.Snapshot, "tag", setAsideTag)
	}
	if _, err := n.state.Remove(ctx, name, true); err != nil {
		return fmt.Errorf("removing what this host had of %s: %w", name, err)
	}
	return nil
}
