package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// readAtOnce is how many layers are decompressed and read at the same time, at most.
const readAtOnce = 4

// layeredRecipe is recipeVersion for images of layers alone.
const layeredRecipe = " 2"

// layeredSource is an opened source of layers.
type layeredSource struct {
	*manifest
	reg *registry // of KindRegistry; nil of others
	io.Closer
}

// openLayered opens a source of layers and reads its documents; of a registry no layer yet.
func (b *buildOptions) openLayered(ctx context.Context, tmp string) (_ *layeredSource, err error) {
	b.progress(StageResolve, 0, 0)
	s := b.source
	if s.Kind == KindRegistry {
		r, err := newRegistry(s.Ref, b.PlainHTTP, b.pause)
		if err != nil {
			return nil, err
		}
		m, err := r.image(ctx, b.platform)
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		return &layeredSource{m, r, r}, nil
	}
	var files members
	if s.Kind == KindOCI {
		files, err = openDirMembers(s.Path)
	} else {
		files, err = openArchive(ctx, s.Path, b.Stdin, tmp, b.MaxBytes, func(n int64) { b.progress(StageRead, n, 0) })
	}
	if err != nil {
		return nil, err
	}
	var m *manifest
	if s.Kind == KindDockerArchive {
		m, err = loadDockerArchive(files, s.Ref, b.platform)
	} else {
		m, err = loadLayout(files, s.Ref, b.platform)
	}
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	return &layeredSource{m, nil, files}, nil
}

