package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Version is the format version that this package writes and reads.
const Version = 2

// Bounds of a manifest. Open refuses larger values before it allocates anything.
const (
	MaxPayloads     = 1024
	MaxPayloadBytes = 16 << 20 // of one payload
	MaxStateBytes   = 64 << 20 // of all payloads, with their headers
	MaxManifestJSON = 4 << 20
	MaxNameBytes    = 255
	MaxVCPUs        = 255
	MaxDisks        = 64
	MaxDiskLayers   = 65536
	// MaxFiles bounds the memory files of a snapshot, and so the descriptors
	// that an open one holds. Create makes fewer, see FORMAT.md.
	MaxFiles      = 64
	maxMapEntries = 16384
	maxValueBytes = 64 << 10
	maxSlots      = 8
)

// Names of the files of a snapshot. Its directory also has hard links to the files of ancestors that it still
// needs, with names made from their ids.
const (
	ManifestName = "manifest"
	MemoryName   = "memory"
)

// linkName is the name of an ancestor's memory file.
func linkName(id string) string { return MemoryName + "-" + id }

const (
	manifestMagic  = "DROWSEMF"
	manifestHeader = 32
	manifestSum    = sha256.Size
	payloadHeader  = 12
)

// arch is the only architecture so far. Open refuses a snapshot of another one with ErrForeign.
const arch = "x86_64"

// Payload is the state of one part of the machine, as that part's own code wrote it. This package does not
// interpret it.
type Payload struct {
	// Name is the instance ("vcpu0", "blk1"), at most MaxNameBytes of printable text. The reader decides whether
	// names may repeat.
	Name string
	// Kind is the kind of part that wrote it ("vcpu", "virtio-blk"), bounded like Name.
	Kind string
	// Version is the version of Data's own layout.
	Version uint32
	// Data is at most MaxPayloadBytes bytes.
	Data []byte
}

// Manifest describes a snapshot. Every string is printable text.
type Manifest struct {
	Version uint32 `json:"version"`
	Arch    string `json:"arch"`
	// ID is unique among all snapshots: 32 hex digits.
	ID string `json:"id"`
	// Base is the ID of the snapshot that this one is a delta of, empty for a full one. It only records the
	// origin: reading the snapshot does not need the base.
	Base string `json:"base"`
	// Depth is the number of deltas in the chain from a full snapshot to this one: 0 for a full snapshot.
	Depth uint32 `json:"depth"`
	// CreatedUnixNano is Spec.Created or, without one, the host's wall clock when Create began.
	CreatedUnixNano int64  `json:"created_unix_nano"`
	Sandbox         string `json:"sandbox"`
	VCPUs           int    `json:"vcpus"`
	// Kernel and Image identify what the guest was booted from.
	Kernel string `json:"kernel"`
	Image  string `json:"image"`
	// Memory says where RAM is stored.
	Memory MemoryLayout `json:"memory"`
	// Disks name the layers that belong to this instant; see package blk.
	Disks []Disk `json:"disks"`
	// Host has the host facts that the guest depends on (CPUID leaves, TSC rate, KVM capabilities, kind of KVM),
	// as the VMM words them.
	Host map[string]string `json:"host"`
	// Labels are the caller's own.
	Labels map[string]string `json:"labels"`
	// Stats say how much space the snapshot's RAM takes in all its files.
	Stats Stats `json:"stats"`
}

// MemoryLayout describes guest RAM and the files that hold it.
type MemoryLayout struct {
	// Slots are the pieces of RAM in ascending order. Page numbers run through all slots and skip the hole.
	Slots []Slot `json:"slots"`
	// Files are in ascending order of their numbers. The last is the snapshot's own, with the root of the index at
	// its end. The others are the ancestors' files that the index refers to.
	Files []MemoryFile `json:"files"`
	// RootCRC32C is the Castagnoli checksum of the root.
	RootCRC32C uint32 `json:"root_crc32c"`
}

// Slot is one piece of RAM, in bytes.
type Slot struct {
	GPA  guestmem.GPA `json:"gpa"`
	Size uint64       `json:"size"`
}

