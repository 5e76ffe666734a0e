package snapshot

import (
	"bytes"
	"math"
	"strings"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// canonical parses the JSON document of a manifest in the one form that [Manifest.encodeJSON] writes, byte by byte
// and without reflection. Every wake runs it. Package encoding/json takes ten times as long, and must encode the
// document again to know that it is in that form. canonical knows plain ASCII only and leaves everything else to
// encoding/json.
func canonical(doc []byte) (*Manifest, bool) {
	c, m := canon{b: doc}, new(Manifest)
	c.manifest(m)
	c.word("}\n")
	return m, !c.bad && len(c.b) == 0
}

// canon holds the bytes not yet read. Once bad is true, the values that its methods return are meaningless.
type canon struct {
	b   []byte
	bad bool
}

func (c *canon) manifest(m *Manifest) {
	c.word(`{"version":`)
	m.Version = c.uint32()
	c.word(`,"arch":`)
	m.Arch = c.text()
	c.word(`,"id":`)
	m.ID = c.text()
	c.word(`,"base":`)
	m.Base = c.text()
	c.word(`,"depth":`)
	m.Depth = c.uint32()
	c.word(`,"created_unix_nano":`)
	m.CreatedUnixNano = c.int64()
	c.word(`,"sandbox":`)
	m.Sandbox = c.text()
	c.word(`,"vcpus":`)
	m.VCPUs = int(c.int64())
	c.word(`,"kernel":`)
	m.Kernel = c.text()
	c.word(`,"image":`)
	m.Image = c.text()
	c.word(`,"memory":{"slots":`)
	m.Memory.Slots = list(c, maxSlots, (*canon).slot)
	c.word(`,"files":`)
	m.Memory.Files = list(c, MaxFiles, (*canon).file)
	c.word(`,"root_crc32c":`)
	m.Memory.RootCRC32C = c.uint32()
	c.word(`},"disks":`)
	m.Disks = list(c, MaxDisks, (*canon).disk)
	c.word(`,"host":`)
	m.Host = c.texts()
	c.word(`,"labels":`)
	m.Labels = c.texts()
	c.word(`,"stats":{"pages":`)
	m.Stats.Pages = c.uint64()
	c.word(`,"frames":`)
	m.Stats.Frames = c.uint64()
	c.word(`,"stored_bytes":`)
	m.Stats.StoredBytes = c.uint64()
	c.word(`}`)
}

func (c *canon) slot(s *Slot) {
	c.word(`{"gpa":`)
	s.GPA = guestmem.GPA(c.uint64())
	c.word(`,"size":`)
	s.Size = c.uint64()
	c.word(`}`)
}

func (c *canon) file(f *MemoryFile) {
	c.word(`{"number":`)
	f.Number = c.uint32()
	c.word(`,"id":`)
	f.ID = c.text()
	c.word(`,"name":`)
	f.Name = c.text()
	c.word(`,"size":`)
	f.Size = c.int64()
	c.word(`,"index":`)
	f.Index = c.int64()
	c.word(`,"stored_pages":`)
	f.StoredPages = c.uint64()
	c.word(`,"pages":`)
	f.Pages = c.uint64()
	c.word(`,"frame_bytes":`)
	f.FrameBytes = c.uint64()
	c.word(`,"leaf_bytes":`)
	f.LeafBytes = c.uint64()
	c.word(`}`)
}

func (c *canon) disk(d *Disk) {
	c.word(`{"name":`)
	d.Name = c.text()
	c.word(`,"size":`)
	d.Size = c.uint64()
	c.word(`,"layers":`)
	d.Layers = list(c, MaxDiskLayers, func(c *canon, s *string) { *s = c.text() })
	c.word(`}`)
}

// has consumes s if it comes next, and reports whether it did.
func (c *canon) has(s string) bool {
	rest, ok := bytes.CutPrefix(c.b, []byte(s))
	if ok {
		c.b = rest
	}
	return ok
}

// word consumes s, which must come next.
func (c *canon) word(s string) {
	if !c.has(s) {
		c.bad = true
	}
}

// list reads null or an array of at most limit elements.
func list[T any](c *canon, limit int, read func(*canon, *T)) []T {
	if c.has("null") {
		return nil
	}
	c.word("[")
	all := []T{}
	for !c.bad && !c.has("]") {
		if len(all) == limit {
			c.bad = true
			break
		}
		if len(all) > 0 {
			c.word(",")
		}
		var one T
		read(c, &one)
		all = append(all, one)
	}
	return all
}

// texts reads null or an object of strings, whose names must be unique and in ascending order.
func (c *canon) texts() map[string]string {
	if c.has("null") {
		return nil
	}
	c.word("{")
	all := map[string]string{}
	last := ""
	for !c.bad && !c.has("}") {
		if len(all) == maxMapEntries {
			c.bad = true
			break
		}
		if len(all) > 0 {
			c.word(",")
		}
		name := c.text()
		if len(all) > 0 && name <= last {
			c.bad = true
		}
		c.word(":")
		last, all[name] = name, c.text()
	}
	return all
}

// text reads a string of printable ASCII in which only quotes and backslashes are escaped.
func (c *canon) text() string {
	c.word(`"`)
	escapes := 0
	for i := 0; !c.bad && i < len(c.b); i++ {
		switch b := c.b[i]; {
		case b == '"':
			s := string(c.b[:i])
			c.b = c.b[i+1:]
			if escapes > 0 {
				s = unescape(s, escapes)
			}
			return s
		case b == '\\':
			// The character after the backslash does not end the string.
			if i++; i == len(c.b) || c.b[i] != '"' && c.b[i] != '\\' {
				c.bad = true
			}
			escapes++
		case b < ' ' || b > '~':
			c.bad = true
		}
	}
	c.bad = true
	return ""
}

// unescape removes the backslashes of the given number of escapes.
func unescape(s string, escapes int) string {
	var out strings.Builder
	out.Grow(len(s) - escapes)
	for ; escapes > 0; escapes-- {
		i := strings.IndexByte(s, '\\')
		out.WriteString(s[:i])
		out.WriteByte(s[i+1])
		s = s[i+2:]
	}
	out.WriteString(s)
	return out.String()
}

// uint64 reads a number without a sign and without leading zeros.
func (c *canon) uint64() (n uint64) {
	digits := 0
	for ; digits < len(c.b) && c.b[digits] >= '0' && c.b[digits] <= '9'; digits++ {
		d := uint64(c.b[digits] - '0')
		if n > (math.MaxUint64-d)/10 {
			c.bad = true
			return 0
		}
		n = 10*n + d
	}
	if digits == 0 || c.b[0] == '0' && digits > 1 {
		c.bad = true
		return 0
	}
	c.b = c.b[digits:]
	return n
}

func (c *canon) uint32() uint32 {
	n := c.uint64()
	if n > math.MaxUint32 {
		c.bad = true
	}
	return uint32(n)
}

func (c *canon) int64() int64 {
	minus := c.has("-")
	n := c.uint64()
	if n > math.MaxInt64 || minus && n == 0 {
		c.bad = true
	}
	if minus {
		return -int64(n)
	}
	return int64(n)
}
