package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// tick is count for several at once.
var tick sync.Mutex

func init() {
	commands["tick"] = func(ctx context.Context, p *fakeguest.Process) int {
		tick.Lock()
		defer tick.Unlock()
		return commands["count"](ctx, p)
	}
}

func (d *door) moves(name, to string) spec.MigrateResult {
	d.t.Helper()
	res, err := d.node.Migrate(d.t.Context(), name, spec.MigrateOptions{To: to})
	must(d.t, err)
	return res
}

func TestSandbox_that_moves_goes_on_awake_on_the_other_host(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	b.loseImages()
	a.create("box") // it was never shared
	a.counts("box", "1")
	// The store has a key of hers.
	_, err := a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Owner = "alice"; return nil })
	must(t, err)
	res := a.moves("box", "b")
	if res.From != "a" || res.To != "b" || res.Asleep || res.Problem != "" || res.BytesAhead == 0 || res.BytesPause == 0 || res.Downtime <= 0 {
		t.Errorf("%+v", res)
	}
	if a.phase("box") != state.Asleep || b.phase("box") != state.Running {
		t.Errorf("on a it is %q, on b %q", a.phase("box"), b.phase("box"))
	}
	b.counts("box", "2")
	b.moves("box", "a")
	a.counts("box", "3")
	// What was taken to be sent ahead is gone, and so are the heads before.
	for _, d := range []*door{a, b} {
		eventually(t, "no snapshot of it is left but its sleeps", func() bool {
			snaps, err := d.State.Snapshots()
			must(t, err)
			for _, s := range snaps {
				if s.Kind == state.KindNamed {
					return false
				}
			}
			return true
		})
	}
	eventually(t, "there are the heads that it needs", func() bool { return onlyNeeded(t, store, "box") })
	// One that sleeps is published, and no host has it.
	_, err = a.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	if res := a.moves("box", "b"); !res.Asleep || b.phase("box") == state.Running {
		t.Errorf("%+v", res)
	}
	b.counts("box", "4")
}

// Clients of both hosts count while it goes back and forth: each count is had once, and none is lost.
func TestSandbox_that_moves_under_load_loses_no_request(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.own("box", "")
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	seen, failed := map[int]bool{}, map[string]int{}
	var users sync.WaitGroup
	for i, d := range []*door{a, b, a, b} {
		c := d.as("user"+strconv.Itoa(i), "")
		users.Go(func() {
			for ctx.Err() == nil {
				done, err := c.Exec(ctx, "box", wire.Exec{Command: []string{"tick"}})
				n, nerr := strconv.Atoi(string(done.Stdout))
				mu.Lock()
				switch {
				case ctx.Err() != nil:
				case err != nil || nerr != nil:
					failed[shorten(errors.Join(err, nerr).Error())]++
				case seen[n]:
					t.Errorf("two have counted to %d", n)
				default:
					seen[n] = true
				}
				mu.Unlock()
				time.Sleep(10 * time.Millisecond) // the hosts are to have time to move it
			}
		})
	}
	const rounds = 12
	from, to := a, b
	for range rounds {
		from.moves("box", to.name)
		from, to = to, from
	}
	stop()
	users.Wait()
	text, err := from.count("box")
	must(t, err)
	last, err := strconv.Atoi(text)
	must(t, err)
	t.Logf("%d moves: %d counts were answered of %d, and not: %v", rounds, len(seen), last-1, failed)
	if len(seen) < rounds {
		t.Error("hardly anybody was answered")
	}
	for n := range seen {
		if n >= last {
			t.Errorf("somebody has counted to %d, and it is lost", n)
		}
	}
}