// MemoryFile is one file with frames and leaves.
type MemoryFile struct {
	// Number identifies the file in the index. A delta's own file has a higher number than all files of its base,
	// so that a number is unique in a chain.
	Number uint32 `json:"number"`
	// ID is 32 hex digits. The file's header has it too, so that a file of another snapshot is not mistaken for
	// this one.
	ID   string `json:"id"`
	Name string `json:"name"`
	// Size is the exact length in bytes, and Index the offset at which the frames end and the leaves begin.
	Size  int64 `json:"size"`
	Index int64 `json:"index"`
	// StoredPages is how many pages the file held for the snapshot that wrote it, and Pages how many of them this
	// snapshot uses.
	StoredPages uint64 `json:"stored_pages"`
	Pages       uint64 `json:"pages"`
	// FrameBytes and LeafBytes are the sizes of the frames and of the leaves
	// in it that this snapshot refers to.
	FrameBytes uint64 `json:"frame_bytes"`
	LeafBytes  uint64 `json:"leaf_bytes"`
}

// Disk is a writable disk of the machine at the instant of the snapshot. The disk's own code gives the layers
// their names; the lowest comes first.
type Disk struct {
	Name   string   `json:"name"`
	Size   uint64   `json:"size"`
	Layers []string `json:"layers"`
}

// Stats say how much RAM the snapshot stores, and in how much space.
type Stats struct {
	// Pages is the number of pages that are not all zeros.
	Pages uint64 `json:"pages"`
	// Frames is the number of frames that hold them.
	Frames uint64 `json:"frames"`
	// StoredBytes is the size of the frames, without the index.
	StoredBytes uint64 `json:"stored_bytes"`
}

// RAM returns the amount of guest memory in bytes.
func (m *Manifest) RAM() uint64 {
	var n uint64
	for _, s := range m.Memory.Slots {
		n += s.Size
	}
	return n
}

func checkText(what, s string, limit int) error {
	if len(s) > limit {
		return fmt.Errorf("%s has %d bytes, at most %d are allowed: %w", what, len(s), limit, ErrSpec)
	}
	if plain(s) {
		return nil
	}
	if !utf8.ValidString(s) {
		return fmt.Errorf("%s is not UTF-8: %w", what, ErrSpec)
	}
	for _, r := range s {
		// Refuse characters that an encoder may write in two ways, and U+FFFD, which decoders put in place of
		// invalid bytes.
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return fmt.Errorf("%s has the unprintable character %U: %w", what, r, ErrSpec)
		}
	}
	return nil
}

// plain reports whether s is all printable ASCII.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func checkHex(what, s string) error {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 || strings.ToLower(s) != s {
		return fmt.Errorf("%s %.40q is not 32 lower-case hex digits: %w", what, s, ErrSpec)
	}
	return nil
}

func checkMap(what string, m map[string]string) error {
	if len(m) > maxMapEntries {
		return fmt.Errorf("%s has %d entries, at most %d are allowed: %w", what, len(m), maxMapEntries, ErrSpec)
	}
	for k, v := range m {
		if err := checkText("a key of "+what, k, MaxNameBytes); err != nil {
			return err
		}
		if err := checkText(what+"["+k+"]", v, maxValueBytes); err != nil {
			return err
		}
	}
	return nil
}

func checkSlots(slots []Slot) error {
	if len(slots) == 0 || len(slots) > maxSlots {
		return fmt.Errorf("%d memory slots, 1 to %d are allowed: %w", len(slots), maxSlots, ErrSpec)
	}
	var total uint64
	var end guestmem.GPA
	for i, s := range slots {
		switch {
		case s.Size == 0 || s.Size > guestmem.MaxSize || s.Size%guestmem.PageSize != 0 || s.GPA%guestmem.PageSize != 0:
			return fmt.Errorf("memory slot %d has an unusable address %#x or size %#x: %w", i, s.GPA, s.Size, ErrSpec)
		case s.GPA < end || s.GPA > 1<<46:
			return fmt.Errorf("memory slot %d at %#x overlaps the one before it or is out of reach: %w", i, s.GPA, ErrSpec)
		}
		end = s.GPA + guestmem.GPA(s.Size)
		total += s.Size
	}
	if total > guestmem.MaxSize {
		return fmt.Errorf("%d bytes of RAM, at most %d are allowed: %w", total, uint64(guestmem.MaxSize), ErrSpec)
	}
	return nil
}

