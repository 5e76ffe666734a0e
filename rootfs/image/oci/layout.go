package oci

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Limits of image archives and layout directories.
const (
	maxMembers     = 16 << 10 // files of an archive
	maxMemberLinks = 8        // links from one to another
)

// members are the files of an image archive or of a layout directory. They are safe for concurrent use.
type members interface {
	// open opens a regular file and returns its size in bytes. The error is fs.ErrNotExist if there is none.
	open(name string) (io.ReadCloser, int64, error)
	Close() error
}

// readMember reads a whole small file.
func readMember(m members, name string) ([]byte, error) {
	r, size, err := m.open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // only read
	if size > maxManifestBytes {
		return nil, fmt.Errorf("%w: %s has %d bytes, at most %d are possible", image.ErrBadManifest, name, size, maxManifestBytes)
	}
	b, err := io.ReadAll(io.LimitReader(r, maxManifestBytes+1))
	if err == nil && int64(len(b)) != size {
		err = fmt.Errorf("%w: %s has %d bytes, not %d", image.ErrChanged, name, len(b), size)
	}
	return b, err
}

// dirMembers are the files of a directory. No link in it leads outside of it.
type dirMembers struct{ root *os.Root }

func openDirMembers(dir string) (members, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return dirMembers{root}, nil
}

func (d dirMembers) open(name string) (io.ReadCloser, int64, error) {
	// Opening a fifo would wait for a writer.
	f, err := d.root.OpenFile(filepath.FromSlash(name), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is no regular file", image.ErrBadManifest, name)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size(), nil
}

func (d dirMembers) Close() error { return d.root.Close() }

// tarMembers are the files of an uncompressed tar archive.
type tarMembers struct {
	f     *os.File
	files map[string]section
	links map[string]string // archives of old dockers name identical layers by links
}

type section struct{ off, size int64 }

func (t *tarMembers) open(name string) (io.ReadCloser, int64, error) {
	name = path.Clean(name)
	for range maxMemberLinks {
		if s, ok := t.files[name]; ok {
			return io.NopCloser(io.NewSectionReader(t.f, s.off, s.size)), s.size, nil
		}
		to, ok := t.links[name]
		if !ok {
			return nil, 0, fmt.Errorf("%.200q is not in the archive: %w", name, fs.ErrNotExist)
		}
		name = to
	}
	return nil, 0, fmt.Errorf("%w: more than %d links lead to a file of the archive", image.ErrBadArchive, maxMemberLinks)
}

func (t *tarMembers) Close() error { return t.f.Close() }

// openTarMembers reads the table of an archive. It closes f on errors.
func openTarMembers(ctx context.Context, f *os.File) (m members, err error) {
	defer func() {
		if err != nil {
			_ = f.Close() // only read
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	t := &tarMembers{f: f, files: map[string]section{}, links: map[string]string{}}
	tr := tar.NewReader(f) // it seeks over contents
	for n := 0; ; n++ {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return t, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: read its table: %w", image.ErrBadArchive, err)
		}
		if n >= maxMembers {
			return nil, fmt.Errorf("%w: the archive has more than %d files, which no image archive has", image.ErrTooLarge, maxMembers)
		}
		if len(h.Name) > fstree.MaxPathBytes || len(h.Linkname) > fstree.MaxPathBytes {
			return nil, fmt.Errorf("%w: a name of more than %d bytes", image.ErrBadArchive, fstree.MaxPathBytes)
		}
		p := strings.Clone(path.Clean(h.Name)) // of a PAX record: see headerInode
		switch h.Typeflag {
		case tar.TypeReg:
			off, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			// Sparse members are not contiguous; no tool makes them.
			if _, sparse := h.PAXRecords["GNU.sparse.major"]; sparse || h.PAXRecords["GNU.sparse.map"] != "" || off > st.Size()-h.Size {
				return nil, fmt.Errorf("%w: file %.200q does not lie in it in one piece", image.ErrBadArchive, p)
			}
			t.files[p] = section{off, h.Size}
			delete(t.links, p)
		case tar.TypeSymlink, tar.TypeLink:
			to := h.Linkname
			if h.Typeflag == tar.TypeSymlink {
				to = path.Join(path.Dir(p), to)
			}
			t.links[p] = strings.Clone(path.Clean(to))
			delete(t.files, p)
		}
	}
}

// blobName returns the path of a blob in a layout.
func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

const refNameAnnotation = "org.opencontainers.image.ref.name"

// loadLayout reads the documents of an OCI image layout (image-layout.md of the OCI image specification). ref is
// an image's name in the index, or "@" and a digest, or "" for the only one.
func loadLayout(m members, ref string, want v1.Platform) (*manifest, error) {
	b, err := readMember(m, "oci-layout")
	if err != nil {
		return nil, notLayout(err)
	}
	var version struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := parseJSON("oci-layout", b, &version); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(version.Version, "1.") {
		return nil, fmt.Errorf("%w: it is a layout of version %.20q, known is 1.0.0", image.ErrBadManifest, version.Version)
	}
	if b, err = readMember(m, "index.json"); err != nil {
		return nil, notLayout(err)
	}
	ix, err := parseIndex(b)
	if err != nil {
		return nil, err
	}
	d, err := chooseNamed(ix.Manifests, ref, want)
	if err != nil {
		return nil, err
	}
	get := fetcher(func(d v1.Descriptor) ([]byte, error) {
		b, err := readMember(m, blobName(d.Digest))
		return b, missingBlob(d.Digest.String(), err)
	})
	return get.image(d, want, func(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
		r, _, err := m.open(blobName(d.Digest))
		return r, missingBlob(d.Digest.String(), err)
	})
}

func notLayout(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: it is no OCI image layout: %w", image.ErrBadManifest, err)
	}
	return err
}

func missingBlob(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: it lacks %s: %w", image.ErrBadManifest, name, err)
	}
	return err
}

