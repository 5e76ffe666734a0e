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
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	// recipeVersion is part of every hash of inputs. Raise it when the steps below change what comes out.
	recipeVersion = "1"

	// sourcePackage is the Debian package with the kernel's source that the patches are for.
	sourcePackage = "linux-source-6.1"

	// compileSteps is about how many lines make prints that progress is counted by, for the share that is done.
	compileSteps = 1840
)

// BuildOptions says where and how to build. The zero value lacks only CacheDir.
type BuildOptions struct {
	// CacheDir is the folder for kernels, downloads and work; it needs some 1 GiB while building, 30 MiB after, and 140
	// MiB for the source package unless that is installed.
	CacheDir string

	// SharedDir, if set, is a folder that the caches of a user have in common, as those of several checkouts: a kernel
	// of the same inputs is copied from it if it is whole, and one that was built is copied to it. The newest four are
	// kept.
	SharedDir string

	// Jobs is how many compilers run at once; 0 means one for each CPU.
	Jobs int

	// InstallDeps lets Build run apt-get update and apt-get install, as root, for what it lacks. Otherwise an error
	// names it.
	InstallDeps bool

	// SourceTarball is a linux-*.tar.xz to use instead of Debian's package, for hosts that are not Debian.
	SourceTarball string

	// Config are options of the caller's, in the form of a .config. They take the place of those of the guest's
	// configuration and must hold in the finished one. Modules, and options that drowse cannot do with or without, are
	// refused. At most 1 MiB.
	Config string

	// Update has the kernel made of the newest source that apt knows and with the compiler that is there, unless the
	// cache has one of exactly these. Without it a kernel in the cache is used that has these patches and options.
	Update bool

	// Newer, if set, is called with the version of the source that apt knows when an older one in the cache is used.
	Newer func(version string)

	// Progress, if set, is called at the start of each stage and as it goes on, from one goroutine at a time. total is
	// 0 where it is not known; done and total are bytes for "download" and steps for "compile".
	Progress func(stage string, done, total int64)

	// Log, if set, receives the output of all programs run. It is kept in a file of the cache as well.
	Log io.Writer
}

// source is where the kernel's source comes from.
type source struct {
	tarball  string     // a .tar.xz, or "" if it is still inside pkg's .deb
	pkg      aptPackage // zero for BuildOptions.SourceTarball
	identity string     // for the hash of inputs
}

// Build returns the kernel made from Debian's kernel source with the patches and the configuration in this folder, from
// the cache if it has one. Nothing is asked of apt or of compilers then. A kernel is known by its inputs: source
// package, patches, configuration, compiler, linker and recipe; BuildOptions.Update says which of them matter. A build
// takes 8 minutes of CPU time. Any number of calls and processes may build at once; those with the same inputs wait for
// the first.
//
// When ctx ends, the compilers are stopped and the error wraps ctx's. A build that was interrupted in any way, also by
// loss of power, leaves nothing that is taken for a result; the next one removes its remains. A failed program gives a
// *CommandError; missing programs, an error that wraps ErrUnsupported and names the packages to install.
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

// make takes the kernel from the shared folder, or builds it and shares it.
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

// openLog makes the log file of this build, and sends all output there from now on.
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

// need is something that the build cannot do without, and the Debian package that has it.
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

// dependencies checks that the programs and headers of needs are there, and installs what is not if it may.
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

// source finds the kernel's source: the tarball that the caller names, the installed package if it is the version apt
// would install, or else that version's .deb, which is not downloaded before it is needed.
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
	if p.sha256 == "" { // installed once, and in no archive that apt knows now
		sum, _, err := artifact.HashFile(ctx, tarball)
		if err != nil {
			return source{}, err
		}
		src.identity = fmt.Sprintf("%s %s tarball sha256:%s", p.name, p.version, sum)
	}
	return src, nil
}

// recipe returns what this program and its caller decide of what is built, by name.
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

// inputs returns everything that decides what is built, by name: the recipe, the source and the tools.
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

// hashInputs hashes names and values so that no two different maps give the same input to the hash.
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

// unneeded are patterns of files that our kernel is made without: half of the source's files and bytes. Kconfig and
// make want the Kconfig files and the Makefiles of every folder that they may go into, so those stay.
var unneeded = []string{
	"Documentation/*.rst", "Documentation/*.yaml", "Documentation/*.txt",
	"drivers/gpu/drm/*.[ch]", "drivers/media/*.[ch]", "drivers/net/ethernet/*.[ch]", "drivers/net/wireless/*.[ch]", "sound/*.[ch]",
	"tools/perf", "tools/testing",
}

// otherArchs are the folders of arch/ that hold nothing for x86-64 but Kconfig files.
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

// applyPatches applies them without fuzz: a place that only resembles the one a patch was made for is not good enough.
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

// makeArgs makes the build the same on every machine: the kernel's version line tells user, host and time.
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
var compileStep = regexp.MustCompile(`^  (CC|AS|AR|LD|HOSTCC|GEN|UPD) `)

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

// release is what a kernel may call itself. It becomes part of a file name.
var release = regexp.MustCompile(`^[0-9]+\.[0-9A-Za-z.+~-]{1,63}$`)

// collect takes the results out of the tree and publishes them.
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
