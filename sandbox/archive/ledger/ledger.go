package ledger

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

var (
	// ErrLost means that a session has ended: what it has claimed must not run, and may run elsewhere.
	ErrLost = errors.New("the session of this host with the ledger is lost")
	// ErrReleased means that a claim was given up, or that another host has taken it.
	ErrReleased = errors.New("the claim on the sandbox has ended")
	// ErrDeleted means that a family is deleted.
	ErrDeleted = errors.New("the sandbox is deleted")
	// ErrExists means that there is a sandbox of the name.
	ErrExists = errors.New("the ledger has a sandbox of that name")
	// ErrNotFound means that there is no such family, or host.
	ErrNotFound = errors.New("the ledger has no record of it")
	// ErrSnapshot means that a snapshot is not in the state that a call needs, or not there.
	ErrSnapshot = errors.New("the ledger has no such snapshot, or not in this state")
	// ErrFull means that the record of a family has no room.
	ErrFull = errors.New("the sandbox's record in the ledger is full")
	// ErrHostInUse means that another process has a session of the host's name.
	ErrHostInUse = errors.New("another process uses the host's name")
	// ErrName means that a name or key is not valid.
	ErrName = errors.New("not a valid name")
	// ErrVersion means that an object has a format that this program does not know.
	ErrVersion = errors.New("made by another version of drowse")
)

// HeldError means that another host has a sandbox, and may be alive.
type HeldError struct {
	Family, Host string
	// Wait is when to try again: a host that has given no sign of life until then is dead. A host that lives is to be
	// asked for the sandbox. 0 means that a claim of the same session has it.
	Wait time.Duration
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("the sandbox %s is held by the host %s", e.Family, e.Host)
}

// CondemnedError means that uploads that were to be used again are not needed by anything that is kept, so that they
// may be gone. They have to be uploaded anew under other keys.
type CondemnedError struct{ Uploads []string }

func (e *CondemnedError) Error() string {
	return fmt.Sprintf("%d uploads may be gone already: upload them anew", len(e.Uploads))
}

// Options are those of Open. The zero value is right for production.
type Options struct {
	// TTL is how long others wait for a sign of life of this host before they take its sandboxes; 0 is 30 s. It is
	// from 1 s to 1 h. Hosts may have different ones.
	TTL time.Duration
	// Clock is this host's; nil is the system's.
	Clock Clock
	// Address is where other hosts reach this one, as HOST:PORT, and Key the SHA-256 of the public key that they find
	// there, in hex. Both are in the records of this host's sessions: see Ledger.Host. Programs from before there were
	// addresses cannot read such a record.
	Address, Key string
}

// DefaultTTL is that of Options.
const DefaultTTL = 30 * time.Second

// Ledger is a ledger in a store of objects. Its methods, and those of its sessions and claims, may be called from
// several goroutines.
//
// Their contexts bound them. A call repeats what failed a few times, and looks what became of it. If a method returns
// an error that is none of this package's, it may yet have done, or do later, what it was to do: it can be called
// again.
type Ledger struct {
	store blob.Store
	clock Clock
	ttl   time.Duration
	// address and key are this host's.
	address, key string

	// Simulations replace these.
	id     func() string
	jitter func(time.Duration) time.Duration

	mu   sync.Mutex
	seen map[string]sight // by the name of the host
	// recent has families as they were last read or written here: a change that follows need not read them.
	recent map[string]recent
	size   int // of the bodies of recent, in bytes
	// cleared has snapshots that Collect has cleared away, by family. The next change drops them.
	cleared map[string][]string
}

type recent struct {
	version blob.Version
	body    []byte
}

const (
	// maxRecent bounds the bytes of Ledger.recent, and maxRecentBody those of one family.
	maxRecent     = 8 << 20
	maxRecentBody = 64 << 10
	// maxFamilies bounds how many families have something in Ledger.cleared.
	maxFamilies = 1 << 16
)