// A move that cannot be is refused while the sandbox runs, and it runs on.
func TestMove_that_cannot_be_is_refused_before_the_sandbox_stops(t *testing.T) {
	store := dir(t)
	a, b, dead := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{}), newDoor(t, "dead", store, cluster.Options{})
	dead.endDoor()
	mute := newHost(t, "mute", store, cluster.Options{})
	full := newDoor(t, "full", store, cluster.Options{})
	must(t, os.WriteFile(filepath.Join(full.State.Dir(), "limits.json"), []byte(`{"memory_overcommit": 4, "default_owner": {"awake_mib": 1}}`), 0o600))
	b.create("twin")
	a.create("twin")
	a.create("box")
	a.counts("box", "1")
	foreign := newDoor(t, "foreign", store, cluster.Options{})
	foreign.passed["migrate"] = refusing{t, foreign.passed["migrate"], "ahead", &control.ErrorReport{Code: "foreign", Message: "this CPU lacks features"}}
	for _, c := range []struct {
		name, to string
		want     error
	}{
		{"box", "a", spec.ErrTarget}, {"box", "nobody", spec.ErrTarget}, {"box", "dead", spec.ErrTarget}, {"box", "mute", spec.ErrTarget},
		{"box", "full", spec.ErrQuota}, {"box", "foreign", (&control.ErrorReport{Code: "foreign"}).Unwrap()}, {"box", "", spec.ErrTarget},
		{"twin", "b", spec.ErrExists}, {"none", "b", sandbox.ErrNotFound},
	} {
		pid := 0
		if r, err := a.State.Get(c.name); err == nil {
			pid = r.PID
		}
		_, err := a.node.Migrate(t.Context(), c.name, spec.MigrateOptions{To: c.to})
		if !errors.Is(err, c.want) {
			t.Errorf("%s to %q: got %v, want %v", c.name, c.to, err, c.want)
		}
		t.Log(err)
		if r, err := a.State.Get(c.name); err == nil && (r.Phase != state.Running || r.PID != pid) {
			t.Errorf("%s to %q: it is %s, in another process than before: %v", c.name, c.to, r.Phase, r.PID != pid)
		}
	}
	a.counts("box", "2")
	if _, err := mute.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error("from a host that does not have it:", err)
	}
	// What it is, not where it goes.
	a.vms.Kill("box")
	eventually(t, "it has crashed", func() bool { return a.phase("box") == state.Crashed })
	_, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
	want(t, "one that has crashed", err, spec.ErrCrashed)
	a.create("brief")
	_, err = a.State.SetMetadata(t.Context(), "brief", func(m *spec.Metadata, _ error) error { m.Class = lifetime.Ephemeral; return nil })
	must(t, err)
	_, err = a.node.Migrate(t.Context(), "brief", spec.MigrateOptions{To: "b"})
	want(t, "an ephemeral one", err, spec.ErrMetadata)
	a.create("model")
	_, err = a.State.SetMetadata(t.Context(), "model", func(m *spec.Metadata, _ error) error { m.Owner = spec.TemplateOwner; return nil })
	must(t, err)
	_, err = a.node.Migrate(t.Context(), "model", spec.MigrateOptions{To: "b"})
	want(t, "a template", err, spec.ErrInvalid)
	eventually(t, "nothing that was sent ahead is left", func() bool { return objects(t, store, "data/heads-")+objects(t, store, "heads/") == 0 })
}

// refusing is a target that refuses a step.
type refusing struct {
	t    *testing.T
	next http.Handler
	step string
	with *control.ErrorReport
}

func (h refusing) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		h.t.Error(err)
	}
	if !strings.Contains(string(text), `"op":"`+h.step+`"`) {
		r.Body = io.NopCloser(bytes.NewReader(text))
		h.next.ServeHTTP(w, r)
		return
	}
	if h.with == nil {
		panic(http.ErrAbortHandler) // it dies
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"error": h.with})
}

