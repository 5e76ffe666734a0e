package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	// recipeVersion is part of every hash of inputs. Raise it when the steps below change the result.
	recipeVersion = "1"

	// sourcePackage is the Debian package with the kernel source that the patches apply to.
	sourcePackage = "linux-source-6.1"

	// compileSteps is about how many progress lines make prints. It is the total of the progress.
	compileSteps = 1840
)

// BuildOptions says where and how to build. Only CacheDir is required.
type BuildOptions struct {
	// CacheDir is the folder for kernels, downloads and work. It needs some 1 GiB during a build, 30 MiB after,
	// and 140 MiB for the source package unless that is installed.
	CacheDir string

	// SharedDir, if set, is a folder that several caches of a user share, such as those of several checkouts.
	// Build copies a kernel of the same inputs from it, if the kernel is intact, and copies a new one to it. It
	// keeps the newest four.
	SharedDir string

	// Jobs is how many compilers run at the same time; 0 means one for each CPU.
	Jobs int

	// InstallDeps lets Build run apt-get update and apt-get install, as root, for missing packages. Otherwise an
	// error names them.
	InstallDeps bool

	// SourceTarball is a linux-*.tar.xz to use instead of Debian's package, for hosts that are not Debian.
	SourceTarball string

	// Config has the caller's options, in the form of a .config. They replace those of the guest's configuration
	// and must hold in the finished one. Build refuses modules, options that drowse needs turned off, and options
	// that it must not have turned on. At most 1 MiB.
	Config string

	// Update makes Build use the newest source that apt knows and the installed compiler, unless the cache has a
	// kernel of exactly these. Otherwise it uses a kernel in the cache that has these patches and options.
	Update bool

	// Newer, if set, is called with apt's version of the source when Build uses an older one from the cache.
	Newer func(version string)

	// Progress, if set, is called at the start of each stage and during it, from one goroutine at a time. total is
	// 0 if it is not known; done and total are bytes for "download" and steps for "compile".
	Progress func(stage string, done, total int64)

	// Log, if set, receives the output of all programs. A file of the cache gets it as well.
	Log io.Writer
}

// source is the origin of the kernel's source.
type source struct {
	tarball  string     // a .tar.xz, or "" while it is still in pkg's .deb
	pkg      aptPackage // zero for BuildOptions.SourceTarball
	identity string     // for the hash of inputs
}

// Build returns the kernel made from Debian's kernel source with the patches and the configuration in this folder,
// from the cache if it has one: then Build needs neither apt nor compilers. The inputs identify a kernel: source
// package, patches, configuration, compiler, linker and recipe. BuildOptions.Update says which of them matter. A
// build takes 8 minutes of CPU time. Any number of calls and processes may build at once; those with the same
// inputs wait for the first.
//
// When ctx ends, Build stops the compilers, and its error wraps ctx's. An interrupted build, also one cut off by
// loss of power, leaves nothing that passes for a result; the next build removes its remains. A failed program
// gives a *CommandError; missing programs, an error that wraps ErrUnsupported and names the packages to install.
func Build(ctx context.Context, opts BuildOptions) (*Kernel, error) {
	b, err := newBuilder(opts)
	if err != nil {
		return nil, err
	}
	k, err := b.build(ctx)
	if err != nil {
		return nil, fmt.Errorf("building the guest kernel: %w", err)
	}
	return k, nil
}

type builder struct {
	opts    BuildOptions
	apt     apt
	config  string
	patches []patch
	logPath string
	log     io.Writer
}

