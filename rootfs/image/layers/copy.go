package layers

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Write writes a compressed tar stream.
func Write(f *os.File, write func(*tar.Writer) error) (image.Layer, error) {
	buffered := bufio.NewWriterSize(SpoolWriter(f), sparse.BufBytes)
	z, err := zstd.NewWriter(buffered, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return image.Layer{}, err
	}
	plain := &HashedWriter{W: z, Hash: sha256.New()}
	tw := tar.NewWriter(plain)
	if err := write(tw); err != nil {
		return image.Layer{}, errors.Join(err, z.Close())
	}
	if err := errors.Join(tw.Close(), z.Close(), buffered.Flush(), f.Chmod(0o444), f.Sync()); err != nil {
		return image.Layer{}, err
	}
	st, err := f.Stat()
	if err != nil {
		return image.Layer{}, err
	}
	return image.Layer{DiffID: plain.Digest(), Size: st.Size()}, nil
}

// overlayXattr is the prefix of an overlay's own attributes. In an image, the VM's overlay would take them for its
// own.
const overlayXattr = "trusted.overlay."

// Copy copies a tar stream entry by entry, without the names in drop.
func Copy(ctx context.Context, tw *tar.Writer, stream io.Reader, lim *Budget, drop []string) error {
	src := artifact.NewReader(ctx, io.LimitReader(stream, lim.MaxBytes+MaxTarOverhead))
	err := eachEntry(ctx, src, lim, func(h *tar.Header, data io.Reader) error {
		if err := lim.Take(h, max(h.Size, 0)); err != nil {
			return err
		}
		return copyEntry(tw, h, data, drop)
	})
	if err == nil {
		_, err = io.Copy(io.Discard, src)
	}
	return err
}

func copyEntry(tw *tar.Writer, h *tar.Header, data io.Reader, drop []string) error {
	parts, err := fstree.SplitPath(h.Name)
	if err != nil {
		return err
	}
	name := strings.Join(parts, "/")
	if name == "" {
		return nil // an overlay's root is that of its upper directory: it says nothing about the image's
	}
	for _, d := range drop {
		dir, base := filepath.Split(d)
		if name == d || name == dir+whiteoutPrefix+base {
			return nil
		}
	}
	out := &tar.Header{
		Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o7777, Uid: h.Uid, Gid: h.Gid,
		ModTime: h.ModTime, Devmajor: h.Devmajor, Devminor: h.Devminor, Format: tar.FormatPAX,
	}
	if h.Typeflag == tar.TypeDir {
		out.Name += "/"
	}
	for k, v := range h.PAXRecords {
		x, ok := strings.CutPrefix(k, paxXattr)
		if !ok || !erofs.KeepXattr(x) || strings.HasPrefix(x, overlayXattr) {
			continue
		}
		if out.PAXRecords == nil {
			out.PAXRecords = map[string]string{}
		}
		out.PAXRecords[k] = v
	}
	if err := tw.WriteHeader(out); err != nil {
		return err
	}
	_, err = io.Copy(tw, data)
	return err
}
