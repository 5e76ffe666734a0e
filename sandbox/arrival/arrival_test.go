package arrival_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/arrival"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node answers until it is ended.
func node(t *testing.T, dir string, do func(context.Context, arrival.Request) error) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- arrival.Serve(ctx, dir, do) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return end
}

func host(t *testing.T) (dir string, c arrival.Client) {
	t.Helper()
	dir = t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "cluster"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, arrival.Client{Dir: dir, Snapshot: "s"}
}

func TestClient_waits_for_the_next_node_and_asks_it_again(t *testing.T) {
	dir, c := host(t)
	answer := make(chan error, 1)
	go func() { answer <- c.Ensure(t.Context(), "memory", 4096, 512) }()
	asked := make(chan arrival.Request, 10)
	end := node(t, dir, func(ctx context.Context, r arrival.Request) error {
		asked <- r
		<-ctx.Done() // it ends before it has an answer
		return ctx.Err()
	})
	want := arrival.Request{Snapshot: "s", File: "memory", Off: 4096, Len: 512}
	if r := <-asked; r != want {
		t.Errorf("asked for %+v, want %+v", r, want)
	}
	end()
	var tries atomic.Int32
	node(t, dir, func(context.Context, arrival.Request) error {
		if tries.Add(1) == 1 {
			return errors.New("the store is busy")
		}
		return nil
	})
	if err := <-answer; err != nil || tries.Load() != 2 {
		t.Errorf("%v after %d tries", err, tries.Load())
	}
}

func TestClient_learns_that_memory_is_lost_at_once(t *testing.T) {
	dir, c := host(t)
	node(t, dir, func(_ context.Context, r arrival.Request) error {
		if r.File != "" {
			return nil
		}
		return errors.Join(arrival.ErrLost, errors.New("it was removed"))
	})
	if err := c.Whole(t.Context()); !errors.Is(err, arrival.ErrLost) {
		t.Errorf("got %v", err)
	}
	if err := c.Ensure(t.Context(), "memory", 0, 1); err != nil {
		t.Error(err)
	}
}

// Whoever stops waiting ends what the node does for him.
func TestClient_that_gives_up_says_why_and_ends_the_request(t *testing.T) {
	dir, c := host(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := c.Ensure(ctx, "memory", 0, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a node: %v", err)
	}
	asked, ended := make(chan struct{}), make(chan struct{})
	node(t, dir, func(ctx context.Context, _ arrival.Request) error {
		close(asked)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	})
	patience := errors.New("long enough")
	ctx, give := context.WithCancelCause(t.Context())
	go func() { <-asked; give(patience) }()
	if err := c.Whole(ctx); !errors.Is(err, patience) {
		t.Errorf("with a node that does not answer: %v", err)
	}
	<-ended
}
