package hwkvm

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// kernel describes the cached kernel. All paths are relative to the cache folder.
type kernel struct {
	Package string `json:"package"` // file of the Debian package
	Image   string `json:"image"`   // file to boot
	Release string `json:"release"` // uname -r
}

const (
	kernelFile     = "kernel.json"
	maxKernelImage = 512 << 20 // bytes of an uncompressed kernel
)

// cachedKernel returns the kernel of the cache, and fetches it first if there is none.
func cachedKernel(ctx context.Context, cacheDir string) (kernel, error) {
	if k, err := readKernel(cacheDir); err == nil {
		return k, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return kernel{}, err
	}
	deb, err := downloadKernel(ctx, cacheDir)
	if err != nil {
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
	elf, err := decompressKernel(ctx, b)
	if errors.Is(err, errCompression) {
		slog.WarnContext(ctx, "hwkvm: the kernel has to decompress itself, which takes seconds of each boot", "reason", err)
		k.Image, elf = "vmlinuz-"+k.Release, b
	} else if err != nil {
		return kernel{}, fmt.Errorf("decompress the kernel: %w", err)
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

// readKernel reads the record of the cached kernel; fs.ErrNotExist says that it or a file it names is not there.
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

// downloadKernel fetches the package that kernelPackage depends on into cacheDir, and returns the name of the file.
func downloadKernel(ctx context.Context, cacheDir string) (string, error) {
	show, err := output(ctx, "", "apt-cache", "show", "--no-all-versions", kernelPackage)
	if err != nil {
		return "", fmt.Errorf("%w: %w; are the package lists there? apt-get update", ErrNoKernel, err)
	}
	name, err := firstDependency(show)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(cacheDir, ".download-")
	if err != nil {
		return "", fmt.Errorf("download %s: %w", name, err)
	}
	defer os.RemoveAll(dir)
	slog.InfoContext(ctx, "hwkvm: downloading the kernel", "package", name)
	// Without the option apt complains that its own user cannot write here.
	if _, err := output(ctx, dir, "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", name); err != nil {
		return "", fmt.Errorf("%w: %w; are the package lists up to date? apt-get update", ErrNoKernel, err)
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get download %s left %d packages, not one: %w", name, len(debs), ErrNoKernel)
	}
	file := filepath.Base(debs[0])
	if err := os.Rename(debs[0], filepath.Join(cacheDir, file)); err != nil {
		return "", fmt.Errorf("download %s: %w", name, err)
	}
	return file, nil
}

// firstDependency returns the first package in the Depends field of a package record (Debian policy 7.1).
func firstDependency(record []byte) (string, error) {
	for _, line := range strings.Split(string(record), "\n") {
		if v, ok := strings.CutPrefix(line, "Depends:"); ok {
			if f := strings.FieldsFunc(v, func(r rune) bool { return strings.ContainsRune(" ,|(", r) }); len(f) > 0 {
				return f[0], nil
			}
		}
	}
	return "", fmt.Errorf("the package record names no dependency: %w", ErrNoKernel)
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

// commandError explains why a program failed: because its context ended, or with what it printed.
func commandError(ctx context.Context, name string, err error, printed []byte) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s was stopped: %w", name, ctx.Err())
	}
	return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(printed))
}

// errCompression says that a kernel is compressed in a way not known here.
var errCompression = errors.New("compression not known")

// Fields of the setup header (Documentation/x86/boot.rst, "The Real-Mode Kernel Header").
const (
	bzSetupSects     = 0x1f1 // u8
	bzMagic          = 0x202 // "HdrS"
	bzVersion        = 0x206 // u16
	bzPayloadOffset  = 0x248 // u32, since protocol 2.08
	bzPayloadLength  = 0x24c // u32
	bzHeaderEnd      = 0x250
	bzPayloadVersion = 0x208
	sectorSize       = 512
)

// decompressKernel returns the ELF image inside a bzImage. QEMU starts it by its PVH entry point, and the emulated CPU
// is spared the decompression.
func decompressKernel(ctx context.Context, b []byte) ([]byte, error) {
	le := binary.LittleEndian
	if len(b) < bzHeaderEnd || string(b[bzMagic:bzMagic+4]) != "HdrS" || le.Uint16(b[bzVersion:]) < bzPayloadVersion {
		return nil, errors.New("not a bzImage of boot protocol 2.08 or later")
	}
	start := (uint64(b[bzSetupSects])+1)*sectorSize + uint64(le.Uint32(b[bzPayloadOffset:]))
	end := start + uint64(le.Uint32(b[bzPayloadLength:]))
	if end > uint64(len(b)) || end-start < 8 {
		return nil, fmt.Errorf("payload at %d to %d of %d bytes", start, end, len(b))
	}
	payload := b[start : end-4] // the last four bytes are the length of the uncompressed image
	want := int(le.Uint32(b[end-4:]))
	if want > maxKernelImage {
		return nil, fmt.Errorf("announces an image of %d bytes", want)
	}
	var image []byte
	var err error
	switch {
	case bytes.HasPrefix(payload, []byte("\xfd7zXZ\x00")):
		image, err = unxz(ctx, payload)
	case bytes.HasPrefix(payload, []byte("\x28\xb5\x2f\xfd")):
		image, err = unzstd(payload, want)
	default:
		return nil, fmt.Errorf("payload begins with %x: %w", payload[:4], errCompression)
	}
	if err != nil {
		return nil, err
	}
	if len(image) != want {
		return nil, fmt.Errorf("decompressed to %d bytes instead of %d", len(image), want)
	}
	if !bytes.HasPrefix(image, []byte("\x7fELF")) {
		return nil, errors.New("what was compressed is not an ELF image")
	}
	return image, nil
}

// unxz calls xz(1): kernels are compressed with the x86 filter before LZMA2, which the Go package does not know.
func unxz(ctx context.Context, b []byte) ([]byte, error) {
	tool, err := exec.LookPath("xz")
	if err != nil {
		return nil, fmt.Errorf("xz, and there is no xz command (apt-get install xz-utils): %w", errCompression)
	}
	cmd := exec.CommandContext(ctx, tool, "-dc")
	cmd.Stdin = bytes.NewReader(b)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, commandError(ctx, "xz", err, errs.Bytes())
	}
	return out, nil
}

func unzstd(b []byte, want int) ([]byte, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxKernelImage))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.DecodeAll(b, make([]byte, 0, want))
}
