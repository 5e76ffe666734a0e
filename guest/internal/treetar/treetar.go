// Package treetar turns a file tree into a tar stream and back, for copies between host and guest. The stream may
// come from an attacker: everything that Unpack creates lies beneath the given directory, within limits, and has the
// name that the archive gives it there. No link redirects it elsewhere.
package treetar

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bounds what Unpack accepts. Zero values mean the defaults.
type Limits struct {
	Bytes   int64 // content of all files
	Entries int64
	Entry   int64 // bytes that Unpack counts for each entry, besides its content; 0 by default
	Names   int64 // bytes of the names and targets of directories and links, which Unpack keeps until the end
}

// Defaults of Limits, and limits that are fixed.
const (
	DefaultBytes   = 64 << 30
	DefaultEntries = 1 << 20
	DefaultNames   = 64 << 20
	MaxDepth       = 256  // elements of a name
	MaxName        = 4095 // bytes of a name or link target
	maxSkipped     = 100  // names that Result.Skipped keeps
	packBuffer     = 32 << 10
	maxTail        = 1 << 20 // bytes that may follow the end of an archive
)

// Errors of Unpack that callers can tell apart.
var (
	ErrLimit  = errors.New("the tree exceeds a limit")
	ErrUnsafe = errors.New("the archive names a file outside of its tree, or by way of a link")
)

// Options says how Unpack treats entries.
type Options struct {
	Limits
	// Owner, if not nil, owns everything. Otherwise the archive's ids do with KeepOwner, and the unpacking user
	// without it.
	Owner     *Owner
	KeepOwner bool
	// KeepSetID keeps set-user-id and set-group-id bits.
	KeepSetID bool
	// KeepLinks keeps symbolic links that are absolute or lead out of the tree. Unpack skips them otherwise.
	KeepLinks bool
	// OwnerWrites takes the write permission from all but the owner.
	OwnerWrites bool
	// Rename, if not empty, replaces the first element of every name. Unpack then changes only what has that name,
	// and leaves an unfinished file beside it if the copy of a single file is cut.
	Rename string
	// Marker, if not empty, is the name of a file at the top of the tree, while the tree is incomplete, if that is a
	// directory that Unpack has made.
	Marker string
}

// Owner is a user and group id.
type Owner struct{ UID, GID int }

// Result tells what Pack or Unpack did.
type Result struct {
	Entries int64
	Bytes   int64
	// Kept is how many bytes of content were already there. Bytes does not count them.
	Kept int64
	// Skipped are the first 100 names that were left out: devices, sockets, pipes, and links out of the tree.
	Skipped []string
	// SkippedCount is how many names were left out.
	SkippedCount int64
}

func (r *Result) skip(name string) {
	r.SkippedCount++
	if len(r.Skipped) < maxSkipped {
		r.Skipped = append(r.Skipped, name)
	}
}

// Pack writes the tree at src, a file or directory, as a tar stream. Names start with name. Pack skips devices,
// pipes, sockets, and unfinished files of copies. Someone who changes the tree meanwhile, such as a guest that
// shares it, cannot make Pack read outside the tree: it follows no link.
func Pack(ctx context.Context, w io.Writer, src, name string) (Result, error) {
	from, err := openSource(src)
	if err != nil {
		return Result{}, fmt.Errorf("pack %s: %w", src, err)
	}
	defer from.close()
	bw := bufio.NewWriterSize(w, packBuffer)
	tw := tar.NewWriter(bw)
	var res Result
	err = from.walk(ctx, from.top, func(rel string, s *spot, fi fs.FileInfo) error {
		return packOne(tw, s, fi, from.rename(rel, name), 0, nil, &res)
	})
	if err == nil {
		err = tw.Close()
	}
	if err == nil {
		err = bw.Flush()
	}
	if err != nil {
		return res, fmt.Errorf("pack %s: %w", src, err)
	}
	return res, nil
}

// packOne packs an entry. It leaves out a file's bytes before offset, unless the file has changed since was.
func packOne(tw *tar.Writer, s *spot, fi fs.FileInfo, name string, offset int64, was fs.FileInfo, res *Result) error {
	link := ""
	switch fi.Mode().Type() {
	case 0:
		return packFile(tw, s, name, offset, was, res)
	case fs.ModeDir:
	case fs.ModeSymlink:
		var err error
		if link, err = s.readlink(); err != nil {
			return err
		}
	default:
		res.skip(name)
		return nil
	}
	return writeHeader(tw, fi, link, name, 0, res)
}

