package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// failFS fails its n-th call that changes something.
type failFS struct {
	osfile.FS
	n     int
	err   error
	short bool // a write does half of its work before it fails
	calls int
	// failed names the call that has failed.
	failed string
	free   uint64
}

func (f *failFS) fail(op, name string) error {
	f.calls++
	if f.calls == f.n {
		f.failed = op + " " + name
		return &fs.PathError{Op: op, Path: name, Err: f.err}
	}
	return nil
}

func (f *failFS) Mkdir(name string, perm fs.FileMode) error {
	if err := f.fail("mkdir", name); err != nil {
		return err
	}
	return f.FS.Mkdir(name, perm)
}

func (f *failFS) Lock(name string) (io.Closer, error) {
	if err := f.fail("flock", name); err != nil {
		return nil, err
	}
	return f.FS.Lock(name)
}

func (f *failFS) OpenFile(name string, flag int, perm fs.FileMode) (osfile.File, error) {
	if flag&os.O_CREATE == 0 {
		return f.FS.OpenFile(name, flag, perm)
	}
	if err := f.fail("open", name); err != nil {
		return nil, err
	}
	g, err := f.FS.OpenFile(name, flag, perm)
	return &failFile{g, f, name}, err
}

func (f *failFS) RenameNew(a, b string) error {
	if err := f.fail("rename", a); err != nil {
		return err
	}
	return f.FS.RenameNew(a, b)
}

func (f *failFS) Link(a, b string) error {
	if err := f.fail("link", b); err != nil {
		return err
	}
	return f.FS.Link(a, b)
}

func (f *failFS) Exchange(a, b string) error {
	if err := f.fail("exchange", b); err != nil {
		return err
	}
	return f.FS.Exchange(a, b)
}

func (f *failFS) SyncDir(name string) error {
	return f.fail("sync", name)
}

func (f *failFS) Free(name string) (uint64, error) {
	if f.free != 0 {
		return f.free, nil
	}
	return f.FS.Free(name)
}

type failFile struct {
	osfile.File
	fs   *failFS
	name string
}

func (f *failFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.fail("write", f.name); err != nil {
		if f.fs.short {
			n, _ := f.File.WriteAt(p[:len(p)/2], off)
			return n, err
		}
		return 0, err
	}
	return f.File.WriteAt(p, off)
}

func (f *failFile) Sync() error {
	// These tests do not cut the power.
	return f.fs.fail("fsync", f.name)
}

func (f *failFile) Close() error {
	err := f.fs.fail("close", f.name)
	return errors.Join(err, f.File.Close())
}

// failing lists operations in which a call fails: a full snapshot, a delta that links the files of its base, a
// delta that carries everything over, and a compaction.
var failing = []struct {
	name string
	// calls is the least number of calls. With fewer the test would test nothing.
	calls int
	run   func(fs osfile.FS, dir string, base *Snapshot, r *ram, changed *guestmem.PageSet) error
}{
	{"full", 13, func(fs osfile.FS, dir string, _ *Snapshot, r *ram, _ *guestmem.PageSet) error {
		spec := r.spec()
		spec.FS = fs
		_, err := Create(context.Background(), dir, spec)
		return err
	}},
	{"delta", 15, func(fs osfile.FS, dir string, base *Snapshot, r *ram, changed *guestmem.PageSet) error {
		spec := r.spec()
		spec.FS, spec.Base, spec.Changed = fs, base, changed
		_, err := Create(context.Background(), dir, spec)
		return err
	}},
	{"delta that carries frames over", 15, func(fs osfile.FS, dir string, base *Snapshot, r *ram, changed *guestmem.PageSet) error {
		spec := r.spec()
		spec.FS, spec.Base, spec.Changed, spec.maxFiles = fs, base, changed, 2
		_, err := Create(context.Background(), dir, spec)
		return err
	}},
	{"compaction", 13, func(fs osfile.FS, _ string, base *Snapshot, _ *ram, _ *guestmem.PageSet) error {
		_, err := compact(context.Background(), base.Dir(), fs)
		if err != nil {
			err = writeError("compacting", err)
		}
		return err
	}},
}