// check returns an error if m breaks a rule of the format. It serves both the writer and the reader.
func (m *Manifest) check() error {
	if m.Version != Version {
		return fmt.Errorf("manifest of format %d in a file of format %d: %w", m.Version, Version, ErrSpec)
	}
	if err := checkHex("snapshot id", m.ID); err != nil {
		return err
	}
	if (m.Base == "") != (m.Depth == 0) || m.Base == m.ID {
		return fmt.Errorf("depth %d and base %.40q of snapshot %s do not go together: %w", m.Depth, m.Base, m.ID, ErrSpec)
	}
	if m.Base != "" {
		if err := checkHex("base id", m.Base); err != nil {
			return err
		}
	}
	if m.VCPUs < 1 || m.VCPUs > MaxVCPUs {
		return fmt.Errorf("%d vCPUs, 1 to %d are allowed: %w", m.VCPUs, MaxVCPUs, ErrSpec)
	}
	for _, f := range []struct{ what, s string }{
		{"arch", m.Arch}, {"sandbox name", m.Sandbox}, {"kernel id", m.Kernel}, {"image id", m.Image},
	} {
		if err := checkText(f.what, f.s, MaxNameBytes); err != nil {
			return err
		}
	}
	if err := checkMap("host facts", m.Host); err != nil {
		return err
	}
	if err := checkMap("labels", m.Labels); err != nil {
		return err
	}
	if len(m.Disks) > MaxDisks {
		return fmt.Errorf("%d disks, at most %d are allowed: %w", len(m.Disks), MaxDisks, ErrSpec)
	}
	for i, d := range m.Disks {
		if err := checkText(fmt.Sprintf("name of disk %d", i), d.Name, MaxNameBytes); err != nil {
			return err
		}
		if len(d.Layers) > MaxDiskLayers {
			return fmt.Errorf("disk %q has %d layers, at most %d are allowed: %w", d.Name, len(d.Layers), MaxDiskLayers, ErrSpec)
		}
		for _, l := range d.Layers {
			if err := checkText("a layer of disk "+d.Name, l, maxValueBytes); err != nil {
				return err
			}
		}
	}
	if err := checkSlots(m.Memory.Slots); err != nil {
		return err
	}
	return m.checkFiles()
}

// rootBytes returns the size of the root of the index.
func (m *Manifest) rootBytes() int64 { return int64(chunksOf(m.RAM())) * rootEntry }

func (m *Manifest) checkFiles() error {
	l := &m.Memory
	if len(l.Files) == 0 || len(l.Files) > MaxFiles || m.Base == "" && len(l.Files) != 1 {
		return fmt.Errorf("%d memory files: a full snapshot has one, a delta 1 to %d: %w", len(l.Files), MaxFiles, ErrSpec)
	}
	var sum Stats
	var last uint32
	ids := map[string]bool{}
	for i := range l.Files {
		f := &l.Files[i]
		if err := checkHex(fmt.Sprintf("id of memory file %d", f.Number), f.ID); err != nil {
			return err
		}
		if f.Number <= last || ids[f.ID] {
			return fmt.Errorf("memory file %d (%s) is out of order or named twice: %w", f.Number, f.ID, ErrSpec)
		}
		last, ids[f.ID] = f.Number, true
		if err := f.check(m.RAM(), i == len(l.Files)-1); err != nil {
			return err
		}
		sum.Pages += f.Pages
		sum.StoredBytes += f.FrameBytes
	}
	st := m.Stats
	if sum.Pages != st.Pages || sum.StoredBytes != st.StoredBytes || st.Pages > m.RAM()/guestmem.PageSize ||
		st.Frames > st.Pages || (st.Frames == 0) != (st.Pages == 0) {
		return fmt.Errorf("%d pages in %d frames of %d bytes, but %d pages and %d bytes in the files: %w",
			st.Pages, st.Frames, st.StoredBytes, sum.Pages, sum.StoredBytes, ErrSpec)
	}
	return nil
}

