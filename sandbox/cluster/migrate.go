package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// A sandbox moves in this order. What fails before a step leaves all as it was before that step:
//
//	check    the target says that it lives, has room, and could run it
//	ahead    a snapshot goes to the store and from there to the target, while the sandbox runs
//	pause    it sleeps; who wants to use it here waits until the move is over
//	publish  the rest goes to the store, under the same head; its commit gives up the claim
//	wake     the target claims and wakes it
//
// Whoever wakes it after a failure does that by a claim: the ledger decides, whatever became of a request.

const (
	// aheadRounds is how many snapshots go ahead: one more while the last one took so long that much has changed since.
	aheadRounds    = 3
	aheadRoundTime = 2 * time.Second
	// moveTries is how often a sandbox is moved anew that has changed meanwhile.
	moveTries = 3
	// checkTime bounds a check, pauseTime all from the sleep on, and backTime the way back.
	checkTime, pauseTime, backTime = 10 * time.Second, 10 * time.Minute, 2 * time.Minute
	// maxMoveAnswer is the most bytes of a target's answer.
	maxMoveAnswer = 64 << 10

	moveService = "migrate"
	aheadNote   = "sent ahead of a move to another host; removed after it"
)

// move is one of a sandbox from this host.
type move struct {
	over chan struct{} // made at its pause, and closed at its end
}

// Reach gives the node what asks other hosts: without it, nothing can move.
func (n *Node) Reach(p *peer.Peers) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts = p
}

// beginMove begins a move, which end ends.
func (n *Node) beginMove(name string) (end func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.moves[name] != nil {
		return nil, fmt.Errorf("%w: another move of it is under way: wait for that", spec.ErrRunning)
	}
	n.moves[name] = &move{}
	return func() { n.endMove(name) }, nil
}

func (n *Node) endMove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m := n.moves[name]; m.over != nil {
		close(m.over)
	}
	delete(n.moves, name)
}

// pauseUses has uses of a sandbox wait until its move is over, or resume is called.
func (n *Node) pauseUses(name string) (resume func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.moves[name].over = make(chan struct{})
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		close(n.moves[name].over)
		n.moves[name].over = nil
	}
}

// awaitMove waits until a sandbox that has stopped to move has moved, or has not.
func (n *Node) awaitMove(ctx context.Context, name string) error {
	n.mu.Lock()
	m := n.moves[name]
	var over chan struct{}
	if m != nil {
		over = m.over
	}
	n.mu.Unlock()
	if over == nil {
		return nil
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s, which moves to another host: %w", name, context.Cause(ctx))
	}
}

// Migrate implements lease.Cluster.
func (n *Node) Migrate(ctx context.Context, name string, o spec.MigrateOptions) (res spec.MigrateResult, err error) {
	end, err := n.beginMove(name)
	if err == nil {
		defer end()
		for try := 1; ; try++ {
			res, err = n.migrate(ctx, name, o)
			if try == moveTries || !errors.Is(err, errChanged) || ctx.Err() != nil {
				break
			}
			n.log.Info("a move begins anew", "sandbox", name, "cause", err)
		}
	}
	if err != nil {
		return res, fmt.Errorf("moving %s to %.64q: %w", name, o.To, err)
	}
	return res, nil
}

// errChanged means that a sandbox is not what it was when its move began: somebody woke it during its pause, by a way
// that does not ask the node, or gave it to another owner.
var errChanged = errors.New("it has changed meanwhile")

// movable returns why a sandbox cannot move.
func (n *Node) movable(r *state.Record, m spec.Metadata) error {
	if err := fits(r.Spec, m); err != nil {
		return err
	}
	switch {
	case m.Class == lifetime.Ephemeral:
		return fmt.Errorf("%w: it is ephemeral, and those do not sleep: change its class: Fleet.Update of %q with Class", spec.ErrMetadata, r.Spec.Name)
	case r.Phase == state.Crashed:
		return fmt.Errorf("%w: start it, or take it back to its last sleep with Sandbox.Wake", spec.ErrCrashed)
	case r.Phase != state.Running && r.Phase != state.Asleep:
		return fmt.Errorf("%w: it is %s: only what runs or sleeps can move", spec.ErrNotRunning, r.Phase)
	}
	return nil
}

