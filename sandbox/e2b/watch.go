package e2b

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/filesystem"
)

// eventTypes are the types of events by the agent's kinds. A rename is two events: see eventsOf.
var eventTypes = map[string]filesystem.EventType{
	guest.WatchCreated: filesystem.EventType_EVENT_TYPE_CREATE, guest.WatchWritten: filesystem.EventType_EVENT_TYPE_WRITE,
	guest.WatchRemoved: filesystem.EventType_EVENT_TYPE_REMOVE, guest.WatchAttributes: filesystem.EventType_EVENT_TYPE_CHMOD,
}

// relative returns a path as clients want it: from the watched directory.
func relative(dir, name string) (string, bool) {
	if name == dir {
		return path.Base(name), true
	}
	rest, ok := strings.CutPrefix(name, strings.TrimSuffix(dir, "/")+"/")
	return rest, ok
}

// eventsOf translates an event below a directory.
func eventsOf(dir string, e guest.WatchEvent) (out []*filesystem.FilesystemEvent) {
	if e.Kind == guest.WatchRenamed {
		if name, ok := relative(dir, e.From); ok {
			out = append(out, &filesystem.FilesystemEvent{Name: text(name), Type: filesystem.EventType_EVENT_TYPE_RENAME})
		}
		if name, ok := relative(dir, e.Path); ok {
			out = append(out, &filesystem.FilesystemEvent{Name: text(name), Type: filesystem.EventType_EVENT_TYPE_CREATE})
		}
		return out
	}
	if t, ok := eventTypes[e.Kind]; ok {
		if name, ok := relative(dir, e.Path); ok {
			out = append(out, &filesystem.FilesystemEvent{Name: text(name), Type: t})
		}
	}
	return out
}

// watch calls tell for what changes in a directory of a guest, until ctx ends.
func (f files) watch(ctx context.Context, means string, recursive, withEntry bool, ready func() error, tell func(*filesystem.FilesystemEvent) error) error {
	c, dir, err := f.at(ctx, means)
	if err != nil {
		return err
	}
	defer c.Close()
	fi, err := c.Client.Stat(ctx, dir)
	if err != nil {
		return err
	}
	if !fi.Mode.IsDir() {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is not a directory", dir))
	}
	var begun error
	return c.Watch(ctx, guest.NewWatch([]string{dir}, recursive), func() { begun = ready() }, func(e guest.WatchEvent) error {
		if begun != nil {
			return begun
		}
		if e.Kind == guest.WatchOverflow {
			return connect.NewError(connect.CodeDataLoss, fmt.Errorf("not all changes are known: %q", e.Problem))
		}
		for _, out := range eventsOf(dir, e) {
			if withEntry {
				// What is there now, if it is still there.
				if entry, err := c.entry(ctx, path.Join(dir, out.Name)); err == nil {
					out.Entry = entry
				}
			}
			if err := tell(out); err != nil {
				return err
			}
		}
		return nil
	})
}

// WatchDir implements filesystem.FilesystemHandler. A directory may be on any file system: allow_network_mounts says
// nothing new.
func (f files) WatchDir(ctx context.Context, m *filesystem.WatchDirRequest, out *connect.ServerStream[filesystem.WatchDirResponse]) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(f.life, func() { cancel(errServerEnds) })()
	var mu sync.Mutex // one message at a time
	send := func(r *filesystem.WatchDirResponse) error {
		mu.Lock()
		defer mu.Unlock()
		return out.Send(r)
	}
	alive := make(chan struct{})
	defer func() { <-alive }()
	defer cancel(nil)
	begun := make(chan struct{})
	go func() {
		defer close(alive)
		select {
		case <-begun:
		case <-ctx.Done():
			return
		}
		tick := time.NewTicker(keepalive(out.Conn().RequestHeader()))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}}}); err != nil {
					cancel(err)
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	err := f.watch(ctx, m.GetPath(), m.GetRecursive(), m.GetIncludeEntry(), func() error {
		defer close(begun)
		return send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Start{Start: &filesystem.WatchDirResponse_StartEvent{}}})
	}, func(e *filesystem.FilesystemEvent) error {
		return send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: e}})
	})
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	select {
	case <-begun:
		return f.cut(ctx, err)
	default:
		return err
	}
}

var errServerEnds = connect.NewError(connect.CodeUnavailable, errors.New("the server ends"))

// watcher gathers events for a client that asks for them.
type watcher struct {
	box    string // id of the record
	owner  string // of the sandbox
	cancel context.CancelFunc

	mu     sync.Mutex // guards what follows
	events []*filesystem.FilesystemEvent
	bytes  int // of events
	err    error
	asked  time.Time
}

