package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// readAtOnce bounds how many layers are decompressed and read at the same time.
const readAtOnce = 4

// Source is an open image of layers, whose documents are read and checked. Close it.
type Source struct {
	*manifest
	reg *registry // nil for an image in files
	io.Closer
}

// OpenRegistry opens an image of a registry. For images of docker.io it asks docker's mirrors first. pause waits
// between attempts of a request; nil uses the clock.
func OpenRegistry(ctx context.Context, ref string, plainHTTP bool, want Platform, pause func(context.Context, time.Duration) error) (*Source, error) {
	for _, m := range mirrors(ref) {
		// A mirror that fails, for whatever reason, is as good as none: the registry itself has the last word.
		if src, err := openRegistry(ctx, m.ref, plainHTTP || m.plainHTTP, want, pause); err == nil {
			return src, nil
		} else if ctx.Err() != nil {
			return nil, err
		}
	}
	return openRegistry(ctx, ref, plainHTTP, want, pause)
}

func openRegistry(ctx context.Context, ref string, plainHTTP bool, want Platform, pause func(context.Context, time.Duration) error) (*Source, error) {
	r, err := newRegistry(ref, plainHTTP, pause)
	if err != nil {
		return nil, err
	}
	m, err := r.image(ctx, want)
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return &Source{m, r, r}, nil
}

// OpenLayout opens an image of a directory with an OCI image layout. ref is the image's name in the index, or "@"
// and a digest, or "" for the only one.
func OpenLayout(dir, ref string, want Platform) (*Source, error) {
	files, err := openDirMembers(dir)
	if err != nil {
		return nil, err
	}
	return opened(files, loadLayout, ref, want)
}

// OpenArchive opens an image of an archive of such a directory or, with docker set, of an archive of `docker
// save`, whose ref is a tag, or "" for the only image.
func OpenArchive(ctx context.Context, a Archive, docker bool, ref string, want Platform) (*Source, error) {
	files, err := openArchive(ctx, a)
	if err != nil {
		return nil, err
	}
	if docker {
		return opened(files, loadDockerArchive, ref, want)
	}
	return opened(files, loadLayout, ref, want)
}

func opened(files members, load func(members, string, Platform) (*manifest, error), ref string, want Platform) (*Source, error) {
	m, err := load(files, ref, want)
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	return &Source{m, nil, files}, nil
}

// Describe returns the part of the image's record that its documents give.
func (s *Source) Describe() *image.Image {
	img := &image.Image{RunConfig: s.run, Platform: s.platform, Architecture: s.arch, Manifest: s.digest, Config: s.config}
	for _, l := range s.layers {
		img.Layers = append(img.Layers, l.Layer)
	}
	return img
}

// Read makes the tree of the image. It fetches layers of a registry that the store lacks, and keeps them there.
// The file contents are in the temporary folder. The caller must call release when the tree is no longer used, and
// after the image is published, also after an error.
func (s *Source) Read(ctx context.Context, store *image.Store, tmp string, lim *layers.Budget, progress image.Progress) (t *fstree.Tree, release func(), err error) {
	var held []io.Closer
	release = func() {
		for _, c := range held {
			_ = c.Close() // spools, which are discarded, and a lock
		}
	}
	if s.reg != nil {
		l, err := shareBlobs(ctx, store)
		if err != nil {
			return nil, release, err
		}
		held = append(held, l)
		if err := s.reg.fetch(ctx, s.manifest, store, tmp, lim.MaxBytes, func(done, total int64) { progress(image.StageDownload, done, total) }); err != nil {
			return nil, release, err
		}
	}
	t, spools, err := s.readLayers(ctx, tmp, lim)
	for _, f := range spools {
		held = append(held, f)
	}
	if err != nil && s.reg != nil && errors.Is(err, image.ErrDigest) {
		// The layer was right when it came: either the stored copy has been damaged, or the configuration has
		// another diff_id.
		if s.dropDamaged(store) {
			err = fmt.Errorf("%w; it was damaged in the image store, and is fetched again by the next build", err)
		}
	}
	if err != nil {
		return nil, release, err
	}
	t.Config, err = s.run.Canonical()
	return t, release, err
}

// dropDamaged removes the stored layers of the image whose bytes are wrong. It reports whether there were any.
func (s *Source) dropDamaged(store *image.Store) (dropped bool) {
	for _, l := range s.layers {
		v, err := layers.NewVerifier(l.Digest)
		if err != nil {
			continue
		}
		f, err := layers.OpenRegular(blobPath(store, l.Digest))
		if err != nil {
			continue
		}
		if _, err := io.Copy(v, f); err == nil && v.Check() != nil {
			dropped = os.Remove(f.Name()) == nil || dropped // if it stays, the next build reports it again
		}
		_ = f.Close() // only read
	}
	return dropped
}

// readLayers reads all layers, several at the same time, and applies them in order. The spools hold the contents
// of the tree's files. The caller must close them, also after an error.
func (m *manifest) readLayers(ctx context.Context, tmp string, lim *layers.Budget) (*fstree.Tree, []*os.File, error) {
	spools := make([]*os.File, 0, len(m.layers))
	for range m.layers {
		f, err := layers.NewSpool(tmp)
		if err != nil {
			return nil, spools, err
		}
		spools = append(spools, f)
	}
	read := make([]*layers.Layer, len(m.layers))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(max(min(runtime.GOMAXPROCS(0), readAtOnce), 1))
	for i, l := range m.layers {
		g.Go(func() error {
			var err error
			if read[i], err = l.Read(gctx, spools[i], lim); err != nil {
				return fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), l.Name(), err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return nil, spools, err
	}
	into := layers.NewMerger(int(lim.MaxFiles))
	for i, l := range read {
		if err := into.Apply(ctx, l); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, spools, cause
			}
			return nil, spools, fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), m.layers[i].Name(), err)
		}
		read[i] = nil
	}
	if m.run.Workdir != "" {
		if err := into.EnsureDir(m.run.Workdir); err != nil {
			return nil, spools, fmt.Errorf("%w: its working directory %.200q: %w", image.ErrBadManifest, m.run.Workdir, err)
		}
	}
	return into.Tree, spools, nil
}
