// Package blobtest tests that a store of objects is what sandbox/blob says.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

// Options say how much Test does.
type Options struct {
	// Objects is how many objects the test of lists makes; 0 is 20. A store that lists in pages is asked for more than
	// one.
	Objects int
	// Overhead is how many bytes more than its content a small object may have in the store.
	Overhead int64
}

// Test tests the stores that open returns: each must be empty, and another handle on it sees the same.
func Test(t *testing.T, o Options, open func(t *testing.T) (s, other blob.Store)) {
	for _, tt := range []struct {
		name string
		test func(t *testing.T, o Options, s, other blob.Store)
	}{
		{"an object is what was put, also elsewhere", testPut},
		{"an object does not change", testCreateOnly},
		{"of many who put one wins", testPutRace},
		{"reads have exactly their range", testRanges},
		{"what is missing is not found", testMissing},
		{"what is not valid is refused", testInvalid},
		{"swaps compare", testSwap},
		{"of many who swap none is lost", testSwapRace},
		{"deleted is gone and can come again", testDelete},
		{"lists have all that begins so", testList},
		{"a context that has ended ends calls", testContext},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, other := open(t)
			tt.test(t, o, s, other)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, what string, err, wanted error) {
	t.Helper()
	if !errors.Is(err, wanted) {
		t.Errorf("%s: got %v, want %v", what, err, wanted)
	}
}

// noise returns n bytes that no one else has.
func noise(n int) []byte {
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rand.Uint32())
	}
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

func testPut(t *testing.T, _ Options, s, other blob.Store) {
	for _, n := range []int{0, 1, 4096, 5<<20 + 7} {
		key, body := fmt.Sprintf("some/deep/key-%d", n), noise(n)
		must(t, s.Put(t.Context(), key, body))
		for _, from := range []blob.Store{s, other} {
			got, version, err := from.Load(t.Context(), key, int64(n))
			must(t, err)
			if !bytes.Equal(got, body) || version == "" {
				t.Errorf("%d bytes came back as %d others of version %q", n, len(got), version)
			}
		}
		if n > 0 {
			if got, _, err := s.Load(t.Context(), key, int64(n)-1); err == nil || len(got) > n {
				t.Errorf("%d bytes of %d: %v", len(got), n, err)
			}
		}
	}
}

func testCreateOnly(t *testing.T, _ Options, s, other blob.Store) {
	must(t, s.Put(t.Context(), "a", []byte("first")))
	want(t, "another content", s.Put(t.Context(), "a", []byte("second")), blob.ErrExists)
	want(t, "from elsewhere", other.Put(t.Context(), "a", []byte("first")), blob.ErrExists)
	_, err := s.Swap(t.Context(), "a", "", []byte("third"))
	want(t, "a swap of nothing", err, blob.ErrChanged)
	got, _, err := other.Load(t.Context(), "a", 100)
	must(t, err)
	if string(got) != "first" {
		t.Errorf("it became %q", got)
	}
}

