package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// Stages of a build, in their order, as Options.Progress is told them. A stage that has nothing to do is left out.
const (
	StageWait     = "wait"     // another build of the same spec is under way
	StageDeps     = "deps"     // installing the build tool
	StageResolve  = "resolve"  // reading the manifest of an image
	StagePrepare  = "prepare"  // starting the build tool
	StageIndex    = "index"    // fetching the package index
	StageDownload = "download" // downloading packages, or layers: bytes of them
	StageInstall  = "install"  // unpacking and configuring packages
	StageRead     = "read"     // reading the root filesystem; bytes of content, total unknown (0)
	StageWrite    = "write"    // writing the image; bytes of content
	StageHash     = "hash"     // computing the id; bytes of the image
	StagePublish  = "publish"  // putting the image into the store
)

// Defaults of Options.
const (
	DefaultMaxAge   = 24 * time.Hour
	DefaultMaxBytes = 64 << 30
	DefaultMaxFiles = 1 << 20
)

// Options says what to build and where to. Store and From are needed, the rest may be zero.
type Options struct {
	Store   *Store
	From    string   // see ParseSource
	Include []string // Debian packages; items may hold several, separated by commas. Of debian: sources only
	// Tag is NAME or NAME:VERSION. Default: debian-FIRSTPACKAGE:latest (python3 gives debian-python), dir-NAME:latest,
	// the repository and tag of an image of a registry, the name of a file.
	Tag string

	// Platform chooses among images for several: OS/ARCH or OS/ARCH/VARIANT. Default: linux and the architecture of
	// this program. Of sources of layers only.
	Platform string
	// PlainHTTP talks to the registry without TLS. Those on this host are talked to so in any case.
	PlainHTTP bool
	// Stdin is what the path "-" stands for.
	Stdin io.Reader

	// Mirrors replaces the host's apt sources: each item is a URL of a Debian archive (of which the suite and component
	// main are taken), or a line as in sources.list(5).
	Mirrors []string
	// NoDocs leaves documentation, manual and info pages out of Debian images (copyright files stay).
	NoDocs bool

	// MaxAge is how old an image of the same spec may be to be used instead of a new build; zero means DefaultMaxAge.
	// The spec is the source, the set of packages, mirrors, NoDocs and the architecture; not the tag. Directories and
	// tar streams are always read anew, but equal content gives the same image. Images of layers are asked for anew,
	// and built again only when their manifest is another one, whatever their age.
	MaxAge time.Duration
	// NoCache builds anew in any case.
	NoCache bool

	// InstallDeps installs a missing build tool with the host's apt. Otherwise that is an ErrToolMissing.
	InstallDeps bool
	// MaxBytes bounds the sum of the file sizes of the source, in all its layers together; zero means DefaultMaxBytes.
	MaxBytes int64
	// MaxFiles bounds the entries of archives, in all layers together, and the directories that they imply; zero means
	// DefaultMaxFiles, the most is 8,388,608. A build takes about 2 KiB of memory for each at worst. Of sources of
	// layers and tar streams.
	MaxFiles int
	// Progress is told the stage (Stage...), and what of it is done, in bytes; total is 0 when it is not known. It is
	// called often, from several goroutines but never from two at once, and must return quickly.
	Progress func(stage string, done, total int64)
	// Log takes the messages of the build tool. It need not be safe for concurrent use.
	Log io.Writer

	// pause waits between tries of a request; nil waits by the clock.
	pause func(context.Context, time.Duration) error
}

// buildOptions is Options, checked and completed.
type buildOptions struct {
	Options
	source   Source
	packages []string
	tag      string
	platform v1.Platform
	progress func(stage string, done, total int64)
}

