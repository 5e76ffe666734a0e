package cluster_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

// farStore is a store behind a network: a round trip, a rate that all reads share, and what reads say while it is down.
// It counts what is read.
type farStore struct {
	blob.Store
	rtt       time.Duration
	perSecond float64 // bytes; 0 is no limit

	gets, bytes atomic.Int64
	down        atomic.Bool
	mu          sync.Mutex // guards free
	free        time.Time
	// refuse, if not nil, is asked before each read.
	refuse func(key string) error
}

var errDown = errors.New("the network is down")

func (s *farStore) wait(ctx context.Context, key string, n int) error {
	if s.down.Load() {
		return errDown
	}
	if s.refuse != nil {
		if err := s.refuse(key); err != nil {
			return err
		}
	}
	s.gets.Add(1)
	s.bytes.Add(int64(n))
	until := time.Now().Add(s.rtt)
	if s.perSecond > 0 {
		s.mu.Lock()
		if s.free.Before(until) {
			s.free = until
		}
		s.free = s.free.Add(time.Duration(float64(n) / s.perSecond * float64(time.Second)))
		until = s.free
		s.mu.Unlock()
	}
	select {
	case <-time.After(time.Until(until)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ReadAt implements blob.Store.
func (s *farStore) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := s.wait(ctx, key, len(p)); err != nil {
		return err
	}
	return s.Store.ReadAt(ctx, key, p, off)
}

// Load implements blob.Store.
func (s *farStore) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	b, v, err := s.Store.Load(ctx, key, limit)
	if werr := s.wait(ctx, key, len(b)); werr != nil {
		return nil, "", werr
	}
	return b, v, err
}

// Swap implements blob.Store.
func (s *farStore) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if !s.down.Load() { // the session goes on: only the memory is out of reach
		time.Sleep(s.rtt)
	}
	return s.Store.Swap(ctx, key, old, body)
}

func isMemory(key string) bool { return strings.HasPrefix(key, "data/heads-") }