func newBuilder(opts BuildOptions) (*builder, error) {
	if opts.CacheDir == "" {
		return nil, errors.New("building the guest kernel: no cache folder given")
	}
	if runtime.GOARCH != "amd64" {
		return nil, fmt.Errorf("building the guest kernel on %s: %w: the patches and the configuration are for amd64", runtime.GOARCH, ErrUnsupported)
	}
	dir, err := filepath.Abs(opts.CacheDir)
	if err != nil {
		return nil, err
	}
	opts.CacheDir = dir
	if opts.Progress == nil {
		opts.Progress = func(string, int64, int64) {}
	}
	if opts.Jobs <= 0 {
		opts.Jobs = runtime.NumCPU()
	}
	p, err := patches()
	if err != nil {
		return nil, err
	}
	config := guestConfig
	if opts.Config != "" {
		if config, err = withOwn(guestConfig, opts.Config); err != nil {
			return nil, fmt.Errorf("building the guest kernel: %w", err)
		}
	}
	return &builder{
		opts:    opts,
		apt:     apt{cacheDir: dir, mayChange: opts.InstallDeps, log: opts.Log, report: opts.Progress},
		config:  config,
		patches: p,
		log:     opts.Log,
	}, nil
}

func (b *builder) build(ctx context.Context) (*Kernel, error) {
	b.opts.Progress("check", 0, 0)
	if !b.opts.Update {
		k, err := b.cached(ctx)
		if err != nil {
			return nil, err
		}
		if k != nil {
			source := func(ctx context.Context) (aptPackage, error) { return b.apt.lookup(ctx, sourcePackage) }
			if b.opts.SourceTarball == "" {
				b.apt.tellNewer(ctx, k.Inputs["source"], source, b.opts.Newer)
			}
			return k, nil
		}
	}
	if err := b.dependencies(ctx); err != nil {
		return nil, err
	}
	src, err := b.source(ctx)
	if err != nil {
		return nil, err
	}
	inputs, err := b.inputs(ctx, src)
	if err != nil {
		return nil, err
	}
	hash, made := hashInputs(inputs), false
	k, err := once(ctx, b.opts.CacheDir, Built, hash, func() (*Kernel, error) {
		made = true
		return b.make(ctx, src, inputs, hash)
	})
	if k != nil && !made {
		b.offer(ctx, k)
	}
	return k, err
}

// make copies the kernel from the shared folder, or builds it and shares it.
func (b *builder) make(ctx context.Context, src source, inputs map[string]string, hash string) (*Kernel, error) {
	logFile, err := b.openLog(hash)
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	if k, err := b.takeShared(ctx, hash); k != nil || err != nil {
		return k, err
	}
	work, err := artifact.StagingDir(filepath.Join(b.opts.CacheDir, workDir), "build-"+hash[:idHashLength])
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	tree, err := b.unpack(ctx, src, work)
	if err != nil {
		return nil, err
	}
	if err := b.applyPatches(ctx, tree); err != nil {
		return nil, err
	}
	if err := b.configure(ctx, tree); err != nil {
		return nil, err
	}
	if err := b.compile(ctx, tree); err != nil {
		return nil, err
	}
	k, err := b.collect(ctx, tree, inputs, hash)
	if err != nil {
		return nil, err
	}
	b.share(ctx, k)
	return k, nil
}