// chooseNamed returns the entry of a layout's index for ref: by the name of the specification, or the one that
// containerd writes.
func chooseNamed(list []v1.Descriptor, ref string, want v1.Platform) (v1.Descriptor, error) {
	var found []v1.Descriptor
	var names []string
	for _, d := range list {
		n := d.Annotations[refNameAnnotation]
		full := d.Annotations["io.containerd.image.name"]
		digest, byDigest := strings.CutPrefix(ref, "@")
		switch {
		case ref == "", byDigest && d.Digest.String() == digest, !byDigest && (n == ref || full != "" && sameTag(full, ref)):
			found = append(found, d)
		}
		if n != "" && len(names) < 20 && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	switch {
	case len(found) == 0:
		return v1.Descriptor{}, fmt.Errorf("%w: %q; it has %q", image.ErrNoSource, strings.TrimPrefix(ref, "@"), names)
	case len(found) == 1:
		return found[0], nil
	}
	// Several entries with the same name, or without one, may be for several platforms.
	d, err := choose(found, want)
	if err != nil {
		return d, err
	}
	for _, other := range found {
		if other.Digest != d.Digest && (other.Platform == nil || other.Platform.Satisfies(want)) {
			return d, fmt.Errorf("%w: it has several; name one of %q, or @DIGEST, behind the path", image.ErrNoSource, names)
		}
	}
	return d, nil
}

// dockerManifest is an entry of the manifest.json that `docker save` writes.
type dockerManifest struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// loadDockerArchive reads the documents of an archive of `docker save`. ref is a tag, or "" for the only image.
func loadDockerArchive(m members, ref string, want v1.Platform) (*manifest, error) {
	b, err := readMember(m, "manifest.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: it has no manifest.json, so `docker save` of docker 1.10 or later has not written it; an OCI layout is read by oci-archive: %w", image.ErrBadManifest, err)
	}
	if err != nil {
		return nil, err
	}
	var list []dockerManifest
	if err := parseJSON("manifest.json", b, &list); err != nil {
		return nil, err
	}
	if len(list) > maxIndexEntries {
		return nil, fmt.Errorf("%w: it has %d images, at most %d are possible", image.ErrBadManifest, len(list), maxIndexEntries)
	}
	doc, err := chooseTagged(list, ref)
	if err != nil {
		return nil, err
	}
	if b, err = readMember(m, doc.Config); err != nil {
		return nil, missingBlob("its configuration", err)
	}
	out, diffs, err := parseConfig(b, want)
	if err != nil {
		return nil, err
	}
	h, _, err := v1.SHA256(strings.NewReader(string(b)))
	if err != nil {
		return nil, err
	}
	out.config = h.String()
	// In all versions of this format, the file's name is the digest of its content.
	if base := strings.TrimSuffix(path.Base(doc.Config), ".json"); layers.IsDigest("sha256:"+base) && base != h.Hex {
		return nil, fmt.Errorf("%w: the configuration %s has the digest %s", image.ErrDigest, doc.Config, h)
	}
	if len(diffs) != len(doc.Layers) {
		return nil, fmt.Errorf("%w: it has %d layers, its configuration tells of %d", image.ErrBadManifest, len(doc.Layers), len(diffs))
	}
	for i, file := range doc.Layers {
		l := image.Layer{DiffID: diffs[i].String(), Size: -1}
		if hex, ok := strings.CutPrefix(file, "blobs/sha256/"); ok && layers.IsDigest("sha256:"+hex) {
			l.Digest = "sha256:" + hex
		}
		out.layers = append(out.layers, layers.Source{Layer: l, Open: func(context.Context) (io.ReadCloser, error) {
			r, _, err := m.open(file)
			return r, missingBlob("a layer", err)
		}})
	}
	return out, nil
}

