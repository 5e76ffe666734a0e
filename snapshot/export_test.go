package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// shelf is a Placer that keeps files in memory.
type shelf struct {
	files   map[string][]byte
	open    int
	failing string // "place", "write", "commit"
	adopt   func(*Manifest) error
}

type shelved struct {
	s    *shelf
	name string
	b    []byte
	done bool
}

var errShelf = errors.New("the shelf is full")

func (s *shelf) Admit(*Manifest) error { return nil }

func (s *shelf) Adopt(m *Manifest) error {
	if s.adopt != nil {
		return s.adopt(m)
	}
	return nil
}

func (s *shelf) Place(name string, size int64) (Placement, error) {
	if s.failing == "place" {
		return nil, errShelf
	}
	s.open++
	return &shelved{s: s, name: name, b: make([]byte, 0, size)}, nil
}

func (p *shelved) Write(b []byte) (int, error) {
	if p.s.failing == "write" {
		return 0, errShelf
	}
	p.b = append(p.b, b...)
	return len(b), nil
}

func (p *shelved) Commit() error {
	if p.s.failing == "commit" && p.name == "layers/2" {
		return errShelf
	}
	if p.s.files == nil {
		p.s.files = map[string][]byte{}
	}
	p.s.files[p.name], p.done = p.b, true
	return nil
}

func (p *shelved) Abort() error {
	p.s.open--
	delete(p.s.files, p.name)
	return nil
}

func extras() []ExtraFile {
	var out []ExtraFile
	for i, n := range []int{0, 3000, 10} {
		b := bytes.Repeat([]byte{byte(i)}, n)
		out = append(out, ExtraFile{Name: fmt.Sprintf("layers/%d", i), Size: int64(n), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(b)), nil
		}})
	}
	return out
}

func exportOf(t testing.TB, dir string, extra []ExtraFile) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Export(context.Background(), &b, dir, extra); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func empty(t testing.TB, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Fatalf("%v is left (%v)", left, err)
	}
}

func TestWhat_was_exported_is_imported(t *testing.T) {
	parent := t.TempDir()
	names, rams := chain(t, parent, 16)
	for i, name := range names {
		dir := filepath.Join(parent, name)
		stream := exportOf(t, dir, extras())
		store := t.TempDir()
		place := &shelf{}
		// Import reads nothing after the end.
		r := bytes.NewReader(append(bytes.Clone(stream), "more"...))
		in, err := Import(context.Background(), r, store, place)
		if err != nil {
			t.Fatal(err)
		}
		if r.Len() != 4 {
			t.Errorf("%d bytes were left, want 4", r.Len())
		}
		if err := rams[i].verify(in.Dir); err != nil {
			t.Error(err)
		}
		s := open(t, dir)
		if in.ManifestSHA256 != s.ManifestSHA256() || filepath.Base(in.Dir) != s.Manifest().ID {
			t.Errorf("%+v was imported", in)
		}
		if err := checkDir(in.Dir, in.Manifest); err != nil {
			t.Error(err)
		}
		for _, e := range extras() {
			if b, ok := place.files[e.Name]; !ok || int64(len(b)) != e.Size {
				t.Errorf("%s has %d bytes", e.Name, len(b))
			}
		}
		// It is a base like any other, and cannot be imported twice.
		r2 := rams[i].clone()
		r2.delta(t, filepath.Join(store, "delta"), open(t, in.Dir), guestmem.NewPageSet(r2.total()))
		if _, err := Import(context.Background(), bytes.NewReader(stream), store, place); !errors.Is(err, ErrExists) {
			t.Errorf("twice: got %v, want ErrExists", err)
		}
		if err := rams[i].verify(in.Dir); err != nil {
			t.Error(err)
		}
	}
}

// Caches of pages are keyed by the ids of memory files. The maker of the stream chooses these.
func TestAttack_import_with_the_ids_of_local_memory_files_meets_none_of_their_cached_pages(t *testing.T) {
	parent := t.TempDir()
	names, rams := chain(t, parent, 3)
	last := filepath.Join(parent, names[len(names)-1])
	own := map[string]bool{}
	for _, mf := range open(t, last).Manifest().Memory.Files {
		own[mf.ID] = true
	}
	place := &shelf{adopt: func(m *Manifest) error {
		m.Labels = map[string]string{"k": "only"}
		return nil
	}}
	in, err := Import(context.Background(), bytes.NewReader(exportOf(t, last, extras())), t.TempDir(), place)
	if err != nil {
		t.Fatal(err)
	}
	m := open(t, in.Dir).Manifest()
	if len(m.Memory.Files) != len(own) || len(own) < 2 {
		t.Fatalf("it has %d files of %d", len(m.Memory.Files), len(own))
	}
	for _, mf := range m.Memory.Files {
		if own[mf.ID] {
			t.Errorf("file %s has the id that the stream says", mf.Name)
		}
		if _, err := os.Stat(filepath.Join(in.Dir, mf.Name)); err != nil {
			t.Error(err)
		}
	}
	if err := rams[len(rams)-1].verify(in.Dir); err != nil {
		t.Error(err)
	}
	if len(m.Labels) != 1 || m.Labels["k"] != "only" {
		t.Errorf("its labels are %v, not what was adopted", m.Labels)
	}
}

