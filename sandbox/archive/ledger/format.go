package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/sandbox/blob"
)

const (
	// MaxFamily is the most bytes that the record of a family may have.
	MaxFamily = 4 << 20
	// MaxName is the most bytes of the name of a host, a family or a snapshot.
	MaxName = 128
	// MaxUpload is the most bytes of the key of an upload.
	MaxUpload = 256

	version = 1
	// hostVersion is that of the record of a host with an address.
	hostVersion = 2
	// maxAddress is the most bytes of an address.
	maxAddress = 260
	// maxHost is the most bytes that the record of a host may have.
	maxHost = 4 << 10
	// reserve is what calls that make a family grow leave free for those that must be possible in a full one.
	reserve = 64 << 10
	// maxCount bounds what counts up, far beyond what can be reached.
	maxCount = 1 << 53
	minTTL   = time.Second
	maxTTL   = time.Hour
)

// State is what is true of a snapshot in a ledger.
type State string

// The states of a snapshot. Each is followed by those below it only.
const (
	// Intent: it is being uploaded, by the claim of its fence.
	Intent State = "intent"
	// Kept: it is the head, and all of its uploads are in the store.
	Kept State = "kept"
	// Gone: it is removed. Its uploads may be those of others too, or wait for Collect.
	Gone State = "gone"
)

// Family is what a ledger knows of one sandbox: an object of the store, as JSON.
type Family struct {
	Version int `json:"version"`
	// Counter grows with each change, so that no content comes twice.
	Counter uint64 `json:"counter"`
	// Deleted means that nothing of it is needed. Only Session.Create makes a sandbox of that name again.
	Deleted bool `json:"deleted,omitempty"`
	// Fence is the number of the last claim. It only grows.
	Fence uint64 `json:"fence"`
	// Head is the snapshot that the sandbox sleeps in, or came from. It is kept.
	Head      string              `json:"head,omitempty"`
	Holder    *Holder             `json:"holder,omitempty"` // who has claimed it; nil if nobody has
	Snapshots map[string]Snapshot `json:"snapshots,omitempty"`
}

// Holder is who may run a sandbox.
type Holder struct {
	Host        string `json:"host"`
	Incarnation string `json:"incarnation"`
	// Claim is a random name. A caller whose answer was lost knows by it that the claim is his.
	Claim string `json:"claim"`
	// Since is the fence of the first of the incarnation's claims since another held the sandbox, or nobody.
	Since uint64 `json:"since"`
}

// Snapshot is what a ledger knows of a snapshot.
type Snapshot struct {
	State State `json:"state"`
	// Fence is that of the claim that intends it.
	Fence   uint64   `json:"fence,omitempty"`
	Uploads []string `json:"uploads,omitempty"` // of this family, sorted
}

// current reports whether a claim is the one that holds the family.
func (f *Family) current(fence uint64) bool { return f.Holder != nil && f.Fence == fence }

// living reports whether a snapshot needs its uploads. Once it does not it never will again: all else rests on that.
func (f *Family) living(s Snapshot) bool {
	return s.State == Kept || s.State == Intent && f.current(s.Fence)
}

// needed returns the uploads that something needs. What it does not return once it never does again.
func (f *Family) needed() map[string]bool {
	uploads := map[string]bool{}
	for _, s := range f.Snapshots {
		if f.living(s) {
			for _, u := range s.Uploads {
				uploads[u] = true
			}
		}
	}
	return uploads
}

// garbage returns the snapshots of a family that do not live, and the uploads that nothing needs, sorted.
func (f *Family) garbage() (snapshots, uploads []string) {
	needed := f.needed()
	for id, s := range f.Snapshots {
		if f.living(s) {
			continue
		}
		snapshots = append(snapshots, id)
		for _, u := range s.Uploads {
			if !needed[u] {
				uploads = append(uploads, u)
			}
		}
	}
	slices.Sort(snapshots)
	return snapshots, set(uploads)
}

// drop removes snapshots that have been cleared away.
func (f *Family) drop(cleared []string) (changed bool) {
	n := len(f.Snapshots)
	for _, id := range cleared {
		if !f.living(f.Snapshots[id]) {
			delete(f.Snapshots, id)
		}
	}
	return n != len(f.Snapshots)
}

// host is what a ledger knows of a host: an object of the store, as JSON.
type host struct {
	Version     int    `json:"version"`
	Incarnation string `json:"incarnation"`
	// Counter grows with each change, so that no content comes twice.
	Counter uint64 `json:"counter"`
	TTL     int64  `json:"ttl_ms"`
	// Ended means that the incarnation never does anything again.
	Ended bool `json:"ended,omitempty"`
	// Address and Key are those of Options; both or none.
	Address string `json:"address,omitempty"`
	Key     string `json:"key,omitempty"`
}

func (h host) ttl() time.Duration { return time.Duration(h.TTL) * time.Millisecond }

// errContent is why the content of an object is refused.
var errContent = errors.New("not valid")

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errContent, fmt.Errorf(format, args...))
}

