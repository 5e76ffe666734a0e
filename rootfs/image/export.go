package image

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"strings"
	"time"

	goerofs "github.com/erofs/go-erofs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// Format is a form in which an image can leave the store.
type Format string

// The formats of Export. What comes out is the same for the same image.
const (
	FormatEROFS      Format = "erofs"       // the image file as it is
	FormatTar        Format = "tar"         // its files as a PAX archive, uncompressed
	FormatOCIArchive Format = "oci-archive" // an OCI image of one layer with its configuration, as a tar archive that docker loads too
)

// Export writes an image to w. progress (may be nil) is told the bytes of file content that are done, and their total.
// Errors are ErrInvalidOption for a format that is not there, ErrTruncated or ErrCorrupt, the context's, and those of
// w.
func (s *Store) Export(ctx context.Context, img *Image, format Format, w io.Writer, progress func(done, total int64)) error {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	if err := s.Check(img); err != nil {
		return err
	}
	f, err := os.Open(img.Path())
	if err != nil {
		return fmt.Errorf("export image %s: %w", img.name(), err)
	}
	defer func() { _ = f.Close() }() // only read
	switch format {
	case FormatEROFS:
		src := &watchedReader{ctx: ctx, r: sparse.NewReader(f, img.Size)}
		told := progressWriter(func(n int64) { progress(n, img.Size) })
		_, err = io.CopyBuffer(io.MultiWriter(w, told), src, make([]byte, sparse.BufBytes))
	case FormatTar:
		err = exportTar(ctx, f, w, false, func(done int64) { progress(done, img.Content) })
	case FormatOCIArchive:
		err = s.exportOCI(ctx, img, f, w, func(done int64) { progress(done, img.Content) })
	default:
		return fmt.Errorf("%w: format %q: use %s, %s or %s", ErrInvalidOption, format, FormatEROFS, FormatTar, FormatOCIArchive)
	}
	if err != nil {
		return fmt.Errorf("export image %s: %w", img.name(), err)
	}
	return nil
}

// exportTar writes the files of an EROFS image as a tar stream: parents first, siblings in byte order. Of several names
// of an inode the first has the content, and the others are hard links to it. Of a layer, names that mean something
// else there are an error.
func exportTar(ctx context.Context, f *os.File, w io.Writer, layer bool, progress func(done int64)) error {
	img, err := goerofs.Open(f)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	modes, err := erofs.NewModeReader(f)
	if err != nil {
		return err
	}
	tw := tar.NewWriter(w)
	first := map[int64]string{}
	var done int64
	err = fs.WalkDir(img, ".", func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		if layer && strings.HasPrefix(path.Base(p), whiteoutPrefix) {
			return fmt.Errorf("%w: the name %q would be a whiteout in a layer; use the format %s", ErrInvalidOption, p, FormatTar)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*goerofs.Stat)
		if !ok {
			return fmt.Errorf("%w: %s has no attributes", ErrCorrupt, p)
		}
		h := &tar.Header{Name: p, Format: tar.FormatPAX}
		if primary, ok := first[st.Ino]; ok && !info.IsDir() {
			h.Typeflag, h.Linkname = tar.TypeLink, primary
			return tw.WriteHeader(h)
		}
		if !info.IsDir() && st.Nlink > 1 {
			first[st.Ino] = p
		}
		if h.Mode, err = modes.Mode(st.Ino); err != nil {
			return err
		}
		h.Uid, h.Gid = int(st.UID), int(st.GID)
		h.ModTime = time.Unix(int64(st.Mtime), int64(st.MtimeNs))
		for k, v := range erofs.UnixXattrs(st.Xattrs) {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords[paxXattr+k] = v
		}
		switch info.Mode().Type() {
		case 0:
			h.Typeflag, h.Size = tar.TypeReg, info.Size()
		case fs.ModeDir:
			h.Typeflag, h.Name = tar.TypeDir, p+"/"
		case fs.ModeSymlink:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = fs.ReadLink(img, p); err != nil {
				return err
			}
		case fs.ModeNamedPipe:
			h.Typeflag = tar.TypeFifo
		case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
			h.Typeflag = tar.TypeBlock
			if info.Mode()&fs.ModeCharDevice != 0 {
				h.Typeflag = tar.TypeChar
			}
			h.Devmajor, h.Devminor = int64(st.Rdev>>8&0xfff), int64(st.Rdev&0xff|st.Rdev>>12&0xfff00)
		default:
			return fmt.Errorf("%w: %s is of the kind %v", ErrCorrupt, p, info.Mode().Type())
		}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if h.Size == 0 {
			return nil
		}
		r, err := img.Open(p)
		if err != nil {
			return err
		}
		n, err := io.Copy(tw, &watchedReader{ctx: ctx, r: r})
		if err = errors.Join(err, r.Close()); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if n != h.Size {
			return fmt.Errorf("%w: %s has %d bytes of %d", ErrCorrupt, p, n, h.Size)
		}
		done += n
		progress(done)
		return nil
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

// exportOCI writes an OCI image layout as a tar archive.
func (s *Store) exportOCI(ctx context.Context, img *Image, f *os.File, w io.Writer, progress func(done int64)) (err error) {
	l, err := s.lock(ctx)
	if err != nil {
		return err
	}
	tmp, err := s.newTemp("export-")
	l.Close()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tmp.remove()) }()
	spool, err := newSpool(tmp.dir)
	if err != nil {
		return err
	}
	defer func() { _ = spool.Close() }() // thrown away
	buffered := bufio.NewWriterSize(markWriteErrors{spool}, sparse.BufBytes)
	packed := &hashedWriter{w: buffered, h: newHash()}
	z := gzip.NewWriter(packed) // no name and no time in its header
	plain := &hashedWriter{w: z, h: newHash()}
	if err := exportTar(ctx, f, plain, true, progress); err != nil {
		return err
	}
	if err := errors.Join(z.Close(), buffered.Flush()); err != nil {
		return err
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return writeOCI(w, img, packed, plain.digest(), spool)
}

// hashedWriter hashes and counts what is written through it.
type hashedWriter struct {
	w io.Writer
	h hash.Hash
	n int64
}

func (h *hashedWriter) Write(p []byte) (int, error) {
	n, err := h.w.Write(p)
	h.h.Write(p[:n])
	h.n += int64(n)
	return n, err
}

func (h *hashedWriter) digest() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", h.h.Sum(nil))}
}