func checkOptions(o Options) (*buildOptions, error) {
	b := &buildOptions{Options: o}
	if o.Store == nil {
		return nil, fmt.Errorf("build an image: %w: no store is given", ErrInvalidOption)
	}
	var err error
	if b.source, err = ParseSource(o.From); err != nil {
		return nil, err
	}
	if b.packages, err = normalizePackages(o.Include); err != nil {
		return nil, err
	}
	if b.source.Kind != KindDebian && (len(b.packages) > 0 || len(o.Mirrors) > 0) {
		return nil, fmt.Errorf("%w: packages and mirrors go with debian: sources only, not with %s", ErrInvalidOption, b.source)
	}
	if (o.Platform != "" || o.PlainHTTP) && !b.source.layered() {
		return nil, fmt.Errorf("%w: a platform and a registry without TLS go with images of layers only, not with %s", ErrInvalidOption, b.source)
	}
	if b.platform, err = parsePlatform(o.Platform); err != nil {
		return nil, err
	}
	for _, m := range o.Mirrors {
		if _, err := parseMirror(m, b.source.Suite); err != nil {
			return nil, err
		}
	}
	tag := o.Tag
	if tag == "" {
		tag = defaultTag(b.source, o.Include)
	}
	if b.tag, err = NormalizeTag(tag); err != nil {
		return nil, err
	}
	if o.MaxAge < 0 || o.MaxBytes < 0 {
		return nil, fmt.Errorf("%w: MaxAge %v and MaxBytes %d must not be negative", ErrInvalidOption, o.MaxAge, o.MaxBytes)
	}
	if o.MaxFiles < 0 || o.MaxFiles > fstree.MaxInodes {
		return nil, fmt.Errorf("%w: MaxFiles %d is not between 0 and %d", ErrInvalidOption, o.MaxFiles, fstree.MaxInodes)
	}
	if b.MaxFiles == 0 {
		b.MaxFiles = DefaultMaxFiles
	}
	if b.pause == nil {
		b.pause = sleep
	}
	if b.MaxAge == 0 {
		b.MaxAge = DefaultMaxAge
	}
	if b.MaxBytes == 0 {
		b.MaxBytes = DefaultMaxBytes
	}
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

// recipeVersion is raised when the same options give another image than before, so that older ones are not taken for
// it.
const recipeVersion = 1

// spec is a hash of all that decides what is built. content names what the source holds, where that is known
// beforehand.
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

func newHash() hash.Hash { return sha256.New() }

// Build makes an image and puts it into the store, or finds a recent one of the same spec there (see Options.MaxAge),
// and gives it the tag. A tag that another image has moves. When ctx ends, all processes of the build are killed, what
// it wrote is removed, and the context's cause is in the error.
//
// Of several builds of one spec at the same time, in any processes, one does the work and the others take its image.
//
// Debian sources need root, and the programs mmdebstrap and unshare. Errors a caller may look for:
// ErrUnsupportedSource, ErrInvalidOption, ErrNotRoot, ErrToolMissing, ErrNoMirror, ErrBuildTool, ErrTooLarge,
// ErrChanged; of archives ErrBadArchive; of layers ErrDigest, ErrBadManifest, ErrNoPlatform, ErrNoSource; of registries
// ErrAuth, ErrRateLimited, ErrRegistry.
func Build(ctx context.Context, opts Options) (*Image, error) {
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
		img, err := o.cached(ctx, spec, o.MaxAge)
		if err != nil || img != nil {
			return img, err
		}
	}
	return o.inTemp(ctx, func(ctx context.Context, tmp string) (*Image, error) { return o.build(ctx, spec, tmp) })
}

// lockSpec waits for other builds of the same spec.
func (b *buildOptions) lockSpec(ctx context.Context, spec string) (*os.File, error) {
	name := filepath.Join(b.Store.dir, locksDir, "spec-"+spec[:16])
	l, err := tryLock(name)
	if errors.Is(err, osfile.ErrLocked) {
		b.progress(StageWait, 0, 0)
		l, err = lock(ctx, name, osfile.Exclusive)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for another build of %s: %w", b.source, err)
	}
	return l, nil
}

// inTemp builds in a temporary folder of the store, which is gone afterwards.
func (b *buildOptions) inTemp(ctx context.Context, build func(ctx context.Context, tmp string) (*Image, error)) (*Image, error) {
	if _, err := b.Store.Prune(ctx); err != nil {
		return nil, err
	}
	tmp, err := b.newTemp(ctx)
	if err != nil {
		return nil, err
	}
	img, err := build(ctx, tmp.dir)
	if err != nil {
		return nil, errors.Join(err, tmp.remove())
	}
	if err := tmp.remove(); err != nil {
		return nil, fmt.Errorf("image %s is built, but not all temporary files could be removed: %w", img.name(), err)
	}
	return img, nil
}

func (b *buildOptions) newTemp(ctx context.Context) (*temp, error) {
	l, err := b.Store.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return b.Store.newTemp("build-")
}

// cached gives the newest image of the spec that is not too old and passes the cheap check, with the tag given to it;
// nil if there is none. With maxAge 0, none is too old.
func (b *buildOptions) cached(ctx context.Context, spec string, maxAge time.Duration) (*Image, error) {
	l, err := b.Store.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	all, _ := b.Store.List() // damaged records are no candidates
	for _, img := range all {
		age := time.Since(img.Created)
		if img.Spec != spec || maxAge > 0 && (age > maxAge || age < 0) || checkFile(img) != nil {
			continue
		}
		if err := b.Store.tag(img, b.tag); err != nil {
			return nil, err
		}
		img.Cached = true
		return img, nil
	}
	return nil, nil
}