// openLog makes this build's log file, and sends all output there from now on.
func (b *builder) openLog(hash string) (io.Closer, error) {
	b.logPath = filepath.Join(b.opts.CacheDir, logsDir, "build-"+hash[:idHashLength]+".log")
	if err := os.MkdirAll(filepath.Dir(b.logPath), 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(b.logPath)
	if err != nil {
		return nil, err
	}
	b.log = f
	if b.opts.Log != nil {
		b.log = io.MultiWriter(f, b.opts.Log)
	}
	return f, nil
}

// need is something that the build requires, and the Debian package that has it.
type need struct {
	program string
	header  string // for the C compiler, in place of a program
	pkg     string
}

var needs = []need{
	{program: "gcc", pkg: "gcc"},
	{program: "ld", pkg: "binutils"},
	{program: "strip", pkg: "binutils"},
	{program: "make", pkg: "make"},
	{program: "flex", pkg: "flex"},
	{program: "bison", pkg: "bison"},
	{program: "bc", pkg: "bc"},
	{program: "patch", pkg: "patch"},
	{program: "perl", pkg: "perl-base"},
	{program: "tar", pkg: "tar"},
	{program: "xz", pkg: "xz-utils"},
	{header: "stdlib.h", pkg: "libc6-dev"},
	{header: "gelf.h", pkg: "libelf-dev"},             // tools/objtool
	{header: "openssl/opensslv.h", pkg: "libssl-dev"}, // scripts/ and certs/
}

// dependencies checks that the programs and headers of needs are installed. It installs missing ones if it may.
func (b *builder) dependencies(ctx context.Context) error {
	missing := b.missing(ctx)
	if len(missing) > 0 && b.opts.InstallDeps {
		if err := b.apt.install(ctx, missing); err != nil {
			return err
		}
		missing = b.missing(ctx)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: missing here: %s (install with: apt-get install --no-install-recommends %s)",
			ErrUnsupported, strings.Join(missing, ", "), strings.Join(missing, " "))
	}
	return nil
}

// missing returns the packages to install, sorted.
func (b *builder) missing(ctx context.Context) []string {
	var out []string
	for _, n := range needs {
		var err error
		if n.program != "" {
			_, err = exec.LookPath(n.program)
		} else {
			c := command{doing: "looking for " + n.header, stdin: strings.NewReader("#include <" + n.header + ">\n")}
			_, err = c.run(ctx, "gcc", "-E", "-xc", "-o", "/dev/null", "-")
		}
		if err != nil && !slices.Contains(out, n.pkg) {
			out = append(out, n.pkg)
		}
	}
	slices.Sort(out)
	return out
}

// source finds the kernel's source: the caller's tarball, the installed package if it has the version that apt
// would install, or else that version's .deb, which is downloaded only when it is needed.
func (b *builder) source(ctx context.Context) (source, error) {
	if t := b.opts.SourceTarball; t != "" {
		sum, _, err := artifact.HashFile(ctx, t)
		if err != nil {
			return source{}, err
		}
		return source{tarball: t, identity: "tarball sha256:" + sum}, nil
	}
	p, err := b.apt.candidate(ctx, sourcePackage)
	if err != nil {
		return source{}, err
	}
	src := source{pkg: p, identity: fmt.Sprintf("%s %s deb sha256:%s", p.name, p.version, p.sha256)}
	have, err := b.apt.installed(ctx, sourcePackage)
	if err != nil {
		return source{}, err
	}
	tarball := "/usr/src/" + sourcePackage + ".tar.xz"
	if have != p.version {
		return src, nil
	}
	if ok, err := b.apt.intact(ctx, sourcePackage); err != nil || !ok {
		return src, err
	}
	if _, err := os.Stat(tarball); err != nil {
		return src, nil
	}
	src.tarball = tarball
	if p.sha256 == "" { // installed once; apt knows no archive with it now
		sum, _, err := artifact.HashFile(ctx, tarball)
		if err != nil {
			return source{}, err
		}
		src.identity = fmt.Sprintf("%s %s tarball sha256:%s", p.name, p.version, sum)
	}
	return src, nil
}

// recipe returns, by name, the inputs that this program and its caller decide.
func (b *builder) recipe() map[string]string {
	in := map[string]string{"recipe": recipeVersion, "config": sha256Of(b.config)}
	if b.opts.Config != "" {
		in[ownConfigInput] = sha256Of(b.opts.Config)
	}
	for _, p := range b.patches {
		in["patch "+p.name] = sha256Of(p.text)
	}
	return in
}

