package pager

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func newImage(t *testing.T, mem *guestmem.Memory) *Image {
	t.Helper()
	i, err := NewImage(mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.Close() })
	return i
}

// A copy is made while RAM changes. Together with what has changed, read from a frozen view, it is RAM at the
// freeze.
func TestAn_image_of_changing_RAM_is_RAM_at_the_moment_of_the_freeze(t *testing.T) {
	for _, kind := range []ramKind{booted, lazy, mapped} {
		for name, opts := range map[string]FreezeOptions{"copied": {Expect: 4400}, "protected": {CopyBytes: MinCopyBytes}} {
			t.Run(string(kind)+", "+name, func(t *testing.T) {
				c := newFrozenCase(t, kind)
				i := newImage(t, c.mem)
				c.mem.TakeDirty(func(uint64) {})
				stop, stopped := make(chan struct{}), make(chan error, 1)
				go func() {
					// Write, zero and discard pages before, during and after the copy.
					for n := 0; ; n++ {
						page := rand.Uint64N(4200)
						var err error
						switch n % 4 {
						case 0:
							err = c.mem.Zero(gpa(page), pageSize)
						case 1:
							err = c.mem.Discard(gpa(page), pageSize)
						default:
							err = c.mem.Write(gpa(page)+guestmem.GPA(n%4000), []byte{byte(n), byte(n >> 8), 1})
						}
						if err != nil {
							stopped <- err
							return
						}
						select {
						case <-stop:
							stopped <- nil
							return
						default:
						}
					}
				}()
				err := i.CopyRunning(t.Context(), c.p)
				close(stop)
				if err := errors.Join(err, <-stopped); err != nil {
					t.Fatal(err)
				}
				changed := guestmem.NewPageSet(frozenSize / pageSize)
				c.mem.DrainDirty(changed)
				c.set = changed
				if err := c.mem.Read(0, c.image); err != nil {
					t.Fatal(err)
				}
				f := c.freeze(t, opts)
				over := make(chan error, 1)
				go func() { over <- c.overwrite(newToucher(t), 0, 0) }()
				err = i.CopySet(t.Context(), changed, f)
				if err := errors.Join(err, <-over, f.Close()); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(i.SetNote([]byte("a note")), i.Seal()); err != nil {
					t.Fatal(err)
				}
				child, err := guestmem.NewPrivate(frozenSize, i.File())
				if err != nil {
					t.Fatal(err)
				}
				defer child.Close()
				got := offHeap(t, frozenSize)
				if err := child.Read(0, got); err != nil {
					t.Fatal(err)
				}
				for page := range frozenSize / pageSize {
					want := c.image[page*pageSize:][:pageSize]
					if !bytes.Equal(got[page*pageSize:][:pageSize], want) {
						t.Fatalf("page %d of the child is not as it was", page)
					}
					if i.data.Has(uint64(page)) == bytes.Equal(want, zeroPage) {
						t.Fatalf("page %d: in the image: %v, zeros: %v", page, i.data.Has(uint64(page)), bytes.Equal(want, zeroPage))
					}
				}
				if note, err := ImageNote(i.File(), frozenSize); err != nil || string(note) != "a note" {
					t.Errorf("the note is %q, %v", note, err)
				}
			})
		}
	}
}

// Pages that another user holds for a moment do not fail a fork. In the test that user is a shared mapping, through
// which the file could be written.
func TestSeal_waits_for_pages_that_are_in_use(t *testing.T) {
	for name, ends := range map[string]bool{"for a moment": true, "for ever": false} {
		t.Run(name, func(t *testing.T) {
			i := newImage(t, newMemory(t, frozenSize))
			used, err := unix.Mmap(int(i.File().Fd()), 0, pageSize, unix.PROT_READ, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			unmap := sync.OnceValue(func() error { return unix.Munmap(used) })
			defer func() {
				if err := unmap(); err != nil {
					t.Error(err)
				}
			}()
			if ends {
				time.AfterFunc(2*sealPause, func() { _ = unmap() })
			}
			if err := i.Seal(); (err == nil) != ends || err != nil && !errors.Is(err, unix.EBUSY) {
				t.Errorf("sealed: %v", err)
			}
		})
	}
}

func TestA_sealed_image_cannot_be_changed(t *testing.T) {
	mem := newMemory(t, frozenSize)
	if err := mem.Write(gpa(5), []byte{1}); err != nil {
		t.Fatal(err)
	}
	i := newImage(t, mem)
	if err := i.CopyRunning(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := i.NextData(0); !errors.Is(err, ErrImage) {
		t.Errorf("reading before Seal: got %v, want ErrImage", err)
	}
	if _, err := guestmem.NewPrivate(frozenSize, i.File()); !errors.Is(err, ErrImage) {
		t.Errorf("mapping before Seal: got %v, want ErrImage", err)
	}
	if err := i.Seal(); err != nil {
		t.Fatal(err)
	}
	if n := i.Pages(); n != 1 {
		t.Errorf("%d pages, want 1", n)
	}
	fd := int(i.File().Fd())
	for name, do := range map[string]func() error{
		"write":  func() error { _, err := unix.Pwrite(fd, []byte{2}, 5*pageSize); return err },
		"shrink": func() error { return unix.Ftruncate(fd, pageSize) },
		"grow":   func() error { return unix.Ftruncate(fd, frozenSize+pageSize) },
		"punch a hole": func() error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, frozenSize)
		},
		"map writable": func() error {
			m, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err == nil {
				_ = unix.Munmap(m)
			}
			return err
		},
	} {
		if err := do(); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: got %v, want EPERM", name, err)
		}
	}
	if err := i.ReadPages(frozenSize/pageSize-1, make([]byte, 2*pageSize)); !errors.Is(err, ErrImage) {
		t.Errorf("reading beyond the end: got %v, want ErrImage", err)
	}
	for _, ram := range []uint64{frozenSize + pageSize, 1 << 60} {
		if _, err := ImageNote(i.File(), ram); !errors.Is(err, ErrImage) {
			t.Errorf("note of an image of %d bytes: got %v, want ErrImage", ram, err)
		}
	}
}

func TestCopying_to_an_image_ends_with_its_context_and_with_a_failing_source(t *testing.T) {
	c := newFrozenCase(t, booted)
	i := newImage(t, c.mem)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := i.CopyRunning(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: got %v", err)
	}
	f := c.freeze(t, FreezeOptions{Expect: 4400})
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := i.CopySet(t.Context(), c.set, f); !errors.Is(err, ErrClosed) {
		t.Errorf("from a view that is closed: got %v, want ErrClosed", err)
	}
}