// Open returns the ledger in a store. It does nothing yet.
func Open(store blob.Store, o Options) (*Ledger, error) {
	if o.TTL == 0 {
		o.TTL = DefaultTTL
	}
	if o.TTL < minTTL || o.TTL > maxTTL {
		return nil, fmt.Errorf("%w: a time to live of %v: it is from %v to %v", errContent, o.TTL, minTTL, maxTTL)
	}
	if o.Clock == nil {
		o.Clock = boottime{}
	}
	if err := checkAddress(o.Address, o.Key); err != nil {
		return nil, err
	}
	return &Ledger{
		store: store, clock: o.Clock, ttl: o.TTL.Truncate(time.Millisecond), address: o.Address, key: o.Key,
		seen: map[string]sight{}, recent: map[string]recent{}, cleared: map[string][]string{},
		id:     rand.Text,
		jitter: func(d time.Duration) time.Duration { return d/2 + mathrand.N(d/2+1) },
	}, nil
}

const (
	storeTries  = 5   // how often a call of the store that fails is repeated
	changeTries = 200 // how often a change is made anew because others were faster
)

func familyKey(id string) string { return "families/" + id }
func hostKey(name string) string { return "hosts/" + name }

// Family returns what the ledger knows of a sandbox.
func (l *Ledger) Family(ctx context.Context, id string) (*Family, error) {
	f, v, err := l.load(ctx, id)
	if err == nil && v == "" {
		err = fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return f, err
}

// load returns a family. An empty version means that there is none yet.
func (l *Ledger) load(ctx context.Context, id string) (*Family, blob.Version, error) {
	if err := checkName("sandbox", id); err != nil {
		return nil, "", err
	}
	body, v, err := l.store.Load(ctx, familyKey(id), MaxFamily)
	if errors.Is(err, blob.ErrNotFound) {
		return &Family{Version: version}, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	f, err := decodeFamily(body)
	if err != nil {
		return nil, "", &recordError{fmt.Errorf("the record of the sandbox %s in the ledger: %w", id, err)}
	}
	l.remember(id, recent{v, body})
	return f, v, nil
}

// remember notes a family as it now is, or that this is not known.
func (l *Ledger) remember(id string, r recent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.size -= len(l.recent[id].body)
	delete(l.recent, id)
	if r.version == "" || len(r.body) > maxRecentBody {
		return
	}
	for other, old := range l.recent { // in random order
		if l.size+len(r.body) <= maxRecent {
			break
		}
		l.size -= len(old.body)
		delete(l.recent, other)
	}
	l.recent[id], l.size = r, l.size+len(r.body)
}

// recall returns a family as it was last seen here. Others may have changed it since.
func (l *Ledger) recall(id string) (*Family, blob.Version, bool) {
	l.mu.Lock()
	r, ok := l.recent[id]
	l.mu.Unlock()
	if !ok {
		return nil, "", false
	}
	f, err := decodeFamily(r.body)
	return f, r.version, err == nil
}

// clear notes snapshots that have been cleared away, and returns how many of the family's are noted.
func (l *Ledger) clear(id string, snapshots []string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.cleared) >= maxFamilies {
		clear(l.cleared) // another Collect clears them away again
	}
	all := set(append(slices.Clone(l.cleared[id]), snapshots...))
	if len(all) > 0 {
		l.cleared[id] = all
	}
	return len(all)
}

// drop removes what has been cleared away from a family. Once the change is made, done forgets it.
func (l *Ledger) drop(id string, f *Family) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cleared := l.cleared[id]
	f.drop(cleared)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		left := slices.DeleteFunc(slices.Clone(l.cleared[id]), func(s string) bool { return slices.Contains(cleared, s) })
		if l.cleared[id] = left; len(left) == 0 {
			delete(l.cleared, id)
		}
	}
}

func (l *Ledger) loadHost(ctx context.Context, name string) (host, blob.Version, error) {
	body, v, err := l.store.Load(ctx, hostKey(name), maxHost)
	if err != nil {
		return host{}, "", err
	}
	h, err := decodeHost(body)
	if err != nil {
		err = &recordError{fmt.Errorf("the record of the host %s in the ledger: %w", name, err)}
	}
	return h, v, err
}

