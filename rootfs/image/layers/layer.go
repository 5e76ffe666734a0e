package layers

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"sync/atomic"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Limits of archives: they bound what a damaged or hostile archive can make this package allocate, write or
// compute. The limits of a tree (package fstree) apply as well.
const (
	MaxLayers = 512 // of an image
	// All files together may have this many bytes for each allowed file (Options.MaxFiles): of names, link targets
	// and extended attributes in the archives, and of full paths in the image, which the writer keeps.
	metaPerFile = 256
	pathPerFile = 256
	leastMeta   = 64 << 20 // bytes of each that are always allowed
	MaxDepth    = 1024     // levels of directories
	maxLinkHops = 40       // symlinks on the way of one path, as in Linux (MAXSYMLINKS)
	maxFollowed = 16 << 20 // components of the targets of symlinks on the ways of all paths of an image
	// MaxTarOverhead is what a tar stream may have besides contents: headers and padding, of the most entries.
	MaxTarOverhead = 8 << 30
	// A PAX record, or another header that extends the next one, is at most 1 MiB: package archive/tar ensures it.
)

// Names of the OCI image specification, "Layer Filesystem Changeset", Whiteouts.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh." // of AUFS; only the next one has a meaning
	whiteoutOpaque = ".wh..wh..opq"
)

// Budget is what all layers of an image together may have. It is safe for concurrent use.
type Budget struct {
	MaxBytes int64
	MaxFiles int64
	bytes    atomic.Int64 // content of regular files
	entries  atomic.Int64
	meta     atomic.Int64
	OnRead   func(n int64) // may be nil; gets the content so far
}

func NewBudget(maxBytes int64, maxFiles int) *Budget {
	return &Budget{MaxBytes: maxBytes, MaxFiles: int64(maxFiles)}
}

func TooManyFiles(most int64) error {
	return fmt.Errorf("%w: its archives have more than %d files, or as many with the directories that they imply; raise MaxFiles (--max-files) to take it", image.ErrTooLarge, most)
}

func (b *Budget) Take(h *tar.Header, size int64) error {
	meta := int64(len(h.Name) + len(h.Linkname))
	for k, v := range h.PAXRecords {
		meta += int64(len(k) + len(v))
	}
	if b.entries.Add(1) > b.MaxFiles {
		return TooManyFiles(b.MaxFiles)
	}
	if most := max(metaPerFile*b.MaxFiles, leastMeta); b.meta.Add(meta) > most {
		return fmt.Errorf("%w: names and attributes have more than %d bytes; raise MaxFiles (--max-files) to take it", image.ErrTooLarge, most)
	}
	// Do not add first: sizes may be near the end of the range.
	if size > b.MaxBytes || b.bytes.Add(size) > b.MaxBytes {
		return fmt.Errorf("%w: its files have more than %d bytes; raise MaxBytes (--max-size) to take it", image.ErrTooLarge, b.MaxBytes)
	}
	return nil
}

// Layer is a tar stream that was read and is not yet part of a tree. Its file contents are in its spool file.
type Layer struct {
	Entries   []Entry // in the order of the stream
	whiteouts []whiteout
	skipped   fstree.Skipped
}

// named returns the paths that the layer names: those of its entries, and those that its whiteouts hide.
func (l *Layer) named() map[string]struct{} {
	out := make(map[string]struct{}, len(l.Entries)+len(l.whiteouts))
	for _, e := range l.Entries {
		out[e.Path] = struct{}{}
	}
	for _, w := range l.whiteouts {
		if w.name != "" {
			out[path.Join(w.dir, w.name)] = struct{}{}
		}
	}
	return out
}

type Entry struct {
	Path  string // components joined by slashes; "" is the root
	Inode *fstree.Inode
	Link  string // of a hard link: the path of its target, never ""; "" for all others
}

// whiteout hides an entry of the layers below: one name of a directory, or with name "" all its contents.
type whiteout struct{ dir, name string }

