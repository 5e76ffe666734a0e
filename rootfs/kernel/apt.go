package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// aptPackage is a version of a Debian package, as apt knows it.
type aptPackage struct {
	name    string
	version string
	arch    string
	sha256  string // of the .deb; "" when apt knows the package only because it is installed
	size    int64  // of the .deb, bytes
	depends string // the Depends field
}

// ErrNoPackage means that apt knows no such package.
var ErrNoPackage = errors.New("apt knows no such package")

// progressPoll is the time between two looks at the size of a file during its download.
const progressPoll = 250 * time.Millisecond

// apt runs Debian's package tools. It installs packages and updates the index only if mayChange is set.
type apt struct {
	cacheDir  string
	mayChange bool // may run apt-get update and apt-get install, which need root
	log       io.Writer
	report    func(stage string, done, total int64)

	updated bool
}

func (a *apt) command(doing string) command {
	return command{doing: doing, log: a.log, env: []string{"DEBIAN_FRONTEND=noninteractive"}}
}

// candidate returns the version of the package that apt would install. Its error wraps ErrNoPackage if there is none.
func (a *apt) candidate(ctx context.Context, name string) (aptPackage, error) {
	p, err := a.lookup(ctx, name)
	if errors.Is(err, ErrNoPackage) && a.mayChange && !a.updated {
		if err := a.update(ctx); err != nil {
			return aptPackage{}, err
		}
		p, err = a.lookup(ctx, name)
	}
	return p, err
}

func (a *apt) lookup(ctx context.Context, name string) (aptPackage, error) {
	out, err := a.command("looking up the Debian package "+name).run(ctx, "apt-cache", "show", "--no-all-versions", name)
	if exited(ctx, err) {
		return aptPackage{}, fmt.Errorf("%w: %s (bring apt's index up to date with: apt-get update; the package is part of Debian 12, bookworm)",
			ErrNoPackage, name)
	}
	if err != nil {
		return aptPackage{}, err
	}
	p, err := parseStanza(out)
	if err != nil {
		return aptPackage{}, fmt.Errorf("looking up the Debian package %s: %w", name, err)
	}
	return p, nil
}

// parseStanza reads the first stanza of a Debian control file (deb-control(5)), as apt-cache show prints it.
func parseStanza(text string) (aptPackage, error) {
	var p aptPackage
	for f := range artifact.Stanzas(text, "package", "version", "architecture", "sha256", "depends", "size", "") {
		if line, ok := f[""]; ok {
			return aptPackage{}, fmt.Errorf("not a field of a package: %q", line)
		}
		p = aptPackage{
			name: f["package"], version: f["version"], arch: f["architecture"], sha256: strings.ToLower(f["sha256"]), depends: f["depends"],
		}
		if size, ok := f["size"]; ok {
			n, err := strconv.ParseInt(size, 10, 64)
			if err != nil || n < 0 {
				return aptPackage{}, fmt.Errorf("size %q of the package", size)
			}
			p.size = n
		}
		break
	}
	// Name and version become parts of file names and of command lines.
	if !packageName.MatchString(p.name) || !packageVersion.MatchString(p.version) {
		return aptPackage{}, fmt.Errorf("package name %q or version %q are not those of a Debian package", p.name, p.version)
	}
	if p.sha256 != "" && !sha256Hex.MatchString(p.sha256) {
		return aptPackage{}, fmt.Errorf("SHA-256 %q of the package", p.sha256)
	}
	return p, nil
}

// The patterns follow Debian Policy 5.6.1 and 5.6.12.
var (
	packageName    = lazyregexp.New(`^[a-z0-9][a-z0-9+.-]+$`)
	packageVersion = lazyregexp.New(`^[0-9][A-Za-z0-9.+:~-]*$`)
	sha256Hex      = lazyregexp.New(`^[0-9a-f]{64}$`)
)

