package builder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// buildLayered builds from a source of layers, or finds an image that was built from the same content.
func (b *buildOptions) buildLayered(ctx context.Context, tmp string) (img *image.Image, err error) {
	b.progress(image.StageResolve, 0, 0)
	src, err := b.openLayered(ctx, tmp)
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	spec, err := b.spec(src.Identity() + layeredRecipe)
	if err != nil {
		return nil, err
	}
	if !b.NoCache {
		l, err := b.lockSpec(ctx, spec)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		// The identity covers the whole content, so the age does not matter.
		img, err := b.Store.Reuse(ctx, spec, 0, b.tag)
		if err != nil || img != nil {
			return img, err
		}
	}
	t, release, err := src.Read(ctx, b.Store, tmp, b.newBudget(), b.progress)
	defer release()
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	return b.finish(ctx, t, src.Describe(), spec, tmp)
}

// layeredRecipe is the recipeVersion of images of layers only.
const layeredRecipe = " 2"

// openLayered opens a source of layers and reads its documents. It fetches no layer from a registry.
func (b *buildOptions) openLayered(ctx context.Context, tmp string) (*oci.Source, error) {
	s := b.source
	a := oci.Archive{File: s.Path, Tmp: tmp, MaxBytes: b.MaxBytes, OnRead: func(n int64) { b.progress(image.StageRead, n, 0) }}
	if s.Path == stdinPath {
		if a.Stdin = b.Stdin; a.Stdin == nil {
			return nil, errNoStdin
		}
	}
	switch s.Kind {
	case KindRegistry:
		return oci.OpenRegistry(ctx, s.Ref, b.PlainHTTP, b.platform, b.pause)
	case KindOCI:
		return oci.OpenLayout(s.Path, s.Ref, b.platform)
	}
	return oci.OpenArchive(ctx, a, s.Kind == KindDockerArchive, s.Ref, b.platform)
}

var errNoStdin = fmt.Errorf("%w: there is no standard input to read", image.ErrInvalidOption)

func (b *buildOptions) newBudget() *layers.Budget {
	lim := layers.NewBudget(b.MaxBytes, b.MaxFiles)
	lim.OnRead = func(n int64) { b.progress(image.StageRead, n, 0) }
	return lim
}

// readTarball reads one tar stream of a whole root filesystem.
func (b *buildOptions) readTarball(ctx context.Context, spool *os.File) (t *fstree.Tree, err error) {
	in := b.Stdin
	if b.source.Path != stdinPath {
		f, err := layers.OpenRegular(b.source.Path)
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }() // only read
		in = f
	} else if in == nil {
		return nil, errNoStdin
	}
	u, err := layers.Unpack(artifact.NewReader(ctx, in), true, b.MaxBytes+layers.MaxTarOverhead)
	if err != nil {
		return nil, err
	}
	defer func() { _ = u.Close() }() // only read
	if t, err = layers.ReadTree(ctx, u, spool, b.newBudget()); err != nil {
		return nil, err
	}
	// The checksum of a compressed stream is at its very end.
	if _, err := io.Copy(io.Discard, u); err != nil {
		return nil, err
	}
	return t, notImageArchive(t)
}

// notImageArchive returns an error for an archive of docker or skopeo, which is not a root filesystem.
func notImageArchive(t *fstree.Tree) error {
	for _, dir := range []string{"bin", "etc", "sbin", "usr"} {
		if t.Lookup(dir) != nil {
			return nil
		}
	}
	kind := KindDockerArchive
	if t.Lookup("oci-layout") != nil && t.Lookup("index.json") != nil {
		kind = KindOCIArchive
	} else if t.Lookup("manifest.json") == nil {
		return nil
	}
	return fmt.Errorf("%w: it is an archive of container images, not of a root filesystem: use %s:FILE", image.ErrUnsupportedSource, kind)
}