// eachEntry calls do for each entry of a tar stream.
//
// It returns errors of r, ErrTooLarge and ErrSpool unchanged. A damaged archive, and an entry that do refuses, is
// ErrBadArchive.
func eachEntry(ctx context.Context, r io.Reader, b *Budget, do func(h *tar.Header, data io.Reader) error) error {
	src := artifact.NewReader(ctx, r)
	tr := tar.NewReader(src)
	data := artifact.NewReader(ctx, tr) // returns holes of sparse files without reading src
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		what := "read the next entry"
		if err == nil {
			what = fmt.Sprintf("entry %.200q", h.Name)
			err = do(h, data)
		}
		switch cause := context.Cause(ctx); {
		case err == nil:
		case src.Err != nil:
			return src.Err
		case cause != nil:
			return cause
		case errors.Is(err, image.ErrTooLarge), errors.Is(err, ErrSpool):
			return err
		default:
			return fmt.Errorf("%w: %s: %w", image.ErrBadArchive, what, err)
		}
		if b.OnRead != nil {
			b.OnRead(b.bytes.Load())
		}
	}
}

// Read reads a whole tar stream. It writes contents to the spool, which must be an empty file and stay open as
// long as the layer's inodes are used. whiteouts gives names with the prefix .wh. the meaning of the image
// specification. Its errors are those of eachEntry.
func Read(ctx context.Context, r io.Reader, spool *os.File, b *Budget, whiteouts bool) (*Layer, error) {
	l := &Layer{}
	w := sparse.NewWriter(spool)
	err := eachEntry(ctx, r, b, func(h *tar.Header, data io.Reader) error { return l.addTar(h, data, w, spool, b, whiteouts) })
	if err != nil {
		return nil, err
	}
	if err := w.Finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSpool, err)
	}
	return l, nil
}

func (l *Layer) addTar(h *tar.Header, data io.Reader, w *sparse.Writer, spool *os.File, b *Budget, whiteouts bool) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return b.Take(h, 0)
	}
	parts, err := fstree.SplitPath(h.Name)
	if err != nil {
		return err
	}
	if len(parts) > MaxDepth {
		return fmt.Errorf("%d directories above each other, at most %d are possible", len(parts), MaxDepth)
	}
	if whiteouts {
		if done, err := l.addWhiteout(parts); done || err != nil {
			return errors.Join(err, b.Take(h, 0))
		}
	}
	n, err := headerInode(h, &l.skipped)
	if err != nil {
		return err
	}
	if err := b.Take(h, n.Size); err != nil {
		return err
	}
	e := Entry{Path: strings.Clone(strings.Join(parts, "/")), Inode: n} // Join copies no single part: see headerInode
	switch {
	case h.Typeflag == tar.TypeLink:
		to, err := fstree.SplitPath(h.Linkname)
		if err != nil {
			return fmt.Errorf("hard link: %w", err)
		}
		if len(to) == 0 {
			return errors.New("hard link to the root")
		}
		e.Link = strings.Clone(strings.Join(to, "/"))
	case n.IsDir():
		n.Children = map[string]*fstree.Inode{}
	case n.Mode.IsRegular():
		if err := spoolFile(n, data, w, spool); err != nil {
			return err
		}
	}
	if err := fstree.CheckInode(n); err != nil {
		return err
	}
	if e.Path == "" && !n.IsDir() {
		return errors.New("the root is not a directory")
	}
	l.Entries = append(l.Entries, e)
	return nil
}

// addWhiteout adds a whiteout if the path is one, and reports whether it is a name with a special meaning.
func (l *Layer) addWhiteout(parts []string) (bool, error) {
	for i, s := range parts {
		if !strings.HasPrefix(s, whiteoutPrefix) {
			continue
		}
		last := i == len(parts)-1
		dir := strings.Clone(path.Join(parts[:i]...))
		switch name := s[len(whiteoutPrefix):]; {
		case s == whiteoutOpaque && last:
			l.whiteouts = append(l.whiteouts, whiteout{dir: dir})
		case strings.HasPrefix(s, whiteoutMeta) && s != whiteoutOpaque:
			// Records of AUFS, and everything below them. No tool has written them for years, and none reads them.
		case !last:
			return true, errors.New("something below a whiteout")
		case name == "" || name == "." || name == "..":
			return true, fmt.Errorf("a whiteout of the name %q", name)
		default:
			l.whiteouts = append(l.whiteouts, whiteout{dir: dir, name: strings.Clone(name)})
		}
		return true, nil
	}
	return false, nil
}
