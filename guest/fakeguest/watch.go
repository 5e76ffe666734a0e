package fakeguest

import (
	"context"
	"maps"
	"path"
	"slices"
	"strings"
	"testing/fstest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Watch implements agentpb.AgentService: changes of files that exist or not. What happens between two connections of
// a watch is lost, and the second one does not resume the first.
func (a agent) Watch(ctx context.Context, stream agentpb.Agent_WatchServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	m := first.GetStart()
	if m == nil || len(m.Paths) == 0 {
		return status.Error(codes.InvalidArgument, "a watch without paths")
	}
	a.g.mu.Lock()
	before, changed := maps.Clone(a.g.files), a.g.changed()
	a.g.mu.Unlock()
	if err := stream.Send(&agentpb.WatchResponse{Ready: true}); err != nil {
		return err
	}
	number := uint64(0)
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		a.g.mu.Lock()
		after := maps.Clone(a.g.files)
		changed = a.g.changed()
		a.g.mu.Unlock()
		var events []*agentpb.WatchEvent
		add := func(kind, name string) {
			if !watches(m, "/"+name) {
				return
			}
			number++
			events = append(events, &agentpb.WatchEvent{Number: number, Kind: kind, Path: "/" + name, WallNanos: time.Now().UnixNano()})
		}
		for _, name := range slices.Sorted(keys(before, after)) {
			switch was, is := before[name], after[name]; {
			case was == nil:
				add("created", name)
			case is == nil:
				add("removed", name)
			case was != is:
				add("written", name)
			}
		}
		before = after
		for part := range slices.Chunk(events, agentpb.MaxWatchEvents) {
			if err := stream.Send(&agentpb.WatchResponse{Events: part}); err != nil {
				return err
			}
			if _, err := stream.Recv(); err != nil { // the acknowledgement
				return err
			}
		}
	}
}

func watches(m *agentpb.WatchStart, name string) bool {
	return slices.ContainsFunc(m.Paths, func(p string) bool {
		return name == p || path.Dir(name) == p || m.Recursive && (strings.HasPrefix(name, p+"/") || p == "/")
	})
}

func keys(all ...map[string]*fstest.MapFile) func(func(string) bool) {
	names := map[string]bool{}
	for _, one := range all {
		for name := range one {
			names[name] = true
		}
	}
	return func(yield func(string) bool) {
		for name := range names {
			if !yield(name) {
				return
			}
		}
	}
}

// changed returns a channel that is closed by the next change of files. The caller holds mu.
func (g *Guest) changed() chan struct{} {
	if g.bell == nil {
		g.bell = make(chan struct{})
	}
	return g.bell
}