func TestA_damaged_export_is_refused_and_nothing_is_left(t *testing.T) {
	dir, _ := smallDelta(t)
	stream := exportOf(t, dir, extras())
	store := fastDir(t)
	try := func(b []byte, what string, want ...error) {
		t.Helper()
		place := &shelf{}
		_, err := importTo(context.Background(), bytes.NewReader(b), store, place, fast)
		if err == nil {
			t.Fatalf("%s: it was imported", what)
		}
		ok := len(want) == 0 && isTyped(err)
		for _, w := range want {
			ok = ok || errors.Is(err, w)
		}
		if !ok {
			t.Fatalf("%s: got %v", what, err)
		}
		empty(t, store)
		if place.open != 0 || len(place.files) != 0 {
			t.Fatalf("%s: %d extra files are left", what, place.open)
		}
	}
	step := racetest.Cases(31, 101)
	for n := 0; n < len(stream); n += step {
		try(stream[:n], fmt.Sprintf("cut to %d bytes of %d", n, len(stream)), ErrIncomplete)
	}
	for i := 0; i < len(stream)*8; i += step {
		bad := bytes.Clone(stream)
		bad[i/8] ^= 1 << (i % 8)
		try(bad, fmt.Sprintf("bit %d of byte %d", i%8, i/8))
	}
	try(append([]byte("#!/bin/sh\n"), stream...), "another kind of file", ErrForeign)
	newer := bytes.Clone(stream)
	binary.LittleEndian.PutUint32(newer[8:], ExportVersion+1)
	try(newer, "a newer format", ErrVersion)
}

// reexport makes a stream of the table and contents with right hashes.
func reexport(t testing.TB, table *exportTable, contents ...[]byte) []byte {
	t.Helper()
	doc, err := table.encode()
	if err != nil {
		t.Fatal(err)
	}
	return sealExport(doc, contents...)
}

func sealExport(doc []byte, contents ...[]byte) []byte {
	b := append([]byte(exportMagic), make([]byte, 8)...)
	binary.LittleEndian.PutUint32(b[8:], ExportVersion)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(doc)))
	b = append(b, doc...)
	sum := sha256.Sum256(b)
	b = append(b, sum[:]...)
	for _, c := range contents {
		b = append(b, c...)
	}
	b = append(b, exportEnd...)
	sum = sha256.Sum256(b)
	return append(b, sum[:]...)
}

func entry(name string, b []byte, extra bool) exportEntry {
	return exportEntry{SentFile{Name: name, Size: int64(len(b)), Extra: extra}, fmt.Sprintf("%x", sha256.Sum256(b))}
}

func TestAn_export_that_does_not_fit_together_is_refused(t *testing.T) {
	dir, _ := smallSnapshot(t)
	other, _ := smallSnapshot(t)
	read := func(dir, name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	man, mem := read(dir, ManifestName), read(dir, MemoryName)
	x := []byte("x")
	for _, tc := range []struct {
		name     string
		table    []exportEntry
		contents [][]byte
	}{
		{"no files", []exportEntry{}, nil},
		{"no memory", []exportEntry{entry(ManifestName, man, false)}, [][]byte{man}},
		{"the manifest is not first", []exportEntry{entry(MemoryName, mem, false), entry(ManifestName, man, false)}, [][]byte{mem, man}},
		{"a file too many", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, mem, false), entry("x", x, false)}, [][]byte{man, mem, x}},
		{"a file that leads elsewhere", []exportEntry{entry(ManifestName, man, false), entry("../memory", mem, false)}, [][]byte{man, mem}},
		{"a file of the snapshot after an extra one", []exportEntry{entry(ManifestName, man, false), entry("x", x, true), entry(MemoryName, mem, false)}, [][]byte{man, x, mem}},
		{"two extra files with one name", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, mem, false), entry("x", x, true), entry("x", x, true)}, [][]byte{man, mem, x, x}},
		{"an extra file without a name", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, mem, false), entry("", x, true)}, [][]byte{man, mem, x}},
		{"the memory of another snapshot", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, read(other, MemoryName), false)}, [][]byte{man, read(other, MemoryName)}},
		{"a memory file of another size", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, mem[1:], false)}, [][]byte{man, mem[1:]}},
		{"a memory file with another hash", []exportEntry{entry(ManifestName, man, false), {SentFile{Name: MemoryName, Size: int64(len(mem))}, entry("", x, false).SHA256}}, [][]byte{man, mem}},
		{"an extra file with another hash", []exportEntry{entry(ManifestName, man, false), entry(MemoryName, mem, false), {SentFile{Extra: true, Name: "x", Size: 1}, entry("", man, false).SHA256}}, [][]byte{man, mem, x}},
		{"a manifest that is none", []exportEntry{entry(ManifestName, mem, false), entry(MemoryName, mem, false)}, [][]byte{mem, mem}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := t.TempDir()
			stream := reexport(t, &exportTable{tc.table}, tc.contents...)
			if _, err := Import(context.Background(), bytes.NewReader(stream), store, &shelf{}); !isTyped(err) {
				t.Errorf("got %v", err)
			}
			empty(t, store)
		})
	}
}

