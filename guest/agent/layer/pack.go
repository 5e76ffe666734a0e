package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Names of the OCI image specification.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// Attributes that an overlay gives to files in its upper directory (Documentation/filesystems/overlayfs.rst). A
// file with one that says that part of it is elsewhere, as with redirect_dir and metacopy, cannot be in a layer.
const (
	overlayPrefix = "trusted.overlay."
	overlayOpaque = overlayPrefix + "opaque"
)

var overlayPartial = map[string]bool{
	overlayPrefix + "redirect": true, overlayPrefix + "metacopy": true, overlayPrefix + "whiteout": true, overlayPrefix + "whiteouts": true,
}

// Limits: paths are Linux's, and an attribute's value is at most 64 KiB (XATTR_SIZE_MAX).
const (
	maxDepth = 1024
	maxXattr = 64 << 10
)

const paxXattr = "SCHILY.xattr."

// Pack writes the upper directory of an overlay as a tar stream: parents first, siblings in byte order. It leaves
// out the directory itself and sockets. Nothing may change the directory meanwhile.
func Pack(w io.Writer, upper string) error {
	p := &packer{tw: tar.NewWriter(w), upper: upper, first: map[uint64]string{}}
	if err := p.dir("", 0); err != nil {
		return fmt.Errorf("pack the layer: %w", err)
	}
	if err := p.tw.Close(); err != nil {
		return fmt.Errorf("pack the layer: %w", err)
	}
	return nil
}

type packer struct {
	tw    *tar.Writer
	upper string
	first map[uint64]string // by inode with several names: the name that has the content
}

func (p *packer) dir(rel string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%.200s...: more than %d directories above each other", rel, maxDepth)
	}
	entries, err := os.ReadDir(filepath.Join(p.upper, rel))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := p.one(path.Join(rel, e.Name()), depth); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) one(name string, depth int) error {
	full := filepath.Join(p.upper, name)
	var st unix.Stat_t
	if err := unix.Lstat(full, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: "/" + name, Err: err}
	}
	dir, base := path.Split(name)
	kind := st.Mode & unix.S_IFMT
	// All whiteouts may be links to one inode.
	if kind == unix.S_IFCHR && st.Rdev == 0 {
		return p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dir + whiteout + base, Format: tar.FormatPAX})
	}
	if strings.HasPrefix(base, whiteout) {
		return fmt.Errorf("/%s: a name that begins with %s means something else in a layer", name, whiteout)
	}
	if kind == unix.S_IFSOCK {
		return nil
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), Format: tar.FormatPAX,
		ModTime: time.Unix(st.Mtim.Unix()),
	}
	if first, ok := p.first[st.Ino]; ok && kind != unix.S_IFDIR {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return p.tw.WriteHeader(h)
	}
	hides, err := p.xattrs(full, h)
	if err != nil {
		return fmt.Errorf("/%s: %w", name, err)
	}
	switch kind {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(full); err != nil {
			return err
		}
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeBlock
		if kind == unix.S_IFCHR {
			h.Typeflag = tar.TypeChar
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	default:
		return fmt.Errorf("/%s: a file of the kind %#o", name, kind)
	}
	if st.Nlink > 1 && kind != unix.S_IFDIR {
		p.first[st.Ino] = name
	}
	if err := p.tw.WriteHeader(h); err != nil {
		return fmt.Errorf("/%s: %w", name, err)
	}
	switch {
	case kind == unix.S_IFDIR:
		if hides {
			if err := p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(name, opaque), Format: tar.FormatPAX}); err != nil {
				return err
			}
		}
		return p.dir(name, depth+1)
	case h.Size > 0:
		return p.content(full, h.Size)
	}
	return nil
}

func (p *packer) content(full string, size int64) error {
	f, err := os.OpenFile(full, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.Copy(p.tw, io.LimitReader(f, size))
	if err == nil && n != size {
		err = fmt.Errorf("%s has changed while it was read", full)
	}
	return err
}

// xattrs adds a file's attributes to its header, except those of the overlay. It reports whether the file hides
// what the layers below have.
func (p *packer) xattrs(full string, h *tar.Header) (hides bool, err error) {
	names, err := listXattrs(full)
	if err != nil {
		return false, err
	}
	for _, k := range names {
		if overlayPartial[k] {
			return false, fmt.Errorf("the overlay keeps it in parts (%s), which cannot be a layer", k)
		}
		if strings.HasPrefix(k, overlayPrefix) && k != overlayOpaque {
			continue
		}
		buf := make([]byte, maxXattr)
		n, err := unix.Lgetxattr(full, k, buf)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("attribute %s: %w", k, err)
		}
		v := string(buf[:n])
		if k == overlayOpaque {
			if v != "y" {
				return false, fmt.Errorf("the overlay keeps it in parts (%s=%q), which cannot be a layer", k, v)
			}
			hides = true
			continue
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[paxXattr+k] = v
	}
	return hides, nil
}

func listXattrs(full string) ([]string, error) {
	n, err := unix.Llistxattr(full, nil)
	if n == 0 || err != nil {
		if errors.Is(err, unix.ENOTSUP) {
			err = nil
		}
		return nil, err
	}
	buf := make([]byte, n)
	if n, err = unix.Llistxattr(full, buf); err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00"), nil
}