func testPutRace(t *testing.T, _ Options, s, other blob.Store) {
	const tries, writers = 5, 8
	for try := range tries {
		key := fmt.Sprintf("race-%d", try)
		var won atomic.Int32
		won.Store(-1)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				err := []blob.Store{s, other}[w%2].Put(t.Context(), key, bytes.Repeat([]byte{byte(w)}, 100_000))
				switch {
				case err == nil && !won.CompareAndSwap(-1, int32(w)):
					t.Errorf("%d has won, and %d before", w, won.Load())
				case err != nil && !errors.Is(err, blob.ErrExists):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		got, _, err := s.Load(t.Context(), key, 1<<20)
		must(t, err)
		if w := won.Load(); w < 0 || !bytes.Equal(got, bytes.Repeat([]byte{byte(w)}, 100_000)) {
			t.Errorf("%d has won, and there are %d bytes of others", w, len(got))
		}
	}
}

func testRanges(t *testing.T, _ Options, s, _ blob.Store) {
	body := noise(1 << 20)
	must(t, s.Put(t.Context(), "ranges", body))
	for _, r := range []struct{ off, n int }{{0, 1}, {0, len(body)}, {1, 4096}, {len(body) - 1, 1}, {777_777, 65_536}, {5, 0}} {
		p := make([]byte, r.n)
		must(t, s.ReadAt(t.Context(), "ranges", p, int64(r.off)))
		if !bytes.Equal(p, body[r.off:r.off+r.n]) {
			t.Errorf("%d bytes at %d are others", r.n, r.off)
		}
	}
	for _, r := range []struct{ off, n int }{{len(body) - 1, 2}, {len(body), 1}, {len(body) + 100, 10}, {0, len(body) + 1}} {
		want(t, fmt.Sprintf("%d bytes at %d", r.n, r.off), s.ReadAt(t.Context(), "ranges", make([]byte, r.n), int64(r.off)), io.ErrUnexpectedEOF)
	}
}

func testMissing(t *testing.T, _ Options, s, _ blob.Store) {
	must(t, s.Put(t.Context(), "there/a", nil))
	for _, key := range []string{"missing", "there/b", "there"} {
		want(t, "reading "+key, s.ReadAt(t.Context(), key, make([]byte, 1), 0), blob.ErrNotFound)
		_, _, err := s.Load(t.Context(), key, 10)
		want(t, "loading "+key, err, blob.ErrNotFound)
		_, err = s.Swap(t.Context(), key, "some-version", []byte("x"))
		want(t, "swapping "+key, err, blob.ErrChanged)
	}
	must(t, s.Delete(t.Context(), "missing"))
}

func testInvalid(t *testing.T, _ Options, s, _ blob.Store) {
	for _, key := range []string{"", "/", "a/", "/a", "a//b", ".", "..", "a/../b", ".hidden", "a/.b", "a\x00", "a b", "ä", "a?b", "a%2fb", string(bytes.Repeat([]byte("k"), blob.MaxKey+1))} {
		want(t, fmt.Sprintf("putting %.20q", key), s.Put(t.Context(), key, nil), blob.ErrKey)
		want(t, fmt.Sprintf("reading %.20q", key), s.ReadAt(t.Context(), key, nil, 0), blob.ErrKey)
		want(t, fmt.Sprintf("deleting %.20q", key), s.Delete(t.Context(), key), blob.ErrKey)
		_, _, err := s.Load(t.Context(), key, 10)
		want(t, fmt.Sprintf("loading %.20q", key), err, blob.ErrKey)
		_, err = s.Swap(t.Context(), key, "", nil)
		want(t, fmt.Sprintf("swapping %.20q", key), err, blob.ErrKey)
	}
	want(t, "a negative offset", s.ReadAt(t.Context(), "a", make([]byte, 1), -1), blob.ErrKey)
	want(t, "too large an object", s.Put(t.Context(), "large", make([]byte, blob.MaxObject+1)), blob.ErrKey)
}

func testSwap(t *testing.T, _ Options, s, other blob.Store) {
	ctx := t.Context()
	v1, err := s.Swap(ctx, "head", "", []byte("one"))
	must(t, err)
	_, err = other.Swap(ctx, "head", "", []byte("uno"))
	want(t, "making it again", err, blob.ErrChanged)
	v2, err := other.Swap(ctx, "head", v1, []byte("two"))
	must(t, err)
	if v1 == v2 {
		t.Error("two contents have one version")
	}
	_, err = s.Swap(ctx, "head", v1, []byte("three"))
	want(t, "with an old version", err, blob.ErrChanged)
	got, v, err := s.Load(ctx, "head", 10)
	must(t, err)
	if string(got) != "two" || v != v2 {
		t.Errorf("it is %q of %q, want two of %q", got, v, v2)
	}
	must(t, s.Delete(ctx, "head"))
	_, err = s.Swap(ctx, "head", v2, []byte("four"))
	want(t, "after it was deleted", err, blob.ErrChanged)
	_, err = s.Swap(ctx, "head", "", []byte("five"))
	must(t, err)
}

func testSwapRace(t *testing.T, _ Options, s, other blob.Store) {
	const writers, each = 6, 10
	_, err := s.Swap(t.Context(), "counter", "", []byte("0"))
	must(t, err)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for done := 0; done < each; {
				s := []blob.Store{s, other}[w%2]
				body, v, err := s.Load(t.Context(), "counter", 100)
				if err != nil {
					t.Error(err)
					return
				}
				n, err := strconv.Atoi(string(body))
				if err != nil {
					t.Error(err)
					return
				}
				switch _, err = s.Swap(t.Context(), "counter", v, []byte(strconv.Itoa(n+1))); {
				case err == nil:
					done++
				case !errors.Is(err, blob.ErrChanged):
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	got, _, err := s.Load(t.Context(), "counter", 100)
	must(t, err)
	if string(got) != strconv.Itoa(writers*each) {
		t.Errorf("%d swaps counted to %s", writers*each, got)
	}
}

func testDelete(t *testing.T, _ Options, s, other blob.Store) {
	ctx := t.Context()
	for range 3 {
		must(t, s.Put(ctx, "dir/a", []byte("a")))
		must(t, other.Delete(ctx, "dir/a"))
		_, _, err := s.Load(ctx, "dir/a", 10)
		want(t, "deleted", err, blob.ErrNotFound)
		must(t, s.Delete(ctx, "dir/a"))
	}
	must(t, s.Put(ctx, "dir/b", nil))
	must(t, s.Delete(ctx, "dir")) // no object
	_, _, err := s.Load(ctx, "dir/b", 10)
	must(t, err)
	// Others' objects come and go in the same place.
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 10 {
				key := fmt.Sprintf("busy/%d-%d", w, i)
				if err := errors.Join(s.Put(ctx, key, nil), s.Delete(ctx, key)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func testList(t *testing.T, o Options, s, _ blob.Store) {
	n := o.Objects
	if n == 0 {
		n = 20
	}
	ctx := t.Context()
	var wanted []string
	for i := range n {
		key := fmt.Sprintf("list/%d/%d", i%3, i)
		wanted = append(wanted, key)
		must(t, s.Put(ctx, key, make([]byte, i%5)))
	}
	must(t, s.Put(ctx, "listed-not", nil))
	list := func(prefix string) (keys []string) {
		must(t, s.List(ctx, prefix, func(i blob.Info) error {
			keys = append(keys, i.Key)
			if i.Size > 5+o.Overhead || i.Changed.IsZero() {
				t.Errorf("%+v", i)
			}
			return nil
		}))
		slices.Sort(keys)
		return keys
	}
	slices.Sort(wanted)
	if got := list("list/"); !slices.Equal(got, wanted) {
		t.Errorf("%d of %d", len(got), len(wanted))
	}
	if got := list(""); len(got) != n+1 {
		t.Errorf("%d of %d", len(got), n+1)
	}
	if got := list("list/1/"); len(got) != (n+1)/3 {
		t.Errorf("%d of %d in one place", len(got), (n+1)/3)
	}
	if got := list("nothing/"); len(got) != 0 {
		t.Errorf("in nothing: %q", got)
	}
	stop, seen := errors.New("enough"), 0
	want(t, "a list that was stopped", s.List(ctx, "list/", func(blob.Info) error { seen++; return stop }), stop)
	if seen != 1 {
		t.Errorf("%d after it was stopped", seen)
	}
}

func testContext(t *testing.T, _ Options, s, _ blob.Store) {
	must(t, s.Put(t.Context(), "a", []byte("x")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, lerr := s.Load(ctx, "a", 10)
	_, serr := s.Swap(ctx, "b", "", nil)
	for what, err := range map[string]error{
		"put": s.Put(ctx, "c", nil), "read": s.ReadAt(ctx, "a", make([]byte, 1), 0), "load": lerr, "swap": serr,
		"list": s.List(ctx, "", func(blob.Info) error { return nil }),
	} {
		want(t, what, err, context.Canceled)
	}
}