func writeHeader(tw *tar.Writer, fi fs.FileInfo, link, name string, offset int64, res *Result) error {
	h, err := tar.FileInfoHeader(fi, link)
	if err != nil {
		return err
	}
	h.Name = name
	if fi.IsDir() {
		h.Name += "/"
	}
	h.Uname, h.Gname = "", "" // names mean nothing on the other side
	h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
	h.Format = tar.FormatPAX
	if offset > 0 {
		h.PAXRecords = map[string]string{paxOffset: strconv.FormatInt(offset, 10)}
		h.Size -= offset
	}
	res.Entries++
	return tw.WriteHeader(h)
}

func packFile(tw *tar.Writer, s *spot, name string, offset int64, was fs.FileInfo, res *Result) error {
	f, err := s.open(os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		res.skip(name)
		return nil
	}
	if offset > 0 && (!os.SameFile(fi, was) || fi.Size() != was.Size() || !fi.ModTime().Equal(was.ModTime())) {
		offset = 0 // the file is no longer the one that was compared
	}
	if err := writeHeader(tw, fi, "", name, offset, res); err != nil {
		return err
	}
	res.Kept += offset
	n, err := io.Copy(tw, io.NewSectionReader(f, offset, fi.Size()-offset))
	res.Bytes += n
	if err != nil {
		return err
	}
	if n < fi.Size()-offset {
		return fmt.Errorf("%s became shorter while it was read: %w", name, io.ErrUnexpectedEOF)
	}
	return nil
}

// Unpack reads a tar stream and creates its tree beneath root. It replaces existing files by renaming: a file has
// its name only when it is whole. It merges directories. It follows no link, from the archive or in the directory:
// an entry below one is ErrUnsafe. It makes symbolic links last. It stops at the first entry that is unsafe or
// exceeds a limit; earlier ones stay. It reads r to its end. If the copy of a large file is cut, an unfinished file
// stays beside it, for UnpackResumed.
func Unpack(ctx context.Context, r io.Reader, root *os.Root, o Options) (Result, error) {
	u, err := newUnpacker(ctx, root, o)
	if err != nil {
		return Result{}, err
	}
	defer u.close()
	return u.unpack(r)
}

func newUnpacker(ctx context.Context, root *os.Root, o Options) (*unpacker, error) {
	in, err := openBeneath(root)
	if err != nil {
		return nil, fmt.Errorf("unpack into %s: %w", root.Name(), err)
	}
	if o.Bytes <= 0 {
		o.Bytes = DefaultBytes
	}
	if o.Entries <= 0 {
		o.Entries = DefaultEntries
	}
	if o.Names <= 0 {
		o.Names = DefaultNames
	}
	u := &unpacker{ctx: ctx, in: in, o: o, links: make(map[string]link)}
	in.made = u.count
	return u, nil
}

// count counts an entry, or a directory that an entry's name implies.
func (u *unpacker) count() error {
	if u.res.Entries++; u.res.Entries > u.o.Entries {
		return fmt.Errorf("%w: more than %d entries", ErrLimit, u.o.Entries)
	}
	if u.left() < 0 {
		return u.tooLarge()
	}
	return u.ctx.Err()
}

// left returns how many bytes of content may still come.
func (u *unpacker) left() int64 { return u.o.Bytes - u.res.Bytes - u.res.Entries*u.o.Entry }

func (u *unpacker) tooLarge() error { return fmt.Errorf("%w: more than %d bytes", ErrLimit, u.o.Bytes) }

// close gives up the tree, and the files of a batch that no entry has used.
func (u *unpacker) close() {
	u.release()
	u.in.close()
}

func (u *unpacker) unpack(r io.Reader) (Result, error) {
	tr := tar.NewReader(r)
	for {
		if err := u.ctx.Err(); err != nil {
			return u.res, err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return u.res, fmt.Errorf("read the archive: %w", err)
		}
		if err := u.count(); err != nil {
			return u.res, err
		}
		if err := u.entry(h, tr); err != nil {
			return u.res, fmt.Errorf("unpack %q: %w", clip(h.Name), err)
		}
	}
	if err := u.finish(); err != nil {
		return u.res, err
	}
	// Padding may follow the archive's end, but only a limited amount.
	n, err := io.Copy(io.Discard, io.LimitReader(r, maxTail))
	if err == nil && n == maxTail {
		err = fmt.Errorf("%w: %d bytes after the end of the archive", ErrLimit, maxTail)
	}
	return u.res, err
}