func chooseTagged(list []dockerManifest, ref string) (dockerManifest, error) {
	var tags []string
	var found []dockerManifest
	for _, d := range list {
		if ref == "" || slices.ContainsFunc(d.RepoTags, func(t string) bool { return sameTag(t, ref) }) {
			found = append(found, d)
		}
		if len(tags) < 20 {
			tags = append(tags, d.RepoTags...)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return dockerManifest{}, fmt.Errorf("%w: %q; it has %q", image.ErrNoSource, ref, tags)
	}
	return dockerManifest{}, fmt.Errorf("%w: it has several; name one of %q behind the path", image.ErrNoSource, tags)
}

// sameTag reports whether two references mean the same: "debian" is docker.io/library/debian:latest.
func sameTag(a, b string) bool {
	if a == b {
		return true
	}
	x, err := name.ParseReference(a)
	if err != nil {
		return false
	}
	y, err := name.ParseReference(b)
	return err == nil && x.Name() == y.Name()
}

// Archive is an image archive, compressed or not.
type Archive struct {
	File     string
	Stdin    io.Reader // replaces File if it is set
	Tmp      string    // folder for unpacked files
	MaxBytes int64
	OnRead   func(n int64) // gets the bytes unpacked so far
}

// openArchive opens an image archive for random access.
func openArchive(ctx context.Context, a Archive) (members, error) {
	if a.Stdin != nil {
		return spoolArchive(ctx, a, a.Stdin)
	}
	f, err := layers.OpenRegular(a.File)
	if err != nil {
		return nil, err
	}
	u, err := layers.Unpack(f, true, a.MaxBytes)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	packed := u.Packed
	_ = u.Close() // it only detected the compression
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if !packed {
		return openTarMembers(ctx, f)
	}
	m, err := spoolArchive(ctx, a, f)
	return m, errors.Join(err, f.Close())
}

// spoolArchive unpacks a stream, or a compressed archive, into an unnamed file, which allows random access.
func spoolArchive(ctx context.Context, a Archive, r io.Reader) (members, error) {
	u, err := layers.Unpack(artifact.NewReader(ctx, r), true, a.MaxBytes+layers.MaxTarOverhead)
	if err != nil {
		return nil, err
	}
	defer func() { _ = u.Close() }() // only read
	f, err := layers.NewSpool(a.Tmp)
	if err != nil {
		return nil, err
	}
	w := sparse.NewWriter(f)
	_, err = io.Copy(io.MultiWriter(layers.SpoolWriter(w), artifact.CountingWriter(a.OnRead)), u)
	if err == nil {
		err = w.Finish()
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return openTarMembers(ctx, f)
}
