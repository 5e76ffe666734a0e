package builder

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/debian"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
)

// Defaults of Options.
const (
	DefaultMaxAge   = 24 * time.Hour
	DefaultMaxBytes = 64 << 30
	DefaultMaxFiles = 1 << 20
)

// Options says what to build, and in which store. Store and From are required, the rest may be zero.
type Options struct {
	Store   *image.Store
	From    string   // see ParseSource
	Include []string // Debian packages; items may hold several, separated by commas. For debian: sources only
	// Tag is NAME or NAME:VERSION. Default: debian-FIRSTPACKAGE:latest (python3 gives debian-python),
	// dir-NAME:latest, the repository and tag of a registry's image, or the name of a file.
	Tag string

	// Platform selects an image where the source has several: OS/ARCH or OS/ARCH/VARIANT. Default: linux and the
	// architecture of this program. For sources of layers only.
	Platform string
	// PlainHTTP allows access to the registry without TLS. Registries on this host are always accessed so.
	PlainHTTP bool
	// Stdin is read for the path "-".
	Stdin io.Reader

	// Mirrors replaces the host's apt sources: each item is a URL of a Debian archive, with the suite and the
	// component main, or a line as in sources.list(5).
	Mirrors []string
	// NoDocs leaves documentation, manual and info pages out of Debian images (copyright files stay).
	NoDocs bool

	// MaxAge is the age up to which an image of the same spec is used instead of a new build; zero means
	// DefaultMaxAge. The spec is the source, the set of packages, mirrors, NoDocs and the architecture, but not
	// the tag. Directories and tar streams are always read again, but equal content gives the same image. Images
	// of layers are always looked up again, and are rebuilt only when their manifest differs, at any age.
	MaxAge time.Duration
	// NoCache always builds anew.
	NoCache bool

	// InstallDeps installs a missing build tool with the host's apt. Without it, a missing tool is an ErrToolMissing.
	InstallDeps bool
	// MaxBytes bounds the sum of the file sizes of the source, in all its layers together; zero means DefaultMaxBytes.
	MaxBytes int64
	// MaxFiles bounds the entries of archives, in all layers together, and the directories that they imply; zero
	// means DefaultMaxFiles, the most is 8,388,608. A build takes at worst about 2 KiB of memory for each. For
	// sources of layers and tar streams.
	MaxFiles int
	// Progress is called with the stage (Stage...) and its progress in bytes; total is 0 if it is not known. It is
	// called often, from several goroutines but never concurrently, and must return quickly.
	Progress image.Progress
	// Log receives the messages of the build tool. It need not be safe for concurrent use.
	Log io.Writer

	// pause waits between attempts of a request; nil uses the clock.
	pause func(context.Context, time.Duration) error
}

// buildOptions is Options, checked and completed.
type buildOptions struct {
	Options
	source   Source
	packages []string
	tag      string
	platform oci.Platform
	progress image.Progress
}

func checkOptions(o Options) (*buildOptions, error) {
	b := &buildOptions{Options: o}
	if o.Store == nil {
		return nil, fmt.Errorf("build an image: %w: no store is given", image.ErrInvalidOption)
	}
	var err error
	if b.source, err = ParseSource(o.From); err != nil {
		return nil, err
	}
	if b.packages, err = debian.NormalizePackages(o.Include); err != nil {
		return nil, err
	}
	if b.source.Kind != KindDebian && (len(b.packages) > 0 || len(o.Mirrors) > 0) {
		return nil, fmt.Errorf("%w: packages and mirrors go with debian: sources only, not with %s", image.ErrInvalidOption, b.source)
	}
	if (o.Platform != "" || o.PlainHTTP) && !b.source.layered() {
		return nil, fmt.Errorf("%w: a platform and a registry without TLS go with images of layers only, not with %s", image.ErrInvalidOption, b.source)
	}
	if b.platform, err = oci.ParsePlatform(o.Platform); err != nil {
		return nil, err
	}
	if _, err := debian.ParseMirrors(o.Mirrors, b.source.Suite); err != nil {
		return nil, err
	}
	if b.tag, err = image.NormalizeTag(cmp.Or(o.Tag, defaultTag(b.source, o.Include))); err != nil {
		return nil, err
	}
	if o.MaxAge < 0 || o.MaxBytes < 0 {
		return nil, fmt.Errorf("%w: MaxAge %v and MaxBytes %d must not be negative", image.ErrInvalidOption, o.MaxAge, o.MaxBytes)
	}
	if o.MaxFiles < 0 || o.MaxFiles > fstree.MaxInodes {
		return nil, fmt.Errorf("%w: MaxFiles %d is not between 0 and %d", image.ErrInvalidOption, o.MaxFiles, fstree.MaxInodes)
	}
	b.MaxFiles = cmp.Or(b.MaxFiles, DefaultMaxFiles)
	b.MaxAge = cmp.Or(b.MaxAge, DefaultMaxAge)
	b.MaxBytes = cmp.Or(b.MaxBytes, DefaultMaxBytes)
	var mu sync.Mutex
	b.progress = func(stage string, done, total int64) {
		if o.Progress != nil {
			mu.Lock()
			defer mu.Unlock()
			o.Progress(stage, done, total)
		}
	}
	return b, nil
}

// recipeVersion is raised when the same options give a different image than before, so that older images are not
// reused.
const recipeVersion = 1