func TestAn_import_that_fails_leaves_nothing(t *testing.T) {
	dir, r := smallDelta(t)
	stream := exportOf(t, dir, extras())
	store := t.TempDir()
	for _, where := range []string{"place", "write", "commit"} {
		place := &shelf{failing: where}
		if _, err := Import(context.Background(), bytes.NewReader(stream), store, place); !errors.Is(err, errShelf) {
			t.Errorf("failing to %s: got %v", where, err)
		}
		if empty(t, store); place.open != 0 || len(place.files) != 0 {
			t.Errorf("failing to %s: %v is left", where, place.files)
		}
	}
	if _, err := Import(context.Background(), bytes.NewReader(stream), store, nil); !errors.Is(err, ErrSpec) {
		t.Errorf("nowhere to put extra files: got %v, want ErrSpec", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Import(ctx, bytes.NewReader(stream), store, &shelf{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	empty(t, store)
	for n := 1; ; n++ {
		f := &failFS{FS: osfile.OS, n: n, err: unix.EIO}
		place := &shelf{}
		in, err := importTo(context.Background(), bytes.NewReader(stream), store, place, f)
		if f.calls < n {
			if err != nil {
				t.Fatal(err)
			}
			if err := r.verify(in.Dir); err != nil {
				t.Error(err)
			}
			if n < 15 {
				t.Errorf("only %d calls were tried", n-1)
			}
			break
		}
		if !errors.Is(err, unix.EIO) {
			t.Fatalf("call %d (%s) failed: got %v", n, f.failed, err)
		}
		if empty(t, store); place.open != 0 || len(place.files) != 0 {
			t.Fatalf("call %d (%s) failed: %v is left", n, f.failed, place.files)
		}
	}
}

func TestExtra_files_that_cannot_be_sent_are_refused(t *testing.T) {
	dir, _ := smallSnapshot(t)
	content := func(b ...string) func() (io.ReadCloser, error) {
		n := -1
		return func() (io.ReadCloser, error) {
			n = min(n+1, len(b)-1)
			return io.NopCloser(bytes.NewReader([]byte(b[n]))), nil
		}
	}
	for _, tc := range []struct {
		name  string
		extra []ExtraFile
		want  error
	}{
		{"no name", []ExtraFile{{Open: content("")}}, ErrSpec},
		{"a name with a line break", []ExtraFile{{Name: "a\n", Open: content("")}}, ErrSpec},
		{"one name twice", []ExtraFile{{Name: "a", Open: content("")}, {Name: "a", Open: content("")}}, ErrSpec},
		{"a negative size", []ExtraFile{{Name: "a", Size: -1, Open: content("")}}, ErrSpec},
		{"shorter than said", []ExtraFile{{Name: "a", Size: 9, Open: content("abc")}}, ErrIncomplete},
		{"changing meanwhile", []ExtraFile{{Name: "a", Size: 3, Open: content("abc", "abd")}}, ErrSpec},
		{"too many", make([]ExtraFile, MaxExtraFiles+1), ErrSpec},
	} {
		if err := Export(context.Background(), io.Discard, dir, tc.extra); !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, err, tc.want)
		}
	}
}

// FuzzExportTable gives the parser tables whose checksum is right.
func FuzzExportTable(f *testing.F) {
	dir, _ := smallDelta(f)
	stream := exportOf(f, dir, extras())
	n := binary.LittleEndian.Uint32(stream[12:])
	f.Add(stream[exportHeader : exportHeader+n])
	f.Fuzz(func(t *testing.T, doc []byte) {
		table, err := decodeExportTable(doc)
		if err != nil {
			return // Import turns this into an ErrCorrupt
		}
		if again, err := table.encode(); err != nil || !bytes.Equal(again, doc) {
			t.Fatal("what was read is written in another way")
		}
		// The contents are missing, so Import refuses every table.
		store := t.TempDir()
		stream := sealExport(doc)
		if _, err := Import(context.Background(), bytes.NewReader(stream), store, &shelf{}); !isTyped(err) && !errors.Is(err, ErrSpec) {
			t.Fatalf("untyped error: %v", err)
		}
		empty(t, store)
	})
}

// Neither Export nor Import holds the snapshot in memory.
func TestExport_and_import_stream(t *testing.T) {
	rnd := rand.New(rand.NewPCG(17, 1))
	r := smallRAM(8, rnd)
	dir := filepath.Join(t.TempDir(), "snap")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(Export(context.Background(), pw, dir, nil)) }()
	in, err := Import(context.Background(), pr, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.verify(in.Dir); err != nil {
		t.Error(err)
	}
}