// inputs returns all inputs of the build by name: the recipe, the source and the tools.
func (b *builder) inputs(ctx context.Context, src source) (map[string]string, error) {
	in := b.recipe()
	in["source"] = src.identity
	for _, tool := range []string{"gcc", "ld"} {
		out, err := command{doing: "asking for the version of " + tool, log: b.log}.run(ctx, tool, "--version")
		if err != nil {
			return nil, err
		}
		in[tool], _, _ = strings.Cut(out, "\n")
	}
	return in, nil
}

func sha256Of(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// hashInputs hashes names and values. Different maps give different input to the hash.
func hashInputs(inputs map[string]string) string {
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(inputs)) {
		fmt.Fprintf(h, "%q=%q\n", n, inputs[n])
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (b *builder) command(doing, dir string) command {
	return command{doing: doing, dir: dir, log: b.log, logPath: b.logPath}
}

// unneeded are patterns of files that the kernel's build does not need: half of the source's files and bytes.
// Kconfig and make require the Kconfig files and the Makefiles of every folder that they may enter, so those stay.
var unneeded = []string{
	"Documentation/*.rst", "Documentation/*.yaml", "Documentation/*.txt",
	"drivers/gpu/drm/*.[ch]", "drivers/media/*.[ch]", "drivers/net/ethernet/*.[ch]", "drivers/net/wireless/*.[ch]", "sound/*.[ch]",
	"tools/perf", "tools/testing",
}

// otherArchs are the folders of arch/ of which x86-64 needs only the Kconfig files.
var otherArchs = []string{
	"alpha", "arc", "arm", "arm64", "csky", "hexagon", "ia64", "loongarch", "m68k", "microblaze", "mips", "nios2", "openrisc", "parisc",
	"powerpc", "riscv", "s390", "sh", "sparc", "um", "xtensa",
}

// unpack puts the source tree into work and returns its path.
func (b *builder) unpack(ctx context.Context, src source, work string) (string, error) {
	tarball := src.tarball
	if tarball == "" {
		deb, err := b.apt.download(ctx, src.pkg)
		if err != nil {
			return "", err
		}
		b.opts.Progress("unpack", 0, 0)
		dir := filepath.Join(work, "deb")
		if _, err := b.command("unpacking the package with the kernel's source", work).run(ctx, "dpkg-deb", "-x", deb, dir); err != nil {
			return "", err
		}
		tarball = filepath.Join(dir, "usr/src", sourcePackage+".tar.xz")
	}
	b.opts.Progress("unpack", 0, 0)
	tree := filepath.Join(work, "linux")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return "", err
	}
	tarball, err := filepath.Abs(tarball)
	if err != nil {
		return "", err
	}
	args := []string{"-xJf", tarball, "-C", tree, "--strip-components=1", "--no-same-owner"}
	for _, pattern := range unneeded {
		args = append(args, "--exclude=*/"+pattern)
	}
	for _, arch := range otherArchs {
		args = append(args, "--exclude=*/arch/"+arch+"/*.[chS]", "--exclude=*/arch/"+arch+"/*.dts*")
	}
	if err := b.command("unpacking the kernel's source", work).stream(ctx, nil, "tar", args...); err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(tree, "Kbuild")); err != nil {
		return "", fmt.Errorf("%s holds no kernel source: %w", tarball, err)
	}
	return tree, nil
}

// applyPatches applies the patches without fuzz: a place that only resembles a patch's context is an error.
func (b *builder) applyPatches(ctx context.Context, tree string) error {
	for i, p := range b.patches {
		b.opts.Progress("patch", int64(i), int64(len(b.patches)))
		c := b.command("applying "+p.name+" to the kernel's source, which may have changed too much for it", tree)
		c.stdin = strings.NewReader(p.text)
		if err := c.stream(ctx, nil, "patch", "-p1", "-F0", "--no-backup-if-mismatch", "-r", "-"); err != nil {
			return err
		}
	}
	return nil
}

