package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// ExportVersion is the version of the stream that Export writes and Import reads.
const ExportVersion = 1

// Bounds of an exported snapshot.
const (
	MaxExtraFiles  = 4096
	maxExportTable = 4 << 20
	exportBuffer   = 256 << 10
)

const (
	exportMagic  = "DROWSEXP"
	exportEnd    = "DROWSEXE"
	exportHeader = 16
	// exportName is what errors call the stream.
	exportName = "export"
)

// ExtraFile is a file of the caller that goes with a snapshot, such as a layer of a disk.
type ExtraFile struct {
	// Name is the name that Import passes to Placer.Place: printable text, at most MaxNameBytes.
	Name string
	// Size is the exact length in bytes.
	Size int64
	// Open opens the file for reading. Export reads it twice, once for its hash.
	Open func() (io.ReadCloser, error)
}

// Placer receives the extra files of a snapshot that is being imported, and decides what its manifest may say.
type Placer interface {
	// Import calls Admit first, before it writes anything, with the manifest as sent. An error refuses the import.
	Admit(m *Manifest) error
	// Place begins a file of exactly size bytes. The name is printable text, at most MaxNameBytes, chosen by the
	// maker of the stream: it may have slashes and dots. If the file already exists, Place may refuse it, or
	// accept it if it is the same.
	Place(name string, size int64) (Placement, error)
	// Import calls Adopt last, when all placements are committed. Adopt may change the manifest's Disks, Labels,
	// Host, Kernel, Image and Sandbox. The imported snapshot has the manifest as Adopt leaves it. An error refuses
	// the import.
	Adopt(m *Manifest) error
}

// Placement is one file that is being placed.
type Placement interface {
	io.Writer
	// Import calls Commit when it has received and checked the whole stream. When Commit returns, the file must be
	// durable.
	Commit() error
	// Abort undoes Place and Commit. A file that others may have come to need since Commit may stay. Import calls
	// Abort at most once, and only if the import fails.
	Abort() error
}

// SentFile describes a file of a snapshot that is sent elsewhere.
type SentFile struct {
	// Extra is true for the caller's files.
	Extra bool   `json:"extra"`
	Name  string `json:"name"`
	Size  int64  `json:"size"` // bytes
}

// exportEntry describes one file in the stream.
type exportEntry struct {
	SentFile
	SHA256 string `json:"sha256"`
}

type exportTable struct {
	Files []exportEntry `json:"files"`
}

func (t *exportTable) encode() ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(t)
	return b.Bytes(), err
}

// Export writes the snapshot in dir, with all its files, and the extra files to w as one stream for Import: see
// FORMAT.md, "Exported snapshots". It reads each file twice and holds 256 KiB in memory. It also sends the parts
// of files that the snapshot does not need; Compact it first if UsageOf finds many of them. Export fails like
// Open, with ErrSpec for extra files that cannot be sent, with ErrIncomplete for those shorter than their Size, or
// with the error of w, of a file or of the context.
func Export(ctx context.Context, w io.Writer, dir string, extra []ExtraFile) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.export(ctx, w, extra); err != nil {
		return fmt.Errorf("exporting snapshot %s: %w", dir, err)
	}
	return nil
}

// Send calls put for each file of the snapshot in dir, and then for the extra files, in the order of Source.Files. A
// reader that ends before the file's size has an incomplete file. Send fails like Export, or with the error of put.
func Send(ctx context.Context, dir string, extra []ExtraFile, put func(f SentFile, r io.Reader) error) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	files, err := s.exports(extra)
	if err != nil {
		return fmt.Errorf("sending snapshot %s: %w", dir, err)
	}
	for i := range files {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := files[i].send(put); err != nil {
			return fmt.Errorf("sending snapshot %s: %s: %w", dir, files[i].Name, err)
		}
	}
	return nil
}

func (f *exported) send(put func(SentFile, io.Reader) error) (err error) {
	r, err := f.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return put(f.SentFile, io.LimitReader(r, f.Size))
}

// exported is a file to be sent.
type exported struct {
	exportEntry
	open func() (io.ReadCloser, error)
}

