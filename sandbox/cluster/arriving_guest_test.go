//go:build workloads

package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// These take minutes each: make scale-proofs.

// A guest reads a large file of its disk while most of that is still in the store, and boots from it when it is whole.
func TestGuest_reads_its_disk_before_that_has_arrived(t *testing.T) {
	near := bootedBox(t)
	far := &farStore{Store: near}
	const ttl = 2 * time.Minute
	a, b := realHost(t, "a", near, cluster.Options{TTL: ttl}), realHost(t, "b", far, cluster.Options{TTL: ttl})
	const size = 16 << 20
	a.wake("box")
	a.says("box", fmt.Sprintf(`python3 -I -S -c "import hashlib; open('/root/large', 'wb').write(hashlib.shake_128(b'x').digest(%d))"
		cd /root; sha256sum large > sum; sync; echo 3 > /proc/sys/vm/drop_caches`, size))
	a.sleep("box")
	r, err := a.State.Get("box")
	must(t, err)
	var stored int64
	must(t, near.List(t.Context(), "data/heads-", func(i blob.Info) error { stored += i.Size; return nil }))
	far.slow.Store(true) // what a guest waits for comes, and nothing else
	far.wake(t, b, stored)
	coming, err := filepath.Glob(filepath.Join(b.State.ArrivingDir(r.Snapshot), "sha256-*"))
	must(t, err)
	if len(coming) == 0 {
		t.Fatal("no layer is on its way")
	}
	before := far.bytes.Load()
	if is := b.says("box", "cd /root; echo since > file; sync; sha256sum -c sum"); is != "large: OK" {
		t.Errorf("while it arrives the file is %q", is)
	}
	if read := far.bytes.Load() - before; read < size || !b.State.IsArriving(r.Snapshot) {
		t.Errorf("its file of %d bytes was here: %d were read", size, read)
	}
	now, err := b.State.Get("box")
	must(t, err)
	must(t, unix.Kill(now.PID, unix.SIGKILL))
	eventually(t, "it has crashed", func() bool { return b.phase("box") == state.Crashed })
	_, err = b.Sandbox("box").Start(t.Context(), sandbox.StartOptions{})
	want(t, "a boot from a part of a disk", err, spec.ErrArriving)
	far.slow.Store(false)
	eventually(t, "all has arrived", func() bool { return b.State.IsThere(r.Snapshot) })
	must(t, b.State.VerifySnapshot(t.Context(), r.Snapshot))
	_, err = b.Sandbox("box").Start(t.Context(), sandbox.StartOptions{})
	must(t, err)
	if is := b.says("box", "cd /root; cat file; sha256sum -c sum"); is != "since\nlarge: OK" {
		t.Errorf("after a crash its disk has %q", is)
	}
	b.sleep("box")
	if is := a.says("box", "cd /root; echo 3 > /proc/sys/vm/drop_caches; sha256sum -c sum"); is != "large: OK" {
		t.Errorf("back on its host the file is %q", is)
	}
	a.sleep("box")
}

// A guest that reads what the store has lost of its disk gets no error, with which it would go on: its VM ends.
func TestGuest_whose_disk_is_lost_ends_by_name(t *testing.T) {
	near := bootedBox(t)
	far := &farStore{Store: near}
	const ttl = 2 * time.Minute
	a, b := realHost(t, "a", near, cluster.Options{TTL: ttl}), realHost(t, "b", far, cluster.Options{TTL: ttl})
	a.wake("box")
	a.says("box", `python3 -I -S -c "import hashlib; open('/root/large', 'wb').write(hashlib.shake_128(b'x').digest(4 << 20))"
		sync; echo 3 > /proc/sys/vm/drop_caches`)
	a.sleep("box")
	far.slow.Store(true)
	far.wake(t, b, 0)
	now, err := b.State.Get("box")
	must(t, err)
	if coming, err := filepath.Glob(filepath.Join(b.State.ArrivingDir(now.Snapshot), "sha256-*")); err != nil || len(coming) == 0 {
		t.Fatalf("no layer is on its way, %v", err)
	}
	far.mu.Lock()
	far.files = nil
	far.mu.Unlock()
	must(t, near.List(t.Context(), "data/heads-", func(i blob.Info) error {
		if i.Size > 4<<20 && filesRE.MatchString(i.Key) && !memoryRE.MatchString(i.Key) { // the layer with the file
			return near.Delete(t.Context(), i.Key)
		}
		return nil
	}))
	if _, err := b.Sandbox("box").Exec(t.Context(), guest.Cmd{Argv: []string{"cat", "/root/large"}}); err == nil {
		t.Error("it has read what is lost")
	}
	eventually(t, "it has ended", func() bool { return b.phase("box") == state.Crashed })
	now, err = b.State.Get("box")
	must(t, err)
	if !strings.Contains(now.Problem, "is lost") {
		t.Errorf("it has ended with %q", now.Problem)
	}
}

