//go:build workloads

package cluster_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
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
