package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/sealed"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) {
	if os.Getenv(childState) != "" {
		child()
		return
	}
	guesttest.MainOf(func() int {
		before := goleak.IgnoreCurrent()
		code := m.Run()
		os.RemoveAll(booted.dir)
		if code == 0 {
			if err := goleak.Find(before); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}
		return code
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, what string, err, wanted error) {
	t.Helper()
	if !errors.Is(err, wanted) {
		t.Errorf("%s: got %v, want %v", what, err, wanted)
	}
}

// host is a host of a test, with VMs in memory whose guests count in a file of their memory.
type host struct {
	t     testing.TB
	name  string
	vms   *sandboxtest.VMs
	bare  *sandbox.Host
	store blob.Store
	o     cluster.Options

	*sandbox.Host
	node    *cluster.Node
	noSleep atomic.Bool // captures fail
	stop    func()      // ends the node, as SIGTERM does
}

var commands = map[string]fakeguest.Command{
	"count": func(_ context.Context, p *fakeguest.Process) int {
		was, _ := p.Guest.ReadFile("/run/count") // missing at first
		if err := p.Guest.WriteFile("/run/count", append(was, 'x')); err != nil {
			return 1
		}
		fmt.Fprint(p.Stdout, len(was)+1)
		return 0
	},
}

func newHost(t testing.TB, name string, store blob.Store, o cluster.Options) *host {
	t.Helper()
	h := &host{t: t, name: name, store: store, o: o}
	h.vms = &sandboxtest.VMs{Commands: commands, Pages: 16, Deltas: true, Fail: func(op, _ string) error {
		if op == "capture" && h.noSleep.Load() {
			return errors.New("it cannot sleep")
		}
		return nil
	}}
	h.bare = h.vms.Host(t)
	facts(t, h)
	return h.begin()
}

// begin joins, until the test ends.
func (h *host) begin() *host {
	h.t.Helper()
	h.join()
	h.t.Cleanup(func() {
		if h.stop != nil {
			h.stop()
		}
	})
	return h
}

// join starts the host's node.
func (h *host) join() {
	h.t.Helper()
	o := h.o
	o.Store, o.Name = h.store, h.name
	o.Log = slog.New(slog.NewTextHandler(h.t.Output(), nil)).With("node", h.name)
	n, err := cluster.Join(context.Background(), h.bare, o)
	must(h.t, err)
	with := *h.bare
	with.Cluster = n
	h.node, h.Host = n, &with
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			h.t.Log("the node has ended:", err)
		}
	})
}

var factsOnce sync.Once

// facts has this process's hosts take snapshots of VMs in memory for those of a machine like theirs.
func facts(t testing.TB, h *host) {
	t.Helper()
	factsOnce.Do(func() {
		b, err := h.bare.Create(t.Context(), sandbox.Spec{Name: "facts", Image: sandboxtest.Image}, sandbox.CreateOptions{})
		must(t, err)
		res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
		must(t, err)
		m, err := h.bare.State.Manifest(res.Snapshot)
		must(t, err)
		instance.NoteGoodFacts(m.Host[instance.FactsKey])
		must(t, b.Delete(t.Context(), sandbox.DeleteOptions{}))
	})
}

// create makes a sandbox.
func (h *host) create(name string) *sandbox.Sandbox {
	h.t.Helper()
	b, err := h.Create(h.t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image, Network: spec.NetworkTAP, Policy: &netpolicy.Policy{}}, sandbox.CreateOptions{})
	must(h.t, err)
	return b
}

// count has a sandbox count, wherever it is.
func (h *host) count(name string) (string, error) {
	var out strings.Builder
	_, err := h.Sandbox(name).Exec(h.t.Context(), guest.Cmd{Argv: []string{"count"}, IO: guest.IO{Stdout: &out}})
	for errors.Is(err, spec.ErrUnclaimed) && h.t.Context().Err() == nil { // a machine that is busy, and a short lease
		time.Sleep(50 * time.Millisecond)
		_, err = h.Sandbox(name).Exec(h.t.Context(), guest.Cmd{Argv: []string{"count"}, IO: guest.IO{Stdout: &out}})
	}
	return out.String(), err
}

func (h *host) counts(name, n string) {
	h.t.Helper()
	if got, err := h.count(name); err != nil || got != n {
		h.t.Fatalf("on %s, %s counts to %q, want %s: %v", h.name, name, got, n, err)
	}
}

// sleep puts a sandbox to sleep, durably.
func (h *host) sleep(name string) {
	h.t.Helper()
	_, err := h.Sandbox(name).Sleep(h.t.Context(), sandbox.SleepOptions{})
	must(h.t, err)
	must(h.t, h.node.Publish(h.t.Context(), name))
}

// wake wakes a sandbox, also on a machine that is busy.
func (h *host) wake(name string) {
	h.t.Helper()
	eventually(h.t, name+" wakes", func() bool {
		_, err := h.Sandbox(name).Wake(h.t.Context())
		if err != nil && !errors.Is(err, spec.ErrUnclaimed) {
			h.t.Fatal(err)
		}
		return err == nil
	})
}

// dir returns a store that encrypts.
func dir(t testing.TB) blob.Store {
	t.Helper()
	return sealedDir(t, t.TempDir())
}

func sealedDir(t testing.TB, at string) blob.Store {
	t.Helper()
	d, err := blob.OpenDir(at)
	must(t, err)
	file := filepath.Join(t.TempDir(), "keys")
	must(t, os.WriteFile(file, []byte(strings.Repeat("5e", 32)+"\n"+strings.Repeat("a1", 32)+" alice\n"), 0o600))
	k, err := sealed.ReadKeys(file)
	must(t, err)
	return sealed.New(d, k)
}

// phase is that of a sandbox on a host.
func (h *host) phase(name string) state.Phase {
	r, err := h.State.Get(name)
	if err != nil {
		return ""
	}
	return r.Phase
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so after a minute:", what)
		}
	}
}

func objects(t testing.TB, s blob.Store, prefix string) (n int) {
	t.Helper()
	must(t, s.List(t.Context(), prefix, func(blob.Info) error { n++; return nil }))
	return n
}

// onlyNeeded reports whether a store has the heads that a sandbox needs, and nothing of others.
func onlyNeeded(t testing.TB, s blob.Store, name string) bool {
	t.Helper()
	l, err := ledger.Open(s, ledger.Options{})
	must(t, err)
	f, err := l.Family(t.Context(), name)
	if errors.Is(err, ledger.ErrNotFound) || err == nil && f.Head == "" {
		return false
	}
	must(t, err)
	needed, data := f.Snapshots[f.Head].Uploads, 0
	for _, id := range needed {
		data += objects(t, s, "data/heads-"+id+"-")
	}
	return len(needed) > 0 && objects(t, s, "heads/") == len(needed) && objects(t, s, "data/heads-") == data
}

// loseImages takes a host's images away.
func (h *host) loseImages() {
	dirs, err := filepath.Glob(filepath.Join(h.State.ImageDir(), "images", "*"))
	must(h.t, err)
	for _, d := range dirs {
		must(h.t, os.RemoveAll(d))
	}
}
