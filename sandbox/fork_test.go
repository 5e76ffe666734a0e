package sandbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

func forks(e *guesttest.Env, parent string, o sandbox.ForkOptions) control.ForkResult {
	e.T.Helper()
	res, err := e.Store.With(e.Launcher).Sandbox(parent).Fork(e.T.Context(), o)
	if err != nil {
		e.T.Fatal(err)
	}
	e.T.Logf("forked %s: %v, %d pages", parent, res.Stages, res.Pages)
	return res
}

// files lists the layers, snapshots and VMs of a store.
func files(t *testing.T, s *sandbox.Host) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{"layers", "snapshots", "vms"} {
		entries, err := os.ReadDir(filepath.Join(s.State.Dir(), dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, dir+"/"+e.Name())
		}
	}
	return out
}

func openImages(t *testing.T, pid int) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.Contains(to, "drowse-fork") {
			n++
		}
	}
	return n
}

// One boot serves all subtests.
func TestForks_of_a_running_VM(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	e.Run(sandbox.Spec{Name: "parent"})
	said := keep(e, "parent")
	const memory, disk = "/run/memory", "/root/disk" // two files, the first one in RAM
	e.Write("parent", "parent", memory, disk)
	sub := func(name string, f func(t *testing.T, e *guesttest.Env)) {
		t.Run(name, func(t *testing.T) {
			own := *e
			own.T = t
			f(t, &own)
		})
	}
	pid := func(t *testing.T, name string) int {
		t.Helper()
		r, err := e.Store.State.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		return r.PID
	}
	var first control.ForkResult
	sub("three children go on from the same memory and differ in randomness and identity", func(t *testing.T, e *guesttest.Env) {
		// A stream stays open in the parent during the fork.
		c := e.Agent("parent")
		out, in := newPipes(t)
		cmd := guest.Cmd{Argv: []string{"/bin/cat"}}
		cmd.Stdin, cmd.Stdout = in.r, out.w
		ended := make(chan error, 1)
		go func() { _, err := c.Exec(t.Context(), cmd); ended <- err }()
		lines := bufio.NewReader(out.r)
		echo := func(what string) {
			t.Helper()
			if _, err := fmt.Fprintln(in.w, what); err != nil {
				t.Fatal(err)
			}
			if got, err := lines.ReadString('\n'); err != nil || got != what+"\n" {
				t.Fatalf("the parent's stream says %q (%v), want %q", got, err, what)
			}
		}
		echo("before")
		first = forks(e, "parent", sandbox.ForkOptions{Count: 3, Name: "c"})
		echo("after")
		in.w.Close()
		if err := <-ended; err != nil {
			t.Errorf("the parent's stream: %v", err)
		}
		if !first.Durable || first.Problem != "" {
			t.Errorf("after Fork the snapshot is not on disk: %+v", first)
		}
		var seen [][]string
		for _, name := range []string{"parent", "c-1", "c-2", "c-3"} {
			if got := ask(e, name); got != said {
				t.Errorf("the keeper says %q in %s, %q before the fork", got, name, said)
			}
			is := identity(e, name)
			if name != "parent" { // only a clone gets a machine id that its image does not have
				id := e.Read(name, "/etc/machine-id")
				if len(id) != 32 {
					t.Errorf("the machine id of a child is %q", id)
				}
				is = append(is, id)
			}
			seen = append(seen, is)
		}
		for i, a := range seen {
			for _, b := range seen[:i] {
				for k := range b {
					if a[k] == b[k] {
						t.Errorf("two VMs have %q", a[k])
					}
				}
			}
		}
		if info, err := e.Agent("c-2").Ping(t.Context()); err != nil || time.Since(info.Wall).Abs() > 5*time.Second {
			t.Errorf("the clock of a child: %v, %v", info.Wall, err)
		}
		for _, name := range []string{"parent", "c-1"} {
			if n := openImages(t, pid(t, name)); n != 0 {
				t.Errorf("the process of %s holds %d images", name, n)
			}
		}
	})
	sub("what one writes no other sees", func(t *testing.T, e *guesttest.Env) {
		all := []string{"parent", "c-1", "c-2", "c-3"}
		for _, name := range all {
			if got := e.Read(name, memory, disk); got != "parent\nparent" {
				t.Errorf("%s has %q", name, got)
			}
			e.Write(name, name, memory)
			e.WriteDurably(name, name, disk)
		}
		for _, name := range all {
			if got := e.Read(name, memory, disk); got != name+"\n"+name {
				t.Errorf("%s has %q", name, got)
			}
		}
	})
	sub("lineage is in the record, and in the snapshot", func(t *testing.T, e *guesttest.Env) {
		p, err := e.Store.State.Get("parent")
		if err != nil {
			t.Fatal(err)
		}
		r, err := e.Store.State.Get("c-1")
		if err != nil {
			t.Fatal(err)
		}
		if r.Fork == nil || r.Fork.Parent != "parent" || r.Fork.ParentID != p.ID || r.Fork.Generation != 1 || r.Parent != first.Snapshot || r.Snapshot != first.Snapshot {
			t.Errorf("the record of a child says %+v, made from %s, comes back from %s", r.Fork, r.Parent, r.Snapshot)
		}
		var v struct {
			Fork *state.Origin `json:"fork"`
		}
		if data, err := e.Store.Sandbox("c-1").Inspect(t.Context()); err != nil || json.Unmarshal(data, &v) != nil || v.Fork == nil || v.Fork.Parent != "parent" {
			t.Errorf("inspect says %+v (%v)", v, err)
		}
		d, err := e.Store.State.InspectSnapshot(first.Snapshot)
		if err != nil {
			t.Fatal(err)
		}
		if d.Kind != "fork" || d.VM != "parent" || len(d.UsedBy) != 3 {
			t.Errorf("the snapshot of the fork is of kind %s of %s, used by %v", d.Kind, d.VM, d.UsedBy)
		}
		if err := e.Store.State.RemoveSnapshot(t.Context(), first.Snapshot); !errors.Is(err, spec.ErrSnapshotInUse) {
			t.Errorf("removing it: got %v, want ErrSnapshotInUse", err)
		}
	})
	sub("a fork of a fork", func(t *testing.T, e *guesttest.Env) {
		res := forks(e, "c-1", sandbox.ForkOptions{Name: "grandchild"})
		if got := askAndRead(e, "grandchild", memory, disk); got != said+"\nc-1\nc-1" {
			t.Errorf("the grandchild has %q", got)
		}
		r, err := e.Store.State.Get("grandchild")
		if err != nil {
			t.Fatal(err)
		}
		if r.Fork == nil || r.Fork.Parent != "c-1" || r.Fork.Generation != 2 {
			t.Errorf("its record says %+v", r.Fork)
		}
		if d, err := e.Store.State.InspectSnapshot(res.Snapshot); err != nil || d.Base != first.Snapshot {
			t.Errorf("the snapshot of the second fork builds upon %s (%v), want that of the first, %s", d.Base, err, first.Snapshot)
		}
		if err := e.Store.State.VerifySnapshot(t.Context(), res.Snapshot); err != nil {
			t.Error(err)
		}
	})
	sub("a child sleeps and wakes with all that it has", func(t *testing.T, e *guesttest.Env) {
		res := e.Sleep("c-2")
		if d, err := e.Store.State.InspectSnapshot(res.Snapshot); err != nil || d.Base != first.Snapshot {
			t.Errorf("its snapshot builds upon %s (%v), want that of the fork, %s", d.Base, err, first.Snapshot)
		}
		if err := e.Store.State.VerifySnapshot(t.Context(), res.Snapshot); err != nil {
			t.Error(err)
		}
		e.Wake("c-2")
		if got := askAndRead(e, "c-2", memory, disk, hostname); got != said+"\nc-2\nc-2\nc-2" {
			t.Errorf("after its sleep it has %q", got)
		}
	})
	sub("a child that is killed comes back as of the fork", func(t *testing.T, e *guesttest.Env) {
		if err := unix.Kill(pid(t, "c-3"), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if r := e.WaitPhase("c-3", state.Crashed, time.Minute); !strings.Contains(r.Problem, "as of the fork") {
			t.Errorf("its record says %q", r.Problem)
		}
		e.Wake("c-3")
		// The fork comes at once, while most of the memory is still on disk.
		forks(e, "c-3", sandbox.ForkOptions{Name: "lazy"})
		for _, name := range []string{"c-3", "lazy"} {
			if got := askAndRead(e, name, memory, disk); got != said+"\nparent\nparent" {
				t.Errorf("%s has %q", name, got)
			}
		}
		if err := e.Store.Sandbox("lazy").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	sub("a fork of a sleeping VM leaves it asleep", func(t *testing.T, e *guesttest.Env) {
		e.Sleep("c-2")
		res := forks(e, "c-2", sandbox.ForkOptions{Count: 2, Name: "s"})
		if r := e.WaitPhase("c-2", state.Asleep, time.Minute); r.Snapshot != res.Snapshot || !res.Durable {
			t.Errorf("it sleeps in %s, the fork is of %s", r.Snapshot, res.Snapshot)
		}
		a, b := askAndRead(e, "s-1", memory, hostname), askAndRead(e, "s-2", memory, hostname)
		if a != said+"\nc-2\ns-1" || b != said+"\nc-2\ns-2" {
			t.Errorf("the clones have %q and %q", a, b)
		}
		r, err := e.Store.State.Get("s-2")
		if err != nil {
			t.Fatal(err)
		}
		if r.Fork == nil || r.Fork.Parent != "c-2" || r.Fork.Generation != 2 {
			t.Errorf("the record of a clone says %+v", r.Fork)
		}
		for _, name := range []string{"s-1", "s-2"} {
			if err := e.Store.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Error(err)
			}
		}
	})
	sub("a fork that fails leaves nothing, and the parent has lost nothing", func(t *testing.T, e *guesttest.Env) {
		e.Write("parent", "kept", memory)
		before := files(t, e.Store)
		fails := func(name string, want error, do func() error) {
			t.Helper()
			if err := do(); !errors.Is(err, want) {
				t.Errorf("%s: got %v, want %v", name, err, want)
			}
			// A capture that was begun leaves a new layer on top of the parent's disk.
			if _, err := e.Store.State.Sweep(t.Context()); err != nil {
				t.Error(err)
			}
			// The snapshot may have reached the disk before the fork gave up the children. The parent's next
			// snapshot then builds upon it.
			parent, err := e.Store.State.Get("parent")
			if err != nil {
				t.Fatal(err)
			}
			after := slices.DeleteFunc(files(t, e.Store), func(f string) bool {
				return strings.HasPrefix(f, "layers/") || parent.Base != "" && f == "snapshots/"+parent.Base
			})
			for _, f := range after {
				if !slices.Contains(before, f) {
					t.Errorf("%s: %s is left", name, f)
				}
			}
			if n := openImages(t, pid(t, "parent")); n != 0 {
				t.Errorf("%s: the parent has %d images open", name, n)
			}
			// Tests beside this one fork from this process too, for a while.
			for end := time.Now().Add(2 * time.Minute); openImages(t, os.Getpid()) != 0; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%s: an image is still open", name)
				}
			}
		}
		fork := func(ctx context.Context, l pool.Launcher, o sandbox.ForkOptions) error {
			_, err := e.Store.With(l).Sandbox("parent").Fork(ctx, o)
			return err
		}
		fails("a name that is taken", sandbox.ErrExists, func() error {
			return fork(t.Context(), e.Launcher, sandbox.ForkOptions{Name: "c-1"})
		})
		fails("too many", sandbox.ErrSpec, func() error {
			return fork(t.Context(), e.Launcher, sandbox.ForkOptions{Count: sandbox.MaxForks + 1})
		})
		fails("children that do not start", spec.ErrCrashed, func() error {
			return fork(t.Context(), pool.Launcher{Command: []string{"/bin/false"}, Agent: e.Launcher.Agent}, sandbox.ForkOptions{Count: 2, Name: "never"})
		})
		fails("a caller that gives up", context.Canceled, func() error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return fork(ctx, e.Launcher, sandbox.ForkOptions{Name: "never"})
		})
		fails("no room for the snapshot", snapshot.ErrNoSpace, func() error {
			dir := filepath.Join(e.Store.State.Dir(), "snapshots")
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Fatal(err)
				}
			}()
			return fork(t.Context(), e.Launcher, sandbox.ForkOptions{Count: 2, Name: "never"})
		})
		if got := askAndRead(e, "parent", memory); got != said+"\nkept" {
			t.Errorf("the parent has %q", got)
		}
		// Pages that changed before a failure are in the next snapshot.
		res := forks(e, "parent", sandbox.ForkOptions{Name: "later"})
		if err := unix.Kill(pid(t, "later"), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		e.WaitPhase("later", state.Crashed, time.Minute)
		e.Wake("later")
		if got := askAndRead(e, "later", memory); got != said+"\nkept" {
			t.Errorf("the child of the fork that worked comes back from %s with %q", res.Snapshot, got)
		}
		if err := e.Store.Sandbox("later").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	sub("a caller that vanishes costs the parent nothing", func(t *testing.T, e *guesttest.Env) {
		conn, err := net.Dial("unix", filepath.Join(filepath.Dir(e.Store.State.VsockPath("parent")), "control.sock"))
		if err != nil {
			t.Fatal(err)
		}
		order := fmt.Sprintf(`{"id":"%032x"}`, 1)
		if _, err := fmt.Fprintf(conn, "POST /orders/fork HTTP/1.1\r\nHost: vm\r\nContent-Length: %d\r\n\r\n%s", len(order), order); err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		// The snapshot has to wait until the fork is over.
		res, err := e.Store.Sandbox("parent").Snapshot(t.Context(), sandbox.SnapshotOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Store.State.RemoveSnapshot(t.Context(), res.Snapshot); err != nil {
			t.Error(err)
		}
		if n := openImages(t, pid(t, "parent")); n != 0 {
			t.Errorf("%d images are still open", n)
		}
		if got := ask(e, "parent"); got != said {
			t.Errorf("the keeper says %q", got)
		}
	})
	sub("a child whose snapshot could not be written does not claim one", func(t *testing.T, e *guesttest.Env) {
		dir := filepath.Join(e.Store.State.Dir(), "snapshots")
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
			t.Fatal(err)
		}
		res, err := e.Store.With(e.Launcher).Sandbox("parent").Fork(t.Context(), sandbox.ForkOptions{Name: "mayfly", Early: true})
		// The snapshot waits until the fork's own has failed.
		_, serr := e.Store.Sandbox("parent").Snapshot(t.Context(), sandbox.SnapshotOptions{})
		if err := unix.Unmount(dir, 0); err != nil {
			t.Fatal(err)
		}
		if err != nil || !errors.Is(serr, snapshot.ErrNoSpace) {
			t.Fatalf("the fork: %v; the snapshot: %v, want ErrNoSpace", err, serr)
		}
		if got := ask(e, "mayfly"); got != said || res.Durable {
			t.Errorf("the child says %q; durable: %v", got, res.Durable)
		}
		r, err := e.Store.State.Get("mayfly")
		if err != nil || r.Snapshot != "" {
			t.Errorf("its record claims snapshot %q (%v)", r.Snapshot, err)
		}
		if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if r = e.WaitPhase("mayfly", state.Crashed, time.Minute); strings.Contains(r.Problem, "wake") {
			t.Errorf("after it was killed the record says %q", r.Problem)
		}
		if _, err := e.Store.With(e.Launcher).Sandbox("mayfly").Wake(t.Context()); !errors.Is(err, sandbox.ErrNotRunning) {
			t.Errorf("waking it: got %v, want ErrNotRunning", err)
		}
		if err := e.Store.Sandbox("mayfly").Delete(t.Context(), sandbox.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	sub("children outlive their parent", func(t *testing.T, e *guesttest.Env) {
		res := forks(e, "parent", sandbox.ForkOptions{Name: "orphan", Early: true})
		if err := e.Store.Sandbox("parent").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"orphan", "c-1"} {
			if got := ask(e, name); got != said {
				t.Errorf("the keeper of %s says %q", name, got)
			}
		}
		r, err := e.Store.State.Get("orphan")
		if err != nil {
			t.Fatal(err)
		}
		_, serr := os.Stat(filepath.Join(e.Store.State.SnapshotDir(res.Snapshot), snapshot.ManifestName))
		if there := serr == nil; there != (r.Snapshot == res.Snapshot) || !there && r.Snapshot != "" {
			t.Errorf("its record says it comes back from %q; the snapshot is there: %v", r.Snapshot, there)
		}
		e.Sleep("orphan")
		e.Wake("orphan")
		if got := askAndRead(e, "orphan", disk); got != said+"\nparent" {
			t.Errorf("after its sleep the orphan has %q", got)
		}
	})
	sub("removing all VMs leaves no layers and no snapshots", func(t *testing.T, e *guesttest.Env) {
		records, err := e.Store.State.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if err := e.Store.Sandbox(r.Spec.Name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Error(err)
			}
		}
		e.RemoveTemplates()
		left := slices.DeleteFunc(files(t, e.Store), func(f string) bool { return strings.HasPrefix(f, "layers/ext4-") || f == "layers/.ext4.lock" })
		if len(left) != 0 {
			t.Errorf("%v left", left)
		}
	})
}

type pipe struct{ r, w *os.File }

func newPipes(t *testing.T) (out, in pipe) {
	t.Helper()
	for _, p := range []*pipe{&out, &in} {
		var err error
		if p.r, p.w, err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			for _, f := range []*os.File{p.r, p.w} {
				if err := f.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
					t.Error(err)
				}
			}
		})
	}
	return out, in
}
