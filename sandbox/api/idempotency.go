package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Bounds of requests with an Idempotency-Key.
const (
	keyTime      = 24 * time.Hour
	maxKey       = 255 // bytes
	maxKeys      = 4096
	maxKeysOfOne = 1024
	maxKeysHeld  = 64 << 20 // bytes of answers
)

// keys are the answers to requests with an Idempotency-Key that have succeeded, or are under way. A request with the
// same key of the same caller gets the same answer. A failed one is forgotten, so that it can be tried again. They
// are lost with the server.
type keys struct {
	mu   sync.Mutex // guards what follows
	all  map[keyOf]*answered
	of   map[caller]share // by caller.sharing
	held int              // bytes of all answers
}

// share is what callers have that share a bound.
type share struct{ keys, held int }

type keyOf struct {
	caller caller
	key    string
}

// caller is a Caller over time: a later token of the same name is another.
type caller struct {
	name, owner string
	hash        [sha256.Size]byte
}

// sharing is with whom a caller shares its bound: all callers of an owner have one.
func (c caller) sharing() caller {
	if c.owner != "" {
		return caller{owner: c.owner}
	}
	return c
}

type answered struct {
	what [sha256.Size]byte // method, path and body
	at   time.Time
	done chan struct{} // closed when status and doc are set, or it has failed
	ok   bool
	doc  []byte
	code int
}

// once answers an idempotent request.
func (s *Server) once(r *request, do func() (int, any, error)) (int, any, error) {
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		return do()
	}
	if len(key) > maxKey || len(r.Header.Values("Idempotency-Key")) > 1 {
		return 0, nil, spec.InField("Idempotency-Key", fmt.Errorf("%w: use one Idempotency-Key of %d bytes at most", sandbox.ErrSpec, maxKey))
	}
	text, err := json.Marshal(r.body)
	if err != nil {
		return 0, nil, err
	}
	what := sha256.Sum256(bytes.Join([][]byte{[]byte(r.Method), []byte(r.URL.RequestURI()), text}, []byte{0}))
	name := keyOf{caller{r.caller().Name, r.caller().Owner, r.caller().is.Hash}, key}
	for {
		a, mine, err := s.keys.take(name, what)
		if err != nil {
			return 0, nil, err
		}
		if mine {
			var out []byte
			known, code := false, 0
			defer func() { s.keys.end(name, a, known, code, out) }() // also after a panic
			status, doc, err := do()
			code = status
			if err == nil {
				out, err = json.Marshal(doc)
			}
			known = err == nil && len(out) <= wire.MaxBody
			return status, doc, err
		}
		select {
		case <-a.done:
		case <-r.Context().Done():
			return 0, nil, context.Cause(r.Context())
		}
		if a.ok {
			r.w.Header().Set("Idempotency-Replayed", "true")
			return a.code, rawText{"application/json", append(a.doc, '\n')}, nil
		}
	}
}

// take returns the answer of a key, and whether the caller must give it.
func (k *keys) take(name keyOf, what [sha256.Size]byte) (a *answered, mine bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.all == nil {
		k.all, k.of = map[keyOf]*answered{}, map[caller]share{}
	}
	if a = k.all[name]; a != nil && time.Since(a.at) < keyTime {
		if a.what != what {
			return nil, false, own(wire.CodeKeyUsed, "use another key", "another request had this Idempotency-Key")
		}
		return a, false, nil
	}
	if a != nil {
		k.drop(name)
	}
	of := name.caller.sharing()
	if k.of[of].keys >= maxKeysOfOne {
		k.evict(func(n keyOf) int {
			if n.caller.sharing() == of {
				return 1
			}
			return 0
		})
	}
	if len(k.all) >= maxKeys {
		k.evict(func(n keyOf) int { return k.of[n.caller.sharing()].keys })
	}
	if k.of[of].keys >= maxKeysOfOne || len(k.all) >= maxKeys {
		return nil, false, own(wire.CodeBusy, "try again in a second", "too many requests with an Idempotency-Key are under way")
	}
	a = &answered{what: what, at: time.Now(), done: make(chan struct{})}
	k.all[name] = a
	k.count(name, 1, 0)
	return a, true, nil
}

func (k *keys) drop(name keyOf) {
	bytes := len(k.all[name].doc)
	delete(k.all, name)
	k.count(name, -1, -bytes)
}

func (k *keys) count(name keyOf, n, bytes int) {
	of := name.caller.sharing()
	s := share{k.of[of].keys + n, k.of[of].held + bytes}
	if k.of[of] = s; s.keys == 0 {
		delete(k.of, of)
	}
	k.held += bytes
}

// evict drops the oldest answer of those whose weight is highest, and reports whether there was one above 0. Weighed by
// what its callers have, it is of those who have most: nobody pushes others out who have less.
func (k *keys) evict(weight func(keyOf) int) bool {
	var oldest keyOf
	var found *answered
	most := 0
	for name, a := range k.all {
		w := weight(name)
		if a.ok && w > 0 && (w > most || w == most && a.at.Before(found.at)) {
			oldest, found, most = name, a, w
		}
	}
	if found != nil {
		k.drop(oldest)
	}
	return found != nil
}

// end sets the answer of a key, or forgets it.
func (k *keys) end(name keyOf, a *answered, ok bool, status int, doc []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	a.ok, a.code = ok, status
	if ok {
		a.doc = doc
		k.count(name, 0, len(doc))
		for k.held > maxKeysHeld && k.evict(func(n keyOf) int { return k.of[n.caller.sharing()].held }) {
		}
	} else {
		k.drop(name)
	}
	close(a.done)
}

// editTag returns the entity tag of what PATCH can change of a sandbox.
func (s *Server) editTag(b records.Sandbox) string {
	m, err := s.o.Host.State.Metadata(b.Name)
	if err != nil {
		return ""
	}
	b.Status, b.Problem, b.Snapshot, b.Confined, b.NextWake = "", "", "", false, time.Time{}
	return tagOf([]any{b, m})
}

// tagOf returns an entity tag for a document.
func tagOf(doc any) string {
	text, err := json.Marshal(doc)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(text)
	return fmt.Sprintf(`"%x"`, sum[:16])
}

// edit does what changes something if If-Match names its entity tag. Changes over HTTP of the same sandbox wait for
// each other; those of commands on the host do not.
func (s *Server) edit(r *request, tag func() (string, error), do func() error) error {
	want := r.Header.Get("If-Match")
	if want == "" {
		return do()
	}
	sum := sha256.Sum256([]byte(r.name()))
	lock := &s.edits[int(sum[0])%len(s.edits)]
	lock.Lock()
	defer lock.Unlock()
	is, err := tag()
	if err != nil {
		return err
	}
	if !matches(want, is) {
		return precondition("it is another version: %s", is)
	}
	return do()
}
