package snapshot

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// failFS fails its n-th call that changes something.
type failFS struct {
	osFS
	n     int
	err   error
	short bool // a write does half of its work first
	calls int
	free  uint64
}

func (f *failFS) fail(op, name string) error {
	f.calls++
	if f.calls == f.n {
		return &fs.PathError{Op: op, Path: name, Err: f.err}
	}
	return nil
}

func (f *failFS) Mkdir(name string) error {
	if err := f.fail("mkdir", name); err != nil {
		return err
	}
	return f.osFS.Mkdir(name)
}

func (f *failFS) Lock(name string) (io.Closer, error) {
	if err := f.fail("flock", name); err != nil {
		return nil, err
	}
	return f.osFS.Lock(name)
}

func (f *failFS) Create(name string) (File, error) {
	if err := f.fail("open", name); err != nil {
		return nil, err
	}
	g, err := f.osFS.Create(name)
	return &failFile{g, f, name}, err
}

func (f *failFS) Rename(a, b string) error {
	if err := f.fail("rename", a); err != nil {
		return err
	}
	return f.osFS.Rename(a, b)
}

func (f *failFS) SyncDir(name string) error {
	if err := f.fail("sync", name); err != nil {
		return err
	}
	return f.osFS.SyncDir(name)
}

func (f *failFS) Free(name string) (uint64, error) {
	if f.free != 0 {
		return f.free, nil
	}
	return f.osFS.Free(name)
}

type failFile struct {
	File
	fs   *failFS
	name string
}

func (f *failFile) Write(p []byte) (int, error) {
	if err := f.fs.fail("write", f.name); err != nil {
		if f.fs.short {
			n, _ := f.File.Write(p[:len(p)/2])
			return n, err
		}
		return 0, err
	}
	return f.File.Write(p)
}

func (f *failFile) Sync() error {
	if err := f.fs.fail("fsync", f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *failFile) Close() error {
	err := f.fs.fail("close", f.name)
	return errors.Join(err, f.File.Close())
}

func TestAFailureAtAnyCallLeavesNothingBehind(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	p := make([]byte, guestmem.PageSize)
	for page := uint64(0); page < 3*ChunkPages; page += 7 {
		fillPage(p, page, page%2 == 0)
		writePage(t, mem, page, p)
	}
	for _, tc := range []struct {
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
		t.Run(tc.name, func(t *testing.T) {
			parent := t.TempDir()
			dir := filepath.Join(parent, "snap")
			n := 1
			for ; ; n++ {
				f := &failFS{n: n, err: tc.err, short: tc.short}
				spec := testSpec(t, mem)
				spec.FS = f
				_, err := Create(context.Background(), dir, spec)
				if f.calls < n {
					if err != nil {
						t.Fatalf("no call failed, and yet: %v", err)
					}
					break
				}
				if !errors.Is(err, tc.want) {
					t.Fatalf("call %d failed: got %v, want %v", n, err, tc.want)
				}
				left, rerr := os.ReadDir(parent)
				if rerr != nil || len(left) != 0 {
					t.Fatalf("call %d failed and left %v behind (%v)", n, left, rerr)
				}
			}
			if n < 14 {
				t.Errorf("only %d calls were tried", n-1)
			}
			s, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := s.Verify(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestAFullDiskIsNoticedBeforeAnythingIsWritten(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	spec := testSpec(t, mem)
	f := &failFS{free: 100}
	spec.FS = f
	_, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec)
	if !errors.Is(err, ErrNoSpace) || f.calls != 0 {
		t.Errorf("got %v after %d calls, want ErrNoSpace after none", err, f.calls)
	}
}

func TestNothingIsOverwritten(t *testing.T) {
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

func TestACancelledCreateLeavesNothingBehind(t *testing.T) {
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

type hookSource struct {
	MemorySource
	hook func(page uint64)
	err  error
}

func (h *hookSource) ReadPages(page uint64, p []byte) error {
	h.hook(page)
	return errors.Join(h.err, h.MemorySource.ReadPages(page, p))
}

func TestAnErrorOfTheSourceEndsCreate(t *testing.T) {
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

func TestUnusableDescriptionsAreRefusedBeforeRAMIsRead(t *testing.T) {
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
		spec.FS = &failFS{n: 1, err: errors.New("something was written")}
		tc.spoil(&spec)
		if _, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec); !errors.Is(err, ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", tc.name, err)
		}
	}
}
