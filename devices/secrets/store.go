package secrets

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Secret describes a secret, without its value.
type Secret struct {
	// Name is 1 to MaxName bytes, without '/' and zero bytes, and not "." or "..".
	Name string
	// Mode has the permissions, 0 to 0777, of the file that the guest sees.
	Mode     uint16
	UID, GID uint32
}

// Errors of Set and Await.
var (
	ErrSecret  = errors.New("not a possible secret")
	ErrTooMany = errors.New("too many secrets")
)

func (s *Secret) check() error {
	if s.Name == "" || s.Name == "." || s.Name == ".." || len(s.Name) > MaxName || strings.ContainsAny(s.Name, "/\x00") || s.Mode > 0o777 {
		return fmt.Errorf("%w: name %q, mode %#o", ErrSecret, s.Name, s.Mode)
	}
	return nil
}

type entry struct {
	Secret
	id      uint32
	present bool
	value   []byte // locked memory; nil if the value is absent or empty
}

// State is a secret as Store.List returns it.
type State struct {
	Secret
	// Present means that the value is here. Otherwise it is awaited.
	Present bool
	Size    int // bytes
}

// Store holds the values of secrets in locked memory. The zero value is empty. Any goroutine may call its methods.
type Store struct {
	mu      sync.Mutex // guards what follows
	entries []*entry   // in the order of names
	lastID  uint32
	closed  bool
	changed chan struct{} // nil while no caller waits for a change
	// wiping, if not nil, is called before a secret's value is wiped.
	wiping func(*entry)
}

var errClosed = errors.New("the machine is gone")

// Set gives a secret a value of at most MaxValue bytes, which it copies.
func (s *Store) Set(secret Secret, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("%w: %s has %d bytes, at most %d", ErrSecret, secret.Name, len(value), MaxValue)
	}
	return s.put(secret, value, true)
}

// Await names a secret whose value will come. The guest waits for it. If the secret has a value already, it stays.
func (s *Store) Await(secret Secret) error { return s.put(secret, nil, false) }

func (s *Store) put(secret Secret, value []byte, present bool) error {
	if err := secret.check(); err != nil {
		return err
	}
	mem, err := keep(value)
	if err != nil {
		return fmt.Errorf("secret %s: %w", secret.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := s.find(secret.Name)
	switch {
	case s.closed:
		drop(mem)
		return errClosed
	case found && !present:
		return nil
	case found:
		s.forget(s.entries[i])
	case len(s.entries) >= MaxSecrets:
		drop(mem)
		return fmt.Errorf("%w: a VM has %d at most", ErrTooMany, MaxSecrets)
	default:
		s.entries = slices.Insert(s.entries, i, nil)
	}
	s.lastID++
	s.entries[i] = &entry{Secret: secret, id: s.lastID, present: present, value: mem}
	s.tell()
	return nil
}

// tell wakes the callers that wait for a change. The caller holds mu.
func (s *Store) tell() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Secret returns a copy of a value. If the value is not here, changed closes when it may be. The caller may drop it.
func (s *Store) Secret(name string) (value string, ok bool, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i, found := s.find(name); found && s.entries[i].present {
		return string(s.entries[i].value), true, nil
	}
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return "", false, s.changed
}

func (s *Store) find(name string) (int, bool) {
	return slices.BinarySearchFunc(s.entries, name, func(e *entry, name string) int { return strings.Compare(e.Name, name) })
}

// Remove removes a secret, and reports whether it existed.
func (s *Store) Remove(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := s.find(name)
	if !found {
		return false
	}
	s.forget(s.entries[i])
	s.entries = slices.Delete(s.entries, i, i+1)
	s.tell()
	return true
}

// forget wipes a value. The caller holds mu.
func (s *Store) forget(e *entry) {
	if s.wiping != nil {
		s.wiping(e)
	}
	drop(e.value)
	e.value, e.present = nil, false
}

// List returns the secrets in the order of their names.
func (s *Store) List() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]State, 0, len(s.entries))
	for _, e := range s.entries {
		out = append(out, State{Secret: e.Secret, Present: e.present, Size: len(e.value)})
	}
	return out
}

// Close wipes all values. From then on there are no secrets.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		s.forget(e)
	}
	s.entries, s.closed = nil, true
	s.tell()
	return nil
}

// keep copies a value into memory of its own that the kernel neither swaps nor dumps.
func keep(value []byte) ([]byte, error) {
	if len(value) == 0 {
		return nil, nil
	}
	mem, err := unix.Mmap(-1, 0, len(value), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory for it: %w", err)
	}
	if err = unix.Mlock(mem); err != nil {
		err = fmt.Errorf("locking its memory: %w: allow more of it (RLIMIT_MEMLOCK)", err)
	} else if err = unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		err = fmt.Errorf("keeping its memory out of core dumps: %w", err)
	}
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	copy(mem, value)
	return mem, nil
}

// drop wipes memory from keep.
func drop(mem []byte) {
	if mem == nil {
		return
	}
	clear(mem)
	_ = unix.Munmap(mem) // our own mapping: this cannot fail
}