// exports lists the files to send, without the hashes.
func (s *Snapshot) exports(extra []ExtraFile) ([]exported, error) {
	// A manifest has one encoding, so this gives the manifest file byte for byte.
	body, err := encodeManifest(s.manifest, s.payloads)
	if err != nil {
		return nil, err
	}
	out := []exported{{sentEntry(false, ManifestName, int64(len(body))), func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(body)), nil
	}}}
	for i, mf := range s.manifest.Memory.Files {
		out = append(out, exported{sentEntry(false, mf.Name, mf.Size), func() (io.ReadCloser, error) {
			return io.NopCloser(io.NewSectionReader(s.files[i], 0, mf.Size)), nil
		}})
	}
	if len(extra) > MaxExtraFiles {
		return nil, fmt.Errorf("%d extra files, at most %d are allowed: %w", len(extra), MaxExtraFiles, ErrSpec)
	}
	seen := map[string]bool{}
	for _, e := range extra {
		if err := checkExtra(e.Name, e.Size); err != nil {
			return nil, err
		}
		if seen[e.Name] {
			return nil, fmt.Errorf("two extra files have the name %q: %w", e.Name, ErrSpec)
		}
		seen[e.Name] = true
		out = append(out, exported{sentEntry(true, e.Name, e.Size), e.Open})
	}
	return out, nil
}

func sentEntry(extra bool, name string, size int64) exportEntry {
	return exportEntry{SentFile: SentFile{Extra: extra, Name: name, Size: size}}
}

func checkExtra(name string, size int64) error {
	if name == "" || size < 0 || size > maxFileSize {
		return fmt.Errorf("extra file %.80q has no name or the impossible size %d: %w", name, size, ErrSpec)
	}
	return checkText("name of an extra file", name, MaxNameBytes)
}

func (s *Snapshot) export(ctx context.Context, w io.Writer, extra []ExtraFile) error {
	files, err := s.exports(extra)
	if err != nil {
		return err
	}
	buf := make([]byte, exportBuffer)
	var table exportTable
	for i := range files {
		f := &files[i]
		sum := sha256.New()
		if err := f.copy(ctx, sum, buf); err != nil {
			return err
		}
		f.SHA256 = hex.EncodeToString(sum.Sum(nil))
		table.Files = append(table.Files, f.exportEntry)
	}
	doc, err := table.encode()
	if err != nil {
		return err
	}
	if len(doc) > maxExportTable {
		return fmt.Errorf("the table of files has %d bytes, at most %d are allowed: %w", len(doc), maxExportTable, ErrSpec)
	}
	head := append([]byte(exportMagic), make([]byte, 8)...)
	binary.LittleEndian.PutUint32(head[8:], ExportVersion)
	binary.LittleEndian.PutUint32(head[12:], uint32(len(doc)))
	head = append(head, doc...)
	sum := sha256.Sum256(head)
	whole := sha256.New()
	out := io.MultiWriter(w, whole)
	if _, err := out.Write(append(head, sum[:]...)); err != nil {
		return err
	}
	for i := range files {
		// Import would refuse a file that has changed since it was hashed. It is better to fail here.
		got := sha256.New()
		if err := files[i].copy(ctx, io.MultiWriter(out, got), buf); err != nil {
			return err
		}
		if hex.EncodeToString(got.Sum(nil)) != files[i].SHA256 {
			return fmt.Errorf("%s has changed while it was being sent: %w", files[i].Name, ErrSpec)
		}
	}
	if _, err := io.WriteString(out, exportEnd); err != nil {
		return err
	}
	_, err = w.Write(whole.Sum(nil))
	return err
}

// copy writes the content of the file to w.
func (f *exported) copy(ctx context.Context, w io.Writer, buf []byte) (err error) {
	r, err := f.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for left := f.Size; left > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		b := buf[:min(left, int64(len(buf)))]
		if _, err := io.ReadFull(r, b); err != nil {
			return readError(f.Name, f.Size-left, len(b), err)
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
		left -= int64(len(b))
	}
	return nil
}

// Imported describes a snapshot that has been imported.
type Imported struct {
	Dir string
	// Manifest is the imported snapshot's manifest. Its memory files have new ids.
	Manifest *Manifest
	// ManifestSHA256 is the hash of the manifest as it was sent.
	ManifestSHA256 string
}

