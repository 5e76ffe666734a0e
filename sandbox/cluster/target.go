package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// What a host asks the one to which it moves a sandbox.
const (
	opCheck = "check" // whether it could take it now
	opAhead = "ahead" // to get what the store already has
	opWake  = "wake"  // to claim and wake it
)

type moveAsk struct {
	Op   string `json:"op"`
	Name string `json:"name"`
	ID   string `json:"id,omitempty"` // the sandbox's
	// For opCheck: MiB is 0 for one that sleeps.
	Owner string `json:"owner,omitempty"`
	MiB   int    `json:"mib,omitempty"`
	// For opAhead: the head that it will be, the manifest of a snapshot, and objects of the store.
	Head     string             `json:"head,omitempty"`
	Manifest *snapshot.Manifest `json:"manifest,omitempty"`
	Objects  []archive.Object   `json:"objects,omitempty"`
}

type moveSaid struct {
	Error *control.ErrorReport `json:"error,omitempty"`
}

const (
	maxMoveAsk = 32 << 20 // bytes: more than a manifest and the names of 100,000 objects
	askTime    = time.Minute
	// roomTime is how long a check waits for room.
	roomTime = time.Second
	// wakeTime bounds the claim and the wake of a sandbox that has moved here.
	wakeTime = 5 * time.Minute
	// nearAtOnce objects are fetched ahead at once, and kept for nearTime. They have at most maxNear bytes, and leave
	// 1/nearFree of the file system free.
	nearAtOnce = 4
	nearTime   = 15 * time.Minute
	maxNear    = 64 << 30
	nearFree   = 10
)

// serveMove answers another host that moves a sandbox to this one.
func (n *Node) serveMove(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(askTime)) // test writers may lack deadlines
	var a moveAsk
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxMoveAsk)).Decode(&a)
	if err != nil {
		http.Error(w, "not a question of a move", http.StatusBadRequest)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	var said moveSaid
	if err := n.take(r.Context(), a); err != nil {
		n.log.Warn("a move to this host", "sandbox", a.Name, "step", a.Op, "error", err)
		said.Error = control.ReportError(err)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(said) // an error means that the host has gone
}

func (n *Node) take(ctx context.Context, a moveAsk) error {
	if !spec.ValidName(a.Name) {
		return fmt.Errorf("%w: the name %.64q", spec.ErrInvalid, a.Name)
	}
	switch a.Op {
	case opCheck:
		return n.couldTake(ctx, a)
	case opAhead:
		if a.Manifest == nil {
			return fmt.Errorf("%w: no manifest", spec.ErrInvalid)
		}
		if err := n.archive.PullImage(ctx, n.state, a.Manifest.Image); err != nil {
			return err
		}
		if err := n.state.Admits(a.Manifest); err != nil {
			return err
		}
		return n.near.fetch(ctx, n.store, a.Head, a.Objects)
	case opWake:
		return n.takeOver(a.Name, a.ID)
	}
	return fmt.Errorf("%w: the step %.20q of a move: use the same version of drowse on all hosts", spec.ErrInvalid, a.Op)
}

// couldTake returns why this host could not take a sandbox now.
func (n *Node) couldTake(ctx context.Context, a moveAsk) error {
	if err := n.current().Err(); err != nil {
		return err
	}
	if r, err := n.state.Load(a.Name); err == nil && r.ID != a.ID && !n.dir.Shared(a.Name) {
		return fmt.Errorf("%w: this host has another sandbox called %s: rename one", spec.ErrExists, a.Name)
	}
	if a.MiB == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, roomTime)
	defer cancel()
	err := n.state.HasRoom(ctx, a.Owner, a.MiB)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("it has no room for %d MiB now: put sandboxes to sleep there, or raise its limits (%w)", a.MiB, err)
	}
	return err
}

// takeOver claims and wakes a sandbox, whatever becomes of the host that it comes from. What this host does not share,
// or another sandbox that has the name, is left alone.
func (n *Node) takeOver(name, id string) error {
	ctx, cancel := context.WithTimeout(n.life, wakeTime)
	defer cancel()
	other := fmt.Errorf("%w: another sandbox is called %s: rename one", spec.ErrExists, name)
	if n.Private(name) {
		return other
	}
	err := n.Claim(ctx, name, nil)
	if err != nil {
		return err
	}
	if n.Private(name) { // it was made meanwhile, and kept the claim away
		return other
	}
	r, err := n.state.Get(name)
	if err != nil {
		return err
	}
	if err = other; r.ID == id {
		_, err = n.host.Sandbox(name).BringUp(ctx)
	}
	if err != nil {
		// Others may wake it, at once.
		n.mu.Lock()
		delete(n.wanted, name)
		n.mu.Unlock()
		if perr := n.Publish(ctx, name); perr != nil && !errors.Is(perr, sandbox.ErrRunning) {
			err = errors.Join(err, perr)
		}
	}
	return err
}

// near is a copy of objects of the store that sandboxes will need which are about to move here. Any of it may go at any
// time: then it is read from the store.
type near struct {
	root  string
	dir   *blob.Dir
	turns chan struct{} // nearAtOnce places, which bound the memory of all fetches
	free  func() (spare int64, err error)

	mu    sync.Mutex // guards all below
	heads map[string]*nearHead
	bytes int64
}