// writeOCI writes the archive around a layer.
func writeOCI(w io.Writer, img *Image, layer *hashedWriter, diff v1.Hash, content io.Reader) error {
	tw := tar.NewWriter(w)
	put := func(name string, size int64, r io.Reader) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.Copy(tw, r)
		return err
	}
	document := func(t types.MediaType, v any) (v1.Descriptor, error) {
		b, err := json.Marshal(v)
		if err != nil {
			return v1.Descriptor{}, err
		}
		h := &hashedWriter{w: io.Discard, h: newHash()}
		_, _ = h.Write(b) // never fails
		d := v1.Descriptor{MediaType: t, Digest: h.digest(), Size: int64(len(b))}
		return d, put(blobName(d.Digest), d.Size, strings.NewReader(string(b)))
	}
	const version = `{"imageLayoutVersion":"1.0.0"}`
	if err := put("oci-layout", int64(len(version)), strings.NewReader(version)); err != nil {
		return err
	}
	config, err := document(types.OCIConfigJSON, v1.ConfigFile{
		OS: "linux", Architecture: exportArch(img),
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diff}},
		Config: img.RunConfig.oci(),
	})
	if err != nil {
		return err
	}
	d := v1.Descriptor{MediaType: types.OCILayer, Digest: layer.digest(), Size: layer.n}
	if err := put(blobName(d.Digest), d.Size, content); err != nil {
		return err
	}
	manifest, err := document(types.OCIManifestSchema1, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: config, Layers: []v1.Descriptor{d}})
	if err != nil {
		return err
	}
	if len(img.Tags) > 0 {
		_, version, _ := strings.Cut(img.Tags[0], ":")
		manifest.Annotations = map[string]string{refNameAnnotation: version}
	}
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{manifest}})
	if err != nil {
		return err
	}
	if err := put("index.json", int64(len(index)), strings.NewReader(string(index))); err != nil {
		return err
	}
	// As `docker save` does: the same blobs once more, for readers of its own format.
	docker, err := json.Marshal([]dockerManifest{{Config: blobName(config.Digest), RepoTags: img.Tags, Layers: []string{blobName(d.Digest)}}})
	if err != nil {
		return err
	}
	if err := put("manifest.json", int64(len(docker)), strings.NewReader(string(docker))); err != nil {
		return err
	}
	return tw.Close()
}

// exportArch is the architecture as Go and OCI name it; Debian's names for those that drowse runs are the same.
func exportArch(img *Image) string {
	if img.Architecture == "" {
		return runtime.GOARCH
	}
	return img.Architecture
}