// clip bounds a name in an error message.
func clip(s string) string {
	const limit = 256
	if len(s) > limit {
		return s[:limit] + "..."
	}
	return s
}

type unpacker struct {
	ctx   context.Context
	in    *beneath
	o     Options
	res   Result
	dirs  []dirMeta       // directories whose mode and time are set at the end
	links map[string]link // symbolic links to make at the end, by name
	held  int64           // bytes of the names and targets in both
	mark  string          // path of the marker, if there is one

	// For a copy that is resumed.
	rw       io.ReadWriter // to the sender
	frames   io.Reader     // from the sender
	there    map[string]*has
	compared int64 // bytes so far
}

type dirMeta struct {
	name  string
	mode  fs.FileMode
	mtime time.Time
}

// link is a symbolic link to make at the end.
type link struct {
	target   string
	owned    bool
	uid, gid int
}

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	name, err := cleanName(h.Name, u.o.Rename)
	if err != nil {
		return err
	}
	if link, ok := u.behindLink(name); ok {
		return fmt.Errorf("%w: %q is a link", ErrUnsafe, clip(link))
	}
	if Unfinished(path.Base(name)) {
		u.res.skip(clip(name))
		return nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.dir(name, h)
	case tar.TypeReg:
		return u.file(name, h, r)
	case tar.TypeSymlink:
		return u.symlink(name, h)
	case tar.TypeLink:
		return u.hardlink(name, h)
	default: // devices, pipes: nothing that a copy should create
		u.res.skip(clip(name))
		return nil
	}
}

// cleanName returns the entry's name beneath the root, or an error if it would lie elsewhere.
func cleanName(name, rename string) (string, error) {
	if len(name) > MaxName || strings.IndexByte(name, 0) >= 0 {
		return "", fmt.Errorf("%w: a name of %d bytes", ErrUnsafe, len(name))
	}
	clean := path.Clean(strings.TrimSuffix(name, "/"))
	if name == "" || path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../") {
		return "", ErrUnsafe
	}
	if strings.Count(clean, "/") >= MaxDepth {
		return "", fmt.Errorf("%w: more than %d directories deep", ErrLimit, MaxDepth)
	}
	if rename != "" {
		_, rest, _ := strings.Cut(clean, "/")
		clean = path.Join(rename, rest)
	}
	return clean, nil
}

// behindLink reports whether a name leads through one of the links to make at the end, and which.
func (u *unpacker) behindLink(name string) (link string, ok bool) {
	if len(u.links) == 0 {
		return "", false
	}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if _, ok := u.links[dir]; ok {
			return dir, true
		}
	}
	return "", false
}

// hold counts bytes of names, which u keeps until the end.
func (u *unpacker) hold(n int) error {
	if u.held += int64(n); u.held > u.o.Names {
		return fmt.Errorf("%w: directories and links with names of more than %d bytes", ErrLimit, u.o.Names)
	}
	return nil
}

// vacate opens the spot of a new file and makes missing parents. It fails if a directory has the name.
func (u *unpacker) vacate(name string) (s *spot, taken bool, err error) {
	s, err = u.in.reach(name)
	if err != nil {
		return nil, false, err
	}
	st, err := s.stat()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s, false, nil
	case err == nil && isDir(&st):
		err = fmt.Errorf("a directory of that name exists: %w", fs.ErrExist)
	}
	if err != nil {
		s.close()
		return nil, false, err
	}
	return s, true, nil
}

// replace makes room for something other than a file. It removes what has the name, unless that is a directory, and
// makes missing parents.
func (u *unpacker) replace(name string) (*spot, error) {
	s, taken, err := u.vacate(name)
	if err == nil && taken {
		if err = s.remove(); err != nil {
			s.close()
		}
	}
	return s, err
}

func (u *unpacker) mode(h *tar.Header) fs.FileMode {
	mode := h.FileInfo().Mode()
	keep := fs.ModePerm | fs.ModeSticky
	if u.o.KeepSetID {
		keep |= fs.ModeSetuid | fs.ModeSetgid
	}
	if u.o.OwnerWrites {
		keep &^= 0o022
	}
	return mode & keep
}

