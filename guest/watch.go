package guest

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Kinds of WatchEvents. A file that is moved in from an unwatched place is created; one that is moved out is
// removed.
const (
	WatchCreated    = "created"
	WatchWritten    = "written"
	WatchAttributes = "attributes" // mode, owner, times, links, extended attributes
	WatchRemoved    = "removed"
	WatchRenamed    = "renamed"
	WatchOverflow   = "overflow" // events are missing: see Problem
)

// WatchEvent is one change of a file or directory in the guest. Its texts are the guest's: quote them before
// printing.
type WatchEvent struct {
	Kind    string
	Path    string
	From    string // of WatchRenamed: the name before
	Dir     bool
	Time    time.Time // by the guest's clock, when its agent received the event
	Problem string
}

// Watch describes what to watch, and how far its events were delivered. Only one Client.Watch may use it at a time,
// but others, of different clients, may follow: after a connection ends, the guest keeps gathering up to 4096
// events, for 10 min of its time.
type Watch struct {
	paths     []string
	recursive bool
	id        string
	begun     bool
	last      uint64
	lastNanos int64
}

// NewWatch describes a watch of 1 to 64 files and directories. With recursive it includes everything below them, now
// or later, on the same file system: 8192 directories at most.
func NewWatch(paths []string, recursive bool) *Watch {
	return &Watch{paths: paths, recursive: recursive, id: "watch-" + rand.Text()}
}

// Watch calls f for changes of files, in their order, until ctx ends or f fails. It calls ready, if not nil, once it
// reports all changes that happen from then on. Several changes of one kind in a row may be one event, and f may get
// the content of a new directory twice. If events are missing, because there were too many or the watch was
// interrupted, f gets a WatchOverflow: no event is lost silently.
//
// The connection ends with ErrConnectionLost when the VM sleeps: after its wake call Watch with the same Watch.
func (c *Client) Watch(ctx context.Context, w *Watch, ready func(), f func(WatchEvent) error) error {
	const op = "watch"
	first := &agentpb.WatchRequest{Msg: &agentpb.WatchRequest_Start{Start: &agentpb.WatchStart{
		Paths: w.paths, Recursive: w.recursive, Id: w.id, After: w.last, AfterNanos: w.lastNanos,
	}}}
	s, err := begin(ctx, c, op, agentpb.AgentClient.Watch, first)
	if err != nil {
		return olderAgent(err)
	}
	defer s.close()
	m, err := s.Recv()
	if err != nil {
		return olderAgent(s.fail(err))
	}
	if !m.Ready || len(m.Events) > 0 {
		return fmt.Errorf("guest: %s: %w: it begins without saying so", op, ErrProtocol)
	}
	missed := w.begun && !m.Resumed
	if !m.Resumed {
		w.last, w.lastNanos = 0, 0
	}
	w.begun = true
	if ready != nil {
		ready()
	}
	if missed {
		if err := f(WatchEvent{Kind: WatchOverflow, Time: time.Now(), Problem: "the watch was not there for a while, or the VM went back to an earlier snapshot: what happened meanwhile is not known"}); err != nil {
			return err
		}
	}
	for {
		if m, err = s.Recv(); err != nil {
			return s.fail(err)
		}
		if err := w.take(m.Events, f); err != nil {
			return err
		}
		if err := s.Send(&agentpb.WatchRequest{Msg: &agentpb.WatchRequest_Ack{Ack: w.last}}); err != nil {
			return s.fail(err)
		}
	}
}

// take passes events to f.
func (w *Watch) take(events []*agentpb.WatchEvent, f func(WatchEvent) error) error {
	if len(events) == 0 || len(events) > agentpb.MaxWatchEvents {
		return fmt.Errorf("guest: watch: %w: %d events in one message", ErrProtocol, len(events))
	}
	for _, e := range events {
		if e.Number != w.last+1 {
			return fmt.Errorf("guest: watch: %w: event %d after %d", ErrProtocol, e.Number, w.last)
		}
		err := f(WatchEvent{
			Kind: shortened(e.Kind, agentpb.MaxID), Path: e.Path, From: e.From, Dir: e.Dir,
			Time: time.Unix(0, e.WallNanos), Problem: shortened(e.Problem, maxErrorText),
		})
		if err != nil {
			return err
		}
		w.last, w.lastNanos = e.Number, e.WallNanos
	}
	return nil
}
