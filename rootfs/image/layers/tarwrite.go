package layers

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// WriteTree writes the files of a tree as a tar stream: parents first, siblings in byte order. The first of
// several names of an inode has the content, and the others are hard links to it. With layer set, names with a
// special meaning in a layer are an error.
func WriteTree(ctx context.Context, t *fstree.Tree, w io.Writer, layer bool, progress func(done int64)) error {
	tw := tar.NewWriter(w)
	first := map[*fstree.Inode]string{}
	var done int64
	err := t.Walk(func(p string, n *fstree.Inode) error {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if layer && IsWhiteout(p) {
			return fmt.Errorf("%w: the name %q would be a whiteout in a layer; use the format tar", image.ErrInvalidOption, p)
		}
		e := Entry{Path: p, Inode: n, Link: first[n]}
		if e.Link == "" && !n.IsDir() {
			first[n] = p
		}
		if err := WriteEntry(ctx, tw, e); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if e.Link == "" && n.Size > 0 {
			done += n.Size
			progress(done)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func IsWhiteout(p string) bool { return strings.HasPrefix(path.Base(p), whiteoutPrefix) }

// WriteEntry writes an entry of a tree to a tar stream.
func WriteEntry(ctx context.Context, tw *tar.Writer, e Entry) error {
	n := e.Inode
	h := &tar.Header{Name: e.Path, Uid: int(n.UID), Gid: int(n.GID), ModTime: n.Mtime, Format: tar.FormatPAX, Mode: int64(n.Mode.Perm())}
	for bit, mode := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if n.Mode&mode != 0 {
			h.Mode |= bit
		}
	}
	for _, k := range slices.Sorted(maps.Keys(n.Xattrs)) {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[paxXattr+k] = n.Xattrs[k]
	}
	switch {
	case e.Link != "":
		h.Typeflag, h.Linkname = tar.TypeLink, e.Link
		return tw.WriteHeader(h)
	case n.IsDir():
		h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
	case n.Mode.Type() == fs.ModeSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.Target
	case n.Mode.Type() == fs.ModeNamedPipe:
		h.Typeflag = tar.TypeFifo
	case n.Mode&fs.ModeDevice != 0:
		h.Typeflag = tar.TypeBlock
		if n.Mode&fs.ModeCharDevice != 0 {
			h.Typeflag = tar.TypeChar
		}
		h.Devmajor, h.Devminor = int64(n.Rdev>>8&0xfff), int64(n.Rdev&0xff|n.Rdev>>12&0xfff00)
	default:
		h.Typeflag, h.Size = tar.TypeReg, n.Size
	}
	if err := tw.WriteHeader(h); err != nil || h.Size == 0 {
		return err
	}
	r, err := n.Data.Open()
	if err != nil {
		return err
	}
	_, err = io.Copy(tw, artifact.NewReader(ctx, r))
	return errors.Join(err, r.Close())
}
