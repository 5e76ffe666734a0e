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

// Limits of archives: they bound what a damaged or hostile one can make this package allocate, write or compute. Those
// of a tree (package fstree) hold as well.
const (
	MaxLayers = 512 // of an image
	// For each file that an image may have (Options.MaxFiles), all may have so many bytes together: of names, link
	// targets and extended attributes in the archives, and of whole paths in the image, which the writer keeps.
	metaPerFile = 256
	pathPerFile = 256
	leastMeta   = 64 << 20 // bytes of each that are possible in any case
	MaxDepth    = 1024     // directories above each other
	maxLinkHops = 40       // symlinks on the way of one path, as Linux has it (MAXSYMLINKS)
	maxFollowed = 16 << 20 // components of the targets of symlinks on the ways of all paths of an image
	// What a tar stream may have besides contents: headers and padding, of the largest number of entries.
	MaxTarOverhead = 8 << 30
	// A PAX record, or another header that extends the next one, is at most 1 MiB: package archive/tar holds that.
)

// Names of the OCI image specification, "Layer Filesystem Changeset", Whiteouts.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh." // of AUFS; only the next one means something
	whiteoutOpaque = ".wh..wh..opq"
)

// Budget is what all layers of an image may have together. Safe for concurrent use.
type Budget struct {
	MaxBytes int64
	MaxFiles int64
	bytes    atomic.Int64 // content of regular files
	entries  atomic.Int64
	meta     atomic.Int64
	OnRead   func(n int64) // may be nil; told the content so far
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
	// Not by adding first: sizes may be near the end of the range.
	if size > b.MaxBytes || b.bytes.Add(size) > b.MaxBytes {
		return fmt.Errorf("%w: its files have more than %d bytes; raise MaxBytes (--max-size) to take it", image.ErrTooLarge, b.MaxBytes)
	}
	return nil
}

// Layer is a read tar stream that is not yet part of a tree. File contents lie in its spool file.
type Layer struct {
	Entries   []Entry // in the order of the stream
	whiteouts []whiteout
	skipped   fstree.Skipped
}

// named gives the paths that the layer says something of: those of its entries, and of what its whiteouts hide.
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
	Link  string // of a hard link: the path it refers to, unlike "" for all others
}

// whiteout hides something of the layers below: one name of a directory, or with name "" all that it has.
type whiteout struct{ dir, name string }

// eachEntry calls do for each entry of a tar stream.
//
// Errors of r are passed on as they are, and so are ErrTooLarge and ErrSpool; a damaged archive, and an entry that do
// refuses, is ErrBadArchive.
func eachEntry(ctx context.Context, r io.Reader, b *Budget, do func(h *tar.Header, data io.Reader) error) error {
	src := artifact.NewReader(ctx, r)
	tr := tar.NewReader(src)
	data := artifact.NewReader(ctx, tr) // holes of sparse files are given without a look at src
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

// Read reads a whole tar stream. Contents go to the spool, which must be an empty file and stay open as long as the
// layer's inodes are used. whiteouts says that names with the prefix .wh. have the meaning of the image specification.
// Its errors are those of eachEntry.
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
	e := Entry{Path: strings.Clone(strings.Join(parts, "/")), Inode: n} // a single part is not copied by Join: see headerInode
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

// addWhiteout takes a name with a meaning of its own. It says whether that is one.
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
			// Book-keeping of AUFS, with all below it. No tool has written it for years, none reads it.
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