// A guest runs while most of its memory is still in the store, and all of it arrives.
func TestGuest_runs_before_its_memory_has_arrived(t *testing.T) {
	near := bootedBox(t)
	far := &farStore{Store: near}
	const ttl = 2 * time.Minute
	a, b := realHost(t, "a", near, cluster.Options{TTL: ttl}), realHost(t, "b", far, cluster.Options{TTL: ttl})
	a.wake("box")
	a.starts("box", "python3", "-I", "-S", "-c", hoarder)
	a.awaits("box", "/dev/shm/n")
	for range 2 { // the first wake records what the second one needs
		_, err := a.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
		must(t, err)
		a.read("box", "/dev/shm/n")
	}
	sum, count := a.read("box", "/dev/shm/sum"), a.number("box", "/dev/shm/n")
	a.sleep("box")
	r, err := a.State.Get("box")
	must(t, err)
	var size int64
	must(t, near.List(t.Context(), "data/heads-", func(i blob.Info) error { size += i.Size; return nil }))
	far.rtt = 20 * time.Millisecond
	far.rate(100e6)
	if os.Getenv(wakesEnv) != "" {
		compareWakes(t, far, size, b, a, r.Snapshot)
	}
	far.rate(1e6) // slow enough for what is to come, also on a busy machine
	far.wake(t, b, size)
	if !b.State.IsArriving(r.Snapshot) || b.State.IsThere(r.Snapshot) {
		t.Error("all of its memory is there")
	}
	// Its process is killed meanwhile: it goes back to its sleep, for which all of that must be there.
	killed, err := b.State.Get("box")
	must(t, err)
	must(t, unix.Kill(killed.PID, unix.SIGKILL))
	eventually(t, "it has crashed", func() bool { return b.phase("box") == state.Crashed })
	far.rate(0)
	eventually(t, "it can go back", func() bool {
		_, err := b.Sandbox("box").Wake(t.Context())
		if !errors.Is(err, spec.ErrArriving) {
			must(t, err)
		}
		return err == nil
	})
	b.still("box", sum, &count)
	must(t, b.State.VerifySnapshot(t.Context(), r.Snapshot))
	b.sleep("box")
	a.still("box", sum, &count)
	a.sleep("box")
	// A sleep waits for all of it, while the guest runs on.
	r, err = a.State.Get("box")
	must(t, err)
	far.rate(1e6)
	far.wake(t, b, size)
	slept := make(chan error, 1)
	go func() {
		_, err := b.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
		slept <- err
	}()
	if now := b.number("box", "/dev/shm/n"); now < count {
		t.Errorf("it counts back from %d to %d", count, now)
	}
	select {
	case err := <-slept:
		t.Error("it sleeps before its memory is there:", err)
	default:
	}
	if !b.State.IsArriving(r.Snapshot) {
		t.Error("its memory is all there")
	}
	far.rate(0)
	must(t, <-slept)
	b.still("box", sum, &count)
	b.sleep("box")
	a.still("box", sum, &count)
}