func (n *Node) migrate(ctx context.Context, name string, o spec.MigrateOptions) (res spec.MigrateResult, err error) {
	if err := spec.InField("hooks", o.Hooks.Validate()); err != nil {
		return res, err
	}
	r, err := n.state.Get(name)
	if err != nil {
		return res, err
	}
	m, err := n.state.Metadata(name)
	if err == nil {
		err = n.movable(r, m)
	}
	if err != nil {
		return res, err
	}
	res = spec.MigrateResult{Name: name, From: n.o.Name, To: o.To, Stages: map[string]float64{}}
	ask := moveAsk{Op: opCheck, Name: name, ID: r.ID, Owner: m.Owner}
	if r.Phase == state.Running {
		ask.MiB = r.Spec.MemoryMiB
	}
	if err := n.askTarget(ctx, o.To, checkTime, ask); err != nil {
		return res, err
	}
	if !n.dir.Shared(name) {
		_, err := n.exists(ctx, name)
		if err == nil {
			err = fmt.Errorf("%w: the cluster has another sandbox called %s: rename this one", spec.ErrExists, name)
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return res, err
		}
	}
	if r.Phase == state.Asleep {
		at := time.Now()
		if err := n.Publish(ctx, name); err != nil {
			return res, err
		}
		res.Asleep, res.Snapshot, res.Stages["publish"] = true, r.Snapshot, control.Milliseconds(time.Since(at))
		return res, nil
	}
	head := spec.NewID()
	ahead, err := n.archive.SealFor(m.Owner).Ahead(head)
	if err != nil {
		return res, err
	}
	at := time.Now()
	var snaps aheadSnapshots
	defer func() {
		if err != nil && len(snaps) > 0 {
			snaps = snaps[:len(snaps)-1] // its next sleep builds upon the last one: see tidyAhead
		}
		n.inBackground(func() { n.removeAhead(snaps) })
	}()
	if err := n.sendAhead(ctx, name, o.To, ahead, &snaps, &res); err != nil {
		n.inBackground(func() { n.abandon(name, head) })
		return res, err
	}
	res.Stages["ahead"] = control.Milliseconds(time.Since(at))
	// From here on it is not left half-way because its caller goes.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pauseTime)
	defer cancel()
	defer n.pauseUses(name)()
	if err := n.pass(ctx, o, moving{r.ID, m.Owner, ahead}, &res); err != nil {
		n.inBackground(func() { n.abandon(name, head) })
		return res, err
	}
	return res, nil
}

// moving is a sandbox, and what was sent ahead of it, sealed for its owner.
type moving struct {
	id, owner string
	ahead     *archive.Ahead
}

// still returns an error unless a sandbox is what was sent ahead.
func (v moving) still(n *Node, r *state.Record) error {
	m, err := n.state.Metadata(r.Spec.Name)
	switch {
	case err != nil:
		return err
	case r.ID != v.id:
		return fmt.Errorf("%w: it was removed meanwhile, and another sandbox has its name", sandbox.ErrNotFound)
	case m.Owner != v.owner:
		return fmt.Errorf("%w: it has got another owner meanwhile", errChanged)
	}
	return nil
}

// aheadSnapshots are the ids of snapshots that were taken to be sent ahead.
type aheadSnapshots []string