// Host is what a ledger knows of a host.
type Host struct {
	Incarnation  string
	Address, Key string // see Options; empty if the host has none
	// Left is after how long without a sign of life the incarnation can be ended; 0 if it has ended, or can be ended
	// now.
	Left time.Duration
}

// Host returns what the ledger knows of a host, or ErrNotFound.
func (l *Ledger) Host(ctx context.Context, name string) (Host, error) {
	if err := checkName("host", name); err != nil {
		return Host{}, err
	}
	h, v, err := l.loadHost(ctx, name)
	if errors.Is(err, blob.ErrNotFound) {
		err = fmt.Errorf("host %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return Host{}, err
	}
	out := Host{Incarnation: h.Incarnation, Address: h.Address, Key: h.Key}
	if !h.Ended {
		out.Left = max(0, l.sight(name, v, waits(h.ttl())))
	}
	return out, nil
}

// recordError is an error that does not pass if one tries again.
type recordError struct{ error }

func (e *recordError) Unwrap() error { return e.error }

func (l *Ledger) swapHost(ctx context.Context, name string, old blob.Version, h host) (blob.Version, error) {
	body, err := json.Marshal(h)
	if err != nil {
		return "", err
	}
	return l.store.Swap(ctx, hostKey(name), old, body)
}

// A change is one of a family by comparison.
type change struct {
	family string
	// limit is the most bytes that the family may then have; 0 is MaxFamily.
	limit int
	// make changes the family, or reports that there is nothing to change: also because an earlier try of the same
	// change was made, though its answer was lost. It may look at the context's end for nothing else than calls.
	make func(f *Family) (changed bool, err error)
	// may is called directly before a change is sent; nil is always.
	may func() error
	// sent is called before a change is sent; it may be nil.
	sent func()
}

// update makes a change. It returns the family as it is then, without what has been cleared away.
func (l *Ledger) update(ctx context.Context, c change) (*Family, error) {
	limit := c.limit
	if limit == 0 {
		limit = MaxFamily
	}
	// The store compares with what is changed here: it may be old. What is not to be changed, or cannot be, is read.
	f, v, old := l.recall(c.family)
	for failed, lost := 0, 0; ; old = false {
		var err error
		if !old {
			f, v, err = l.load(ctx, c.family)
		}
		var record *recordError
		switch {
		case errors.As(err, &record), errors.Is(err, ErrName):
			return nil, err
		case err == nil:
			changed, err := c.make(f)
			if old && (err != nil || !changed) {
				continue
			}
			if err != nil {
				return nil, err
			}
			dropped := l.drop(c.family, f)
			if !changed {
				return f, nil
			}
			f.Counter++
			body, err := f.encode(limit)
			if old && err != nil {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("sandbox %s: %w", c.family, err)
			}
			if c.may != nil {
				if err := c.may(); err != nil {
					return nil, err
				}
			}
			if c.sent != nil {
				c.sent()
			}
			now, err := l.store.Swap(ctx, familyKey(c.family), v, body)
			if err == nil {
				l.remember(c.family, recent{now, body})
				dropped()
				return f, nil
			}
			l.remember(c.family, recent{})
			if errors.Is(err, blob.ErrChanged) {
				if old {
					continue
				}
				if lost++; lost < changeTries && l.pause(ctx, min(lost, storeTries)) {
					continue
				}
				return nil, fmt.Errorf("sandbox %s: %d other changes were faster: %w", c.family, lost, err)
			}
			if failed++; failed >= storeTries || !l.pause(ctx, failed) {
				return nil, err
			}
		default:
			if failed++; failed >= storeTries || !l.pause(ctx, failed) {
				return nil, err
			}
		}
	}
}

// pause waits before the next try. It reports false if ctx has ended.
func (l *Ledger) pause(ctx context.Context, try int) bool {
	const first = 10 * time.Millisecond
	return l.clock.Sleep(ctx, l.jitter(first<<try)) == nil
}