// Bounds of watchers.
const (
	maxWatchers      = 1024 // of all sandboxes; an owner's have half of them at most
	maxWatchersOf    = 64   // of one
	maxWatcherEvents = 4096 // that wait
	maxWatcherBytes  = 1 << 20
	watcherTime      = 10 * time.Minute
)

// CreateWatcher implements filesystem.FilesystemHandler.
func (f files) CreateWatcher(ctx context.Context, m *filesystem.CreateWatcherRequest) (*filesystem.CreateWatcherResponse, error) {
	b := boxOf(ctx)
	life, cancel := context.WithCancel(context.WithValue(context.WithValue(f.life, keyBox, b), keyUser, userOf(ctx)))
	w := &watcher{box: b.record.ID, owner: b.meta.Owner, cancel: cancel, asked: time.Now()}
	id := strings.ToLower(rand.Text())
	if !f.addWatcher(id, w) {
		cancel()
		return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("there are too many watchers: remove some"))
	}
	began := make(chan error, 1)
	f.all.Go(func() {
		err := f.watch(life, m.GetPath(), m.GetRecursive(), m.GetIncludeEntry(), func() error {
			began <- nil
			return nil
		}, func(e *filesystem.FilesystemEvent) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.bytes += proto.Size(e); len(w.events) == maxWatcherEvents || w.bytes > maxWatcherBytes {
				return connect.NewError(connect.CodeDataLoss, errors.New("more events than are kept came between two requests"))
			}
			w.events = append(w.events, e)
			return nil
		})
		w.mu.Lock()
		w.err = err
		w.mu.Unlock()
		select {
		case began <- err:
		default:
		}
	})
	select {
	case err := <-began:
		if err != nil {
			f.removeWatcher(id, w.box)
			return nil, err
		}
	case <-ctx.Done():
		f.removeWatcher(id, w.box)
		return nil, ctx.Err()
	}
	return &filesystem.CreateWatcherResponse{WatcherId: id}, nil
}

// addWatcher adds a watcher, if there is room for it.
func (s *Server) addWatcher(id string, w *watcher) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ofBox, ofOwner := 0, 0
	for _, other := range s.watchers {
		if other.box == w.box {
			ofBox++
		}
		if other.owner == w.owner {
			ofOwner++
		}
	}
	if s.closed || ofBox >= maxWatchersOf || w.owner != "" && ofOwner >= maxWatchers/2 || len(s.watchers) >= maxWatchers {
		return false
	}
	s.watchers[id] = w
	return true
}

// removeWatcher ends a watcher of a sandbox, and reports whether there was one.
func (s *Server) removeWatcher(id, box string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.watchers[id]
	if w == nil || w.box != box {
		return false
	}
	w.cancel()
	delete(s.watchers, id)
	return true
}

var errNoWatcher = connect.NewError(connect.CodeNotFound, errors.New("there is no such watcher"))

// GetWatcherEvents implements filesystem.FilesystemHandler.
func (f files) GetWatcherEvents(ctx context.Context, m *filesystem.GetWatcherEventsRequest) (*filesystem.GetWatcherEventsResponse, error) {
	f.mu.Lock()
	w := f.watchers[m.GetWatcherId()]
	f.mu.Unlock()
	if w == nil || w.box != boxOf(ctx).record.ID {
		return nil, errNoWatcher
	}
	w.mu.Lock()
	out, err := &filesystem.GetWatcherEventsResponse{Events: w.events}, w.err
	w.asked, w.events, w.bytes = time.Now(), nil, 0
	w.mu.Unlock()
	if len(out.Events) == 0 && err != nil {
		f.removeWatcher(m.GetWatcherId(), w.box)
		return nil, err
	}
	return out, nil
}

// RemoveWatcher implements filesystem.FilesystemHandler.
func (f files) RemoveWatcher(ctx context.Context, m *filesystem.RemoveWatcherRequest) (*filesystem.RemoveWatcherResponse, error) {
	if !f.removeWatcher(m.GetWatcherId(), boxOf(ctx).record.ID) {
		return nil, errNoWatcher
	}
	return &filesystem.RemoveWatcherResponse{}, nil
}

// tidy removes what nobody asks for any more: watchers, builds that have ended, uploads.
func (s *Server) tidy() {
	tick := time.NewTicker(watcherTime / 10)
	defer tick.Stop()
	for {
		select {
		case <-s.life.Done():
			return
		case now := <-tick.C:
			s.mu.Lock()
			for id, w := range s.watchers {
				w.mu.Lock()
				old := now.Sub(w.asked) > watcherTime
				w.mu.Unlock()
				if old {
					w.cancel()
					delete(s.watchers, id)
				}
			}
			s.mu.Unlock()
			s.templates.Tidy(now)
		}
	}
}