// Import reads a stream of Export from r, up to its end and no further, and makes the snapshot in the directory
// parent under its ID, which must not be taken. Extra files go to place; if place is nil, Import refuses a stream
// that has any. Import checks all data as it arrives, against hashes that came earlier in the stream. It commits
// the extra files and then the snapshot only when the whole stream is there. It fails with ErrIncomplete,
// ErrCorrupt, ErrForeign or ErrVersion if the stream ends early, is damaged, or is of another kind or version, and
// leaves nothing behind; other errors are those of Create. The hashes detect accidents only: an attacker who can
// change the stream can change them too, so compare ManifestSHA256 with the sender's.
//
// The memory files get new ids, because the maker of the stream has chosen those in it.
func Import(ctx context.Context, r io.Reader, parent string, place Placer) (*Imported, error) {
	return imported(parent)(importTo(ctx, r, filepath.Clean(parent), place, osfile.OS))
}

// Source is where the files of a snapshot come from that has been sent.
type Source interface {
	// Files returns the manifest, then the memory files in its order, then at most MaxExtraFiles extra files, no two
	// of one name.
	Files() []SentFile
	// Copy writes the content of file i to w, which is exactly of the stated size and checked against a hash. Receive
	// calls it once for each file, in their order.
	Copy(ctx context.Context, i int, w io.Writer) error
	// End says whether all was as it must be.
	End() error
}

// Receive is Import from a Source.
func Receive(ctx context.Context, src Source, parent string, place Placer) (*Imported, error) {
	return imported(parent)(receive(ctx, src, filepath.Clean(parent), place, osfile.OS, nil))
}

func imported(parent string) func(*Imported, error) (*Imported, error) {
	return func(in *Imported, err error) (*Imported, error) {
		if err != nil {
			return nil, writeError(fmt.Sprintf("importing a snapshot to %s", parent), err)
		}
		return in, nil
	}
}

// importer reads the stream.
type importer struct {
	r     io.Reader
	at    int64
	whole hash.Hash
	buf   []byte
	files []exportEntry
}

// Files implements Source.
func (im *importer) Files() (out []SentFile) {
	for _, e := range im.files {
		out = append(out, e.SentFile)
	}
	return out
}

// Copy implements Source.
func (im *importer) Copy(ctx context.Context, i int, w io.Writer) error {
	return im.file(ctx, im.files[i], w)
}

// read fills p and adds it to the hash of the whole stream.
func (im *importer) read(p []byte) error {
	n, err := io.ReadFull(im.r, p)
	im.at += int64(n)
	if err != nil {
		return readError(exportName, im.at-int64(n), len(p), err)
	}
	im.whole.Write(p)
	return nil
}

// table reads everything before the first file.
func (im *importer) table() (*exportTable, error) {
	head := make([]byte, exportHeader)
	if err := im.read(head); err != nil {
		return nil, err
	}
	if string(head[:8]) != exportMagic {
		return nil, fmt.Errorf("it does not begin like an exported snapshot: %w", ErrForeign)
	}
	if v := binary.LittleEndian.Uint32(head[8:]); v != ExportVersion {
		return nil, fmt.Errorf("it is an export of format %d, this version reads format %d: %w: use the version that wrote it",
			v, ExportVersion, ErrVersion)
	}
	size := binary.LittleEndian.Uint32(head[12:])
	if size > maxExportTable {
		return nil, corrupt(exportName, 0, "the header states an impossible length")
	}
	doc := make([]byte, size)
	if err := im.read(doc); err != nil {
		return nil, err
	}
	want := sha256.Sum256(append(head, doc...))
	var got [sha256.Size]byte
	if err := im.read(got[:]); err != nil {
		return nil, err
	}
	if got != want {
		return nil, corrupt(exportName, 0, "the table's SHA-256 is %x, the stream says %x", want[:4], got[:4])
	}
	t, err := decodeExportTable(doc)
	if err != nil {
		return nil, corrupt(exportName, exportHeader, "%v", err)
	}
	return t, nil
}

// decodeExportTable accepts only what encode writes.
func decodeExportTable(doc []byte) (*exportTable, error) {
	t := new(exportTable)
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.DisallowUnknownFields()
	if err := dec.Decode(t); err != nil {
		return nil, fmt.Errorf("table: %w", err)
	}
	if again, err := t.encode(); err != nil || !bytes.Equal(again, doc) {
		return nil, errors.New("the table is not in canonical form")
	}
	for _, e := range t.Files {
		sum, err := hex.DecodeString(e.SHA256)
		if err != nil || len(sum) != sha256.Size || strings.ToLower(e.SHA256) != e.SHA256 {
			return nil, fmt.Errorf("file %.80q has no SHA-256", e.Name)
		}
	}
	return t, nil
}

