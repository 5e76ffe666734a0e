package guest_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
)

// bulk returns n bytes that depend on a seed.
func bulk(seed byte, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// unfinished returns the paths of the unfinished files in a directory.
func unfinished(t *testing.T, dir string) (paths []string) {
	t.Helper()
	paths, err := filepath.Glob(dir + "/.drowse-part-*")
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// A copy is cut half-way, as by the sleep of a VM or by a client that is killed, and then resumed.
func TestCopy_that_is_cut_goes_on_where_it_was(t *testing.T) {
	const size, cutAt = 12 << 20, 6 << 20
	type way struct {
		name string
		copy func(c *guest.Client, src, dst string, o guest.CopyOptions) (guest.CopyResult, error)
	}
	for _, w := range []way{
		{"in", func(c *guest.Client, src, dst string, o guest.CopyOptions) (guest.CopyResult, error) {
			return c.CopyIn(t.Context(), src, dst, o)
		}},
		{"out", func(c *guest.Client, src, dst string, o guest.CopyOptions) (guest.CopyResult, error) {
			return c.CopyOut(t.Context(), src, dst, o)
		}},
	} {
		for _, tt := range []struct {
			name    string
			between func(t *testing.T, src, part string)
			goesOn  bool
		}{
			{"nothing has changed", func(*testing.T, string, string) {}, true},
			{"the source is another file", func(t *testing.T, src, _ string) { write(t, src, string(bulk(9, size)), 0o644) }, false},
			{"what there is has been changed", func(t *testing.T, _, part string) {
				f, err := os.OpenFile(part, os.O_WRONLY, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				if _, err := f.WriteAt([]byte("changed"), 100); err != nil {
					t.Fatal(err)
				}
			}, false},
		} {
			t.Run(w.name+", "+tt.name, func(t *testing.T) {
				v := startVM(t)
				src, dst := filepath.Join(t.TempDir(), "file"), t.TempDir()
				write(t, src, string(bulk(1, size)), 0o640)
				cut := false
				_, err := w.copy(v.dial(t), src, dst+"/copy", guest.CopyOptions{Progress: func(n int64) {
					if n > cutAt && !cut {
						cut = true
						v.reset()
					}
				}})
				if !errors.Is(err, guest.ErrConnectionLost) {
					t.Fatalf("the copy that is cut: %v, want ErrConnectionLost", err)
				}
				if _, err := os.Lstat(dst + "/copy"); err == nil {
					t.Fatal("there is a half file under the copy's name")
				}
				var part string
				eventually(t, "an unfinished file is there", func() bool {
					list := unfinished(t, dst)
					if len(list) == 1 {
						part = list[0]
					}
					return len(list) == 1
				})
				tt.between(t, src, part)
				res, err := w.copy(v.dial(t), src, dst+"/copy", guest.CopyOptions{Resume: true})
				if err != nil {
					t.Fatal(err)
				}
				if goesOn := res.Kept > 0; goesOn != tt.goesOn || res.At != dst+"/copy" {
					t.Errorf("%d bytes were kept, %d copied, at %s", res.Kept, res.Bytes, res.At)
				}
				if w.name == "in" && tt.goesOn && res.Kept+res.Bytes != size {
					t.Errorf("%d bytes were kept and %d copied, of %d", res.Kept, res.Bytes, size)
				}
				want, _ := os.ReadFile(src)
				if got, err := os.ReadFile(dst + "/copy"); err != nil || !bytes.Equal(got, want) {
					t.Errorf("the copy is another file, %v", err)
				}
				if left := unfinished(t, dst); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			})
		}
	}
}

// The destination of a tree's copy must not depend on how far the previous copy came.
func TestCopy_of_a_tree_that_is_cut_goes_on_in_the_same_place(t *testing.T) {
	const size = 8 << 20
	for _, exists := range []bool{false, true} {
		for _, way := range []string{"in", "out"} {
			name := way + ", the destination is new"
			if exists {
				name = way + ", the destination is a directory to copy into"
			}
			t.Run(name, func(t *testing.T) {
				v := startVM(t)
				src, dst := filepath.Join(t.TempDir(), "tree"), t.TempDir()+"/dst"
				for _, f := range []string{"a/small", "b/big", "c/last"} {
					n := 1000
					if f == "b/big" {
						n = size
					}
					write(t, filepath.Join(src, f), string(bulk(f[0], n)), 0o644)
				}
				at := dst
				if exists {
					if err := os.Mkdir(dst, 0o755); err != nil {
						t.Fatal(err)
					}
					at = dst + "/tree"
				}
				copyTree := func(o guest.CopyOptions) (guest.CopyResult, error) {
					c := v.dial(t)
					if way == "in" {
						return c.CopyIn(t.Context(), src, dst, o)
					}
					return c.CopyOut(t.Context(), src, dst, o)
				}
				cut := false
				if _, err := copyTree(guest.CopyOptions{Progress: func(n int64) {
					if n > size/2 && !cut {
						cut = true
						v.reset()
					}
				}}); !errors.Is(err, guest.ErrConnectionLost) {
					t.Fatalf("the copy that is cut: %v", err)
				}
				eventually(t, "what was begun is there", func() bool { return len(unfinished(t, at+"/b")) == 1 })
				res, err := copyTree(guest.CopyOptions{Resume: true})
				if err != nil {
					t.Fatal(err)
				}
				if res.At != at || res.Kept < 1000 {
					t.Errorf("it is at %s, and %d bytes were kept; want %s", res.At, res.Kept, at)
				}
				if got, want := tree(t, at), tree(t, src); got != want {
					t.Errorf("got:\n%swant:\n%s", got, want)
				}
				// Copy once more. All of it exists, and an exact copy still does not copy into that directory.
				res, err = copyTree(guest.CopyOptions{Resume: true, Exact: !exists})
				if err != nil || res.At != at || res.Bytes != 0 || res.Kept != size+2000 {
					t.Errorf("again: %+v, %v", res, err)
				}
			})
		}
	}
}

func TestCopy_resumed_of_what_is_not_there_fails_as_any_copy(t *testing.T) {
	c := startVM(t).dial(t)
	_, err := c.CopyOut(t.Context(), "/no/such/file", t.TempDir(), guest.CopyOptions{Resume: true})
	if !errors.Is(err, guest.ErrNotFound) || errors.Is(err, guest.ErrNoResume) {
		t.Errorf("got %v", err)
	}
	if _, err := c.CopyIn(t.Context(), "/no/such/file", "/tmp", guest.CopyOptions{Resume: true}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	big := filepath.Join(t.TempDir(), "big")
	write(t, big, strings.Repeat("x", 4<<20), 0o644)
	var re *guest.RemoteError
	if _, err := c.CopyIn(t.Context(), big, t.TempDir(), guest.CopyOptions{Resume: true, MaxBytes: 1 << 20}); !errors.As(err, &re) {
		t.Errorf("beyond its limit: %v", err)
	}
	if _, err := c.CopyOut(t.Context(), big, t.TempDir(), guest.CopyOptions{Resume: true, MaxBytes: 1 << 20}); !errors.Is(err, guest.ErrLimit) {
		t.Errorf("beyond its limit: %v", err)
	}
}
