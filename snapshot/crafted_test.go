package snapshot

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// crafted is a small delta that gets right checksums again after a change. Only a writer with a bug or an attacker
// would make it.
type crafted struct {
	m      *Manifest
	ps     []Payload
	memory []byte // the delta's own memory file
	dir    string
}

func craft(t *testing.T) *crafted {
	t.Helper()
	dir, _ := smallDelta(t)
	s := open(t, dir)
	b, err := os.ReadFile(filepath.Join(dir, MemoryName))
	if err != nil {
		t.Fatal(err)
	}
	return &crafted{m: s.manifest, ps: s.payloads, memory: b, dir: dir}
}

// root returns the root's entry of chunk 0, whose leaf is in the delta's own file.
func (c *crafted) root() []byte {
	return c.memory[int64(len(c.memory))-c.m.rootBytes():][:rootEntry]
}

// leaf returns that leaf. Its first frame is in file 1, the second in file 2.
func (c *crafted) leaf() []byte {
	r := decodeRoot(c.root())
	return c.memory[r.offset:][:r.length()]
}

func (c *crafted) frame(i int) []byte { return c.leaf()[leafHeader+i*frameEntry:] }

// seal writes the manifest and memory with right checksums.
func (c *crafted) seal(t *testing.T, leafToo bool) {
	t.Helper()
	if leafToo {
		binary.LittleEndian.PutUint32(c.root()[4:], checksum(c.leaf()))
	}
	c.m.Memory.RootCRC32C = checksum(c.memory[int64(len(c.memory))-c.m.rootBytes():])
	body, err := encodeManifest(c.m, c.ps)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{ManifestName: body, MemoryName: c.memory} {
		if err := os.WriteFile(filepath.Join(c.dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestA_root_that_refers_to_wrong_places_is_refused_by_open(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(c *crafted, e []byte)
	}{
		{"a file that is not named", func(_ *crafted, e []byte) { binary.LittleEndian.PutUint32(e, 9) }},
		{"file 0 with an offset", func(_ *crafted, e []byte) { binary.LittleEndian.PutUint32(e, 0) }},
		{"the header", func(_ *crafted, e []byte) { binary.LittleEndian.PutUint16(e[8:], 0) }},
		{"the frames", func(_ *crafted, e []byte) { binary.LittleEndian.PutUint16(e[8:], fileHeader) }},
		{"itself", func(c *crafted, e []byte) {
			binary.LittleEndian.PutUint16(e[8:], uint16(int64(len(c.memory))-c.m.rootBytes()))
		}},
		{"beyond the end", func(_ *crafted, e []byte) { e[13] = 0x7f }},
		{"a leaf without frames", func(_ *crafted, e []byte) { e[14], e[15] = 0, 0 }},
		{"a leaf with too many frames", func(_ *crafted, e []byte) { e[14], e[15] = 1, 2 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := craft(t)
			tc.spoil(c, c.root())
			c.seal(t, false)
			s, err := Open(c.dir)
			if err == nil {
				s.Close()
			}
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("got %v, want ErrCorrupt", err)
			}
		})
	}
}

func TestA_leaf_that_refers_to_wrong_places_is_refused(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(c *crafted)
	}{
		{"a file that is not named", func(c *crafted) { c.frame(0)[16] = 9 }},
		{"no file", func(c *crafted) { c.frame(0)[16] = 0 }},
		{"itself", func(c *crafted) {
			binary.LittleEndian.PutUint64(c.frame(1), uint64(decodeRoot(c.root()).offset))
		}},
		{"the root", func(c *crafted) {
			binary.LittleEndian.PutUint64(c.frame(1), uint64(int64(len(c.memory))-c.m.rootBytes()))
		}},
		{"the header", func(c *crafted) { binary.LittleEndian.PutUint64(c.frame(1), 0) }},
		{"the other file's frame", func(c *crafted) { c.frame(0)[16] = 2 }},
		{"another frame of its file", func(c *crafted) { copy(c.frame(1)[:20], c.frame(0)[:20]); c.frame(1)[12] ^= 1 }},
		{"an unknown codec", func(c *crafted) { c.frame(0)[20] = 2 }},
		{"a frame without pages", func(c *crafted) { c.frame(0)[21] = 0 }},
		{"a frame with too many pages", func(c *crafted) { c.frame(0)[21] = MaxFramePages + 1 }},
		{"a bomb", func(c *crafted) { c.frame(1)[21] = 2 }},
		{"another chunk", func(c *crafted) { c.leaf()[0] = 1 }},
		{"two pages at one place", func(c *crafted) {
			pages := c.leaf()[leafHeader+2*frameEntry:]
			copy(pages[10:12], pages[0:2])
		}},
		{"a frame that no page is in", func(c *crafted) {
			pages := c.leaf()[leafHeader+2*frameEntry:]
			clear(pages[4:6]) // page 2
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := craft(t)
			tc.spoil(c)
			c.seal(t, true)
			s, err := Open(c.dir)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			d, err := NewDecoder()
			if err != nil {
				t.Fatal(err)
			}
			defer d.Release()
			p := make([]byte, guestmem.PageSize)
			// Page 0 is in the old file, page 2 in the new one.
			err = errors.Join(s.Memory().ReadPage(0, p, d), s.Memory().ReadPage(2, p, d))
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("reading: got %v, want ErrCorrupt", err)
			}
			if err := s.Verify(context.Background()); !errors.Is(err, ErrCorrupt) {
				t.Errorf("verifying: got %v, want ErrCorrupt", err)
			}
		})
	}
}