// download puts the package's .deb into the cache, unless it is there already, and checks its SHA-256 against
// apt's signed index. It removes older versions of the package from the cache.
func (a *apt) download(ctx context.Context, p aptPackage) (string, error) {
	if p.sha256 == "" {
		return "", fmt.Errorf("no archive in apt's index has the Debian package %s %s (bring it up to date with: apt-get update)", p.name, p.version)
	}
	dir := filepath.Join(a.cacheDir, downloadsDir)
	final := filepath.Join(dir, fmt.Sprintf("%s_%s_%s.deb", p.name, strings.ReplaceAll(p.version, ":", "%3a"), p.sha256[:idHashLength]))
	unlock, err := artifact.Lock(ctx, filepath.Join(a.cacheDir, locksDir, "download-"+p.name))
	if err != nil {
		return "", err
	}
	defer unlock()

	if sum, _, err := artifact.HashFile(ctx, final); err == nil && sum == p.sha256 {
		return final, nil
	}
	err = a.downloadTo(ctx, p, final)
	if err != nil && ctx.Err() == nil && a.mayChange && !a.updated {
		// An outdated index names files that the archive no longer has.
		if err := a.update(ctx); err != nil {
			return "", err
		}
		err = a.downloadTo(ctx, p, final)
	}
	if err != nil {
		return "", err
	}
	old, _ := filepath.Glob(filepath.Join(dir, p.name+"_*.deb"))
	for _, o := range old {
		if o != final {
			_ = os.Remove(o) // failure costs only disk space
		}
	}
	return final, nil
}

func (a *apt) downloadTo(ctx context.Context, p aptPackage, final string) error {
	tmp, err := artifact.StagingDir(filepath.Dir(final), "download-"+p.name)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	stop := a.watchSize(tmp, p.size)
	defer stop()

	c := a.command("downloading the Debian package " + p.name)
	c.dir = tmp
	// Without the option apt, run as root, writes as the user _apt, who may have no access to the cache.
	args := []string{"-q", "-o", "APT::Sandbox::User=root", "download", p.name + "=" + p.version}
	if _, err := c.run(ctx, "apt-get", args...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("downloading the Debian package %s: apt-get download left %d files, not one", p.name, len(debs))
	}
	sum, _, err := artifact.HashFile(ctx, debs[0])
	if err != nil {
		return err
	}
	if sum != p.sha256 {
		return fmt.Errorf("downloading the Debian package %s %s: SHA-256 is %s, apt's index has %s (run apt-get update and try again)",
			p.name, p.version, sum, p.sha256)
	}
	if err := os.Rename(debs[0], final); err != nil {
		return err
	}
	stop()
	a.report("download", p.size, p.size)
	return nil
}

// watchSize reports the growth of the files in dir until the function it returns is called.
func (a *apt) watchSize(dir string, total int64) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			case <-time.After(progressPoll):
			}
			var sum int64
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				if info, err := e.Info(); err == nil {
					sum += info.Size()
				}
			}
			a.report("download", min(sum, total), total)
		}
	}()
	return sync.OnceFunc(func() {
		close(quit)
		<-done
	})
}

func (a *apt) update(ctx context.Context) error {
	a.report("apt-get update", 0, 0)
	_, err := a.command("bringing apt's index up to date").run(ctx, "apt-get", "-q", "update")
	a.updated = err == nil
	return err
}

// install installs packages, after apt-get update.
func (a *apt) install(ctx context.Context, names []string) error {
	if !a.updated {
		if err := a.update(ctx); err != nil {
			return err
		}
	}
	a.report("apt-get install", 0, 0)
	args := append([]string{"-q", "-y", "--no-install-recommends", "install"}, names...)
	_, err := a.command("installing the build dependencies").run(ctx, "apt-get", args...)
	return err
}

// installed returns the version in which the package is installed, or "" if it is not.
func (a *apt) installed(ctx context.Context, name string) (string, error) {
	out, err := a.command("asking for the installed version of "+name).run(ctx, "dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", name)
	if err != nil && !exited(ctx, err) { // dpkg-query(1): 1 when no package of that name is known
		return "", err
	}
	if version, ok := strings.CutPrefix(out, "installed "); ok && err == nil {
		return strings.TrimSpace(version), nil
	}
	return "", nil
}

// intact reports whether the installed package's files are unchanged.
func (a *apt) intact(ctx context.Context, name string) (bool, error) {
	out, err := a.command("verifying the installed package "+name).run(ctx, "dpkg", "--verify", name)
	if err != nil && !exited(ctx, err) {
		return false, err
	}
	return err == nil && strings.TrimSpace(out) == "", nil
}