// spec returns a hash of everything that decides the result. content identifies the source's content if it is
// known beforehand.
func (b *buildOptions) spec(content string) (string, error) {
	j, err := json.Marshal(struct {
		Recipe   int
		Source   string
		Packages []string
		Mirrors  []string
		NoDocs   bool
		Arch     string
		Content  string `json:",omitempty"`
	}{recipeVersion, b.source.String(), b.packages, b.Mirrors, b.NoDocs, runtime.GOARCH, content})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(j)
	return hex.EncodeToString(sum[:]), nil
}

// Build makes an image and puts it into the store, or finds a recent one of the same spec there (see
// Options.MaxAge), and gives it the tag. A tag of another image moves. When ctx ends, Build kills all its
// processes, removes what it wrote, and returns the context's cause in its error.
//
// Of concurrent builds of one spec, in any processes, one does the work and the others take its image.
//
// Debian sources need root, and the programs mmdebstrap and unshare. Errors a caller may check for:
// ErrUnsupportedSource, ErrInvalidOption, ErrNotRoot, ErrToolMissing, ErrNoMirror, ErrBuildTool, ErrTooLarge,
// ErrChanged; for archives ErrBadArchive; for layers ErrDigest, ErrBadManifest, ErrNoPlatform, ErrNoSource; for
// registries ErrAuth, ErrRateLimited, ErrRegistry.
func Build(ctx context.Context, opts Options) (*image.Image, error) {
	o, err := checkOptions(opts)
	if err != nil {
		return nil, err
	}
	if o.source.layered() {
		return o.inTemp(ctx, o.buildLayered)
	}
	spec, err := o.spec("")
	if err != nil {
		return nil, err
	}
	if o.source.Kind == KindDebian && !o.NoCache {
		l, err := o.lockSpec(ctx, spec)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		img, err := o.Store.Reuse(ctx, spec, o.MaxAge, o.tag)
		if err != nil || img != nil {
			return img, err
		}
	}
	return o.inTemp(ctx, func(ctx context.Context, tmp string) (*image.Image, error) { return o.build(ctx, spec, tmp) })
}

// lockSpec waits for other builds of the same spec.
func (b *buildOptions) lockSpec(ctx context.Context, spec string) (*os.File, error) {
	name := "spec-" + spec[:16]
	l, err := b.Store.TryLock(name)
	if errors.Is(err, osfile.ErrLocked) {
		b.progress(image.StageWait, 0, 0)
		l, err = b.Store.Lock(ctx, name, osfile.Exclusive)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for another build of %s: %w", b.source, err)
	}
	return l, nil
}

// inTemp builds in a temporary folder of the store, and removes the folder.
func (b *buildOptions) inTemp(ctx context.Context, build func(ctx context.Context, tmp string) (*image.Image, error)) (*image.Image, error) {
	if _, err := b.Store.Prune(ctx); err != nil {
		return nil, err
	}
	tmp, err := b.Store.NewTemp(ctx, "build-")
	if err != nil {
		return nil, err
	}
	img, err := build(ctx, tmp.Dir)
	if err != nil {
		return nil, errors.Join(err, tmp.Remove())
	}
	if err := tmp.Remove(); err != nil {
		return nil, fmt.Errorf("image %s is built, but not all temporary files could be removed: %w", img.Name(), err)
	}
	return img, nil
}

// build does the work in the folder tmp, which the caller removes.
func (b *buildOptions) build(ctx context.Context, spec, tmp string) (*image.Image, error) {
	spool, err := layers.NewSpool(tmp)
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	defer func() { _ = spool.Close() }() // the spool is discarded
	var t *fstree.Tree
	switch b.source.Kind {
	case KindDebian:
		t, err = debian.Build(ctx, debian.Options{
			Suite: b.source.Suite, Packages: b.packages, Mirrors: b.Mirrors, NoDocs: b.NoDocs, InstallDeps: b.InstallDeps, Progress: b.progress, Log: b.Log,
		}, tmp, func(r io.Reader) (*fstree.Tree, error) { return layers.ReadTree(ctx, r, spool, b.newBudget()) })
	case KindDir:
		t, err = readDir(ctx, b.source.Path, b.MaxBytes, func(n int64) { b.progress(image.StageRead, n, 0) })
	case KindTar:
		t, err = b.readTarball(ctx, spool)
	default:
		err = fmt.Errorf("%w: kind %q", image.ErrUnsupportedSource, b.source.Kind)
	}
	if err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	return b.finish(ctx, t, &image.Image{Architecture: runtime.GOARCH}, spec, tmp)
}

// finish makes an image of a tree and publishes it. img has the part of the record that only its source knows.
func (b *buildOptions) finish(ctx context.Context, t *fstree.Tree, img *image.Image, spec, tmp string) (*image.Image, error) {
	if err := addVMFiles(t, b.source.Kind == KindDebian); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	img.Source, img.Spec, img.Include = b.source.String(), spec, b.packages
	if err := describePackages(t, img); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	if err := b.Store.Write(ctx, t, img, filepath.Join(tmp, "image"), b.progress); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	b.progress(image.StagePublish, 0, 0)
	if err := b.Store.Publish(ctx, img, b.tag); err != nil {
		return nil, err
	}
	return img, nil
}
