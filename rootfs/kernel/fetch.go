package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// cloudPackage is the Debian package that depends on the newest stock kernel for virtual machines.
const cloudPackage = "linux-image-cloud-amd64"

// FetchOptions says where to put Debian's kernel. Only CacheDir is required.
type FetchOptions struct {
	// CacheDir is the folder for kernels and downloads. A fetched kernel takes 110 MiB, its package 26 MiB.
	CacheDir string

	// ExtraModules are names of modules for Kernel.Modules besides those that every guest needs. Fetch adds their
	// dependencies.
	ExtraModules []string

	// Update makes Fetch return the version that apt would install now. Otherwise it uses a kernel in the cache.
	Update bool

	// Newer, if set, is called with the version that apt knows when Fetch uses an older one in the cache.
	Newer func(version string)

	// UpdateIndex lets Fetch run apt-get update, as root, when apt does not know the package or the archive no
	// longer has its file.
	UpdateIndex bool

	// Progress, if set, is called at the start of each stage and during it, from one goroutine at a time. total is
	// 0 if it is not known; done and total are bytes for "download".
	Progress func(stage string, done, total int64)

	// Log, if set, receives the messages of the programs.
	Log io.Writer
}

// realKernel matches the name of a package that holds a kernel, not only a dependency on one.
var realKernel = lazyregexp.New(`^linux-image-[0-9]`)

// Fetch returns Debian's stock kernel for virtual machines, unmodified, from the cache if it is there;
// FetchOptions.Update chooses the version. Apt downloads it, and Fetch compares it with the hash in apt's signed
// index and unpacks it in the cache. It installs nothing on the host.
//
// Any number of calls and processes may fetch at once. When ctx ends, Fetch stops the programs, and its error
// wraps ctx's. An interrupted Fetch leaves nothing that passes for a result. The error wraps ErrNoPackage if apt
// does not know the package.
func Fetch(ctx context.Context, opts FetchOptions) (*Kernel, error) {
	k, err := fetch(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("fetching Debian's kernel: %w", err)
	}
	return k, nil
}

func fetch(ctx context.Context, opts FetchOptions) (*Kernel, error) {
	if opts.CacheDir == "" {
		return nil, errors.New("no cache folder given")
	}
	if runtime.GOARCH != "amd64" {
		return nil, fmt.Errorf("on %s: %w: only amd64 is", runtime.GOARCH, ErrUnsupported)
	}
	cacheDir, err := filepath.Abs(opts.CacheDir)
	if err != nil {
		return nil, err
	}
	if opts.Progress == nil {
		opts.Progress = func(string, int64, int64) {}
	}
	a := &apt{cacheDir: cacheDir, mayChange: opts.UpdateIndex, log: opts.Log, report: opts.Progress}
	a.report("check", 0, 0)
	wanted := slices.Concat(wantedModules, opts.ExtraModules)
	modules := strings.Join(wanted, " ")
	if !opts.Update {
		if k, err := cachedCloud(cacheDir, modules); err != nil {
			return nil, err
		} else if k != nil {
			newest := func(ctx context.Context) (aptPackage, error) { return resolveKernel(ctx, a.lookup, cloudPackage) }
			a.tellNewer(ctx, k.Inputs["package"], newest, opts.Newer)
			return k, nil
		}
	}
	p, err := resolveKernel(ctx, a.candidate, cloudPackage)
	if err != nil {
		return nil, err
	}
	inputs := map[string]string{
		"recipe":  recipeVersion,
		"package": fmt.Sprintf("%s %s deb sha256:%s", p.name, p.version, p.sha256),
		"modules": modules,
	}
	hash := hashInputs(inputs)
	return once(ctx, cacheDir, Debian, hash, func() (*Kernel, error) { return a.take(ctx, p, wanted, inputs, hash) })
}

// take puts the kernel of a package into the cache.
func (a *apt) take(ctx context.Context, p aptPackage, wanted []string, inputs map[string]string, hash string) (*Kernel, error) {
	deb, err := a.download(ctx, p)
	if err != nil {
		return nil, err
	}
	a.report("unpack", 0, 0)
	version := strings.TrimPrefix(p.name, "linux-image-")
	if !release.MatchString(version) {
		return nil, fmt.Errorf("%w: the package %s does not name the kernel's version", ErrUnsupported, p.name)
	}
	k := &Kernel{
		ID: fmt.Sprintf("%s-%s-%s", Debian, version, hash[:idHashLength]), Kind: Debian, Version: version, Arch: "amd64",
		Image: "boot/vmlinuz-" + version, Config: "boot/config-" + version, ModulesDir: "lib/modules/" + version,
		InputsHash: hash, Inputs: inputs,
	}
	staging, err := artifact.StagingDir(filepath.Join(a.cacheDir, kernelsDir), k.ID)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(staging)
	if _, err := a.command("unpacking "+p.name).run(ctx, "dpkg-deb", "-x", deb, staging); err != nil {
		return nil, err
	}
	for _, want := range []string{k.Image, k.Config, k.ModulesDir} {
		if _, err := os.Stat(filepath.Join(staging, want)); err != nil {
			return nil, fmt.Errorf("%w: the package %s has no /%s", ErrUnsupported, p.name, want)
		}
	}
	// The changelogs, and a System.map that only says where the real one is.
	for _, drop := range []string{"usr", "boot/System.map-" + version} {
		if err := os.RemoveAll(filepath.Join(staging, drop)); err != nil {
			return nil, err
		}
	}
	set, err := readModules(filepath.Join(staging, k.ModulesDir))
	if err != nil {
		return nil, err
	}
	paths, err := set.order(wanted, optionalModules)
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		rel, err := filepath.Rel(staging, path)
		if err != nil {
			return nil, err
		}
		k.Modules = append(k.Modules, rel)
	}
	a.report("publish", 0, 0)
	return k.publish(ctx, a.cacheDir, staging)
}

// Download returns the path, in the cache, of the Debian package with the kernel that a package name stands for.
// Apt downloads it if necessary, and Download compares it with the hash in apt's signed index.
func Download(ctx context.Context, cacheDir, name string) (string, error) {
	a := &apt{cacheDir: cacheDir, report: func(string, int64, int64) {}}
	p, err := resolveKernel(ctx, a.candidate, name)
	if err != nil {
		return "", err
	}
	return a.download(ctx, p)
}

// maxMetaPackages bounds the chain of packages that only depend on a kernel; Debian's chain has one.
const maxMetaPackages = 4

// resolveKernel follows packages that only depend on a kernel to the one that holds it.
func resolveKernel(ctx context.Context, candidate func(context.Context, string) (aptPackage, error), name string) (aptPackage, error) {
	for range maxMetaPackages {
		p, err := candidate(ctx, name)
		if err != nil {
			return aptPackage{}, err
		}
		if realKernel.MatchString(p.name) {
			return p, nil
		}
		next := ""
		for dep := range strings.SplitSeq(p.depends, ",") {
			// Debian Policy 7.1: "name (= version) [arch] | alternative"
			if f := strings.Fields(dep); len(f) > 0 && strings.HasPrefix(f[0], "linux-image-") {
				next = f[0]
				break
			}
		}
		if next == "" || !packageName.MatchString(next) {
			return aptPackage{}, fmt.Errorf("%w: the package %s neither holds a kernel nor depends on one (take %s)",
				ErrUnsupported, p.name, cloudPackage)
		}
		name = next
	}
	return aptPackage{}, fmt.Errorf("%w: %d packages that only depend on each other, from %s on", ErrUnsupported, maxMetaPackages, name)
}