// check returns an error if f cannot be a file of a snapshot with that much RAM. A snapshot uses all of its own
// file, and a part of every other.
func (f *MemoryFile) check(ram uint64, own bool) error {
	root := int64(chunksOf(ram)) * rootEntry
	name := linkName(f.ID)
	if own {
		name = MemoryName
	}
	if f.Name != name {
		return fmt.Errorf("memory file %d has the name %.80q instead of %s: %w", f.Number, f.Name, name, ErrSpec)
	}
	if f.Size < fileHeader+root || f.Size > maxFileSize || f.Index < fileHeader || f.Index > f.Size-root {
		return fmt.Errorf("memory file %d has the impossible size %d or index at %d: %w", f.Number, f.Size, f.Index, ErrSpec)
	}
	frames, leaves := uint64(f.Index-fileHeader), uint64(f.Size-root-f.Index)
	if f.FrameBytes > frames || f.LeafBytes > leaves || f.Pages > f.StoredPages || f.StoredPages > ram/guestmem.PageSize ||
		(f.Pages == 0) != (f.FrameBytes == 0) {
		return fmt.Errorf("memory file %d has impossible amounts in use: %w", f.Number, ErrSpec)
	}
	if own && (f.FrameBytes != frames || f.LeafBytes != leaves || f.Pages != f.StoredPages) ||
		!own && f.FrameBytes+f.LeafBytes == 0 {
		return fmt.Errorf("memory file %d has parts that nothing refers to: %w", f.Number, ErrSpec)
	}
	return nil
}

// encodeJSON returns the one form of m that decodeJSON accepts.
func (m *Manifest) encodeJSON() ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(m); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// encodeManifest returns the content of a manifest file.
func encodeManifest(m *Manifest, payloads []Payload) ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	if err := checkPayloads(payloads); err != nil {
		return nil, err
	}
	doc, err := m.encodeJSON()
	if err != nil {
		return nil, fmt.Errorf("encoding the manifest: %w", err)
	}
	if len(doc) > MaxManifestJSON {
		return nil, fmt.Errorf("the manifest has %d bytes, at most %d are allowed: %w", len(doc), MaxManifestJSON, ErrSpec)
	}
	state := payloadBytes(payloads)
	b := make([]byte, 0, manifestHeader+len(doc)+state+manifestSum)
	b = append(b, manifestMagic...)
	b = binary.LittleEndian.AppendUint32(b, Version)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(doc)))
	b = binary.LittleEndian.AppendUint64(b, uint64(state))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payloads)))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = append(b, doc...)
	for _, p := range payloads {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(p.Name)))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(p.Kind)))
		b = binary.LittleEndian.AppendUint32(b, p.Version)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.Data)))
		b = append(b, p.Name...)
		b = append(b, p.Kind...)
		b = append(b, p.Data...)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

func payloadBytes(ps []Payload) int {
	n := 0
	for _, p := range ps {
		n += payloadHeader + len(p.Name) + len(p.Kind) + len(p.Data)
	}
	return n
}

func checkPayloads(ps []Payload) error {
	if len(ps) > MaxPayloads {
		return fmt.Errorf("%d payloads, at most %d are allowed: %w", len(ps), MaxPayloads, ErrSpec)
	}
	for i, p := range ps {
		if err := checkText(fmt.Sprintf("name of payload %d", i), p.Name, MaxNameBytes); err != nil {
			return err
		}
		if err := checkText(fmt.Sprintf("kind of payload %d", i), p.Kind, MaxNameBytes); err != nil {
			return err
		}
		if len(p.Data) > MaxPayloadBytes {
			return fmt.Errorf("payload %q has %d bytes, at most %d are allowed: %w", p.Name, len(p.Data), MaxPayloadBytes, ErrSpec)
		}
	}
	if n := payloadBytes(ps); n > MaxStateBytes {
		return fmt.Errorf("all payloads have %d bytes, at most %d are allowed: %w", n, MaxStateBytes, ErrSpec)
	}
	return nil
}

// manifestSize returns the length that a manifest file with this header must have.
func manifestSize(h []byte) (int64, error) {
	if len(h) < manifestHeader {
		if !strings.HasPrefix(manifestMagic, string(h[:min(len(h), len(manifestMagic))])) {
			return 0, fmt.Errorf("%s does not begin like one: %w", ManifestName, ErrForeign)
		}
		return 0, fmt.Errorf("%s has only %d bytes: %w", ManifestName, len(h), ErrIncomplete)
	}
	if string(h[:8]) != manifestMagic {
		return 0, fmt.Errorf("%s does not begin like one: %w", ManifestName, ErrForeign)
	}
	if v := binary.LittleEndian.Uint32(h[8:]); v != Version {
		return 0, fmt.Errorf("%s is of format %d, this version reads format %d: %w: use the version that wrote it",
			ManifestName, v, Version, ErrVersion)
	}
	doc, state := binary.LittleEndian.Uint32(h[12:]), binary.LittleEndian.Uint64(h[16:])
	if doc > MaxManifestJSON || state > MaxStateBytes || binary.LittleEndian.Uint32(h[24:]) > MaxPayloads ||
		binary.LittleEndian.Uint32(h[28:]) != 0 {
		return 0, corrupt(ManifestName, 0, "the header states impossible lengths")
	}
	return manifestHeader + int64(doc) + int64(state) + manifestSum, nil
}

