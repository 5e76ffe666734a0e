package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"golang.org/x/sync/errgroup"
)

// readAtOnce is how many layers are decompressed and read at the same time, at most.
const readAtOnce = 4

// layeredSource is an opened image of layers, whose documents are read and checked. Close it.
type layeredSource struct {
	*manifest
	reg *registry // nil if it is in files
	io.Closer
}

// openRegistry opens an image of a registry. pause waits between tries of a request; nil waits by the clock.
func openRegistry(ctx context.Context, ref string, plainHTTP bool, want Platform, pause func(context.Context, time.Duration) error) (*layeredSource, error) {
	r, err := newRegistry(ref, plainHTTP, pause)
	if err != nil {
		return nil, err
	}
	m, err := r.image(ctx, want)
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return &layeredSource{m, r, r}, nil
}

// openLayout opens an image of a directory with an OCI image layout. ref is a name that the index gives to it, or "@"
// and a digest, or "" for the only one.
func openLayout(dir, ref string, want Platform) (*layeredSource, error) {
	files, err := openDirMembers(dir)
	if err != nil {
		return nil, err
	}
	return opened(files, loadLayout, ref, want)
}

// openLayoutArchive opens an image of an archive of such a directory.
func openLayoutArchive(ctx context.Context, a Archive, ref string, want Platform) (*layeredSource, error) {
	files, err := openArchive(ctx, a)
	if err != nil {
		return nil, err
	}
	return opened(files, loadLayout, ref, want)
}

// openDockerArchive opens an image of an archive as `docker save` writes it. ref is a tag, or "" for the only image.
func openDockerArchive(ctx context.Context, a Archive, ref string, want Platform) (*layeredSource, error) {
	files, err := openArchive(ctx, a)
	if err != nil {
		return nil, err
	}
	return opened(files, loadDockerArchive, ref, want)
}

func opened(files members, load func(members, string, Platform) (*manifest, error), ref string, want Platform) (*layeredSource, error) {
	m, err := load(files, ref, want)
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	return &layeredSource{m, nil, files}, nil
}

// Describe is what the documents say about the image, for its record.
func (s *layeredSource) Describe() *Image {
	img := &Image{RunConfig: s.run, Platform: s.platform, Architecture: s.arch, Manifest: s.digest, Config: s.config}
	for _, l := range s.layers {
		img.Layers = append(img.Layers, l.Layer)
	}
	return img
}

// Read makes the tree of the image; of a registry, it fetches the layers that the store lacks, and keeps them there.
// The temporary folder has the contents. release must be called when the tree is no longer used, and after the image is
// published, also when there is an error.
func (s *layeredSource) Read(ctx context.Context, store *Store, tmp string, lim *budget, progress Progress) (t *fstree.Tree, release func(), err error) {
	var held []io.Closer
	release = func() {
		for _, c := range held {
			_ = c.Close() // spools, which are thrown away, and a lock
		}
	}
	if s.reg != nil {
		l, err := shareBlobs(ctx, store)
		if err != nil {
			return nil, release, err
		}
		held = append(held, l)
		if err := s.reg.fetch(ctx, s.manifest, store, tmp, lim.maxBytes, func(done, total int64) { progress(StageDownload, done, total) }); err != nil {
			return nil, release, err
		}
	}
	t, spools, err := s.readLayers(ctx, tmp, lim)
	for _, f := range spools {
		held = append(held, f)
	}
	if err != nil && s.reg != nil && errors.Is(err, ErrDigest) {
		// A layer was right when it came: either it has been damaged where it is kept, or the configuration says
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

// dropDamaged removes the layers of the image whose bytes are not what they should be. It says whether there were any.
func (s *layeredSource) dropDamaged(store *Store) (dropped bool) {
	for _, l := range s.layers {
		v, err := newVerifier(l.Digest)
		if err != nil {
			continue
		}
		f, err := openRegular(blobPath(store, l.Digest))
		if err != nil {
			continue
		}
		if _, err := io.Copy(v, f); err == nil && v.check() != nil {
			dropped = os.Remove(f.Name()) == nil || dropped // if it stays, another build tells again
		}
		_ = f.Close() // only read
	}
	return dropped
}

// readLayers reads all layers, several at once, and puts them on each other. The spools hold the contents of the tree's
// files and must be closed by the caller, also when there is an error.
func (m *manifest) readLayers(ctx context.Context, tmp string, lim *budget) (*fstree.Tree, []*os.File, error) {
	spools := make([]*os.File, 0, len(m.layers))
	for range m.layers {
		f, err := newSpool(tmp)
		if err != nil {
			return nil, spools, err
		}
		spools = append(spools, f)
	}
	layers := make([]*layer, len(m.layers))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(max(min(runtime.GOMAXPROCS(0), readAtOnce), 1))
	for i, l := range m.layers {
		g.Go(func() error {
			var err error
			if layers[i], err = l.read(gctx, spools[i], lim); err != nil {
				return fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), l.name(), err)
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
	into := newMerger(int(lim.maxFiles))
	for i, l := range layers {
		if err := into.apply(ctx, l); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, spools, cause
			}
			return nil, spools, fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), m.layers[i].name(), err)
		}
		layers[i] = nil
	}
	if m.run.Workdir != "" {
		if err := into.ensureDir(m.run.Workdir); err != nil {
			return nil, spools, fmt.Errorf("%w: its working directory %.200q: %w", ErrBadManifest, m.run.Workdir, err)
		}
	}
	return into.t, spools, nil
}
