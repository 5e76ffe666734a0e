package layers

import (
	"archive/tar"
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

var ErrSpool = errors.New("write the spool file (is the disk of the image store full?)")

// headerInode makes the inode of a header, without its content and without the target of a hard link. It counts in
// skipped what it cannot keep. For a time that EROFS cannot hold it takes the nearest one.
func headerInode(h *tar.Header, skipped *fstree.Skipped) (*fstree.Inode, error) {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > 1<<32-2 || int64(h.Gid) > 1<<32-2 {
		return nil, fmt.Errorf("owner %d:%d is out of range", h.Uid, h.Gid)
	}
	n := &fstree.Inode{Mode: h.FileInfo().Mode(), UID: uint32(h.Uid), GID: uint32(h.Gid), Mtime: h.ModTime}
	if sec := h.ModTime.Unix(); sec < 0 || sec > maxSeconds {
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
		// Records are substrings of one string of up to 1 MiB, which stays in memory with any of them.
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

// maxSeconds is the end of the year 9999. Later times are not valid times of files.
const maxSeconds = 253402300799

// spoolContent is the content of a file in a spool file.
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
			return fmt.Errorf("%w: %w", ErrSpool, err)
		}
	}
	n.Data = spoolContent{f: spool, off: w.Pos(), size: n.Size}
	got, err := io.Copy(SpoolWriter(w), data)
	if err != nil {
		return err
	}
	if got != n.Size {
		return fmt.Errorf("%d bytes of content where its header says %d", got, n.Size)
	}
	return nil
}

// SpoolWriter writes to w. It marks the errors of w as ErrSpool, unlike those of the source.
func SpoolWriter(w io.Writer) io.Writer { return spoolWriter{w} }

type spoolWriter struct{ w io.Writer }

func (s spoolWriter) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrSpool, err)
	}
	return n, err
}
