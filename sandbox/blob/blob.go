// Package blob is a store of objects that several hosts share: immutable ones, and small ones that change only by
// comparison with what they were. It knows nothing of what is in them.
//
// A Store is small so that an embedder can write one. What a user of it may count on is tested by
// sandbox/blob/blobtest for each.
package blob

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// MaxObject is the most bytes that an object may have.
const MaxObject = 64 << 20

// MaxKey is the most bytes that a key may have.
const MaxKey = 512

var (
	// ErrNotFound means that there is no object of the key.
	ErrNotFound = errors.New("there is no such object in the store")
	// ErrExists means that there is an object of the key already. It may be the caller's own: see Store.Put.
	ErrExists = errors.New("the store has an object of that key")
	// ErrChanged means that the object is not the version that the caller knows. It may be the caller's own: see
	// Store.Swap.
	ErrChanged = errors.New("the object in the store has changed")
	// ErrCorrupt means that the content of the object is not what was put.
	ErrCorrupt = errors.New("what the store has is damaged")
	// ErrNoKey means that a Sealer lacks the key to open an object.
	ErrNoKey = errors.New("what the store has cannot be opened")
	// ErrKey means that a key or a size is not valid.
	ErrKey = errors.New("not valid for a store of objects")
)

// A Version tells contents of one object apart. The empty one means that there is no object.
//
// A store may give equal contents equal versions. So what is swapped has something in it that never comes again, such
// as a number that counts up.
type Version string

// Info describes an object in a list.
type Info struct {
	Key  string
	Size int64 // bytes in the store
	// Changed is when it was made or swapped, by the store's clock.
	Changed time.Time
}

// Store keeps objects under keys: see CheckKey. Its methods may be called from several goroutines and hosts. They are
// linearizable: what a call has done, each call that begins later sees. Only List may be late.
//
// All methods end when ctx ends. If one then, or for another reason, returns an error other than those above, what it
// was to change may have changed, and may still change later.
type Store interface {
	// Put makes an object with the content body, which has at most MaxObject bytes. It is durable and whole when Put
	// returns nil; no one sees a part of it. If there is one, Put changes nothing and returns ErrExists. A store that
	// repeats a request may so refuse what it has itself put: a caller that cares puts under a key that only he knows,
	// or compares.
	Put(ctx context.Context, key string, body []byte) error
	// ReadAt fills p from the offset off. It returns ErrNotFound, or io.ErrUnexpectedEOF if the object has fewer bytes.
	ReadAt(ctx context.Context, key string, p []byte, off int64) error
	// Load returns a whole object of at most limit bytes, and its version. A larger one is an error.
	Load(ctx context.Context, key string, limit int64) ([]byte, Version, error)
	// Swap replaces the content of an object, durably, if it has the version old; the empty version makes it. It
	// returns the new version, or ErrChanged. A store that repeats a request may so refuse what it has itself swapped:
	// the caller loads the object, and knows his own by what is in it.
	Swap(ctx context.Context, key string, old Version, body []byte) (Version, error)
	// Delete removes an object. If there is none, that is no error.
	Delete(ctx context.Context, key string) error
	// List calls each for the objects whose keys begin with prefix, in no order, and stops at its error. It may omit
	// objects that have just been made and name some that are gone: nothing may depend upon it.
	List(ctx context.Context, prefix string, each func(Info) error) error
}

// Sealer is a Store that encrypts.
type Sealer interface {
	Store
	// SealFor returns a store of the same objects that puts what it puts under a key of the owner, if it has one.
	SealFor(owner string) Store
	// Seal says how what it puts is sealed.
	Seal() Seal
	// LoadOf is Load, and says how the object was sealed.
	LoadOf(ctx context.Context, key string, limit int64) (body []byte, v Version, by Seal, err error)
}

// Seal says under which key an object is sealed. It is zero for one that is not.
type Seal struct {
	// Key is the key's id.
	Key string `json:"key,omitempty"`
	// Owner is whose key it is; empty for one of the hosts. Whoever has only keys of owners can make no other objects.
	Owner string `json:"owner,omitempty"`
}

// SealFor is that of a Sealer. Other stores seal nothing.
func SealFor(s Store, owner string) Store {
	if sealer, ok := s.(Sealer); ok {
		return sealer.SealFor(owner)
	}
	return s
}

// SealOf is Sealer.Seal.
func SealOf(s Store) Seal {
	if sealer, ok := s.(Sealer); ok {
		return sealer.Seal()
	}
	return Seal{}
}

// LoadOf is that of a Sealer.
func LoadOf(ctx context.Context, s Store, key string, limit int64) (body []byte, v Version, by Seal, err error) {
	if sealer, ok := s.(Sealer); ok {
		return sealer.LoadOf(ctx, key, limit)
	}
	body, v, err = s.Load(ctx, key, limit)
	return body, v, by, err
}

// Hosts returns a store whose Load refuses what was sealed for an owner. It is for what only hosts may say.
func Hosts(s Store) Store { return hosts{s} }

type hosts struct{ Store }

// Load implements Store.
func (h hosts) Load(ctx context.Context, key string, limit int64) ([]byte, Version, error) {
	body, v, by, err := LoadOf(ctx, h.Store, key, limit)
	if err == nil && by.Owner != "" {
		err = fmt.Errorf("%w: %.100s: it is sealed under the key of an owner, and hosts seal it under theirs", ErrCorrupt, key)
	}
	if err != nil {
		return nil, "", err
	}
	return body, v, nil
}

var partRE = lazyregexp.New(`^[A-Za-z0-9_-][A-Za-z0-9._-]*$`)

// CheckKey returns an error, which wraps ErrKey, unless a key is parts of letters, digits, '.', '_' and '-' with
// slashes between them, of at most MaxKey bytes. No part is empty or begins with a dot.
func CheckKey(key string) error {
	if len(key) > MaxKey {
		return fmt.Errorf("%w: a key of %d bytes, and %d are allowed", ErrKey, len(key), MaxKey)
	}
	for part := range strings.SplitSeq(key, "/") {
		if !partRE.MatchString(part) {
			return fmt.Errorf("%w: the key %.100q", ErrKey, key)
		}
	}
	return nil
}

// CheckPut returns an error, which wraps ErrKey, if the key is not valid or the object too large.
func CheckPut(key string, body []byte) error {
	if len(body) > MaxObject {
		return fmt.Errorf("%w: an object of %d bytes, and %d are allowed", ErrKey, len(body), MaxObject)
	}
	return CheckKey(key)
}

// CheckRead returns an error, which wraps ErrKey, if the key is not valid or the offset negative.
func CheckRead(key string, off int64) error {
	if off < 0 {
		return fmt.Errorf("%w: the offset %d", ErrKey, off)
	}
	return CheckKey(key)
}