// build does the work in the folder tmp, which the caller removes.
func (b *buildOptions) build(ctx context.Context, spec, tmp string) (*Image, error) {
	var t *fstree.Tree
	var err error
	switch b.source.Kind {
	case KindDebian:
		spool, err := os.OpenFile(filepath.Join(tmp, "spool"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, fmt.Errorf("build from %s: %w", b.source, err)
		}
		defer func() { _ = spool.Close() }() // thrown away
		if t, err = debianBuild(ctx, b, tmp, spool); err != nil {
			return nil, err
		}
	case KindDir:
		if t, err = readDir(ctx, b.source.Path, b.MaxBytes, func(n int64) { b.progress(StageRead, n, 0) }); err != nil {
			return nil, fmt.Errorf("build from %s: %w", b.source, err)
		}
	case KindTar:
		spool, err := newSpool(tmp)
		if err != nil {
			return nil, fmt.Errorf("build from %s: %w", b.source, err)
		}
		defer func() { _ = spool.Close() }() // thrown away
		if t, err = b.readTarball(ctx, spool); err != nil {
			return nil, fmt.Errorf("build from %s: %w", b.source, err)
		}
	default:
		return nil, fmt.Errorf("%w: kind %q", ErrUnsupportedSource, b.source.Kind)
	}
	return b.finish(ctx, t, &Image{Architecture: runtime.GOARCH}, spec, tmp)
}

// finish makes an image of a tree and publishes it. img has what only its source knows.
func (b *buildOptions) finish(ctx context.Context, t *fstree.Tree, img *Image, spec, tmp string) (*Image, error) {
	if err := addVMFiles(t, b.source.Kind == KindDebian); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	img.Version, img.Source, img.Spec, img.Include = RecordVersion, b.source.String(), spec, b.packages
	img.Skipped, img.dir = t.Skipped, filepath.Join(tmp, "image")
	if err := describePackages(t, img); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	if err := b.write(ctx, t, img); err != nil {
		return nil, fmt.Errorf("build from %s: %w", b.source, err)
	}
	img.Inodes, img.Content = t.Inodes, t.Bytes
	b.progress(StagePublish, 0, 0)
	img.Created = time.Now().UTC()
	if err := b.Store.publish(ctx, img, b.tag); err != nil {
		return nil, err
	}
	return img, nil
}

// write makes the image file and its id.
func (b *buildOptions) write(ctx context.Context, t *fstree.Tree, img *Image) error {
	if err := os.Mkdir(img.dir, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(img.Path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // synced before, errors would have come then
	if err := erofs.Write(ctx, t, f, func(done, total int64) { b.progress(StageWrite, done, total) }); err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	img.Size = st.Size()
	if img.ID, err = hashFile(ctx, f, func(done, total int64) { b.progress(StageHash, done, total) }); err != nil {
		return fmt.Errorf("hash the image: %w", err)
	}
	return nil
}

// Limits of dpkg's database, which anybody may have written. The record of an image must stay below maxRecordBytes with
// what is taken from it; Debian's whole archive has 65,000 packages, and no system a tenth of them.
const (
	maxStatusBytes   = 32 << 20 // it is read into memory
	maxInstalled     = 32 << 10 // packages
	maxInstalledText = 1 << 20  // bytes of their names, versions and architectures
)

var archRE = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// describePackages takes the list of installed packages, and the architecture, from the dpkg database of a tree if it
// has one.
func describePackages(t *fstree.Tree, img *Image) error {
	status, err := t.ReadText("var/lib/dpkg/status", maxStatusBytes)
	if err != nil {
		return err
	}
	if img.Packages, err = parseDpkgStatus(status); err != nil {
		return err
	}
	arch, err := t.ReadText("var/lib/dpkg/arch", maxStatusBytes)
	if err != nil {
		return err
	}
	// The configuration of an image of layers has said for what it is.
	if native, _, _ := strings.Cut(strings.TrimSpace(arch), "\n"); img.Platform == "" && archRE.MatchString(native) {
		img.Architecture = native
	}
	return nil
}

// parseDpkgStatus gives the installed packages of a dpkg status file, in its order.
func parseDpkgStatus(text string) ([]Package, error) {
	var (
		out    []Package
		cur    Package
		status string
		total  int
	)
	flush := func() error {
		p := cur
		installed := status == "install ok installed" || status == "hold ok installed"
		cur, status = Package{}, ""
		if !installed {
			return nil
		}
		total += len(p.Name) + len(p.Version) + len(p.Architecture)
		if len(out) >= maxInstalled || total > maxInstalledText {
			return fmt.Errorf("%w: its dpkg database names more than %d packages, or has more than %d bytes of names", ErrTooLarge, maxInstalled, maxInstalledText)
		}
		// Not as pieces of the text, which would stay.
		out = append(out, Package{strings.Clone(p.Name), strings.Clone(p.Version), strings.Clone(p.Architecture)})
		return nil
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if strings.TrimSpace(line) == "" {
			if err := flush(); err != nil {
				return nil, err
			}
			continue
		}
		k, v, ok := strings.Cut(line, ":")
		if !ok || line[0] == ' ' || line[0] == '\t' || line[0] == '#' {
			continue // a further line of a field, or a comment
		}
		v = strings.TrimSpace(v)
		switch strings.ToLower(strings.TrimSpace(k)) {
		case "package":
			cur.Name = v
		case "version":
			cur.Version = v
		case "architecture":
			cur.Architecture = v
		case "status":
			status = v
		}
	}
	return out, flush()
}