// A guest whose memory is on its way stands still while its host has no lease, since it cannot sleep, and then goes on
// with what it has done.
func TestGuest_stands_still_while_the_store_is_away(t *testing.T) {
	near := bootedBox(t)
	far := &farStore{Store: near}
	const ttl = 15 * time.Second
	a, b := realHost(t, "a", near, cluster.Options{TTL: ttl}), realHost(t, "b", far, cluster.Options{TTL: ttl})
	a.wake("box")
	a.starts("box", "python3", "-I", "-S", "-c", hoarder)
	a.awaits("box", "/dev/shm/n")
	sum, count := a.read("box", "/dev/shm/sum"), a.number("box", "/dev/shm/n")
	a.sleep("box")
	far.slow.Store(true)
	_, err := b.Sandbox("box").Wake(t.Context())
	must(t, err)
	b.says("box", "echo since-its-wake > /dev/shm/work")
	r, err := b.State.Get("box")
	must(t, err)
	far.cut.Store(true)
	if !b.State.IsArriving(r.Snapshot) {
		t.Fatal("all of its memory is there")
	}
	leases := lease.In(b.State.Dir())
	eventually(t, "the lease has ended", func() bool { _, _, _, err := leases.Left("box"); return errors.Is(err, spec.ErrUnclaimed) })
	eventually(t, "it is frozen", func() bool {
		if b.phase("box") != state.Running {
			t.Fatalf("it is %q", b.phase("box"))
		}
		info, err := b.Sandbox("box").Info(t.Context())
		return err == nil && strings.HasPrefix(info.Problem, "frozen")
	})
	far.slow.Store(false)
	far.cut.Store(false)
	// It sleeps as soon as it can, as it was told to, and may do so under a command.
	eventually(t, "it goes on", func() bool {
		var out strings.Builder
		_, err := b.Sandbox("box").Exec(t.Context(), guest.Cmd{Argv: []string{"cat", "/dev/shm/work"}, IO: guest.IO{Stdout: &out}})
		return err == nil && out.String() == "since-its-wake\n"
	})
	eventually(t, "it sleeps where others can wake it", func() bool {
		_, err := b.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
		return (err == nil || b.phase("box") == state.Asleep) && b.node.Publish(t.Context(), "box") == nil
	})
	a.still("box", sum, &count)
	if got := a.read("box", "/dev/shm/work"); got != "since-its-wake" {
		t.Errorf("what it did is %q", got)
	}
}

// noJailEnv is control.NoJailEnv.
const noJailEnv = "DROWSE_NO_JAIL"

// wake wakes a sandbox, and says what that took.
func (s *farStore) wake(t *testing.T, h *host, size int64) time.Duration {
	t.Helper()
	s.gets.Store(0)
	s.bytes.Store(0)
	s.mu.Lock()
	s.files = map[string]int{}
	s.mu.Unlock()
	begun := time.Now()
	rep, err := h.Sandbox("box").Wake(t.Context())
	must(t, err)
	took, bytes := time.Since(begun), s.bytes.Load()
	t.Logf("awake after %v (ready %.0f ms), %d GETs, %d of %d bytes: %.1f %%", took, rep.Stages["resume_ready"], s.gets.Load(), bytes, size, 100*float64(bytes)/float64(size))
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Log("bytes by file, the memory from the third on: ", s.files)
	return took
}

func compareWakes(t *testing.T, far *farStore, size int64, h, back *host, id string) {
	for i := range 6 {
		kind := "lazy"
		if i%2 == 1 {
			kind = "whole"
			t.Setenv(noJailEnv, "1") // such a VM waits for all of its memory
		} else {
			must(t, os.Unsetenv(noJailEnv))
		}
		t.Log(kind)
		far.wake(t, h, size)
		eventually(t, "its memory has arrived", func() bool { return h.State.IsThere(id) })
		// As if it had never been here.
		must(t, h.Sandbox("box").Kill(t.Context()))
		_, err := h.State.Remove(t.Context(), "box", true)
		must(t, err)
		h.stop()
		h.join()
		eventually(t, "it can be had again", func() bool { return !h.State.IsThere(id) })
	}
	must(t, os.Unsetenv(noJailEnv))
}