// makeArgs makes the build reproducible: the kernel's version line names user, host and time.
func makeArgs(tree string, target ...string) ([]string, error) {
	info, err := os.Stat(filepath.Join(tree, "Kbuild")) // its time comes from the tarball
	if err != nil {
		return nil, err
	}
	return append([]string{
		"ARCH=x86_64", "KBUILD_BUILD_USER=drowse", "KBUILD_BUILD_HOST=drowse", "KBUILD_BUILD_VERSION=1",
		"KBUILD_BUILD_TIMESTAMP=" + info.ModTime().UTC().Format(time.UnixDate),
	}, target...), nil
}

func (b *builder) configure(ctx context.Context, tree string) error {
	b.opts.Progress("configure", 0, 0)
	path := filepath.Join(tree, ".config")
	mk := func(target string) (string, error) {
		args, err := makeArgs(tree, target)
		if err != nil {
			return "", err
		}
		if err := b.command("configuring the kernel", tree).stream(ctx, nil, "make", args...); err != nil {
			return "", err
		}
		text, err := os.ReadFile(path)
		return string(text), err
	}
	base, err := mk("tinyconfig")
	if err != nil {
		return err
	}
	merged, err := mergeConfig(base, b.config)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(merged), 0o644); err != nil {
		return err
	}
	finished, err := mk("olddefconfig")
	if err != nil {
		return err
	}
	return checkConfig(finished, b.config)
}

// compileStep matches make's line for a file that is compiled, assembled or archived.
var compileStep = lazyregexp.New(`^  (CC|AS|AR|LD|HOSTCC|GEN|UPD) `)

func (b *builder) compile(ctx context.Context, tree string) error {
	var done int64
	b.opts.Progress("compile", 0, compileSteps)
	c := b.command("compiling the kernel", tree)
	c.onLine = func(line string) {
		if compileStep.MatchString(line) {
			done++
			b.opts.Progress("compile", done, max(done, compileSteps))
		}
	}
	args, err := makeArgs(tree, "-j"+strconv.Itoa(b.opts.Jobs), "vmlinux")
	if err != nil {
		return err
	}
	if err := c.stream(ctx, nil, "make", args...); err != nil {
		return err
	}
	b.opts.Progress("compile", done, done)
	return nil
}

// release matches a kernel's release. It becomes part of a file name.
var release = lazyregexp.New(`^[0-9]+\.[0-9A-Za-z.+~-]{1,63}$`)

// collect moves the results out of the tree and publishes them.
func (b *builder) collect(ctx context.Context, tree string, inputs map[string]string, hash string) (*Kernel, error) {
	b.opts.Progress("publish", 0, 0)
	args, err := makeArgs(tree, "-s", "kernelrelease")
	if err != nil {
		return nil, err
	}
	version, err := b.command("asking for the kernel's version", tree).run(ctx, "make", args...)
	if err != nil {
		return nil, err
	}
	version = strings.TrimSpace(version)
	if !release.MatchString(version) {
		return nil, fmt.Errorf("the kernel calls itself %q, which cannot be part of a file name", version)
	}
	k := &Kernel{
		ID: fmt.Sprintf("%s-%s-%s", Built, version, hash[:idHashLength]), Kind: Built, Version: version, Arch: "amd64",
		Image: "vmlinux", Config: "config", SymbolMap: "System.map", InputsHash: hash, Inputs: inputs,
	}
	staging, err := artifact.StagingDir(filepath.Join(b.opts.CacheDir, kernelsDir), k.ID)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(staging)
	c := b.command("stripping the kernel", tree)
	if err := c.stream(ctx, nil, "strip", "--strip-all", "-o", filepath.Join(staging, k.Image), "vmlinux"); err != nil {
		return nil, err
	}
	for from, to := range map[string]string{".config": k.Config, "System.map": k.SymbolMap} {
		if err := copyFile(ctx, filepath.Join(staging, to), filepath.Join(tree, from)); err != nil {
			return nil, err
		}
	}
	return k.publish(ctx, b.opts.CacheDir, staging)
}
