package sandbox

import (
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Spec says what a VM is: see spec.VM.
type Spec = spec.VM

// What a caller may want to tell apart. ErrSpec says that a VM cannot be like that.
var (
	ErrSpec       = spec.ErrInvalid
	ErrNotFound   = spec.ErrNotFound
	ErrExists     = spec.ErrExists
	ErrNotRunning = spec.ErrNotRunning
	ErrRunning    = spec.ErrRunning
	ErrCrashed    = spec.ErrCrashed
	ErrRecord     = spec.ErrRecord
	ErrServed     = spec.ErrServed
	ErrHooks      = spec.ErrHooks
	ErrShare      = spec.ErrShare
	ErrSecrets    = spec.ErrSecrets
)

// Store is a directory with the VMs of a host, and what can be done with them: the verbs over a state.Store.
type Store struct{ *state.Store }

// OpenStore opens or makes a store: state.OpenStore.
func OpenStore(dir string) (*Store, error) {
	s, err := state.OpenStore(dir)
	if err != nil {
		return nil, err
	}
	return &Store{s}, nil
}

// WithHostHooks is the store with hooks of the embedding program: state.Store.WithHostHooks.
func (s *Store) WithHostHooks(list ...state.HostHook) *Store {
	return &Store{s.Store.WithHostHooks(list...)}
}