// sendAhead sends what the target needs of a sandbox that runs on. The last of snaps stays until it sleeps, which
// builds upon it.
func (n *Node) sendAhead(ctx context.Context, name, to string, ahead *archive.Ahead, snaps *aheadSnapshots, res *spec.MigrateResult) error {
	for range aheadRounds {
		at := time.Now()
		took, err := n.host.Sandbox(name).Snapshot(ctx, spec.SnapshotOptions{Note: aheadNote, Hooks: spec.HooksSkip})
		if errors.Is(err, spec.ErrQuota) {
			n.log.Warn("nothing of it is sent ahead: its owner may have no more snapshots", "sandbox", name, "error", err)
			return nil
		}
		if err != nil {
			return err
		}
		*snaps = append(*snaps, took.Snapshot)
		if err := n.dir.NoteAhead(took.Snapshot); err != nil {
			return err
		}
		m, err := n.state.Manifest(took.Snapshot)
		if err != nil {
			return err
		}
		sent, err := ahead.Send(ctx, n.state, m.Image, took.Snapshot)
		if res.BytesAhead += sent; err != nil {
			return err
		}
		ask := moveAsk{Op: opAhead, Name: name, Head: ahead.ID(), Manifest: m}
		if ask.Objects, err = ahead.Objects(ctx); err != nil {
			return err
		}
		if err := n.askTarget(ctx, to, 0, ask); err != nil {
			return err
		}
		if time.Since(at) < aheadRoundTime {
			break
		}
	}
	return nil
}

// pass is the part of a move in which the sandbox does not run.
func (n *Node) pass(ctx context.Context, o spec.MigrateOptions, v moving, res *spec.MigrateResult) error {
	name := res.Name
	unlock, err := n.publishing.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := n.state.Get(name)
	if err == nil {
		err = v.still(n, r)
	}
	if err != nil {
		return err
	}
	begun := time.Now()
	slept, err := n.host.Sandbox(name).Sleep(ctx, spec.SleepOptions{Hooks: o.Hooks})
	if err != nil {
		return errors.Join(err, n.back(name))
	}
	res.Snapshot, res.Stages["pause"] = slept.Snapshot, control.Milliseconds(time.Since(begun))
	at := time.Now()
	res.BytesPause, err = n.publishAs(ctx, name, func(r *state.Record) (upload, error) {
		return upload{Ahead: v.ahead}, v.still(n, r)
	})
	if errors.Is(err, sandbox.ErrRunning) {
		err = fmt.Errorf("%w: %w", errChanged, err)
	}
	if err != nil {
		return errors.Join(err, n.back(name))
	}
	res.Stages["publish"] = control.Milliseconds(time.Since(at))
	at = time.Now()
	err = n.askTarget(ctx, o.To, 0, moveAsk{Op: opWake, Name: name, ID: v.id})
	res.Stages["wake"] = control.Milliseconds(time.Since(at))
	res.Downtime = control.Milliseconds(time.Since(begun)) - slept.Stages["hooks"]
	if err == nil {
		n.log.Info("moved", "sandbox", name, "to", o.To, "downtime_ms", res.Downtime, "bytes_ahead", res.BytesAhead, "bytes_pause", res.BytesPause)
		return nil
	}
	return n.notWoken(ctx, name, o.To, err, res)
}

// notWoken finds a sandbox that the target has not woken, as far as this host knows. Any host may wake it now.
func (n *Node) notWoken(ctx context.Context, name, to string, err error, res *spec.MigrateResult) error {
	n.log.Warn("a sandbox that has moved was not woken there", "sandbox", name, "to", to, "error", err)
	back := n.back(name)
	if back == nil {
		return fmt.Errorf("%w: it runs on this host again", err)
	}
	if f, ferr := n.family(ctx, name); ferr == nil && f.Holder != nil && f.Holder.Host == to {
		res.Problem = fmt.Sprintf("it is on %s, which has not said whether it runs: %v: its next use wakes it", to, err)
		return nil
	}
	return errors.Join(fmt.Errorf("%w: it sleeps in the store, and its next use on any host wakes it", err), back)
}

// back brings up a sandbox here whose move has failed, if no other host has it.
func (n *Node) back(name string) error {
	ctx, cancel := context.WithTimeout(n.life, backTime)
	defer cancel()
	err := n.claim(ctx, name, nil)
	if err == nil {
		_, err = n.host.Sandbox(name).BringUp(ctx)
	}
	if err != nil {
		return fmt.Errorf("waking it here again: %w", err)
	}
	return nil
}

