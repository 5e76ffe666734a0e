package hwkvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/osfile"
	debian "github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/vmm/boot"
)

// kernel describes the cached kernel. All paths are relative to the cache folder.
type kernel struct {
	Package string `json:"package"` // file of the Debian package
	Image   string `json:"image"`   // file to boot
	Release string `json:"release"` // uname -r
}

const (
	kernelFile = "kernel.json"
)

// cachedKernel returns the kernel in the cache. It fetches one first if the cache has none.
func cachedKernel(ctx context.Context, cacheDir string) (kernel, error) {
	if k, err := readKernel(cacheDir); err == nil {
		return k, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return kernel{}, err
	}
	slog.InfoContext(ctx, "hwkvm: downloading the kernel", "package", kernelPackage)
	deb, err := debian.Download(ctx, cacheDir, kernelPackage)
	if err != nil {
		return kernel{}, fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	if deb, err = filepath.Rel(cacheDir, deb); err != nil {
		return kernel{}, err
	}
	k := kernel{Package: deb}
	tree, remove, err := extractPackage(ctx, cacheDir, k)
	if err != nil {
		return kernel{}, err
	}
	defer remove()
	images, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return kernel{}, fmt.Errorf("package %s has %d kernels, not one: %w", deb, len(images), ErrNoKernel)
	}
	k.Release = strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	b, err := os.ReadFile(images[0])
	if err != nil {
		return kernel{}, fmt.Errorf("read the kernel: %w", err)
	}
	k.Image = "vmlinux-" + k.Release
	// QEMU starts an ELF kernel at its PVH entry point, which saves the emulated CPU the decompression.
	elf, _, err := boot.UnpackBzImage(b)
	if err != nil {
		return kernel{}, fmt.Errorf("unpack the kernel: %w", err)
	}
	err = osfile.Replace(filepath.Join(cacheDir, k.Image), 0o644, func(w *os.File) error {
		_, err := w.Write(elf)
		return err
	})
	if err != nil {
		return kernel{}, fmt.Errorf("store the kernel: %w", err)
	}
	err = osfile.Replace(filepath.Join(cacheDir, kernelFile), 0o644, func(w *os.File) error {
		return json.NewEncoder(w).Encode(k)
	})
	if err != nil {
		return kernel{}, fmt.Errorf("store the kernel: %w", err)
	}
	return k, nil
}

// readKernel reads the record of the cached kernel; fs.ErrNotExist means that it or one of its files is missing.
func readKernel(cacheDir string) (kernel, error) {
	b, err := os.ReadFile(filepath.Join(cacheDir, kernelFile))
	if err != nil {
		return kernel{}, err
	}
	var k kernel
	if err := json.Unmarshal(b, &k); err != nil {
		return kernel{}, fmt.Errorf("%s is damaged; remove that folder: %w", filepath.Join(cacheDir, kernelFile), err)
	}
	for _, p := range []string{k.Package, k.Image} {
		if _, err := os.Stat(filepath.Join(cacheDir, p)); err != nil {
			return kernel{}, err
		}
	}
	return k, nil
}

// extractPackage unpacks the kernel's package into a new folder. remove removes it.
func extractPackage(ctx context.Context, cacheDir string, k kernel) (tree string, remove func(), err error) {
	tree, err = os.MkdirTemp(cacheDir, ".tree-")
	if err != nil {
		return "", nil, fmt.Errorf("unpack %s: %w", k.Package, err)
	}
	remove = func() { _ = os.RemoveAll(tree) }
	if _, err := output(ctx, "", "dpkg-deb", "-x", filepath.Join(cacheDir, k.Package), tree); err != nil {
		remove()
		return "", nil, fmt.Errorf("unpack %s: %w", k.Package, err)
	}
	return tree, remove, nil
}

// modulesDir returns the folder of the modules in an unpacked package. Debian has it in /usr since release 13.
func modulesDir(tree, release string) string {
	d := filepath.Join(tree, "usr", "lib", "modules", release)
	if _, err := os.Stat(d); err == nil {
		return d
	}
	return filepath.Join(tree, "lib", "modules", release)
}

func output(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, commandError(ctx, name, err, errs.Bytes())
	}
	return out, nil
}

// commandError explains why a program failed: its context ended, or what it printed.
func commandError(ctx context.Context, name string, err error, printed []byte) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s was stopped: %w", name, ctx.Err())
	}
	return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(printed))
}
