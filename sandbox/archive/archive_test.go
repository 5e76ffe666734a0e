package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/snapshot"
)

var errDown = errors.New("the store is down")

// failing is a store in a directory that fails: from operation number `from` on, or with lost answers.
type failing struct {
	blob.Store
	ops  atomic.Int64
	from int64 // 0: never
	// lost: the operation number from is done, and its answer lost. Then the store is up again.
	lost bool
}

func (f *failing) fails() (before, after bool) {
	n := f.ops.Add(1)
	switch {
	case f.from == 0 || n < f.from:
		return false, false
	case f.lost:
		return false, n == f.from
	}
	return true, false
}

func (f *failing) do(op func() error) error {
	before, after := f.fails()
	if before {
		return errDown
	}
	err := op()
	if after {
		return errDown
	}
	return err
}

func (f *failing) Put(ctx context.Context, key string, body []byte) error {
	return f.do(func() error { return f.Store.Put(ctx, key, body) })
}

func (f *failing) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	return f.do(func() error { return f.Store.ReadAt(ctx, key, p, off) })
}

func (f *failing) Load(ctx context.Context, key string, limit int64) (body []byte, v blob.Version, err error) {
	err = f.do(func() error { body, v, err = f.Store.Load(ctx, key, limit); return err })
	return body, v, err
}

func (f *failing) Delete(ctx context.Context, key string) error {
	return f.do(func() error { return f.Store.Delete(ctx, key) })
}

func (f *failing) List(ctx context.Context, prefix string, each func(blob.Info) error) error {
	return f.do(func() error { return f.Store.List(ctx, prefix, each) })
}

func newStore(t testing.TB) blob.Store {
	t.Helper()
	s, err := blob.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// content returns bytes of which some compress, some do not, and some are zeros.
func content(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, 0, n)
	for len(b) < n {
		part := make([]byte, min(n-len(b), 1+r.IntN(3*frameSize)))
		switch r.IntN(3) {
		case 0:
			for i := range part {
				part[i] = byte(r.Uint32())
			}
		case 1:
			copy(part, bytes.Repeat([]byte("compresses well "), len(part)/16))
		}
		b = append(b, part...)
	}
	return b
}

const id1, id2 = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"

// files are those of a snapshot.
type files map[string][]byte

