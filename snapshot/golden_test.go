package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

var update = flag.Bool("update", false, "write the golden snapshots anew")

const golden = "testdata/golden"

// hashes lists the stored pages of a snapshot as read_snapshot.py does.
func hashes(t *testing.T, dir string) []byte {
	t.Helper()
	s := open(t, dir)
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	var out bytes.Buffer
	p := make([]byte, guestmem.PageSize)
	for c := range s.Memory().Chunks() {
		l, err := s.Memory().Leaf(c)
		if err != nil {
			t.Fatal(err)
		}
		for i := range ChunkPages {
			if l == nil {
				break
			}
			if _, _, ok := l.Page(i); !ok {
				continue
			}
			page := uint64(c*ChunkPages + i)
			if err := s.Memory().ReadPage(page, p, d); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&out, "%d %x\n", page, sha256.Sum256(p))
		}
	}
	return out.Bytes()
}

// listed returns the same list from the model.
func (r *ram) listed() []byte {
	var pages []uint64
	for p := range r.pages {
		pages = append(pages, p)
	}
	slices.Sort(pages)
	var out bytes.Buffer
	for _, p := range pages {
		fmt.Fprintf(&out, "%d %x\n", p, sha256.Sum256(r.pages[p]))
	}
	return out.Bytes()
}

// chain writes a full snapshot and two deltas to parent. RAM has two slots, frames of both codecs, and pages that
// become zeros and come back.
func chain(t *testing.T, parent string, seed uint64) (names []string, rams []*ram) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 14))
	r := newRAM(Slot{Size: 1300 * guestmem.PageSize}, Slot{GPA: 4 << 30, Size: 300 * guestmem.PageSize})
	for p := uint64(0); p < r.total(); p += 27 {
		r.set(p, rnd)
	}
	for i, name := range []string{"full", "delta1", "delta2"} {
		spec := r.spec()
		spec.Sandbox, spec.Host, spec.Labels = "otter", map[string]string{"b": "2", "a": `"\`}, map[string]string{"ü": "<&>"}
		spec.Disks = []Disk{{Name: "disk", Size: 1 << 30, Layers: []string{"base", "top"}}}
		if i > 0 {
			spec.Base = open(t, filepath.Join(parent, names[i-1]))
			spec.Changed = guestmem.NewPageSet(r.total())
			for range 12 {
				p := rnd.Uint64N(1000) // the last chunk stays in the oldest file
				spec.Changed.Add(p, p+2)
				r.set(p, rnd)
			}
		}
		if _, err := Create(context.Background(), filepath.Join(parent, name), spec); err != nil {
			t.Fatal(err)
		}
		names, rams = append(names, name), append(rams, r.clone())
	}
	return names, rams
}

// The first version of this format wrote the golden snapshots. They must always open and have the same pages.
// Write them anew, with -update, only together with a new version of the format. Deltas have copies of the files
// that would be hard links, since git does not store hard links.
func TestGolden_snapshots_open_and_have_their_pages(t *testing.T) {
	if *update {
		if err := os.RemoveAll(golden); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(golden, 0o755); err != nil {
			t.Fatal(err)
		}
		names, rams := chain(t, golden, 1)
		for i, name := range names {
			if err := os.WriteFile(filepath.Join(golden, name+".pages"), rams[i].listed(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, name := range []string{"full", "delta1", "delta2"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(golden, name)
			want, err := os.ReadFile(dir + ".pages")
			if err != nil {
				t.Fatal(err)
			}
			if got := hashes(t, dir); !bytes.Equal(got, want) {
				t.Errorf("the pages are\n%s\nand not\n%s", got, want)
			}
			if err := Verify(context.Background(), dir); err != nil {
				t.Error(err)
			}
			m := open(t, dir).Manifest()
			if m.Depth != uint32(i) || len(m.Memory.Files) != i+1 || m.Labels["ü"] != "<&>" || m.Host["a"] != `"\` {
				t.Errorf("%+v", m)
			}
		})
	}
}

// An independent reader, written from FORMAT.md, reads the same pages from the golden snapshots and from a chain
// that this test writes.
func TestAn_independent_reader_reads_the_same(t *testing.T) {
	for _, tool := range []string{"python3", "zstd"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("this needs %s: apt-get install python3 zstd", tool)
		}
	}
	read := func(args ...string) []byte {
		t.Helper()
		var errs bytes.Buffer
		cmd := exec.Command("python3", append([]string{"-B", "testdata/read_snapshot.py"}, args...)...)
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, errs.Bytes())
		}
		return out
	}
	for _, name := range []string{"full", "delta1", "delta2"} {
		want, err := os.ReadFile(filepath.Join(golden, name+".pages"))
		if err != nil {
			t.Fatal(err)
		}
		if got := read(filepath.Join(golden, name)); !bytes.Equal(got, want) {
			t.Errorf("golden %s: it reads\n%s", name, got)
		}
	}
	parent := t.TempDir()
	names, rams := chain(t, parent, 2)
	last := filepath.Join(parent, "compact")
	if err := os.CopyFS(last, os.DirFS(filepath.Join(parent, names[2]))); err != nil {
		t.Fatal(err)
	}
	if _, err := compact(context.Background(), last, fast); err != nil {
		t.Fatal(err)
	}
	for i, name := range append(names, "compact") {
		r := rams[min(i, 2)]
		if got := read(filepath.Join(parent, name)); !bytes.Equal(got, r.listed()) {
			t.Errorf("%s: it reads\n%s", name, got)
		}
	}
	raw := read(filepath.Join(parent, "delta2"), "--raw")
	if uint64(len(raw)) != rams[2].total()*guestmem.PageSize {
		t.Fatalf("%d bytes of RAM", len(raw))
	}
	for p := range rams[2].total() {
		want := rams[2].pages[p]
		if want == nil {
			want = zeroPage[:]
		}
		if !bytes.Equal(raw[p*guestmem.PageSize:][:guestmem.PageSize], want) {
			t.Fatalf("page %d of RAM is another", p)
		}
	}
	// The reader refuses damaged data.
	f, err := os.OpenFile(filepath.Join(last, MemoryName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0xa5}, fileHeader+100); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("python3", "-B", "testdata/read_snapshot.py", last).CombinedOutput(); err == nil {
		t.Errorf("a damaged snapshot was read: %s", out)
	}
}