// decodeManifest is the inverse of encodeManifest. The payloads' Data point
// into b. It accepts only what encodeManifest writes.
func decodeManifest(b []byte) (*Manifest, []Payload, error) {
	size, err := manifestSize(b)
	if err != nil {
		return nil, nil, err
	}
	if int64(len(b)) < size {
		return nil, nil, fmt.Errorf("%s has %d bytes of %d: %w", ManifestName, len(b), size, ErrIncomplete)
	}
	if int64(len(b)) > size {
		return nil, nil, corrupt(ManifestName, size, "%d bytes too many", int64(len(b))-size)
	}
	body, sum := b[:size-manifestSum], b[size-manifestSum:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, nil, corrupt(ManifestName, 0, "SHA-256 is %x, the file says %x", got[:4], sum[:4])
	}
	docEnd := manifestHeader + int(binary.LittleEndian.Uint32(b[12:]))
	m, err := decodeJSON(body[manifestHeader:docEnd])
	if err != nil {
		return nil, nil, err
	}
	ps, err := decodePayloads(body[docEnd:], int(binary.LittleEndian.Uint32(b[24:])), int64(docEnd))
	if err != nil {
		return nil, nil, err
	}
	return m, ps, nil
}

func decodeJSON(doc []byte) (*Manifest, error) {
	m, plain := canonical(doc)
	if plain {
		if err := m.acceptable(); err != nil {
			return nil, err
		}
		return m, nil
	}
	m = new(Manifest)
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.DisallowUnknownFields()
	if err := dec.Decode(m); err != nil {
		return nil, corrupt(ManifestName, manifestHeader, "JSON: %v", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, corrupt(ManifestName, manifestHeader, "JSON: something follows the document")
	}
	if err := m.acceptable(); err != nil {
		return nil, err
	}
	// The decoder accepts repeated names, names in other cases and missing fields. A manifest has one canonical
	// form, so encode it again and compare.
	if again, err := m.encodeJSON(); err != nil || !bytes.Equal(again, doc) {
		return nil, corrupt(ManifestName, manifestHeader, "JSON is not in canonical form")
	}
	return m, nil
}

// acceptable returns an error if a manifest that was read is foreign or corrupt.
func (m *Manifest) acceptable() error {
	if m.Arch != arch {
		return fmt.Errorf("%s is of a %.20q machine, this is %s: %w", ManifestName, m.Arch, arch, ErrForeign)
	}
	if err := m.check(); err != nil {
		return corrupt(ManifestName, manifestHeader, "%v", err)
	}
	return nil
}

func decodePayloads(b []byte, n int, at int64) ([]Payload, error) {
	total := len(b)
	ps := make([]Payload, 0, n)
	for i := range n {
		where := at + int64(total-len(b))
		if len(b) < payloadHeader {
			return nil, corrupt(ManifestName, where, "payload %d of %d has no header", i, n)
		}
		name, kind := uint64(binary.LittleEndian.Uint16(b)), uint64(binary.LittleEndian.Uint16(b[2:]))
		version, data := binary.LittleEndian.Uint32(b[4:]), uint64(binary.LittleEndian.Uint32(b[8:]))
		b = b[payloadHeader:]
		if name > MaxNameBytes || kind > MaxNameBytes || data > MaxPayloadBytes || name+kind+data > uint64(len(b)) {
			return nil, corrupt(ManifestName, where, "payload %d of %d has impossible lengths", i, n)
		}
		ps = append(ps, Payload{
			Name:    string(b[:name]),
			Kind:    string(b[name : name+kind]),
			Version: version,
			Data:    b[name+kind : name+kind+data : name+kind+data],
		})
		b = b[name+kind+data:]
	}
	if len(b) != 0 {
		return nil, corrupt(ManifestName, at+int64(total-len(b)), "%d bytes follow the last payload", len(b))
	}
	if err := checkPayloads(ps); err != nil {
		return nil, corrupt(ManifestName, at, "%v", err)
	}
	return ps, nil
}