func (fs files) names() []string {
	var names []string
	for n := range fs {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func (fs files) send(put func(snapshot.SentFile, io.Reader) error) error {
	for _, n := range fs.names() {
		if err := put(snapshot.SentFile{Name: n, Size: int64(len(fs[n]))}, bytes.NewReader(fs[n])); err != nil {
			return err
		}
	}
	return nil
}

func some(seed uint64) files {
	return files{"empty": nil, "large": content(seed, 3*packSize/2+77), "one frame": content(seed+1, frameSize), "small": []byte("x"), "zeros": make([]byte, 2*frameSize+3)}
}

func putAll(t testing.TB, a *Archive, id string, fs files) Info {
	t.Helper()
	i, err := a.Put(t.Context(), Snapshots, Info{ID: id, Name: "box", Created: time.Unix(1e9, 0).UTC()}, fs.send)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func getAll(ctx context.Context, a *Archive, id string) (files, error) {
	e, err := a.Get(ctx, Snapshots, id)
	if err != nil {
		return nil, err
	}
	out := files{}
	for i, f := range e.Files() {
		var b bytes.Buffer
		if err := e.Copy(ctx, i, &b); err != nil {
			return nil, err
		}
		out[f.Name] = b.Bytes()
	}
	return out, e.End()
}

func wantAll(t testing.TB, got, want files) {
	t.Helper()
	if !slices.Equal(got.names(), want.names()) {
		t.Fatalf("files %q, want %q", got.names(), want.names())
	}
	for n := range want {
		if !bytes.Equal(got[n], want[n]) {
			t.Errorf("%s: %d other bytes, want %d", n, len(got[n]), len(want[n]))
		}
	}
}

func keys(t testing.TB, s blob.Store) (out []string) {
	t.Helper()
	if err := s.List(context.Background(), "", func(i blob.Info) error { out = append(out, i.Key); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestArchive_gives_back_what_was_put(t *testing.T) {
	s := newStore(t)
	a := Open(s)
	info := putAll(t, a, id1, some(1))
	got, err := getAll(t.Context(), Open(s), id1)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, got, some(1))
	if info.Size < 3*packSize/2 || info.Stored <= 0 || info.Stored >= info.Size {
		t.Errorf("%+v", info)
	}
	putAll(t, a, id2, some(5))
	list, err := a.List(t.Context(), Snapshots)
	if err != nil || len(list) != 2 || list[0] != info {
		t.Errorf("listed %+v, %v; want %+v first", list, err, info)
	}
	if _, err := a.Put(t.Context(), Snapshots, Info{ID: id1}, some(1).send); !errors.Is(err, ErrExists) {
		t.Errorf("again: %v", err)
	}
	if err := a.Remove(t.Context(), Snapshots, id1); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Get(t.Context(), Snapshots, id1); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed: %v", err)
	}
	if err := a.Remove(t.Context(), Snapshots, id1); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	got, err = getAll(t.Context(), a, id2)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, got, some(5))
	for _, k := range keys(t, s) {
		if strings.Contains(k, id1) {
			t.Errorf("%s is left", k)
		}
	}
	putAll(t, a, id1, some(9)) // it may come again
}

func TestPut_refuses_files_of_another_size(t *testing.T) {
	a := Open(newStore(t))
	for name, size := range map[string]int64{"longer": 3, "shorter": 1, "negative": -1, "immense": maxFile + 1} {
		_, err := a.Put(t.Context(), Snapshots, Info{ID: id1}, func(put func(snapshot.SentFile, io.Reader) error) error {
			return put(snapshot.SentFile{Name: "a", Size: size}, strings.NewReader("ab"))
		})
		if err == nil {
			t.Errorf("%s was put", name)
		}
	}
	for _, id := range []string{"", "x", strings.ToUpper(id1), id1[:31], "../" + id1} {
		if _, err := a.Put(t.Context(), Snapshots, Info{ID: id}, some(1).send); err == nil {
			t.Errorf("id %q was put", id)
		}
	}
}

// A put that fails anywhere leaves the whole entry or none, and what Sweep removes.
func TestPut_is_whole_or_nothing_wherever_the_store_fails(t *testing.T) {
	small := files{"a": content(1, 3*frameSize), "b": content(2, 100)}
	for _, lost := range []bool{false, true} {
		for from := int64(1); ; from++ {
			s := newStore(t)
			f := &failing{Store: s, from: from, lost: lost}
			_, err := Open(f).Put(t.Context(), Snapshots, Info{ID: id1}, small.send)
			if f.ops.Load() < from {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			a := Open(s)
			got, gerr := getAll(t.Context(), a, id1)
			switch {
			case gerr == nil:
				wantAll(t, got, small)
			case !errors.Is(gerr, ErrNotFound):
				t.Fatalf("lost %v, operation %d: %v", lost, from, gerr)
			case err == nil:
				t.Fatalf("lost %v, operation %d: it was put and is not there", lost, from)
			}
			if _, err := a.sweep(t.Context(), time.Now().Add(minSweep+time.Minute)); err != nil {
				t.Fatal(err)
			}
			again, aerr := getAll(t.Context(), a, id1)
			if gerr == nil {
				if aerr != nil {
					t.Fatal(aerr)
				}
				wantAll(t, again, small)
			} else if left := keys(t, s); len(left) > 0 {
				t.Errorf("lost %v, operation %d: left after a sweep: %q", lost, from, left)
			}
		}
	}
}

// late puts manifests when it is told to, after it has said that they failed.
type late struct {
	blob.Store
	then func() error
}

func (l *late) Put(ctx context.Context, key string, body []byte) error {
	if !strings.HasPrefix(key, string(Snapshots)) {
		return l.Store.Put(ctx, key, body)
	}
	l.then = func() error { return l.Store.Put(context.WithoutCancel(ctx), key, body) }
	return errDown
}

func TestPut_keeps_the_files_of_a_manifest_that_may_still_come(t *testing.T) {
	s := newStore(t)
	l := &late{Store: s}
	want := files{"a": content(1, 3*frameSize)}
	if _, err := Open(l).Put(t.Context(), Snapshots, Info{ID: id1}, want.send); !errors.Is(err, errDown) {
		t.Fatal(err)
	}
	if err := l.then(); err != nil {
		t.Fatal(err)
	}
	got, err := getAll(t.Context(), Open(s), id1)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, got, want)
}

func TestSweep_leaves_what_is_young_or_named(t *testing.T) {
	s := newStore(t)
	a := Open(s)
	putAll(t, a, id1, some(1))
	young := dataOf(Snapshots, id2) + "YOUNG/0/0"
	other := dataOf(Snapshots, id1) + "CUT/0/0" // of another attempt at what is there
	for _, k := range []string{young, other} {
		if err := s.Put(t.Context(), k, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if swept, err := a.Sweep(t.Context()); err != nil || swept.Objects != 0 {
		t.Errorf("%+v, %v", swept, err)
	}
	swept, err := a.sweep(t.Context(), time.Now().Add(25*time.Hour))
	if err != nil || swept != (Swept{Objects: 2, Bytes: 2}) {
		t.Errorf("%+v, %v", swept, err)
	}
	got, err := getAll(t.Context(), a, id1)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, got, some(1))
	// What cannot be asked for is not removed.
	if err := s.Put(t.Context(), young, []byte("x")); err != nil {
		t.Fatal(err)
	}
	down := &failing{Store: s, from: 2}
	if swept, err := Open(down).sweep(t.Context(), time.Now().Add(25*time.Hour)); !errors.Is(err, errDown) || swept.Objects != 0 {
		t.Errorf("with a store that fails: %+v, %v", swept, err)
	}
}

// skewed is a store whose clock is wrong, or right where the host's is wrong.
type skewed struct {
	blob.Store
	by time.Duration
}

func (s skewed) List(ctx context.Context, prefix string, each func(blob.Info) error) error {
	return s.Store.List(ctx, prefix, func(i blob.Info) error { i.Changed = i.Changed.Add(s.by); return each(i) })
}

func TestAttack_clock_of_a_host_that_is_days_ahead_sweeps_what_is_being_put(t *testing.T) {
	for _, by := range []time.Duration{-48 * time.Hour, 48 * time.Hour} {
		s := skewed{newStore(t), by}
		a := Open(s)
		want := some(1)
		_, err := a.Put(t.Context(), Snapshots, Info{ID: id1}, func(put func(f snapshot.SentFile, r io.Reader) error) error {
			if err := want.send(put); err != nil {
				return err
			}
			swept, err := a.Sweep(t.Context())
			if swept.Objects != 0 {
				t.Errorf("%v: %+v", by, swept)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := getAll(t.Context(), a, id1)
		if err != nil {
			t.Fatal(err)
		}
		wantAll(t, got, want)
		if left := keys(t, s); len(left) == 0 || strings.Contains(strings.Join(left, " "), "clock") {
			t.Errorf("%v: left: %q", by, left)
		}
	}
}

func TestAttack_manifest_that_nobody_can_read_keeps_all_garbage(t *testing.T) {
	s := newStore(t)
	kept, cut := dataOf(Snapshots, id1)+"A/0/0", dataOf(Snapshots, id2)+"B/0/0"
	for _, k := range []string{string(Snapshots) + "/" + id1, kept, cut} {
		if err := s.Put(t.Context(), k, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	swept, err := Open(s).sweep(t.Context(), time.Now().Add(25*time.Hour))
	if !errors.Is(err, ErrCorrupt) || swept.Objects != 1 {
		t.Errorf("%+v, %v", swept, err)
	}
	if left := keys(t, s); len(left) != 2 || !slices.Contains(left, kept) {
		t.Errorf("left: %q", left)
	}
}

func TestAttack_manifest_names_files_whose_indexes_fill_the_memory(t *testing.T) {
	s := newStore(t)
	m := manifest{Version: manifestVersion, Info: Info{ID: id1}, Data: dataOf(Snapshots, id1) + "X"}
	for range 5 {
		m.Files = append(m.Files, entryFile{SentFile: snapshot.SentFile{Name: "f", Size: maxFile}, Index: strings.Repeat("0", 64)})
	}
	if err := commit(t.Context(), s, string(Snapshots)+"/"+id1, &m); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(s).Get(t.Context(), Snapshots, id1); !errors.Is(err, ErrCorrupt) {
		t.Errorf("got %v", err)
	}
	// Neither can one be made.
	_, err := Open(s).Put(t.Context(), Snapshots, Info{ID: id2}, func(put func(f snapshot.SentFile, r io.Reader) error) error {
		return put(snapshot.SentFile{Name: "f", Size: maxEntry + 1}, strings.NewReader(""))
	})
	if !errors.Is(err, errTooMuch) {
		t.Errorf("got %v", err)
	}
}

func TestPut_of_many_at_once_makes_one(t *testing.T) {
	s := newStore(t)
	var won atomic.Int64
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			_, err := Open(s).Put(t.Context(), Snapshots, Info{ID: id1}, files{"a": content(uint64(w), 2*frameSize)}.send)
			switch {
			case err == nil:
				won.Add(1 + int64(w)<<8)
			case !errors.Is(err, ErrExists):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load()&0xff != 1 {
		t.Fatalf("%d have won", won.Load()&0xff)
	}
	got, err := getAll(t.Context(), Open(s), id1)
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, got, files{"a": content(uint64(won.Load()>>8), 2*frameSize)})
	if n := len(keys(t, s)); n != 3 {
		t.Errorf("%d objects are left, want manifest, index and pack: %q", n, keys(t, s))
	}
}

// Whatever byte changes in the store, what is read is what was put, or an error.
func TestGet_never_gives_other_bytes(t *testing.T) {
	s := newStore(t)
	want := files{"a": content(1, 2*frameSize+100), "b": []byte("b")}
	putAll(t, Open(s), id1, want)
	r := rand.New(rand.NewPCG(7, 7))
	for _, key := range keys(t, s) {
		body, v, err := s.Load(t.Context(), key, blob.MaxObject)
		if err != nil {
			t.Fatal(err)
		}
		for range 60 {
			bad := bytes.Clone(body)
			switch r.IntN(4) {
			case 0:
				bad = bad[:r.IntN(len(bad))]
			case 1:
				bad = append(bad, 0)
			default:
				bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
			}
			if v, err = s.Swap(t.Context(), key, v, bad); err != nil {
				t.Fatal(err)
			}
			got, err := getAll(t.Context(), Open(s), id1)
			if err == nil {
				for n := range got { // names and times in a manifest have no hash
					if w, ok := want[n]; ok && !bytes.Equal(got[n], w) {
						t.Fatalf("%s: %d other bytes", n, len(got[n]))
					}
				}
			} else if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrNotFound) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("%s: %v", key, err)
			}
			if v, err = s.Swap(t.Context(), key, v, body); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestGet_ends_when_its_writer_or_its_context_does(t *testing.T) {
	s := newStore(t)
	putAll(t, Open(s), id1, some(1))
	e, err := Open(s).Get(t.Context(), Snapshots, id1)
	if err != nil {
		t.Fatal(err)
	}
	large := slices.IndexFunc(e.Files(), func(f snapshot.SentFile) bool { return f.Name == "large" })
	full := errors.New("the disk is full")
	if err := e.Copy(t.Context(), large, writerFunc(func([]byte) (int, error) { return 0, full })); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	n := 0
	err = e.Copy(ctx, large, writerFunc(func(p []byte) (int, error) {
		if n++; n == 3 {
			cancel(full)
		}
		return len(p), nil
	}))
	if !errors.Is(err, full) {
		t.Errorf("canceled: %v", err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func FuzzIndex(f *testing.F) {
	x := index{size: 3*frameSize + 5, packs: []uint32{10, 20}, frames: []frame{{0, 0, 10, [32]byte{1}}, {}, {1, 0, 17, [32]byte{2}}, {1, 17, 3, [32]byte{3}}}}
	f.Add(x.encode(), x.size)
	f.Add([]byte(indexMagic), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if size < 0 || size > 1<<30 {
			size %= 1 << 30
		}
		x, err := decodeIndex(b, size)
		if err != nil {
			return
		}
		if !bytes.Equal(x.encode(), b) {
			t.Error("an index has two forms")
		}
		at := 0
		for _, p := range x.pieces() {
			if p.first != at || p.end <= p.first || p.n > readSize && p.end-p.first > 1 || p.n > 0 && p.off+p.n > x.packs[p.pack] {
				t.Fatalf("piece %+v after frame %d", p, at)
			}
			at = p.end
		}
		if at != len(x.frames) {
			t.Errorf("%d of %d frames in pieces", at, len(x.frames))
		}
	})
}

func FuzzManifest(f *testing.F) {
	good, err := json.Marshal(manifest{Version: 1, Info: Info{ID: id1}, Data: dataOf(Snapshots, id1) + "X", Files: []entryFile{{SentFile: snapshot.SentFile{Name: "a"}, Index: fmt.Sprintf("%x", sha256.Sum256(nil))}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	var m manifest
	if err := json.Unmarshal(good, &m); err != nil {
		f.Fatal(err)
	}
	for version, numbers := range map[int][]int{1: {0, 2}, 2: {0, 1}, 4: {0, 1}} {
		m.Version, m.Files = version, []entryFile{m.Files[0], m.Files[0]}
		m.Files[0].At, m.Files[1].At = numbers[0], numbers[1]
		text, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		if _, err := decodeManifest(text); (err == nil) != (version == 2) {
			f.Errorf("%s: %v", text, err)
		}
	}
	m.Version, m.Files[0].At, m.Files[1].At = 2, 5, 5
	if text, err := json.Marshal(m); err != nil {
		f.Fatal(err)
	} else if _, err := decodeManifest(text); err == nil {
		f.Error("two files have one key")
	}
	earlier := dataOf(Heads, id1) + "X"
	for in, ok := range map[string]bool{earlier: true, earlier + "/0": false, dataOf(Images, id1) + "X": false, dataOf(Heads, "x") + "X": false, "heads/" + id1: false} {
		for version, at := range map[int]int{2: 5, 3: 5, keptVersion + 1: 5, 0: 0} {
			m.Version, m.Files[0].At, m.Files[0].In = cmp.Or(version, keptVersion), at, in
			text, err := json.Marshal(m)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text)
			if _, err := decodeManifest(text); (err == nil) != (ok && version == keptVersion) {
				f.Errorf("%s: %v", text, err)
			}
		}
	}
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeManifest(b)
		if err == nil && (len(m.Files) > maxFiles || blob.CheckKey(m.Data) != nil) {
			t.Errorf("%+v", m)
		}
		for i := 0; err == nil && i < len(m.Files); i++ {
			if key := m.file(i); blob.CheckKey(key) != nil || !strings.HasPrefix(key, dataPrefix) {
				t.Errorf("file %d is %s", i, key)
			}
		}
	})
}
