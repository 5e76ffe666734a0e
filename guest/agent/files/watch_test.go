package files

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestWatches_one_more_than_there_may_be_is_refused(t *testing.T) {
	all, dir := &watches{}, t.TempDir()
	defer all.close()
	start := func(i int) (*watch, error) {
		w, _, err := all.get(&agentpb.WatchStart{Id: fmt.Sprint("w", i), Paths: []string{dir}})
		return w, err
	}
	var last *watch
	var turn uint64
	for i := range maxWatches {
		w, err := start(i)
		if err != nil {
			t.Fatalf("watch %d: %v", i, err)
		}
		_, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		var ok bool
		if turn, ok = w.attach(cancel, 0); !ok {
			t.Fatalf("watch %d has ended", i)
		}
		last = w
	}
	if _, err := start(maxWatches); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("watch %d: %v, want ResourceExhausted", maxWatches, err)
	}
	// A watch without a reader makes way.
	last.detach(turn)
	if _, err := start(maxWatches); err != nil {
		t.Errorf("when one has lost its connection: %v", err)
	}
}
