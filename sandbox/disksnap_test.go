package sandbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// recorder appends records to a file and prints the number of each one that is durable.
const recorder = `
import os
f = os.open('/root/records', os.O_WRONLY|os.O_CREAT|os.O_APPEND)
n = 0
while True:
    n += 1
    os.write(f, b'%08d ' % n + b'x' * 1000 + b'\n')
    os.fsync(f)
    os.write(1, b'%d\n' % n)
`

// acknowledged reads the recorder's output.
type acknowledged struct {
	mu   sync.Mutex
	more sync.Cond // its L is &mu
	last int
	rest []byte
}

// Write implements io.Writer.
func (a *acknowledged) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rest = append(a.rest, p...)
	for {
		line, rest, ok := bytes.Cut(a.rest, []byte{'\n'})
		if !ok {
			return len(p), nil
		}
		n, err := strconv.Atoi(string(line))
		if err != nil {
			return 0, err
		}
		a.last, a.rest = n, rest
		a.more.Broadcast()
	}
}

// beyond waits for a record after n, and returns the number of the last one.
func (a *acknowledged) beyond(n int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.last <= n {
		a.more.Wait()
	}
	return a.last
}

func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%s %q: %v", name, args, err)
	}
	return string(out)
}

// rawCopy makes a raw file with the content of a disk, and leaves holes where the disk has no data.
func rawCopy(t *testing.T, d *disk.Disk, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(d.Size()); err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < d.Size(); {
		from, at, n, err := d.ReadExtent(off, min(64<<20, d.Size()-off))
		if err == nil && from != nil {
			_, err = io.Copy(io.NewOffsetWriter(f, off), io.NewSectionReader(from, at, n))
		}
		if err != nil {
			t.Fatal(err)
		}
		off += n
	}
}

// checkDiskSnapshot checks that the file system in a snapshot is clean without its journal, and returns its number
// of whole records.
func checkDiskSnapshot(t *testing.T, e *guesttest.Env, id string) int {
	t.Helper()
	st, err := e.Store.State.SnapshotDisk(id)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	raw := filepath.Join(t.TempDir(), "raw")
	rawCopy(t, d, raw)
	defer os.Remove(raw)
	if out := tool(t, "dumpe2fs", "-h", raw); strings.Contains(out, "needs_recovery") || !strings.Contains(out, "has_journal") {
		t.Errorf("snapshot %s: the journal has something to replay:\n%s", id, out)
	}
	if out := tool(t, "e2fsck", "-fn", raw); strings.Contains(out, "journal") || t.Failed() {
		t.Errorf("snapshot %s: e2fsck says:\n%s", id, out)
	}
	records := tool(t, "debugfs", "-R", "cat /upper/root/records", raw)
	_, records, _ = strings.Cut(records, "\n") // debugfs prints its version first
	n := 0
	for line := range strings.Lines(records) {
		if len(line) != 8+1+1000+1 || line[8] != ' ' {
			break // the last one, which was not acknowledged
		}
		if got, err := strconv.Atoi(line[:8]); err != nil || got != n+1 {
			t.Errorf("snapshot %s: record %q follows %d", id, line[:8], n)
			break
		}
		n++
	}
	return n
}

func TestDisk_snapshots_of_a_busy_guest_are_clean_and_have_all_that_was_acknowledged(t *testing.T) {
	guesttest.Long(t)
	t.Parallel()
	for _, name := range []string{"e2fsck", "dumpe2fs", "debugfs"} {
		if _, err := exec.LookPath(name); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	e, _, _ := base(t)
	const writer = "base"
	e.Wake(writer)
	e.Write(writer, "00000000000000000000000000000001", "/etc/machine-id")
	said := &acknowledged{}
	said.more.L = &said.mu
	cmd := guest.Cmd{Argv: []string{"python3", "-S", "-E", "-c", recorder}}
	cmd.Stdout = said
	p, err := e.Agent(writer).Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	const snapshots = 20
	type taken struct {
		id    string
		least int
	}
	var all []taken
	n := 0
	for i := range snapshots {
		if i == snapshots-1 {
			putHook(e, writer, "10-a", "")
		}
		// At least one new record comes between any two snapshots.
		n = said.beyond(n)
		res, err := e.Store.Sandbox(writer).Snapshot(t.Context(), sandbox.SnapshotOptions{DiskOnly: true, Note: fmt.Sprint(i)})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("after record %d: %v", n, res.Stages)
		all = append(all, taken{res.Snapshot, n})
	}
	said.beyond(n + 1) // the recorder continues
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		r, err := e.Store.State.Get(writer)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Disk.Layers) <= maxStackOfTests {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %d snapshots the disk has %d layers, want %d at most", snapshots, len(r.Disk.Layers), maxStackOfTests)
		}
	}
	wantNotes(e, writer, "10-a freeze", "10-a thaw freeze")
	for i, s := range all {
		if got := checkDiskSnapshot(t, e, s.id); got < s.least {
			t.Errorf("snapshot %d has %d records, and %d were acknowledged before it", i, got, s.least)
		}
		if t.Failed() {
			return
		}
	}
	last := all[snapshots-1]

	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), last.id, sandbox.CloneOptions{Name: "r"}); !errors.Is(err, spec.ErrDiskOnly) {
		t.Errorf("restoring it: %v, want ErrDiskOnly", err)
	}
	if err := e.Store.State.VerifySnapshot(t.Context(), last.id); err != nil {
		t.Error(err)
	}
	list, err := e.Store.State.Snapshots()
	list = slices.DeleteFunc(list, func(s spec.SnapshotInfo) bool { return s.Kind == "sleep" }) // it woke from it
	if err != nil || len(list) != snapshots || list[0].Kind != "disk" || list[0].RAM != 0 {
		t.Errorf("listed as %+v (%v)", list, err)
	}
	// The snapshot keeps its layers after the VM is deleted.
	if err := e.Store.Sandbox(writer).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Store.State.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := e.Store.State.ExportSnapshot(t.Context(), last.id, &file); err != nil {
		t.Fatal(err)
	}
	other := guesttest.New(t)
	if _, err := other.Store.State.ImportSnapshot(t.Context(), &file, state.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := checkDiskSnapshot(t, other, last.id); got < last.least {
		t.Errorf("after export and import it has %d records of %d", got, last.least)
	}
	if _, err := other.Store.With(other.Launcher).Create(t.Context(), sandbox.Spec{Name: "n", DiskMiB: 128}, sandbox.CreateOptions{Disk: last.id}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("another size of disk: %v, want ErrSpec", err)
	}
	if _, err := other.Store.With(other.Launcher).Create(t.Context(), sandbox.Spec{Name: "n"}, sandbox.CreateOptions{Disk: last.id}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(other.Read("n", "/root/records"), "x\n"); got < last.least-1 { // no last line feed
		t.Errorf("the new VM has %d records of %d", got+1, last.least)
	}
	if got := other.Read("n", "/etc/machine-id", hostname); strings.HasPrefix(got, "00000000000000000000000000000001") || !strings.HasSuffix(got, "\nn") {
		t.Errorf("the new VM is %q", got)
	}
}