// checkSent checks the list of files of a snapshot. It returns how many are not extra files.
func checkSent(files []SentFile) (own int, err error) {
	extra := map[string]bool{}
	for _, e := range files {
		if err := checkExtra(e.Name, e.Size); err != nil {
			return 0, err
		}
		switch {
		case e.Extra && extra[e.Name], !e.Extra && len(extra) > 0:
			return 0, fmt.Errorf("file %.80q is there twice or out of order", e.Name)
		case e.Extra:
			extra[e.Name] = true
		default:
			own++
		}
	}
	if own < 2 || own > 1+MaxFiles || len(extra) > MaxExtraFiles || files[0].Name != ManifestName {
		return 0, fmt.Errorf("%d files of the snapshot and %d extra files cannot be", own, len(extra))
	}
	if m := files[0]; m.Size < manifestHeader+manifestSum || m.Size > manifestHeader+MaxManifestJSON+MaxStateBytes+manifestSum {
		return 0, fmt.Errorf("a manifest of %d bytes cannot be", m.Size)
	}
	return own, nil
}

// file copies the next file of the stream.
func (im *importer) file(ctx context.Context, e exportEntry, w io.Writer) error {
	sum, began := sha256.New(), im.at
	for left := e.Size; left > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		b := im.buf[:min(left, int64(len(im.buf)))]
		if err := im.read(b); err != nil {
			return err
		}
		sum.Write(b)
		if _, err := w.Write(b); err != nil {
			return err
		}
		left -= int64(len(b))
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != e.SHA256 {
		return corrupt(exportName, began, "SHA-256 of %s is %.8s, the table says %.8s", e.Name, got, e.SHA256)
	}
	return nil
}

// writeHeader makes a memory file that has its size and its header.
func (w *writer) writeHeader(name string, size int64, id [16]byte) (err error) {
	f, err := w.fs.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(size); err != nil {
		return err
	}
	if _, err := f.WriteAt(encodeFileHeader(id), 0); err != nil {
		return err
	}
	return f.Sync()
}

// newHeader writes a memory file to w with another header. The first Write must have the whole old header.
type newHeader struct {
	w io.Writer
	// of is the file's entry in the stream's manifest, and id its new id.
	of   MemoryFile
	id   [16]byte
	done bool
}

// Write implements io.Writer.
func (h *newHeader) Write(p []byte) (int, error) {
	if h.done {
		return h.w.Write(p)
	}
	if len(p) < fileHeader {
		return 0, corrupt(h.of.Name, 0, "%d bytes are no header", len(p))
	}
	if err := checkFileHeader(p[:fileHeader], h.of.Name, h.of.ID); err != nil {
		return 0, err
	}
	h.done = true
	if _, err := h.w.Write(encodeFileHeader(h.id)); err != nil {
		return 0, err
	}
	n, err := h.w.Write(p[fileHeader:])
	return fileHeader + n, err
}

// End implements Source: it reads and checks the trailer.
func (im *importer) End() error {
	began := im.at
	mark := make([]byte, len(exportEnd))
	if err := im.read(mark); err != nil {
		return err
	}
	want := im.whole.Sum(nil)
	got := make([]byte, sha256.Size)
	if err := im.read(got); err != nil {
		return err
	}
	if string(mark) != exportEnd || !bytes.Equal(got, want) {
		return corrupt(exportName, began, "the end is not what it must be")
	}
	return nil
}

func importTo(ctx context.Context, r io.Reader, parent string, place Placer, fsys osfile.FS) (in *Imported, err error) {
	im := &importer{r: r, whole: sha256.New(), buf: make([]byte, exportBuffer)}
	t, err := im.table()
	if err != nil {
		return nil, err
	}
	im.files = t.Files
	return receive(ctx, im, parent, place, fsys, nil)
}