// Wherever a move fails, the sandbox goes on, with all that it had.
func TestMove_that_fails_half_way_leaves_the_sandbox_running_here(t *testing.T) {
	back := &backStore{Store: dir(t)}
	a, b := newDoor(t, "a", back, cluster.Options{}), newDoor(t, "b", back, cluster.Options{})
	var no atomic.Pointer[string] // what does not work on b
	b.vms.Fail = func(op, _ string) error {
		if is := no.Load(); is != nil && op == *is {
			return errors.New("it does not come up")
		}
		return nil
	}
	a.create("box")
	n := 0
	counts := func(h *door) {
		t.Helper()
		n++
		h.counts("box", strconv.Itoa(n))
	}
	fails := func(what string) {
		t.Helper()
		counts(a)
		_, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
		if err == nil {
			t.Errorf("%s: it has moved", what)
		}
		t.Log(what+":", err)
		if a.phase("box") != state.Running || b.phase("box") == state.Running {
			t.Errorf("%s: on a it is %q, on b %q", what, a.phase("box"), b.phase("box"))
		}
		counts(a)
	}
	a.noSleep.Store(true)
	fails("it cannot sleep")
	a.noSleep.Store(false)
	back.fail("heads/")
	fails("its manifest cannot be put")
	back.fail("data/")
	fails("nothing can be put")
	back.fail("")
	restore := "restore"
	no.Store(&restore)
	fails("it does not wake on the target")
	no.Store(nil)
	here := b.passed["migrate"]
	b.passed["migrate"] = refusing{t, here, "wake", nil}
	fails("the target dies before it wakes it")
	b.passed["migrate"] = here
	counts(a)
	a.moves("box", "b")
	counts(b)
	eventually(t, "there are the heads that it needs", func() bool { return onlyNeeded(t, back, "box") })
}

// backStore is a store in which puts of keys that begin with something fail.
type backStore struct {
	blob.Store
	prefix atomic.Pointer[string]
}

func (s *backStore) fail(prefix string) { s.prefix.Store(&prefix) }

// Put implements blob.Store.
func (s *backStore) Put(ctx context.Context, key string, body []byte) error {
	if p := s.prefix.Load(); p != nil && *p != "" && strings.HasPrefix(key, *p) {
		return errors.New("the store is full")
	}
	return s.Store.Put(ctx, key, body)
}

// Who may move a sandbox is judged by the host that has it, whichever host is asked.
func TestApi_moves_a_sandbox_for_those_who_may_at_any_host(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.own("box", "alice")
	a.counts("box", "1")
	usual := []tokens.Scope{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}
	for _, d := range []*door{a, b} {
		for _, c := range []struct {
			name, owner string
			scopes      []tokens.Scope
			want        string
		}{
			{"another owner", "bob", usual, "forbidden"}, // no token with an owner may have the scope
			{"its owner without the scope", "alice", usual, "forbidden"},
			{"one of all owners without the scope", "", usual, "forbidden"},
		} {
			_, err := d.as(strings.ReplaceAll(c.name, " ", "-"), c.owner, c.scopes...).Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
			var is *records.Error
			if !errors.As(err, &is) || string(is.Code) != c.want {
				t.Errorf("%s at %s: got %v, want %s", c.name, d.name, err, c.want)
			}
		}
	}
	// What a host passes on is judged again.
	for caller, code := range map[*peer.Caller]int{
		{Name: "alice", Owner: "alice", Scopes: []string{"create"}}: http.StatusForbidden,
		{Name: "bob", Owner: "bob", Scopes: []string{"admin"}}:      http.StatusNotFound,
	} {
		var w httptest.ResponseRecorder
		w.Body = &bytes.Buffer{}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/sandboxes/box/migrate", strings.NewReader(`{"to":"b"}`))
		r.Header.Set("Content-Type", "application/json")
		answered, err := b.peers.Pass(&w, r, peer.Passed{Service: api.PeerService, Sandbox: "box", Caller: *caller})
		if !answered || err != nil || w.Code != code {
			t.Errorf("%s through a peer: %v, %v, %d %s", caller.Name, answered, err, w.Code, w.Body)
		}
	}
	if a.phase("box") != state.Running || b.phase("box") != "" {
		t.Errorf("on a it is %q, on b %q", a.phase("box"), b.phase("box"))
	}
	// Asked at the host where it is to go.
	res, err := b.as("operator", "", append(usual, tokens.ScopeAdmin)...).Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
	if err != nil || res.From != "a" || b.phase("box") != state.Running {
		t.Errorf("%+v, %v", res, err)
	}
	b.counts("box", "2")
}
