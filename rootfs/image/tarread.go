package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// paxXattr is the prefix of PAX records that carry extended attributes, as star, GNU tar and libarchive write them.
const paxXattr = "SCHILY.xattr."

// readTar reads a whole tar stream into a tree. The contents of regular files go to the spool, which must be an empty
// file and must stay open as long as the tree is used. onRead is told the number of content bytes so far.
//
// Read errors of r are passed on as they are; a damaged archive, and an entry that has no place in a root filesystem,
// is ErrBadArchive.
func readTar(ctx context.Context, r io.Reader, spool *os.File, maxBytes int64, onRead func(int64)) (*fstree.Tree, error) {
	t := fstree.New()
	w := sparse.NewWriter(spool)
	src := &watchedReader{ctx: ctx, r: r}
	tr := tar.NewReader(src)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			if src.err != nil {
				return nil, src.err
			}
			return nil, fmt.Errorf("%w: read the next entry: %w", ErrBadArchive, err)
		}
		if err := addTar(t, h, tr, w, spool, maxBytes); err != nil {
			switch {
			case src.err != nil:
				return nil, src.err
			case errors.Is(err, ErrTooLarge), errors.Is(err, errSpool):
				return nil, err
			}
			return nil, fmt.Errorf("%w: entry %q: %w", ErrBadArchive, h.Name, err)
		}
		if onRead != nil {
			onRead(t.Bytes)
		}
	}
	if err := w.Finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", errSpool, err)
	}
	return t, nil
}

var errSpool = errors.New("write the spool file (is the disk of the image store full?)")

// headerInode makes the inode that a header describes, without its content, and without what a hard link refers to. It
// counts in skipped what cannot be kept. Times that EROFS cannot hold are an error, or are clamped and counted.
func headerInode(h *tar.Header, skipped *fstree.Skipped, clampTimes bool) (*fstree.Inode, error) {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > 1<<32-2 || int64(h.Gid) > 1<<32-2 {
		return nil, fmt.Errorf("owner %d:%d is out of range", h.Uid, h.Gid)
	}
	n := &fstree.Inode{Mode: h.FileInfo().Mode(), UID: uint32(h.Uid), GID: uint32(h.Gid), Mtime: h.ModTime}
	if sec := h.ModTime.Unix(); sec < 0 || clampTimes && sec > maxSeconds {
		if !clampTimes {
			return nil, fmt.Errorf("modification time %v is before 1970, which EROFS cannot hold", h.ModTime)
		}
		skipped.Times++
		n.Mtime = time.Unix(min(max(sec, 0), maxSeconds), 0)
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, paxXattr)
		if !ok {
			continue
		}
		if !erofs.KeepXattr(name) {
			skipped.Xattrs++
			continue
		}
		if n.Xattrs == nil {
			n.Xattrs = map[string]string{}
		}
		// Records are pieces of one string of up to 1 MiB, which stays as long as any piece of it.
		n.Xattrs[strings.Clone(name)] = strings.Clone(v)
	}
	perm := n.Mode &^ fs.ModeType
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, '\x00':
		n.Mode, n.Size = perm, h.Size
	case tar.TypeLink:
		n.Mode = perm
	case tar.TypeSymlink:
		n.Mode, n.Target = fs.ModeSymlink|0o777, strings.Clone(h.Linkname)
	case tar.TypeDir:
		n.Mode = perm | fs.ModeDir
	case tar.TypeFifo:
		n.Mode = perm | fs.ModeNamedPipe
	case tar.TypeChar, tar.TypeBlock:
		n.Mode = perm | fs.ModeDevice
		if h.Typeflag == tar.TypeChar {
			n.Mode |= fs.ModeCharDevice
		}
		if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 1<<12 || h.Devminor > 1<<20 {
			return nil, fmt.Errorf("device number %d:%d is out of range", h.Devmajor, h.Devminor)
		}
		var err error
		if n.Rdev, err = fstree.EncodeDev(uint32(h.Devmajor), uint32(h.Devminor)); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("entry type %q is not known", h.Typeflag)
	}
	return n, nil
}

// maxSeconds is the end of the year 9999. Times beyond it are no times of files.
const maxSeconds = 253402300799

// spoolContent is the content of a file that lies in a spool file.
type spoolContent struct {
	f         *os.File
	off, size int64
}

func (c spoolContent) Open() (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(c.f, c.off, c.size)), nil
}

// spoolFile copies the content of a regular file to the spool.
func spoolFile(n *fstree.Inode, data io.Reader, w *sparse.Writer, spool *os.File) error {
	if n.Size == 0 {
		return nil
	}
	if n.Size >= sparse.BlockSize { // so that its blocks of zeros become holes
		if err := w.Align(); err != nil {
			return fmt.Errorf("%w: %w", errSpool, err)
		}
	}
	n.Data = spoolContent{f: spool, off: w.Pos(), size: n.Size}
	got, err := io.Copy(markWriteErrors{w}, data)
	if err != nil {
		return err
	}
	if got != n.Size {
		return fmt.Errorf("%d bytes of content where its header says %d", got, n.Size)
	}
	return nil
}

// addTar puts an entry of a tar stream on the tree.
func addTar(t *fstree.Tree, h *tar.Header, data io.Reader, w *sparse.Writer, spool *os.File, maxBytes int64) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	n, err := headerInode(h, &t.Skipped, false)
	if err != nil {
		return err
	}
	if n.Mode.IsRegular() && h.Typeflag != tar.TypeLink {
		if t.Bytes += n.Size; t.Bytes > maxBytes {
			return fmt.Errorf("%w: its files have more than %d bytes; raise MaxBytes (--max-size) to take it", ErrTooLarge, maxBytes)
		}
		if err := spoolFile(n, data, w, spool); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeLink {
		to := t.Lookup(h.Linkname)
		if to == nil || to.IsDir() {
			return fmt.Errorf("hard link to %q, which no earlier entry made a file", h.Linkname)
		}
		n = to
	}
	return t.Add(h.Name, n)
}

// markWriteErrors tells failures of the spool apart from failures of the stream.
type markWriteErrors struct{ w io.Writer }

func (m markWriteErrors) Write(p []byte) (int, error) {
	n, err := m.w.Write(p)
	if err != nil {
		err = fmt.Errorf("%w: %w", errSpool, err)
	}
	return n, err
}

// watchedReader ends at the cancellation of a context and remembers the error of the reader below it.
type watchedReader struct {
	ctx context.Context
	r   io.Reader
	err error
}

func (w *watchedReader) Read(p []byte) (int, error) {
	if err := context.Cause(w.ctx); err != nil {
		w.err = err
		return 0, err
	}
	n, err := w.r.Read(p)
	if err != nil && err != io.EOF {
		w.err = err
	}
	return n, err
}