// receive makes the snapshot. If more is not nil, its memory files have only headers.
func receive(ctx context.Context, src Source, parent string, place Placer, fsys osfile.FS, more *More) (in *Imported, err error) {
	later := more != nil
	w := &writer{fs: fsys}
	files := src.Files()
	own, err := checkSent(files)
	if err != nil {
		return nil, corrupt(exportName, exportHeader, "%v", err)
	}
	if own < len(files) && place == nil {
		return nil, fmt.Errorf("%d extra files, and nowhere to put them: %w", len(files)-own, ErrSpec)
	}
	var body bytes.Buffer
	if err := src.Copy(ctx, 0, &body); err != nil {
		return nil, err
	}
	m, payloads, err := decodeManifest(body.Bytes())
	if err != nil {
		return nil, err
	}
	need := uint64(body.Len())
	if len(m.Memory.Files) != own-1 {
		return nil, corrupt(exportName, exportHeader, "%d memory files, the manifest has %d", own-1, len(m.Memory.Files))
	}
	for i, f := range m.Memory.Files {
		if e := files[1+i]; e.Name != f.Name || e.Size != f.Size {
			return nil, corrupt(exportName, exportHeader, "the table has %s of %d bytes, the manifest %s of %d", e.Name, e.Size, f.Name, f.Size)
		}
		need += uint64(f.Size)
	}
	if later {
		need += uint64(more.Bytes)
	}
	dir := filepath.Join(parent, m.ID)
	if err := unused(fsys, dir); err != nil {
		return nil, fmt.Errorf("%s: %w", m.ID, err)
	}
	if free, err := fsys.Free(parent); err == nil && free < need {
		return nil, fmt.Errorf("%s has %d bytes left and %d are needed: %w", parent, free, need, ErrNoSpace)
	}
	if place != nil {
		if err := place.Admit(m); err != nil {
			return nil, err
		}
	}
	temp, lock, err := w.tempDir(parent)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	unwanted := temp
	var placed []Placement
	defer func() {
		if unwanted == "" {
			return
		}
		in = nil
		err = errors.Join(err, fsys.RemoveAll(unwanted))
		for _, p := range placed {
			err = errors.Join(err, p.Abort())
		}
	}()
	put := func(name string, write func(io.Writer) error) error {
		_, err := w.writeFile(filepath.Join(temp, name), func(f io.Writer) (int64, error) { return 0, write(f) })
		return err
	}
	for i := range own - 1 {
		mf := &m.Memory.Files[i]
		h := &newHeader{of: *mf, id: randomID()}
		mf.ID = hex.EncodeToString(h.id[:])
		if i < own-2 { // the last is the snapshot's own, whose name does not depend on its id
			mf.Name = linkName(mf.ID)
		}
		if later {
			err = w.writeHeader(filepath.Join(temp, mf.Name), mf.Size, h.id)
		} else {
			err = put(mf.Name, func(f io.Writer) error { h.w = f; return src.Copy(ctx, 1+i, h) })
		}
		if err != nil {
			return nil, err
		}
	}
	for i, e := range files[own:] {
		p, err := place.Place(e.Name, e.Size)
		if err != nil {
			return nil, fmt.Errorf("extra file %q: %w", e.Name, err)
		}
		placed = append(placed, p)
		if err := src.Copy(ctx, own+i, p); err != nil {
			return nil, fmt.Errorf("extra file %q: %w", e.Name, err)
		}
	}
	if err := src.End(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	for i, p := range placed {
		if err := p.Commit(); err != nil {
			return nil, fmt.Errorf("extra file %q: %w", files[own+i].Name, err)
		}
	}
	if later && more.Put != nil {
		if err := more.Put(temp); err != nil {
			return nil, err
		}
	}
	if place != nil {
		if err := place.Adopt(m); err != nil {
			return nil, err
		}
	}
	adopted, err := encodeManifest(m, payloads)
	if err != nil {
		return nil, err
	}
	if err := put(ManifestName, func(f io.Writer) error { _, err := f.Write(adopted); return err }); err != nil {
		return nil, err
	}
	if !later {
		// The bytes are those that were sent. Open checks that they are a valid snapshot.
		s, err := OpenIn(fsys, temp)
		if err != nil {
			return nil, err
		}
		s.Close()
	}
	if err := fsys.SyncDir(temp); err != nil {
		return nil, err
	}
	if err := fsys.RenameNew(temp, dir); err != nil {
		return nil, err
	}
	unwanted = dir
	if err := fsys.SyncDir(parent); err != nil {
		return nil, fmt.Errorf("making the name durable: %w", err)
	}
	unwanted = ""
	return &Imported{Dir: dir, Manifest: m, ManifestSHA256: manifestDigest(body.Bytes())}, nil
}