// buildLayered builds from a source of layers, or finds an image that was built from the very same content.
func (b *buildOptions) buildLayered(ctx context.Context, tmp string) (img *Image, err error) {
	src, err := b.openLayered(ctx, tmp)
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	spec, err := b.spec(src.identity() + layeredRecipe)
	if err != nil {
		return nil, err
	}
	if !b.NoCache {
		l, err := b.lockSpec(ctx, spec)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		// The content has a name that says all of it, so the age is of no matter.
		img, err := b.cached(ctx, spec, 0)
		if err != nil || img != nil {
			return img, err
		}
	}
	if src.reg != nil {
		l, err := b.Store.shareBlobs(ctx)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		if err := src.reg.fetch(ctx, src.manifest, b.Store, tmp, b.MaxBytes, func(done, total int64) { b.progress(StageDownload, done, total) }); err != nil {
			return nil, fmt.Errorf("build from %s: %w", b.source, err)
		}
	}
	t, spools, err := b.readLayers(ctx, src.manifest, tmp)
	defer func() {
		for _, f := range spools {
			_ = f.Close() // thrown away
		}
	}()
	if err != nil && src.reg != nil && errors.Is(err, ErrDigest) {
		// A layer was right when it came: either it has been damaged where it is kept, or the configuration says
		// another diff_id.
		if src.dropDamaged(b.Store) {
			err = fmt.Errorf("%w; it was damaged in the image store, and is fetched again by the next build", err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	described := &Image{RunConfig: src.run, Platform: src.platform, Architecture: src.arch, Manifest: src.digest, Config: src.config}
	for _, l := range src.layers {
		described.Layers = append(described.Layers, l.Layer)
	}
	if t.Config, err = src.run.canonical(); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	return b.finish(ctx, t, described, spec, tmp)
}

// dropDamaged removes the layers of the image whose bytes are not what they should be. It says whether there were any.
func (s *layeredSource) dropDamaged(store *Store) (dropped bool) {
	for _, l := range s.layers {
		h, err := v1.NewHash(l.Digest)
		if err != nil {
			continue
		}
		f, err := openRegular(store.blobPath(h))
		if err != nil {
			continue
		}
		if hash, err := v1.Hasher(h.Algorithm); err == nil {
			if _, err := io.Copy(hash, f); err == nil && fmt.Sprintf("%x", hash.Sum(nil)) != h.Hex {
				dropped = os.Remove(store.blobPath(h)) == nil || dropped // if it stays, another build tells again
			}
		}
		_ = f.Close() // only read
	}
	return dropped
}

// readLayers reads all layers, several at once, and puts them on each other. The spools hold the contents of the tree's
// files and must be closed by the caller, also when there is an error.
func (b *buildOptions) readLayers(ctx context.Context, m *manifest, tmp string) (*fstree.Tree, []*os.File, error) {
	spools := make([]*os.File, 0, len(m.layers))
	for range m.layers {
		f, err := newSpool(tmp)
		if err != nil {
			return nil, spools, err
		}
		spools = append(spools, f)
	}
	lim := b.newBudget()
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
	into := newMerger(b.MaxFiles)
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

func (b *buildOptions) newBudget() *budget {
	lim := newBudget(b.MaxBytes, b.MaxFiles)
	lim.onRead = func(n int64) { b.progress(StageRead, n, 0) }
	return lim
}

// newSpool makes a file without a name.
func newSpool(tmp string) (*os.File, error) {
	f, err := os.CreateTemp(tmp, "spool-")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errSpool, err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// name is how errors call the layer.
func (l *layerSource) name() string {
	if l.Digest != "" {
		return l.Digest
	}
	return l.DiffID
}

// read reads the layer and checks its digests, compressed and not. That it is not what its digest says is told rather
// than what else is wrong with it then.
func (l *layerSource) read(ctx context.Context, spool *os.File, lim *budget) (*layer, error) {
	r, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // only read
	raw := &digester{r: &watchedReader{ctx: ctx, r: r}, size: l.Size}
	check := func() error { return nil }
	if l.Digest != "" {
		if check, err = raw.expect(l.Digest); err != nil {
			return nil, err
		}
	} else {
		raw.h = newHash()
	}
	u, err := unpack(raw, false, lim.maxBytes+maxTarOverhead)
	if err != nil {
		return nil, l.blame(ctx, raw, check, err)
	}
	defer func() { _ = u.Close() }() // only read
	plain := &digester{r: u, size: -1}
	checkPlain, err := plain.expect(l.DiffID)
	if err != nil {
		return nil, err
	}
	out, err := readLayer(ctx, plain, spool, lim, true)
	if err == nil {
		_, err = io.Copy(io.Discard, plain) // what lies behind the end of the archive belongs to the digest
	}
	if err == nil {
		_, err = io.Copy(io.Discard, raw)
	}
	if err == nil {
		err = errors.Join(check(), checkPlain())
	}
	if err != nil {
		return nil, l.blame(ctx, raw, check, err)
	}
	return out, nil
}

// blame looks whether a layer that cannot be read is another one than its digest says.
func (l *layerSource) blame(ctx context.Context, raw *digester, check func() error, err error) error {
	if !errors.Is(err, ErrBadArchive) || context.Cause(ctx) != nil {
		return err
	}
	if _, cerr := io.Copy(io.Discard, raw); cerr != nil {
		return cerr
	}
	if cerr := check(); cerr != nil {
		return fmt.Errorf("%w (%w)", cerr, err)
	}
	return err
}

// expect makes the digester compute the digest of a kind, and gives a function that compares when all has been read.
func (d *digester) expect(digest string) (func() error, error) {
	want, err := v1.NewHash(digest)
	if err == nil {
		d.h, err = v1.Hasher(want.Algorithm)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: digest %.100q: %w", ErrBadManifest, digest, err)
	}
	return func() error {
		if d.size >= 0 && d.n != d.size {
			return fmt.Errorf("%w: it has %d bytes, its descriptor says %d", ErrDigest, d.n, d.size)
		}
		if got := fmt.Sprintf("%x", d.h.Sum(nil)); got != want.Hex {
			return fmt.Errorf("%w: %s has the digest %s:%s", ErrDigest, want, want.Algorithm, got)
		}
		return nil
	}, nil
}

// readTarball reads one tar stream of a whole root filesystem. Names with the prefix .wh. are names like others there.
func (b *buildOptions) readTarball(ctx context.Context, spool *os.File) (t *fstree.Tree, err error) {
	in := b.Stdin
	if b.source.Path != stdinPath {
		f, err := openRegular(b.source.Path)
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }() // only read
		in = f
	} else if in == nil {
		return nil, fmt.Errorf("%w: there is no standard input to read", ErrInvalidOption)
	}
	u, err := unpack(&watchedReader{ctx: ctx, r: in}, true, b.MaxBytes+maxTarOverhead)
	if err != nil {
		return nil, err
	}
	defer func() { _ = u.Close() }() // only read
	l, err := readLayer(ctx, u, spool, b.newBudget(), false)
	if err != nil {
		return nil, err
	}
	if len(l.entries) == 0 {
		return nil, fmt.Errorf("%w: it has no entries", ErrBadArchive)
	}
	// The checksum of a compressed stream comes at its very end.
	if _, err := io.Copy(io.Discard, u); err != nil {
		return nil, err
	}
	m := newMerger(b.MaxFiles)
	if err := m.apply(ctx, l); err != nil {
		return nil, err
	}
	return m.t, notImageArchive(m.t)
}

// notImageArchive is an error for what docker or skopeo has saved: as a root filesystem it is of no use to anybody.
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
	return fmt.Errorf("%w: it is an archive of container images, not of a root filesystem: use %s:FILE", ErrUnsupportedSource, kind)
}