// decode reads an object that was encoded by encode, and no other bytes. newest is the newest version of it.
func decode[T any](body []byte, v *T, newest int, check func() error) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(body, &head); err != nil {
		return invalid("%w", err)
	}
	if head.Version < version || head.Version > newest {
		return fmt.Errorf("%w: its format is %d, and this is %d", ErrVersion, head.Version, newest)
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return invalid("%w", err)
	}
	// One value has one encoding: no name twice, nothing behind it.
	again, err := json.Marshal(v)
	switch {
	case err != nil:
		return invalid("%w", err)
	case !bytes.Equal(again, body):
		return invalid("it is not as this package writes it")
	}
	return check()
}

func decodeHost(body []byte) (h host, err error) {
	err = decode(body, &h, hostVersion, func() error {
		if err := checkAddress(h.Address, h.Key); err != nil || (h.Version == hostVersion) != (h.Address != "") {
			return invalid("version %d and the address %.300q", h.Version, h.Address)
		}
		if h.Counter > maxCount || h.TTL < minTTL.Milliseconds() || h.TTL > maxTTL.Milliseconds() {
			return invalid("a counter of %d, a time to live of %d ms", h.Counter, h.TTL)
		}
		return checkName("incarnation", h.Incarnation)
	})
	return h, err
}

func decodeFamily(body []byte) (*Family, error) {
	f := new(Family)
	if err := decode(body, f, version, f.check); err != nil {
		return nil, err
	}
	return f, nil
}

func checkName(what, name string) error {
	if len(name) > MaxName || strings.Contains(name, "/") || blob.CheckKey(name) != nil {
		return fmt.Errorf("%w: the name %.150q of a %s: at most %d letters, digits, '.', '_' and '-', first no '.'", ErrName, name, what, MaxName)
	}
	return nil
}

// checkAddress returns an error unless others can be told an address and a key, or neither.
func checkAddress(address, key string) error {
	if address == "" && key == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" || len(address) > maxAddress || !addressRE.MatchString(host) {
		return fmt.Errorf("%w: the address %.300q of a host: use HOST:PORT", ErrName, address)
	}
	if !keyRE.MatchString(key) {
		return fmt.Errorf("%w: the key %.100q of a host: use 64 hex digits", ErrName, key)
	}
	return nil
}

var (
	addressRE = lazyregexp.New(`^[A-Za-z0-9._:%-]+$`)
	keyRE     = lazyregexp.New(`^[0-9a-f]{64}$`)
)

func checkUpload(key string) error {
	if len(key) > MaxUpload || blob.CheckKey(key) != nil {
		return fmt.Errorf("%w: the upload %.300q: at most %d bytes, and a key of a store of objects", ErrName, key, MaxUpload)
	}
	return nil
}

// check returns an error unless a family is one that this package can have written.
func (f *Family) check() error {
	if f.Counter > maxCount || f.Fence > maxCount {
		return invalid("a counter of %d, a fence of %d", f.Counter, f.Fence)
	}
	if f.Head != "" && f.Snapshots[f.Head].State != Kept {
		return invalid("the head %.150q is not kept", f.Head)
	}
	if h := f.Holder; h != nil {
		if err := errors.Join(checkName("host", h.Host), checkName("incarnation", h.Incarnation), checkName("claim", h.Claim)); err != nil {
			return err
		}
		if h.Since == 0 || h.Since > f.Fence {
			return invalid("a claim since %d, and there were %d", h.Since, f.Fence)
		}
	}
	if f.Deleted && (f.Head != "" || f.Holder != nil) {
		return invalid("it is deleted, and has a head or a holder")
	}
	for id, s := range f.Snapshots {
		if err := checkName("snapshot", id); err != nil {
			return err
		}
		if err := f.checkSnapshot(s); err != nil {
			return fmt.Errorf("the snapshot %s: %w", id, err)
		}
	}
	return nil
}

func (f *Family) checkSnapshot(s Snapshot) error {
	switch s.State {
	case Intent:
		if s.Fence == 0 || s.Fence > f.Fence || f.Deleted {
			return invalid("an intent of the claim %d of %d, or of a deleted family", s.Fence, f.Fence)
		}
	case Kept, Gone:
		if s.Fence != 0 || s.State == Kept && f.Deleted {
			return invalid("it has a claim, or is kept by a deleted family")
		}
	default:
		return invalid("the state %.20q", s.State)
	}
	for _, u := range s.Uploads {
		if err := checkUpload(u); err != nil {
			return err
		}
	}
	if !increasing(s.Uploads) {
		return invalid("its uploads are not in order")
	}
	return nil
}

func increasing(s []string) bool {
	for i := 1; i < len(s); i++ {
		if s[i-1] >= s[i] {
			return false
		}
	}
	return true
}

// encode returns the object of a family, which has at most limit bytes.
func (f *Family) encode(limit int) ([]byte, error) {
	if f.Counter > maxCount || f.Fence > maxCount {
		return nil, invalid("a counter of %d, a fence of %d", f.Counter, f.Fence)
	}
	body, err := json.Marshal(f)
	if err == nil && len(body) > limit {
		err = fmt.Errorf("%w: it would have %d bytes, and %d are allowed: remove snapshots", ErrFull, len(body), limit)
	}
	return body, err
}

// set returns names sorted, each once, or nil.
func set(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return slices.Compact(names)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