func TestA_failure_at_any_call_leaves_nothing_behind(t *testing.T) {
	for _, f := range failing {
		for _, e := range []struct {
			name  string
			err   error
			short bool
			want  error
		}{
			{"ENOSPC", unix.ENOSPC, false, ErrNoSpace},
			{"ENOSPC after a short write", unix.ENOSPC, true, ErrNoSpace},
			{"quota", unix.EDQUOT, false, ErrNoSpace},
			{"EIO", unix.EIO, false, unix.EIO},
		} {
			t.Run(f.name+"/"+e.name, func(t *testing.T) {
				parent := t.TempDir()
				rnd := rand.New(rand.NewPCG(8, 8))
				before := smallRAM(2, rnd)
				older := filepath.Join(parent, "older")
				if _, err := Create(context.Background(), older, before.spec()); err != nil {
					t.Fatal(err)
				}
				changed := guestmem.NewPageSet(before.total())
				changed.Add(0, 30)
				for p := range uint64(30) {
					before.set(p, rnd)
				}
				basedir := filepath.Join(parent, "base")
				before.delta(t, basedir, open(t, older), changed)
				base, good := open(t, basedir), content(t, basedir)
				after := before.clone()
				changed = guestmem.NewPageSet(after.total())
				for p := uint64(5); p < after.total(); p += 300 {
					changed.Add(p, p+1)
					after.set(p, rnd)
				}
				dir := filepath.Join(parent, "snap")
				n := 1
				for ; ; n++ {
					fs := &failFS{FS: osfile.OS, n: n, err: e.err, short: e.short}
					err := f.run(fs, dir, base, after, changed)
					if fs.calls < n {
						if err != nil {
							t.Fatalf("no call failed, and yet: %v", err)
						}
						break
					}
					if !errors.Is(err, e.want) {
						t.Fatalf("call %d (%s) failed: got %v, want %v", n, fs.failed, err, e.want)
					}
					// A compaction that cannot be made durable keeps both.
					if f.name == "compaction" && fs.failed == "sync "+parent {
						if _, err := Clean(parent); err != nil {
							t.Fatal(err)
						}
						if err := before.compare(basedir); err != nil {
							t.Fatal(err)
						}
						n = 0
						break
					}
					left, rerr := os.ReadDir(parent)
					if rerr != nil || len(left) != 2 {
						t.Fatalf("call %d (%s) failed and left %v (%v)", n, fs.failed, left, rerr)
					}
					if !maps.EqualFunc(content(t, basedir), good, bytes.Equal) {
						t.Fatalf("call %d (%s) failed and harmed the base", n, fs.failed)
					}
				}
				if n != 0 && n <= f.calls {
					t.Errorf("only %d calls were tried", n-1)
				}
				if err := before.verify(basedir); err != nil {
					t.Error(err)
				}
				if f.name != "compaction" {
					if err := after.verify(dir); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// content returns the content of each file of a directory.
func content(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for _, e := range entries {
		if out[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// Where links are not possible, the delta holds everything that it needs itself.
func TestA_delta_without_links_is_whole(t *testing.T) {
	for _, e := range []error{unix.EXDEV, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP} {
		rnd := rand.New(rand.NewPCG(8, 9))
		r := smallRAM(3, rnd)
		parent := t.TempDir()
		if _, err := Create(context.Background(), filepath.Join(parent, "base"), r.spec()); err != nil {
			t.Fatal(err)
		}
		spec := r.spec()
		spec.Base = open(t, filepath.Join(parent, "base"))
		spec.Changed = guestmem.NewPageSet(r.total())
		spec.Changed.Add(0, 1)
		r.set(0, rnd)
		spec.FS = noLinks{noSync: fast, err: e}
		info, err := Create(context.Background(), filepath.Join(parent, "delta"), spec)
		if err != nil {
			t.Fatalf("%v: %v", e, err)
		}
		if n := len(info.Manifest.Memory.Files); n != 1 {
			t.Errorf("%v: %d files", e, n)
		}
		if err := r.verify(info.Dir); err != nil {
			t.Errorf("%v: %v", e, err)
		}
	}
}

type noLinks struct {
	noSync
	err error
}

func (n noLinks) Link(a, b string) error {
	return &os.LinkError{Op: "link", Old: a, New: b, Err: n.err}
}

func TestA_full_disk_is_noticed_before_anything_is_written(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	spec := testSpec(t, mem)
	f := &failFS{FS: osfile.OS, free: 100}
	spec.FS = f
	_, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec)
	if !errors.Is(err, ErrNoSpace) || f.calls != 0 {
		t.Errorf("got %v after %d calls, want ErrNoSpace after none", err, f.calls)
	}
}

func TestNothing_is_overwritten(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	for _, tc := range []struct {
		name string
		make func(dir string) error
	}{
		{"an empty directory", func(dir string) error { return os.Mkdir(dir, 0o700) }},
		{"a file", func(dir string) error { return os.WriteFile(dir, []byte("x"), 0o600) }},
		{"a snapshot", func(dir string) error {
			_, err := Create(context.Background(), dir, testSpec(t, mem))
			return err
		}},
		{"a dangling link", func(dir string) error { return os.Symlink("nowhere", dir) }},
	} {
		parent := t.TempDir()
		dir := filepath.Join(parent, "snap")
		if err := tc.make(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := Create(context.Background(), dir, testSpec(t, mem)); !errors.Is(err, ErrExists) {
			t.Errorf("%s: got %v, want ErrExists", tc.name, err)
		}
		left, err := os.ReadDir(parent)
		if err != nil || len(left) != 1 {
			t.Errorf("%s: %v is there afterwards (%v)", tc.name, left, err)
		}
	}
}

func TestA_cancelled_create_leaves_nothing_behind(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	p := make([]byte, guestmem.PageSize)
	for page := uint64(0); page < 8*ChunkPages; page += 3 {
		fillPage(p, page, true)
		writePage(t, mem, page, p)
	}
	why := errors.New("the owner thought better of it")
	ctx, cancel := context.WithCancelCause(context.Background())
	parent := t.TempDir()
	spec := testSpec(t, mem)
	spec.Memory = &hookSource{MemorySource: spec.Memory, hook: func(page uint64) {
		if page > 3*ChunkPages {
			cancel(why)
		}
	}}
	if _, err := Create(ctx, filepath.Join(parent, "snap"), spec); !errors.Is(err, why) {
		t.Errorf("got %v, want the cause of the cancellation", err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
		t.Errorf("%v is left behind (%v)", left, err)
	}
}

// The last moment at which a cancellation counts is before the rename.
func TestA_create_that_is_cancelled_when_all_is_written_leaves_nothing_behind(t *testing.T) {
	r := smallRAM(2, rand.New(rand.NewPCG(8, 13)))
	ctx, cancel := context.WithCancel(context.Background())
	parent := t.TempDir()
	spec := r.spec()
	spec.FS = &cancelFS{noSync: fast, cancel: cancel}
	if _, err := Create(ctx, filepath.Join(parent, "snap"), spec); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
		t.Errorf("%v is left behind (%v)", left, err)
	}
}

// cancelFS cancels when the first directory is synced, which is the snapshot's.
type cancelFS struct {
	noSync
	cancel func()
}

func (c *cancelFS) SyncDir(string) error {
	c.cancel()
	return nil
}

type hookSource struct {
	MemorySource
	hook func(page uint64)
	err  error
}

func (h *hookSource) ReadPages(page uint64, p []byte) error {
	h.hook(page)
	return errors.Join(h.err, h.MemorySource.ReadPages(page, p))
}

func TestAn_error_of_the_source_ends_create(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	writePage(t, mem, 9, []byte("x"))
	spec := testSpec(t, mem)
	why := errors.New("no such page")
	spec.Memory = &hookSource{MemorySource: spec.Memory, hook: func(uint64) {}, err: why}
	parent := t.TempDir()
	if _, err := Create(context.Background(), filepath.Join(parent, "snap"), spec); !errors.Is(err, why) {
		t.Errorf("got %v, want the source's error", err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
		t.Errorf("%v is left behind (%v)", left, err)
	}
}

// A source fails half-way through a delta, or a base is damaged where the delta needs it. Nothing is left behind,
// and the base is unchanged.
func TestA_delta_whose_input_fails_is_gone(t *testing.T) {
	rnd := rand.New(rand.NewPCG(8, 10))
	r := smallRAM(8, rnd)
	parent := t.TempDir()
	basedir := filepath.Join(parent, "base")
	if _, err := Create(context.Background(), basedir, r.spec()); err != nil {
		t.Fatal(err)
	}
	base := open(t, basedir)
	spec := r.spec()
	spec.Base, spec.Changed = base, guestmem.NewPageSet(r.total())
	spec.Changed.Add(0, r.total())
	why := errors.New("the copy is gone")
	spec.Memory = &failingSource{ram: r, at: 5 * ChunkPages, err: why}
	if _, err := Create(context.Background(), filepath.Join(parent, "delta"), spec); !errors.Is(err, why) {
		t.Errorf("got %v, want the source's error", err)
	}
	if err := r.verify(basedir); err != nil {
		t.Error(err)
	}
	// Damage the leaf of chunk 3, and then a frame of it that must be carried over.
	f, err := os.OpenFile(filepath.Join(basedir, MemoryName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := base.Memory().Leaf(3)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{base.Memory().ref(3).offset + 4, l.Frame(0).Offset() + 1} {
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{b[0] ^ 1}, at); err != nil {
			t.Fatal(err)
		}
		spec = r.spec()
		spec.Base, spec.Changed, spec.maxFiles = base, guestmem.NewPageSet(r.total()), 1
		spec.Changed.Add(3*ChunkPages+1, 3*ChunkPages+2)
		if _, err := Create(context.Background(), filepath.Join(parent, "delta"), spec); !errors.Is(err, ErrCorrupt) {
			t.Errorf("byte %d of the base is wrong: got %v, want ErrCorrupt", at, err)
		}
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
		t.Errorf("%v is left (%v)", left, err)
	}
}

type failingSource struct {
	*ram
	at  uint64
	err error
}

func (f *failingSource) ReadPages(page uint64, p []byte) error {
	if page >= f.at {
		return f.err
	}
	return f.ram.ReadPages(page, p)
}

// An error at any read of the base ends the delta with the host's error.
func TestA_delta_whose_base_cannot_be_read_is_gone(t *testing.T) {
	r := smallRAM(4, rand.New(rand.NewPCG(8, 12)))
	parent := t.TempDir()
	basedir := filepath.Join(parent, "base")
	if _, err := Create(context.Background(), basedir, r.spec()); err != nil {
		t.Fatal(err)
	}
	changed := guestmem.NewPageSet(r.total())
	for p := uint64(1); p < r.total(); p += 200 {
		changed.Add(p, p+1)
	}
	for n := int64(1); ; n++ {
		base, err := Open(basedir)
		if err != nil {
			t.Fatal(err)
		}
		fail := &failingReads{r: base.memory.files[0].r, n: n}
		base.memory.files[0].r = fail
		spec := r.spec()
		// The delta carries everything over, and so reads all leaves and frames.
		spec.Base, spec.Changed, spec.maxFiles, spec.Writers = base, changed, 1, 1
		_, err = Create(context.Background(), filepath.Join(parent, "delta"), spec)
		base.Close()
		if fail.calls.Load() < n {
			if err != nil {
				t.Fatal(err)
			}
			if n < 12 {
				t.Errorf("only %d reads were tried", n-1)
			}
			break
		}
		if !errors.Is(err, unix.EIO) {
			t.Fatalf("read %d failed: got %v", n, err)
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
			t.Fatalf("read %d failed and left %v (%v)", n, left, err)
		}
	}
	if err := r.verify(filepath.Join(parent, "delta")); err != nil {
		t.Error(err)
	}
}

type failingReads struct {
	r     io.ReaderAt
	n     int64
	calls atomic.Int64
}

func (f *failingReads) ReadAt(p []byte, off int64) (int, error) {
	if f.calls.Add(1) == f.n {
		return 0, unix.EIO
	}
	return f.r.ReadAt(p, off)
}

// However slow the source is, and whichever goroutine is held up, the reader reads no more ahead than the units
// can hold. This is tested for a full snapshot and for a delta of scattered pages.
func TestA_held_up_writer_stops_reading(t *testing.T) {
	for _, kind := range []string{"full", "delta"} {
		t.Run(kind, func(t *testing.T) {
			r := smallRAM(64, rand.New(rand.NewPCG(8, 11)))
			parent := t.TempDir()
			spec := r.spec()
			if kind == "delta" {
				if _, err := Create(context.Background(), filepath.Join(parent, "base"), spec); err != nil {
					t.Fatal(err)
				}
				r = r.clone()
				spec = r.spec()
				spec.Base, spec.Changed = open(t, filepath.Join(parent, "base")), guestmem.NewPageSet(r.total())
				for p := uint64(7); p < r.total(); p += ChunkPages {
					spec.Changed.Add(p, p+1)
					r.pages[p] = bytes.Repeat([]byte("x"), guestmem.PageSize)
				}
			}
			spec.Writers = 2
			heldUp(t, r, spec, filepath.Join(parent, "snap"))
		})
	}
}

func heldUp(t *testing.T, r *ram, spec Spec, dir string) {
	t.Helper()
	hold := &holdFS{noSync: fast, held: make(chan struct{}), release: make(chan struct{})}
	spec.FS = hold
	done := make(chan error)
	go func() {
		_, err := Create(context.Background(), dir, spec)
		done <- err
	}()
	<-hold.held
	// Give the reader time to read as much as there is room for.
	chunks := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		seen := map[uint64]bool{}
		for p := range r.read {
			seen[p/ChunkPages] = true
		}
		return len(seen)
	}
	for range 1000 {
		if n := chunks(); n > 4 {
			t.Errorf("%d chunks were read, the units hold 4", n)
			break
		}
		runtime.Gosched()
	}
	close(hold.release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := chunks(); n < 60 {
		t.Errorf("only %d chunks were read", n)
	}
}

// holdFS holds up the first write of frames.
type holdFS struct {
	noSync
	held, release chan struct{}
}

type holdFile struct {
	osfile.File
	fs     *holdFS
	writes int
}

func (h *holdFS) OpenFile(name string, flag int, perm fs.FileMode) (osfile.File, error) {
	f, err := h.noSync.OpenFile(name, flag, perm)
	return &holdFile{File: f, fs: h}, err
}

func (h *holdFile) WriteAt(p []byte, off int64) (int, error) {
	if h.writes++; h.writes == 2 {
		close(h.fs.held)
		<-h.fs.release
	}
	return h.File.WriteAt(p, off)
}

func TestUnusable_descriptions_are_refused_before_RAM_is_read(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	long := strings.Repeat("x", MaxNameBytes+1)
	for _, tc := range []struct {
		name  string
		spoil func(*Spec)
	}{
		{"no RAM", func(s *Spec) { s.Memory = nil }},
		{"no vCPUs", func(s *Spec) { s.VCPUs = 0 }},
		{"too many vCPUs", func(s *Spec) { s.VCPUs = MaxVCPUs + 1 }},
		{"an id that is no id", func(s *Spec) { s.ID = "7" }},
		{"a long name", func(s *Spec) { s.Sandbox = long }},
		{"a name with a line break", func(s *Spec) { s.Sandbox = "a\nb" }},
		{"a name that is not UTF-8", func(s *Spec) { s.Kernel = "\xff" }},
		{"a replacement character", func(s *Spec) { s.Image = "\ufffd" }},
		{"too many payloads", func(s *Spec) { s.Payloads = make([]Payload, MaxPayloads+1) }},
		{"a payload that is too large", func(s *Spec) { s.Payloads[0].Data = make([]byte, MaxPayloadBytes+1) }},
		{"a long host fact", func(s *Spec) { s.Host = map[string]string{"a": strings.Repeat("x", maxValueBytes+1)} }},
		{"too many disks", func(s *Spec) { s.Disks = make([]Disk, MaxDisks+1) }},
	} {
		spec := testSpec(t, mem)
		spec.FS = &failFS{FS: osfile.OS, n: 1, err: errors.New("something was written")}
		tc.spoil(&spec)
		if _, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec); !errors.Is(err, ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", tc.name, err)
		}
	}
}
