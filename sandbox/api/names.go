package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
)

// names keep a request that was admitted to one owner's sandbox from reaching another owner's, which gets the name
// after the first was removed. Whoever makes a sandbox first ends what other owners' requests still do under its
// name.
type names struct {
	mu     sync.Mutex // guards what follows
	using  map[string]map[*use]struct{}
	making map[string]*making
}

// use is a request of a caller with an owner to a sandbox by its name.
type use struct {
	owner string
	end   func()        // ends the request
	over  chan struct{} // closed when it has ended
}

// making is a name for which sandboxes of one owner are made.
type making struct {
	owner string
	n     int
}

// errGone is the cause of the end of a request whose sandbox is no longer the caller's.
var errGone = errors.New("the sandbox is not there any more")

// use admits a request to a sandbox of its caller's. The request ends, with the returned context, if the name becomes
// another owner's. The caller calls done.
func (s *Server) use(w http.ResponseWriter, r *http.Request, name string) (_ *http.Request, done func(), err error) {
	c := CallerOf(r.Context())
	if c.Owner == "" {
		return r, func() {}, nil
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	u := &use{owner: c.Owner, over: make(chan struct{}), end: func() { interrupt(w, cancel, errGone) }}
	n := &s.names
	n.mu.Lock()
	if m := n.making[name]; m != nil && m.owner != c.Owner {
		err = noSandbox(name)
	} else {
		if n.using == nil {
			n.using = map[string]map[*use]struct{}{}
		}
		if n.using[name] == nil {
			n.using[name] = map[*use]struct{}{}
		}
		n.using[name][u] = struct{}{}
	}
	n.mu.Unlock()
	if err != nil {
		cancel(nil)
		return nil, nil, err
	}
	done = func() {
		cancel(nil)
		n.mu.Lock()
		defer n.mu.Unlock()
		if delete(n.using[name], u); len(n.using[name]) == 0 {
			delete(n.using, name)
		}
		close(u.over)
	}
	if err := s.reaches(ctx, c, name); err != nil { // after it is noted: what is made later ends it
		done()
		return nil, nil, err
	}
	return r.WithContext(ctx), done, nil
}

// interrupt ends a request, also one that waits for its client.
func interrupt(w http.ResponseWriter, cancel context.CancelCauseFunc, cause error) {
	cancel(cause)
	out, past := http.NewResponseController(w), time.Unix(1, 0)
	_ = errors.Join(out.SetReadDeadline(past), out.SetWriteDeadline(past)) // test writers may lack deadlines
}

// makes is called before sandboxes of an owner are made under these names, and done afterwards.
func (s *Server) makes(ctx context.Context, owner string, wanted ...string) (done func(), err error) {
	n := &s.names
	var mine []string
	done = func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, name := range mine {
			if n.making[name].n--; n.making[name].n == 0 {
				delete(n.making, name)
			}
		}
	}
	for _, name := range wanted {
		if name == "" {
			continue // the host chooses one that is new
		}
		n.mu.Lock()
		if n.making == nil {
			n.making = map[string]*making{}
		}
		m := n.making[name]
		if m == nil {
			m = &making{owner: owner}
			n.making[name] = m
		}
		if m.owner != owner {
			n.mu.Unlock()
			done()
			return nil, fmt.Errorf("%w: %.64q", sandbox.ErrExists, name)
		}
		m.n++
		mine = append(mine, name)
		var others []*use
		for u := range n.using[name] {
			if u.owner != owner {
				others = append(others, u)
			}
		}
		n.mu.Unlock()
		// The requests to one that is there go on: nothing is made in its place.
		if _, err := s.o.Host.State.Get(name); len(others) == 0 || !errors.Is(err, sandbox.ErrNotFound) {
			continue
		}
		for _, u := range others {
			u.end()
		}
		for _, u := range others {
			select {
			case <-u.over:
			case <-ctx.Done():
				done()
				return nil, context.Cause(ctx)
			}
		}
	}
	return done, nil
}

// end ends what other owners' requests do to a sandbox that has got this owner.
func (n *names) end(name, owner string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for u := range n.using[name] {
		if u.owner != owner {
			u.end()
		}
	}
}
