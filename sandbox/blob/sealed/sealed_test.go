package sealed_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/blobtest"
	"github.com/drowse-vm/drowse/sandbox/blob/sealed"
)

// keyA and the others are keys.
var (
	keyA, keyB, keyC = strings.Repeat("a1", 32), strings.Repeat("b2", 32), strings.Repeat("c3", 32)
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func keys(t *testing.T, lines ...string) *sealed.Keys {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	must(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	k, err := sealed.ReadKeys(path)
	must(t, err)
	return k
}

func dir(t *testing.T) *blob.Dir {
	t.Helper()
	d, err := blob.OpenDir(t.TempDir())
	must(t, err)
	return d
}

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestStore_is_what_package_blob_says(t *testing.T) {
	blobtest.Test(t, blobtest.Options{Overhead: 8 << 10}, func(t *testing.T) (s, other blob.Store) {
		d := dir(t)
		return sealed.New(d, keys(t, keyA)), sealed.New(d, keys(t, keyB+" alice", keyA))
	})
}

func TestReads_have_exactly_their_range_at_the_edges_of_pieces(t *testing.T) {
	d := dir(t)
	s := sealed.New(d, keys(t, keyA))
	const piece = 4096
	for _, size := range []int{0, 1, piece - 1, piece, piece + 1, 3*piece - 1, 3 * piece} {
		body, name := content(size), "o"+strings.Repeat("x", size%7+1)
		must(t, s.Put(t.Context(), name, body))
		for _, off := range []int{0, 1, piece - 1, piece, piece + 1, 2 * piece} {
			for _, n := range []int{0, 1, piece - 1, piece, piece + 1, 2 * piece} {
				p := make([]byte, n)
				err := s.ReadAt(t.Context(), name, p, int64(off))
				switch {
				case off+n <= size && (err != nil || !bytes.Equal(p, body[off:off+n])):
					t.Errorf("%d bytes at %d of %d: %v", n, off, size, err)
				case off+n > size && n > 0 && !errors.Is(err, io.ErrUnexpectedEOF):
					t.Errorf("%d bytes at %d of %d: %v", n, off, size, err)
				}
			}
		}
		got, _, err := s.Load(t.Context(), name, int64(size))
		if err != nil || !bytes.Equal(got, body) {
			t.Errorf("loading %d bytes: %v", size, err)
		}
		if _, _, err := s.Load(t.Context(), name, int64(size)-1); size > 0 && !errors.Is(err, blob.ErrKey) {
			t.Errorf("loading at most %d bytes of %d: %v", size-1, size, err)
		}
		must(t, s.Delete(t.Context(), name))
	}
}

// golden is "a sandbox" as families/box, sealed under keyA.
const golden = "7cefd7d1b27b92e8010900e6665ff23463be67f8d8c1a880ba75cd" +
	"75b757c95696dd3403a15839ba6a584ffc47798288"

func TestLoad_opens_what_an_earlier_version_has_sealed(t *testing.T) {
	d := dir(t)
	b, err := hex.DecodeString(golden)
	must(t, err)
	must(t, d.Put(t.Context(), "families/box", b))
	if got, _, err := sealed.New(d, keys(t, keyA)).Load(t.Context(), "families/box", 9); err != nil || string(got) != "a sandbox" {
		t.Errorf("%q, %v", got, err)
	}
}

func FuzzLoad(f *testing.F) {
	b, err := hex.DecodeString(golden)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, 0, 9)
	f.Add(b[:len(b)-1], 1, 1)
	f.Add([]byte(nil), 0, 0)
	f.Fuzz(func(t *testing.T, b []byte, off, n int) {
		d := dir(t)
		if d.Put(t.Context(), "families/box", b) != nil {
			return
		}
		s := sealed.New(d, keys(t, keyA))
		got, _, err := s.Load(t.Context(), "families/box", blob.MaxObject)
		if err == nil && string(got) != "a sandbox" {
			t.Errorf("%q was never sealed", got)
		}
		p := make([]byte, min(max(n, 0), 1<<20))
		if err := s.ReadAt(t.Context(), "families/box", p, int64(off)); err == nil && len(p) > 0 && string(p) != "a sandbox"[off:off+len(p)] {
			t.Errorf("%q at %d was never sealed", p, off)
		}
	})
}

func TestAttack_store_that_shows_what_is_in_an_object(t *testing.T) {
	d := dir(t)
	s := sealed.New(d, keys(t, keyA))
	secret := bytes.Repeat([]byte("secret-token "), 2000)
	must(t, s.Put(t.Context(), "a", secret))
	must(t, s.Put(t.Context(), "b", secret))
	v, err := s.Swap(t.Context(), "c", "", secret)
	must(t, err)
	before, _, err := d.Load(t.Context(), "c", blob.MaxObject)
	must(t, err)
	_, err = s.Swap(t.Context(), "c", v, secret)
	must(t, err)
	raw := map[string][]byte{"the first swap": before}
	for _, name := range []string{"a", "b", "c"} {
		b, _, err := d.Load(t.Context(), name, blob.MaxObject)
		must(t, err)
		raw[name] = b
	}
	seen := map[string]string{}
	for name, b := range raw {
		if bytes.Contains(b, []byte("secret")) {
			t.Errorf("%s shows its content", name)
		}
		// Neither is it to be seen that two objects, or two pieces of one, have the same content.
		for at := 27; at+16 <= len(b); at += 4096 + 39 {
			block := string(b[at : at+16])
			if was, again := seen[block]; again {
				t.Errorf("a piece of %s is like one of %s", name, was)
			}
			seen[block] = name
		}
	}
}

// Each change of what is in the store is noticed, by Load, and by ReadAt if it reads a piece that has changed.
func TestAttack_store_that_changes_an_object(t *testing.T) {
	ctx := t.Context()
	body := content(3*4096 + 100)
	const step = 4096 + 39
	for name, change := range map[string]func(b, other []byte) []byte{
		"a bit of the key's id":  func(b, _ []byte) []byte { b[0] ^= 1; return b },
		"the mark of the last":   func(b, _ []byte) []byte { b[8] ^= 1; return b },
		"the length of a piece":  func(b, _ []byte) []byte { b[9] ^= 1; return b },
		"the length of the last": func(b, _ []byte) []byte { b[3*step+9] ^= 1; return b },
		"the nonce":              func(b, _ []byte) []byte { b[11] ^= 1; return b },
		"the content":            func(b, _ []byte) []byte { b[27] ^= 1; return b },
		"the tag":                func(b, _ []byte) []byte { b[step-1] ^= 1; return b },
		"the order of pieces": func(b, _ []byte) []byte {
			return append(append(bytes.Clone(b[step:2*step]), b[:step]...), b[2*step:]...)
		},
		"a piece twice":             func(b, _ []byte) []byte { return append(bytes.Clone(b[:step]), b...) },
		"without the last piece":    func(b, _ []byte) []byte { return b[:3*step] },
		"without the first piece":   func(b, _ []byte) []byte { return b[step:] },
		"within a piece":            func(b, _ []byte) []byte { return b[:len(b)-1] },
		"nothing":                   func(_, _ []byte) []byte { return nil },
		"something behind it":       func(b, _ []byte) []byte { return append(b, b[3*step:]...) },
		"another object":            func(_, o []byte) []byte { return o },
		"a piece of another object": func(b, o []byte) []byte { return append(bytes.Clone(o[:step]), b[step:]...) },
		"one that is not sealed":    func(_, _ []byte) []byte { return body },
	} {
		t.Run(name, func(t *testing.T) {
			d := dir(t)
			s := sealed.New(d, keys(t, keyA))
			must(t, s.Put(ctx, "a", body))
			must(t, s.Put(ctx, "b", body))
			b, v, err := d.Load(ctx, "a", blob.MaxObject)
			must(t, err)
			other, _, err := d.Load(ctx, "b", blob.MaxObject)
			must(t, err)
			_, err = d.Swap(ctx, "a", v, change(bytes.Clone(b), other))
			must(t, err)
			if _, _, err := s.Load(ctx, "a", blob.MaxObject); !errors.Is(err, blob.ErrCorrupt) && !errors.Is(err, blob.ErrNoKey) {
				t.Errorf("loading it: %v", err)
			}
			// What is read of it is what was put, or an error.
			for off := 0; off < len(body); off += 1000 {
				p := make([]byte, min(1000, len(body)-off))
				if err := s.ReadAt(ctx, "a", p, int64(off)); err == nil && !bytes.Equal(p, body[off:off+len(p)]) {
					t.Errorf("other bytes at %d", off)
				}
			}
			if err := s.ReadAt(ctx, "a", make([]byte, len(body)), 0); err == nil && name != "something behind it" {
				t.Error("all of it was read")
			}
		})
	}
}

// What an object had at two times, and what others have sealed for it, does not mix.
func TestAttack_store_that_mixes_contents_of_an_object(t *testing.T) {
	ctx := t.Context()
	d := dir(t)
	both := keys(t, keyA, keyB+" alice")
	s := sealed.New(d, both)
	raw := func() ([]byte, blob.Version) {
		b, v, err := d.Load(ctx, "families/box", blob.MaxObject)
		must(t, err)
		return b, v
	}
	v, err := s.Swap(ctx, "families/box", "", content(3*4096))
	must(t, err)
	first, _ := raw()
	v, err = s.Swap(ctx, "families/box", v, bytes.Repeat([]byte("a"), 3*4096))
	must(t, err)
	second, _ := raw()
	_, err = blob.SealFor(s, "alice").Swap(ctx, "families/box", v, content(3*4096))
	must(t, err)
	hers, _ := raw()
	const step = 4096 + 39
	for name, mixed := range map[string][]byte{
		"an earlier end":       append(bytes.Clone(second[:2*step]), first[2*step:]...),
		"an earlier beginning": append(bytes.Clone(first[:step]), second[step:]...),
		"her middle":           append(append(bytes.Clone(second[:step]), hers[step:2*step]...), second[2*step:]...),
	} {
		_, v := raw()
		_, err := d.Swap(ctx, "families/box", v, mixed)
		must(t, err)
		if _, _, err := s.Load(ctx, "families/box", blob.MaxObject); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("%s: loading it: %v", name, err)
		}
		if err := s.ReadAt(ctx, "families/box", make([]byte, 2*4096), 100); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("%s: reading it: %v", name, err)
		}
	}
}