func (u *unpacker) owner(h *tar.Header) (uid, gid int, ok bool) {
	switch {
	case u.o.Owner != nil:
		return u.o.Owner.UID, u.o.Owner.GID, true
	case u.o.KeepOwner:
		return h.Uid, h.Gid, true
	}
	return 0, 0, false
}

func (u *unpacker) dir(name string, h *tar.Header) error {
	if err := u.hold(len(name)); err != nil {
		return err
	}
	delete(u.links, name)
	s, err := u.in.reach(name)
	if err != nil {
		return err
	}
	defer s.close()
	made := false
	st, err := s.stat()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		made = true
		err = s.mkdir(0o700)
	case err == nil && !isDir(&st):
		if err = s.remove(); err == nil {
			err = s.mkdir(0o700)
		}
	}
	if err != nil {
		return err
	}
	if uid, gid, ok := u.owner(h); ok {
		if err := s.chown(uid, gid); err != nil {
			return err
		}
	}
	u.dirs = append(u.dirs, dirMeta{name: name, mode: u.mode(h), mtime: h.ModTime})
	if u.o.Marker == "" || len(u.dirs) > 1 {
		return nil
	}
	// The top of the tree.
	mark := path.Join(name, u.o.Marker)
	m, err := u.in.find(mark)
	if err != nil {
		return err
	}
	defer m.close()
	if made {
		f, err := m.open(os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		u.mark = mark
		return f.Close()
	}
	if st, err := m.stat(); err == nil && isFile(&st) {
		u.mark = mark // from the cut copy
	}
	return nil
}

func (u *unpacker) file(name string, h *tar.Header, r io.Reader) error {
	there, err := u.claim(name, h)
	if err != nil {
		return err
	}
	delete(u.links, name)
	var p *part
	var offset int64
	if there != nil {
		p, offset = there.part, there.there
		u.res.Kept += offset
	}
	var s *spot
	if h.Size < 0 || h.Size > u.left() {
		err = u.tooLarge()
	} else {
		s, _, err = u.vacate(name)
	}
	switch {
	case err != nil:
	case there != nil && p == nil: // it is whole
		defer s.close()
		if h.Size > 0 {
			return fmt.Errorf("%w: %d bytes more than there are", ErrFrames, h.Size)
		}
		return u.describeWhole(s, offset, h)
	case p != nil:
		s.close() // the part has its own spot
	case h.Size >= KeepPart:
		p, err = openPart(u.ctx, s, true)
	default:
		p, err = newPart(s)
	}
	if err != nil {
		if p != nil {
			p.abandon(false)
		} else if s != nil {
			s.close()
		}
		return err
	}
	if cut, err := u.fill(p, offset, h, r); err != nil {
		p.abandon(cut)
		return err
	}
	return p.commit()
}

// fill writes a file's content from an offset on, and its metadata. cut reports that reading the archive failed.
func (u *unpacker) fill(p *part, offset int64, h *tar.Header, r io.Reader) (cut bool, err error) {
	if p.kept {
		if err := p.Truncate(offset); err != nil {
			return false, err
		}
	}
	if _, err := p.Seek(offset, io.SeekStart); err != nil {
		return false, err
	}
	in := &ctxReader{ctx: u.ctx, r: r}
	n, err := io.Copy(p, in)
	u.res.Bytes += n
	if err == nil {
		err = u.describe(p.File, p.at, h)
	}
	if err == nil && p.kept {
		err = p.Sync() // so that the name never has less than the whole content, even after a crash
	}
	return in.failed, err
}

// describe gives an open file its owner, mode and time.
func (u *unpacker) describe(f *os.File, s *spot, h *tar.Header) error {
	if uid, gid, ok := u.owner(h); ok {
		if err := f.Chown(uid, gid); err != nil {
			return err
		}
	}
	if err := f.Chmod(u.mode(h)); err != nil {
		return err
	}
	return s.setTime(h.ModTime)
}

// describeWhole sets the metadata of a file whose content is all there.
func (u *unpacker) describeWhole(s *spot, size int64, h *tar.Header) error {
	f, err := s.open(os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return s.fail("fstat", err)
	}
	if !isWhole(&st, size) {
		return fmt.Errorf("%w: the file is not the one that was compared", ErrFrames)
	}
	return u.describe(f, s, h)
}

// isWhole reports whether a file can be updated in place. One with further names cannot: they may be where no copy
// may change anything.
func isWhole(st *unix.Stat_t, size int64) bool {
	return isFile(st) && st.Size == size && st.Nlink == 1
}