// An older leaf must not refer to a younger file, whatever that file holds.
func TestA_leaf_that_refers_to_a_younger_file_is_refused(t *testing.T) {
	c := craft(t)
	s := open(t, c.dir)
	m := s.Memory()
	r := m.ref(2)
	if r.file != 1 {
		t.Fatalf("the leaf of chunk 2 is in file %d", r.file)
	}
	name := filepath.Join(c.dir, s.manifest.Memory.Files[0].Name)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	leaf := b[r.offset:][:r.length()]
	// A frame that exists and is right but for its age.
	copy(leaf[leafHeader:], c.frame(1)[:frameEntry])
	if leaf[leafHeader+16] != 2 {
		t.Fatalf("the frame is in file %d", leaf[leafHeader+16])
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	entry := c.memory[int64(len(c.memory))-c.m.rootBytes()+2*rootEntry:]
	binary.LittleEndian.PutUint32(entry[4:], checksum(leaf))
	c.seal(t, false)
	if _, err := open(t, c.dir).Memory().Leaf(2); !errors.Is(err, ErrCorrupt) {
		t.Errorf("got %v, want ErrCorrupt", err)
	}
}

func TestA_manifest_with_an_impossible_table_of_files_is_refused(t *testing.T) {
	id := strings.Repeat("ab", 16)
	for _, tc := range []struct {
		name  string
		spoil func(m *Manifest, old, own *MemoryFile)
	}{
		{"its own base", func(m *Manifest, _, _ *MemoryFile) { m.Base = m.ID }},
		{"a base without depth", func(m *Manifest, _, _ *MemoryFile) { m.Depth = 0 }},
		{"depth without a base", func(m *Manifest, _, _ *MemoryFile) { m.Base = "" }},
		{"a base that is no id", func(m *Manifest, _, _ *MemoryFile) { m.Base = "../x" }},
		{"no files", func(m *Manifest, _, _ *MemoryFile) { m.Memory.Files = nil }},
		{"too many files", func(m *Manifest, _, own *MemoryFile) {
			for len(m.Memory.Files) <= MaxFiles {
				m.Memory.Files = append(m.Memory.Files, *own)
			}
		}},
		{"two files with one number", func(_ *Manifest, old, own *MemoryFile) { old.Number = own.Number }},
		{"files out of order", func(_ *Manifest, old, _ *MemoryFile) { old.Number = 7 }},
		{"a file without a number", func(_ *Manifest, old, _ *MemoryFile) { old.Number = 0 }},
		{"two files with one id", func(_ *Manifest, old, own *MemoryFile) { old.ID, old.Name = own.ID, linkName(own.ID) }},
		{"a name that leads elsewhere", func(_ *Manifest, old, _ *MemoryFile) { old.Name = "../" + old.Name }},
		{"a name of another id", func(_ *Manifest, old, _ *MemoryFile) { old.Name = linkName(id) }},
		{"the own file under the name of a link", func(_ *Manifest, _, own *MemoryFile) { own.Name = linkName(own.ID) }},
		{"an index before the frames", func(_ *Manifest, old, _ *MemoryFile) { old.Index = 0 }},
		{"an index in the root", func(_ *Manifest, old, _ *MemoryFile) { old.Index = old.Size - 1 }},
		{"a file that is too short", func(_ *Manifest, old, _ *MemoryFile) { old.Size = fileHeader }},
		{"a file that is too long", func(_ *Manifest, old, _ *MemoryFile) { old.Size = maxFileSize + 1 }},
		{"a file that nothing refers to", func(m *Manifest, old, _ *MemoryFile) {
			m.Stats.Pages -= old.Pages
			m.Stats.StoredBytes -= old.FrameBytes
			old.Pages, old.FrameBytes, old.LeafBytes = 0, 0, 0
		}},
		{"more pages than there were", func(_ *Manifest, old, _ *MemoryFile) { old.StoredPages = old.Pages - 1 }},
		{"more frames than fit", func(_ *Manifest, old, _ *MemoryFile) { old.FrameBytes = 1 << 40 }},
		{"frames of its own that nothing refers to", func(_ *Manifest, _, own *MemoryFile) { own.FrameBytes-- }},
		{"leaves of its own that nothing refers to", func(_ *Manifest, _, own *MemoryFile) { own.LeafBytes-- }},
		{"another sum of pages", func(m *Manifest, _, _ *MemoryFile) { m.Stats.Pages++ }},
		{"another sum of bytes", func(m *Manifest, _, _ *MemoryFile) { m.Stats.StoredBytes++ }},
		{"more frames than pages", func(m *Manifest, _, _ *MemoryFile) { m.Stats.Frames = m.Stats.Pages + 1 }},
		{"no frames", func(m *Manifest, _, _ *MemoryFile) { m.Stats.Frames = 0 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := craft(t)
			files := c.m.Memory.Files
			tc.spoil(c.m, &files[0], &files[1])
			doc, err := c.m.encodeJSON()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := decodeJSON(doc); !errors.Is(err, ErrCorrupt) {
				t.Errorf("got %v, want ErrCorrupt", err)
			}
		})
	}
}

// Verify counts anew what the manifest says about the use of its files.
func TestVerify_finds_a_wrong_account(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(m *Manifest)
	}{
		{"a page too few", func(m *Manifest) { m.Memory.Files[0].Pages--; m.Stats.Pages-- }},
		{"a leaf too many", func(m *Manifest) { m.Memory.Files[0].LeafBytes++ }},
		{"a frame too few", func(m *Manifest) { m.Stats.Frames-- }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := craft(t)
			tc.spoil(c.m)
			c.seal(t, false)
			if err := Verify(context.Background(), c.dir); !errors.Is(err, ErrCorrupt) {
				t.Errorf("got %v, want ErrCorrupt", err)
			}
		})
	}
}

// The other file is from another snapshot, or has a newer format.
func TestThe_wrong_file_in_place_of_a_link_is_refused_by_open(t *testing.T) {
	c := craft(t)
	link := filepath.Join(c.dir, c.m.Memory.Files[0].Name)
	good, err := os.ReadFile(link)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		make func() []byte
		want error
	}{
		{"a file with another id", func() []byte {
			h := encodeFileHeader(randomID())
			return append(h, good[fileHeader:]...)
		}, ErrCorrupt},
		{"a file of a newer format", func() []byte {
			b := append([]byte(nil), good...)
			binary.LittleEndian.PutUint32(b[8:], Version+1)
			binary.LittleEndian.PutUint32(b[60:], checksum(b[:60]))
			return b
		}, ErrVersion},
		{"another kind of file", func() []byte { return make([]byte, len(good)) }, ErrCorrupt},
	} {
		if err := os.WriteFile(link, tc.make(), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(c.dir)
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, err, tc.want)
		}
	}
}
