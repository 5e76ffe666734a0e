package hwkvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// CacheEnv names the environment variable that overrides DefaultCacheDir.
const CacheEnv = "DROWSE_HWKVM_CACHE"

const (
	kernelPackage = "linux-image-amd64" // depends on Debian's current kernel
	formatVersion = "1"                 // part of every cache key: raise it when the initramfs's layout changes
	staleAfter    = 7 * 24 * time.Hour  // an initramfs unused for this time is removed
)

var (
	// ErrNoQEMU means that the machine has no qemu-system-x86_64.
	ErrNoQEMU = errors.New("qemu-system-x86_64 is not installed; on Debian: apt-get install --no-install-recommends qemu-system-x86")
	// ErrNoKernel means that Debian's kernel package is not available.
	ErrNoKernel = errors.New("cannot get Debian's kernel package " + kernelPackage)
	// ErrNoGo means that there is no Go toolchain to build the init program.
	ErrNoGo = errors.New("no go command in PATH; it is needed to build the init program of the virtual machine")
)

//go:embed guestinit/*.go wire/*.go
var initSource embed.FS

const initModule = "module github.com/drowse-vm/drowse\n\ngo 1.26\n"

// Image is what a machine starts from. It does not change, and several machines may use it at once.
type Image struct {
	QEMU      string // path of qemu-system-x86_64
	Kernel    string // path of the uncompressed kernel
	Initramfs string // path
	Release   string // uname -r of the kernel
}

// DefaultCacheDir returns $DROWSE_HWKVM_CACHE, or drowse/hwkvm in the user's cache folder.
func DefaultCacheDir() (string, error) {
	if d := os.Getenv(CacheEnv); d != "" {
		return filepath.Abs(d)
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder for the cache (set %s): %w", CacheEnv, err)
	}
	return filepath.Join(d, "drowse", "hwkvm"), nil
}

// FindQEMU returns the path of QEMU, or ErrNoQEMU.
func FindQEMU() (string, error) {
	p, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return "", ErrNoQEMU
	}
	return p, nil
}

// Prepare makes an Image, in cacheDir (DefaultCacheDir if empty), from what apt-get and the Go toolchain deliver.
// It installs nothing on the host. The first call fetches a package of 70 MB and takes about 10 s; later ones take
// milliseconds and no network. A cached kernel stays in use until the folder is removed. Calls may run
// concurrently, in other processes too: a lock on the folder orders them, and every file appears complete.
func Prepare(ctx context.Context, cacheDir string) (*Image, error) {
	if cacheDir == "" {
		d, err := DefaultCacheDir()
		if err != nil {
			return nil, err
		}
		cacheDir = d
	}
	qemu, err := FindQEMU()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return nil, fmt.Errorf("make the cache folder: %w", err)
	}
	lock, err := osfile.OpenLocked(ctx, filepath.Join(cacheDir, "lock"), os.O_CREATE|os.O_RDWR, 0o644, osfile.Exclusive)
	if err != nil {
		return nil, fmt.Errorf("wait for another process that prepares %s: %w", cacheDir, err)
	}
	defer lock.Close()
	k, err := cachedKernel(ctx, cacheDir)
	if err != nil {
		return nil, err
	}
	initramfs, err := cachedInitramfs(ctx, cacheDir, k)
	if err != nil {
		return nil, err
	}
	return &Image{QEMU: qemu, Kernel: filepath.Join(cacheDir, k.Image), Initramfs: initramfs, Release: k.Release}, nil
}

// initKey hashes everything that an initramfs is made from.
func initKey(k kernel) (string, error) {
	h := sha256.New()
	enc := json.NewEncoder(h)
	if err := enc.Encode([]any{formatVersion, runtime.Version(), initModule, k, bootModules, demandModules, moduleParams}); err != nil {
		return "", err
	}
	err := eachInitSource(func(path string, b []byte) error {
		return enc.Encode([]any{path, b})
	})
	return hex.EncodeToString(h.Sum(nil)[:12]), err
}

func eachInitSource(do func(path string, b []byte) error) error {
	return fs.WalkDir(initSource, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := initSource.ReadFile(path)
		if err != nil {
			return err
		}
		return do(path, b)
	})
}

func cachedInitramfs(ctx context.Context, cacheDir string, k kernel) (string, error) {
	key, err := initKey(k)
	if err != nil {
		return "", fmt.Errorf("hash the inputs of the initramfs: %w", err)
	}
	path := filepath.Join(cacheDir, "initramfs-"+key+".cpio")
	now := time.Now()
	if err := os.Chtimes(path, now, now); err == nil {
		return path, nil
	}
	slog.InfoContext(ctx, "hwkvm: building the initramfs", "kernel", k.Release)
	init, err := buildInit(ctx)
	if err != nil {
		return "", err
	}
	tree, remove, err := extractPackage(ctx, cacheDir, k)
	if err != nil {
		return "", err
	}
	defer remove()
	modules, err := openModuleTree(modulesDir(tree, k.Release))
	if err != nil {
		return "", err
	}
	index, err := modules.index(bootModules, demandModules)
	if err != nil {
		return "", err
	}
	err = osfile.Replace(path, 0o644, func(w *os.File) error {
		return writeInitramfs(w, init, index, func(name string) ([]byte, error) { return readModule(modules.files[name]) })
	})
	if err != nil {
		return "", err
	}
	removeStale(cacheDir)
	return path, nil
}

// removeStale removes initramfs files that were unused for a while. Failures do not matter.
func removeStale(cacheDir string) {
	old, _ := filepath.Glob(filepath.Join(cacheDir, "initramfs-*.cpio"))
	for _, p := range old {
		if fi, err := os.Stat(p); err == nil && time.Since(fi.ModTime()) > staleAfter {
			_ = os.Remove(p)
		}
	}
}

// buildInit builds the embedded init program and returns the static executable. The program has no dependencies,
// so this needs no network.
func buildInit(ctx context.Context) ([]byte, error) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		return nil, ErrNoGo
	}
	dir, err := os.MkdirTemp("", "hwkvm-init-")
	if err != nil {
		return nil, fmt.Errorf("build init: %w", err)
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(initModule), 0o644); err != nil {
		return nil, fmt.Errorf("build init: %w", err)
	}
	err = eachInitSource(func(path string, b []byte) error {
		p := filepath.Join(dir, "internal", "test", "hwkvm", filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		return os.WriteFile(p, b, 0o644)
	})
	if err != nil {
		return nil, fmt.Errorf("build init: %w", err)
	}
	bin := filepath.Join(dir, "init")
	cmd := exec.CommandContext(ctx, goTool, "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "./internal/test/hwkvm/guestinit")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOAMD64=v1", "GOWORK=off", "GOFLAGS=", "GOPROXY=off", "GOTOOLCHAIN=local")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build init: %w", commandError(ctx, "go build", err, out.Bytes()))
	}
	return os.ReadFile(bin)
}
