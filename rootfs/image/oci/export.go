package oci

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Format is an export format of an image.
type Format string

// The formats of Export. The same image always gives the same bytes.
const (
	FormatEROFS      Format = "erofs"       // the unchanged image file
	FormatTar        Format = "tar"         // its files as a PAX archive, uncompressed
	FormatOCIArchive Format = "oci-archive" // an OCI image of one layer, as a tar archive that docker loads too
)

// Export writes an image to w. progress (may be nil) gets the bytes of file content written, and their total.
// Errors are ErrInvalidOption for an unknown format, ErrTruncated or ErrCorrupt, the context's, and those of w.
func Export(ctx context.Context, s *image.Store, img *image.Image, format Format, w io.Writer, progress func(done, total int64)) error {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	if err := s.Check(img); err != nil {
		return err
	}
	f, err := os.Open(img.Path())
	if err != nil {
		return fmt.Errorf("export image %s: %w", img.Name(), err)
	}
	defer func() { _ = f.Close() }() // only read
	switch format {
	case FormatEROFS:
		src := artifact.NewReader(ctx, sparse.NewReader(f, img.Size))
		told := artifact.CountingWriter(func(n int64) { progress(n, img.Size) })
		_, err = io.CopyBuffer(io.MultiWriter(w, told), src, make([]byte, sparse.BufBytes))
	case FormatTar:
		var t *fstree.Tree
		if t, err = erofs.Read(ctx, f); err == nil {
			err = layers.WriteTree(ctx, t, w, false, func(done int64) { progress(done, img.Content) })
		}
	case FormatOCIArchive:
		err = exportOCI(ctx, s, img, f, w, func(done int64) { progress(done, img.Content) })
	default:
		return fmt.Errorf("%w: format %q: use %s, %s or %s", image.ErrInvalidOption, format, FormatEROFS, FormatTar, FormatOCIArchive)
	}
	if err != nil {
		return fmt.Errorf("export image %s: %w", img.Name(), err)
	}
	return nil
}

// exportOCI writes an OCI image layout as a tar archive.
func exportOCI(ctx context.Context, s *image.Store, img *image.Image, f *os.File, w io.Writer, progress func(done int64)) (err error) {
	t, err := erofs.Read(ctx, f)
	if err != nil {
		return err
	}
	tmp, err := s.NewTemp(ctx, "export-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tmp.Remove()) }()
	spool, err := layers.NewSpool(tmp.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = spool.Close() }() // the spool is discarded
	buffered := bufio.NewWriterSize(layers.SpoolWriter(spool), sparse.BufBytes)
	packed := &layers.HashedWriter{W: buffered, Hash: sha256.New()}
	z := gzip.NewWriter(packed) // no name and no time in its header
	plain := &layers.HashedWriter{W: z, Hash: sha256.New()}
	if err := layers.WriteTree(ctx, t, plain, true, progress); err != nil {
		return err
	}
	if err := errors.Join(z.Close(), buffered.Flush()); err != nil {
		return err
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return writeOCI(w, img, packed, plain.Digest(), spool)
}

// writeOCI writes the archive around a layer.
func writeOCI(w io.Writer, img *image.Image, layer *layers.HashedWriter, diff string, content io.Reader) error {
	tw := tar.NewWriter(w)
	put := func(name string, size int64, r io.Reader) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.Copy(tw, r)
		return err
	}
	// document writes a document under its name, or as a blob, and returns its descriptor.
	document := func(name string, t types.MediaType, v any) (v1.Descriptor, error) {
		b, err := json.Marshal(v)
		if err != nil {
			return v1.Descriptor{}, err
		}
		h, _, _ := v1.SHA256(bytes.NewReader(b)) // never fails
		d := v1.Descriptor{MediaType: t, Digest: h, Size: int64(len(b))}
		return d, put(cmp.Or(name, blobName(h)), d.Size, bytes.NewReader(b))
	}
	diffID, err := v1.NewHash(diff)
	if err != nil {
		return err
	}
	digest, err := v1.NewHash(layer.Digest())
	if err != nil {
		return err
	}
	const version = `{"imageLayoutVersion":"1.0.0"}`
	if err := put("oci-layout", int64(len(version)), strings.NewReader(version)); err != nil {
		return err
	}
	config, err := document("", types.OCIConfigJSON, v1.ConfigFile{
		OS: "linux", Architecture: cmp.Or(img.Architecture, runtime.GOARCH), // Debian's names are those of Go and OCI
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diffID}},
		Config: configOf(img.RunConfig),
	})
	if err != nil {
		return err
	}
	d := v1.Descriptor{MediaType: types.OCILayer, Digest: digest, Size: layer.N}
	if err := put(blobName(d.Digest), d.Size, content); err != nil {
		return err
	}
	manifest, err := document("", types.OCIManifestSchema1, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: config, Layers: []v1.Descriptor{d}})
	if err != nil {
		return err
	}
	if len(img.Tags) > 0 {
		_, version, _ := strings.Cut(img.Tags[0], ":")
		manifest.Annotations = map[string]string{refNameAnnotation: version}
	}
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{manifest}}
	if _, err := document("index.json", "", index); err != nil {
		return err
	}
	// Like `docker save`, list the same blobs once more, for readers of its own format.
	docker := []dockerManifest{{Config: blobName(config.Digest), RepoTags: img.Tags, Layers: []string{blobName(d.Digest)}}}
	if _, err := document("manifest.json", "", docker); err != nil {
		return err
	}
	return tw.Close()
}
