package image

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/erofs/go-erofs"
)

// readEROFS makes a tree of an image file. Contents stay in the file, which must be open as long as the tree is used.
func readEROFS(ctx context.Context, f *os.File) (*tree, error) {
	img, err := erofs.Open(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	modes, err := newModeReader(f)
	if err != nil {
		return nil, err
	}
	t := newTree()
	seen := map[int64]*inode{}
	err = fs.WalkDir(img, ".", func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*erofs.Stat)
		if !ok {
			return fmt.Errorf("%w: %s has no attributes", ErrCorrupt, p)
		}
		if n := seen[st.Ino]; n != nil && !info.IsDir() {
			return t.add(p, n)
		}
		perm, err := modes.mode(st.Ino)
		if err != nil {
			return err
		}
		n := &inode{uid: st.UID, gid: st.GID, mtime: time.Unix(int64(st.Mtime), int64(st.MtimeNs)), xattrs: unixXattrs(st.Xattrs)}
		n.mode = info.Mode().Type() | fs.FileMode(perm&0o777)
		for bit, mode := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
			if perm&bit != 0 {
				n.mode |= mode
			}
		}
		switch info.Mode().Type() {
		case 0:
			n.size = info.Size()
			n.data = erofsContent{img, p}
			t.bytes += n.size
		case fs.ModeSymlink:
			if n.target, err = fs.ReadLink(img, p); err != nil {
				return err
			}
		case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
			n.rdev = st.Rdev
		case fs.ModeDir, fs.ModeNamedPipe:
		default:
			return fmt.Errorf("%w: %s is of the kind %v", ErrCorrupt, p, info.Mode().Type())
		}
		if st.Nlink > 1 && !info.IsDir() {
			seen[st.Ino] = n
		}
		return t.add(p, n)
	})
	return t, err
}

// erofsContent is the content of a file of an image.
type erofsContent struct {
	img fs.FS
	p   string
}

func (c erofsContent) open() (io.ReadCloser, error) { return c.img.Open(c.p) }