func TestLoadOf_says_for_whom_an_object_was_sealed(t *testing.T) {
	ctx := t.Context()
	s := sealed.New(dir(t), keys(t, keyA, keyB+" alice"))
	for owner, of := range map[string]string{"alice": "alice", "bob": "", "": ""} {
		must(t, blob.SealFor(s, owner).Put(ctx, "o"+owner, []byte("x")))
		if _, _, is, err := blob.LoadOf(ctx, s, "o"+owner, 1); err != nil || is.Owner != of || is != blob.SealOf(blob.SealFor(s, owner)) || is.Key == "" {
			t.Errorf("that of %q is of %+v, %v", owner, is, err)
		}
		if _, _, err := blob.Hosts(s).Load(ctx, "o"+owner, 1); errors.Is(err, blob.ErrCorrupt) != (of != "") {
			t.Errorf("hosts take that of %q: %v", owner, err)
		}
	}
}

func TestSealFor_seals_under_the_key_of_an_owner_that_has_one(t *testing.T) {
	ctx := t.Context()
	d := dir(t)
	s := sealed.New(d, keys(t, keyA, keyB+" alice", keyC+" alice"))
	must(t, blob.SealFor(s, "alice").Put(ctx, "alices", []byte("hers")))
	must(t, blob.SealFor(s, "bob").Put(ctx, "bobs", []byte("his")))
	must(t, s.Put(ctx, "hosts", []byte("the host's")))
	for _, c := range []struct {
		name       string
		keys       []string
		opens, not string
	}{
		{"all keys open all", []string{keyA, keyB + " alice"}, "alices bobs hosts", ""},
		{"without hers, hers stays shut", []string{keyA}, "bobs hosts", "alices"},
		{"her second key does not open what the first one sealed", []string{keyA, keyC + " alice"}, "bobs hosts", "alices"},
		{"the host's key alone opens what has no owner with a key", []string{keyC, keyB + " alice"}, "alices", "bobs hosts"},
		{"a key opens under whichever name", []string{keyB, keyA + " carol"}, "alices bobs hosts", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sealed.New(d, keys(t, c.keys...))
			for name := range strings.FieldsSeq(c.opens) {
				if _, _, err := s.Load(ctx, name, 100); err != nil {
					t.Error(err)
				}
			}
			for name := range strings.FieldsSeq(c.not) {
				if _, _, err := s.Load(ctx, name, 100); !errors.Is(err, blob.ErrNoKey) {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	if s := blob.SealFor(d, "alice"); s != blob.Store(d) {
		t.Error("a store that does not encrypt is another one for an owner")
	}
}

func TestReadKeys_refuses_what_is_not_a_file_of_keys(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
	}{
		"others may read it":             {keyA, 0o640},
		"no key":                         {"# none\n\n", 0o600},
		"no key of the host":             {keyA + " alice", 0o600},
		"a key twice":                    {keyA + "\n" + keyA + " alice", 0o600},
		"a short key":                    {keyA[2:], 0o600},
		"a long key":                     {keyA + "00", 0o600},
		"digits that are none":           {strings.Repeat("g", 64), 0o600},
		"an endless line":                {strings.Repeat("a", 5<<20), 0o600},
		"more keys than a host may have": {manyKeys(10_001), 0o600},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "keys")
			must(t, os.WriteFile(path, []byte(c.text), c.mode))
			_, err := sealed.ReadKeys(path)
			if !errors.Is(err, sealed.ErrKeys) {
				t.Errorf("%v", err)
			}
			if err != nil && strings.Contains(err.Error(), keyA[:16]) {
				t.Errorf("the error has a key: %v", err)
			}
		})
	}
	if _, err := sealed.ReadKeys(filepath.Join(t.TempDir(), "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	keys(t, "# the host's", "", "  "+keyA+"  ", keyB+"  two words", keyC)
}

func manyKeys(n int) string {
	var b strings.Builder
	r := rand.New(rand.NewPCG(2, 2))
	for range n {
		for range 64 {
			b.WriteByte("0123456789abcdef"[r.IntN(16)])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