// ctxReader ends a long copy when its context ends.
type ctxReader struct {
	ctx    context.Context
	r      io.Reader
	failed bool // a read failed
}

func (c *ctxReader) Read(p []byte) (int, error) {
	err := c.ctx.Err()
	n := 0
	if err == nil {
		n, err = c.r.Read(p)
	}
	c.failed = c.failed || err != nil && !errors.Is(err, io.EOF)
	return n, err
}

func (u *unpacker) symlink(name string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) > MaxName || strings.IndexByte(h.Linkname, 0) >= 0 {
		return fmt.Errorf("%w: a link target of %d bytes", ErrUnsafe, len(h.Linkname))
	}
	if !u.o.KeepLinks && leadsOut(name, h.Linkname) {
		u.res.skip(clip(name))
		return nil
	}
	if err := u.hold(len(name) + len(h.Linkname)); err != nil {
		return err
	}
	s, _, err := u.vacate(name)
	if err != nil {
		return err
	}
	s.close()
	l := link{target: h.Linkname}
	l.uid, l.gid, l.owned = u.owner(h)
	u.links[name] = l
	return nil
}

// leadsOut reports whether a link at name may lead out of the tree. Every ".." after a name counts as leading out as
// well, since the name may be a link itself.
//
// Other links stay inside, however they are chained. A link's name says in which directory the link really is, since
// no link is on the way there. So the ".." elements at the beginning of its target lead to a directory of the tree.
// From there it only goes down: to an existing file, or to another link of the tree, for which the same holds.
func leadsOut(name, target string) bool {
	if path.IsAbs(target) {
		return true
	}
	depth := strings.Count(name, "/") - 1 // directories of the tree above the link
	if depth < 0 {
		return true // the link is all of the tree
	}
	down := false
	for elem := range strings.SplitSeq(target, "/") {
		switch elem {
		case "", ".":
		case "..":
			if depth--; depth < 0 || down {
				return true
			}
		default:
			down = true
		}
	}
	return false
}

func (u *unpacker) hardlink(name string, h *tar.Header) error {
	from, err := cleanName(h.Linkname, u.o.Rename)
	if err != nil {
		return err
	}
	if from == name {
		return nil
	}
	if link, ok := u.behindLink(from); ok {
		return fmt.Errorf("%w: %q is a link", ErrUnsafe, clip(link))
	}
	if _, ok := u.links[from]; ok || Unfinished(path.Base(from)) {
		return fmt.Errorf("%w: a hard link to what is not a file", ErrUnsafe)
	}
	src, err := u.in.find(from)
	if err != nil {
		return err
	}
	defer src.close()
	st, err := src.stat()
	if err != nil {
		return err
	}
	if !isFile(&st) {
		return fmt.Errorf("%w: a hard link to what is not a file", ErrUnsafe)
	}
	delete(u.links, name)
	s, err := u.replace(name)
	if err != nil {
		return err
	}
	defer s.close()
	return s.link(src)
}

// finish makes the links. Then it sets modes and times of directories, deepest first: set earlier, they would block
// new entries or be undone by them.
func (u *unpacker) finish() error {
	for _, name := range slices.Sorted(maps.Keys(u.links)) {
		if err := u.makeLink(name, u.links[name]); err != nil {
			return fmt.Errorf("unpack link %q: %w", clip(name), err)
		}
	}
	if u.mark != "" {
		if err := u.removeMark(); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		if err := u.dirs[i].set(u.in); err != nil {
			return fmt.Errorf("unpack directory %q: %w", clip(u.dirs[i].name), err)
		}
	}
	return nil
}

func (u *unpacker) makeLink(name string, l link) error {
	if err := u.ctx.Err(); err != nil {
		return err
	}
	s, err := u.replace(name)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.symlink(l.target); err != nil || !l.owned {
		return err
	}
	return s.chown(l.uid, l.gid)
}

func (u *unpacker) removeMark() error {
	s, err := u.in.find(u.mark)
	if err != nil {
		return err
	}
	defer s.close()
	return s.remove()
}

// set gives a directory its mode and time, unless a later entry has replaced it.
func (d *dirMeta) set(in *beneath) error {
	s, err := in.find(d.name)
	if err != nil {
		return nil
	}
	defer s.close()
	if st, err := s.stat(); err != nil || !isDir(&st) {
		return nil
	}
	f, err := s.openDir()
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Chmod(d.mode); err != nil {
		return err
	}
	return s.setTime(d.mtime)
}