// nearHead is what is near of a head.
type nearHead struct {
	users int       // fetches that are under way
	until time.Time // for when it is kept after the last
	bytes int64
}

// openNear opens an empty one.
func openNear(root string) (*near, error) {
	if err := os.RemoveAll(root); err != nil {
		return nil, err
	}
	dir, err := blob.OpenDir(root)
	c := &near{root: root, dir: dir, turns: make(chan struct{}, nearAtOnce), heads: map[string]*nearHead{}}
	c.free = func() (int64, error) {
		var st unix.Statfs_t
		if err := unix.Statfs(root, &st); err != nil {
			return 0, err
		}
		return (int64(st.Bavail) - int64(st.Blocks)/nearFree) * st.Bsize, nil //nolint:gosec // blocks of a file system
	}
	return c, err
}

// fetch gets objects of a head that are not here yet, as far as there is room.
func (c *near) fetch(ctx context.Context, from blob.Store, head string, objects []archive.Object) error {
	for _, o := range objects {
		if !archive.IsAhead(o.Key, head) || o.Size <= 0 || o.Size > blob.MaxObject {
			return fmt.Errorf("%w: %.200q is not of the head %.40q", blob.ErrKey, o.Key, head)
		}
	}
	if len(objects) == 0 {
		return nil
	}
	h := c.use(head)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(nearAtOnce)
	for _, o := range objects {
		g.Go(func() error {
			if c.dir.ReadAt(ctx, o.Key, make([]byte, 1), o.Size-1) == nil {
				return nil
			}
			select {
			case c.turns <- struct{}{}:
				defer func() { <-c.turns }()
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if !c.reserve(head, h, o.Size) {
				return nil
			}
			body := make([]byte, o.Size)
			if err := from.ReadAt(ctx, o.Key, body, 0); err != nil {
				return err
			}
			err := c.dir.Put(ctx, o.Key, body)
			if errors.Is(err, blob.ErrExists) {
				err = nil
			}
			return err
		})
	}
	err := g.Wait()
	if !c.done(head, h) {
		c.clear(head) // it was dropped meanwhile
	}
	if err != nil {
		c.drop(head)
		return fmt.Errorf("getting what it needs ahead: %w", err)
	}
	return nil
}

// use begins a fetch, which done ends. done reports whether its head was not dropped.
func (c *near) use(head string) *nearHead {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.heads[head]
	if h == nil {
		h = &nearHead{}
		c.heads[head] = h
	}
	h.users++
	return h
}

func (c *near) done(head string, h *nearHead) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	h.users--
	h.until = time.Now().Add(nearTime)
	return c.heads[head] == h
}

// reserve reports whether there is room for an object.
func (c *near) reserve(head string, h *nearHead, size int64) bool {
	spare, err := c.free()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || spare < size || size > maxNear-c.bytes || c.heads[head] != h {
		return false
	}
	h.bytes, c.bytes = h.bytes+size, c.bytes+size
	return true
}

// drop removes the objects of a head.
func (c *near) drop(head string) {
	c.mu.Lock()
	h := c.heads[head]
	if h != nil {
		delete(c.heads, head)
		c.bytes -= h.bytes
	}
	c.mu.Unlock()
	if h != nil {
		c.clear(head)
	}
}

func (c *near) clear(head string) {
	dirs, _ := filepath.Glob(filepath.Join(c.root, filepath.FromSlash(archive.AheadPrefix(head))+"*"))
	for _, d := range dirs {
		_ = os.RemoveAll(d) // else the next process does it
	}
}

// tidy drops what nobody has come for.
func (c *near) tidy(now time.Time) {
	c.mu.Lock()
	var old []string
	for head, h := range c.heads {
		if h.users == 0 && now.After(h.until) {
			old = append(old, head)
		}
	}
	c.mu.Unlock()
	for _, head := range old {
		c.drop(head)
	}
}

func (c *near) has(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for head := range c.heads {
		if strings.HasPrefix(key, archive.AheadPrefix(head)) {
			return true
		}
	}
	return false
}

// nearStore is the store, with what is near. Keys of heads' files never have other objects.
type nearStore struct {
	blob.Store
	near *near
}

// SealFor implements blob.Sealer.
func (s nearStore) SealFor(owner string) blob.Store {
	return nearStore{blob.SealFor(s.Store, owner), s.near}
}

// Seal implements blob.Sealer.
func (s nearStore) Seal() blob.Seal { return blob.SealOf(s.Store) }

// LoadOf implements blob.Sealer. Manifests are never near.
func (s nearStore) LoadOf(ctx context.Context, key string, limit int64) ([]byte, blob.Version, blob.Seal, error) {
	return blob.LoadOf(ctx, s.Store, key, limit)
}

// ReadAt implements blob.Store.
func (s nearStore) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if s.near.has(key) && s.near.dir.ReadAt(ctx, key, p, off) == nil {
		return nil
	}
	return s.Store.ReadAt(ctx, key, p, off)
}

// Load implements blob.Store.
func (s nearStore) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	if s.near.has(key) {
		if body, v, err := s.near.dir.Load(ctx, key, limit); err == nil {
			return body, v, nil
		}
	}
	return s.Store.Load(ctx, key, limit)
}