// abandon removes what was sent for a head that was not committed.
func (n *Node) abandon(name, head string) {
	ctx, cancel := context.WithTimeout(n.life, collectTime)
	defer cancel()
	f, err := n.ledger.Family(ctx, name)
	switch {
	case err == nil && f.Head == head: // it was
		return
	case err == nil && hasSnapshot(f, head):
		if err = n.ledger.Remove(ctx, name, head); err == nil {
			err = n.collect(ctx, name)
		}
	case err == nil, errors.Is(err, ledger.ErrNotFound):
		err = n.archive.RemoveHead(ctx, head)
	}
	if err != nil {
		n.log.Warn("what was sent for a move stays until it is swept", "sandbox", name, "error", err)
	}
}

func hasSnapshot(f *ledger.Family, id string) bool {
	_, ok := f.Snapshots[id]
	return ok
}

// removeAhead removes snapshots that were sent ahead.
func (n *Node) removeAhead(ids aheadSnapshots) {
	for _, id := range ids {
		err := n.state.RemoveSnapshot(n.life, id)
		if err == nil || errors.Is(err, spec.ErrSnapshotInUse) || !n.state.IsThere(id) {
			err = n.dir.ForgetAhead(id)
		}
		if err != nil {
			n.log.Warn("a snapshot that was sent ahead stays", "snapshot", id, "error", err)
		}
	}
}

// tidyAhead removes snapshots of moves that have failed, or that an earlier process has left. The last one of a sandbox
// that runs stays until its next sleep, which would write all of its memory without it.
func (n *Node) tidyAhead() {
	ids, err := n.dir.Ahead()
	if err != nil {
		n.log.Warn("looking for snapshots that were sent ahead", "error", err)
	}
	last := map[string]*snapshot.Manifest{} // by the name of the sandbox
	var old aheadSnapshots
	for _, id := range ids {
		m, err := n.state.Manifest(id)
		switch {
		case err == nil && n.moving(m.Sandbox): // it removes them
			continue
		case err != nil || !n.needsAhead(m):
			old = append(old, id)
			continue
		case last[m.Sandbox] == nil:
		case m.CreatedUnixNano < last[m.Sandbox].CreatedUnixNano:
			old = append(old, id)
			continue
		default:
			old = append(old, last[m.Sandbox].ID)
		}
		last[m.Sandbox] = m
	}
	n.removeAhead(old)
}

func (n *Node) moving(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.moves[name] != nil
}

// needsAhead reports whether the next sleep of a sandbox may build upon a snapshot of a move that is over.
func (n *Node) needsAhead(m *snapshot.Manifest) bool {
	r, err := n.state.Get(m.Sandbox)
	if err != nil || r.Phase != state.Running {
		return false
	}
	if r.Snapshot == "" {
		return true
	}
	slept, err := n.state.ComingManifest(r.Snapshot)
	return err == nil && slept.CreatedUnixNano < m.CreatedUnixNano
}

// askTarget asks the host that a sandbox is to move to. limit 0 is the context's.
func (n *Node) askTarget(ctx context.Context, to string, limit time.Duration, a moveAsk) error {
	n.mu.Lock()
	hosts := n.hosts
	n.mu.Unlock()
	switch {
	case to == n.o.Name:
		return fmt.Errorf("%w: it is there: name another host", spec.ErrTarget)
	case hosts == nil || n.o.Address == "":
		return fmt.Errorf("%w: this host has no address in the cluster: give `drowse serve` --cluster-address", spec.ErrTarget)
	}
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	text, err := hosts.Ask(ctx, to, moveService, body, maxMoveAnswer)
	switch {
	case errors.Is(err, peer.ErrNoHost):
		return fmt.Errorf("%w: %w: see that `drowse serve --cluster` runs there, with --cluster-address and the version of this host", spec.ErrTarget, err)
	case err != nil:
		return fmt.Errorf("%w: %w: try again, or name another host", spec.ErrTarget, err)
	}
	var said moveSaid
	if err := json.Unmarshal(text, &said); err != nil {
		return fmt.Errorf("%w: what it says of that: %w", spec.ErrTarget, err)
	}
	if said.Error != nil {
		return fmt.Errorf("%w: %s says: %w", spec.ErrTarget, to, said.Error)
	}
	return nil
}
