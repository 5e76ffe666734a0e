package erofs

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/erofs/go-erofs"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// Read makes a tree of an image file. Contents stay in the file, which must be open as long as the tree is used.
func Read(ctx context.Context, f *os.File) (*fstree.Tree, error) {
	img, err := erofs.Open(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	t := fstree.New()
	seen := map[int64]*fstree.Inode{}
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
			return t.Add(p, n)
		}
		n := &fstree.Inode{UID: st.UID, GID: st.GID, Mtime: time.Unix(int64(st.Mtime), int64(st.MtimeNs)), Xattrs: UnixXattrs(st.Xattrs)}
		n.Mode = info.Mode().Type() | st.Mode&^fs.ModeType // info's lacks setuid, setgid and sticky
		switch info.Mode().Type() {
		case 0:
			n.Size = info.Size()
			n.Data = erofsContent{img, p}
			t.Bytes += n.Size
		case fs.ModeSymlink:
			if n.Target, err = fs.ReadLink(img, p); err != nil {
				return err
			}
		case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
			n.Rdev = st.Rdev
		case fs.ModeDir, fs.ModeNamedPipe:
		default:
			return fmt.Errorf("%w: %s is of the kind %v", ErrCorrupt, p, info.Mode().Type())
		}
		if st.Nlink > 1 && !info.IsDir() {
			seen[st.Ino] = n
		}
		return t.Add(p, n)
	})
	return t, err
}

// erofsContent is the content of a file of an image.
type erofsContent struct {
	img fs.FS
	p   string
}

func (c erofsContent) Open() (io.ReadCloser, error) { return c.img.Open(c.p) }
