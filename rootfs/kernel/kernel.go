package kernel

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Kind is a kernel's origin, and with that what it needs to boot.
type Kind string

const (
	// Built is an uncompressed ELF vmlinux made by Build. All drivers are built in: it needs no initramfs.
	Built Kind = "built"
	// Debian is a bzImage fetched by Fetch. Its virtio drivers are modules: it needs an initramfs that carries them.
	Debian Kind = "debian"
)

// Kernel is a kernel in the cache. Its paths are absolute, and its files never change. All methods may be called
// concurrently.
type Kernel struct {
	ID      string `json:"id"`      // unique in the cache, and the name of the folder
	Kind    Kind   `json:"kind"`    //
	Version string `json:"version"` // as uname -r prints it in the guest
	Arch    string `json:"arch"`    // GOARCH name: amd64

	Image       string `json:"image"`        // ELF vmlinux (Built) or bzImage (Debian)
	ImageSize   int64  `json:"image_size"`   // bytes
	ImageSHA256 string `json:"image_sha256"` // hexadecimal
	Config      string `json:"config"`       // the kernel's .config
	SymbolMap   string `json:"symbol_map"`   // System.map, or "" if there is none: Debian ships its own elsewhere

	ModulesDir string   `json:"modules_dir"` // the kernel's lib/modules/VERSION, or ""
	Modules    []string `json:"modules"`     // .ko files the guest needs before it has a root, in the order to load them

	Created    time.Time         `json:"created"`
	InputsHash string            `json:"inputs_hash"` // SHA-256 over Inputs, hexadecimal
	Inputs     map[string]string `json:"inputs"`      // everything the kernel was made from, by name

	symbols symbolCache
}

// Errors that a caller may want to distinguish.
var (
	// ErrNotFound: the cache holds no such kernel.
	ErrNotFound = errors.New("no such kernel")
	// ErrDamaged: a kernel's folder lacks a file, or one has changed since it was published.
	ErrDamaged = errors.New("damaged kernel")
	// ErrUnsupported: this host cannot make or run such a kernel.
	ErrUnsupported = errors.New("not supported")
)

const (
	// Layout of the cache folder.
	kernelsDir   = "kernels"   // one folder for each kernel
	downloadsDir = "downloads" // Debian packages
	workDir      = "work"      // source trees during their build
	locksDir     = "locks"
	logsDir      = "logs"

	metadataFile    = "kernel.json"
	metadataVersion = 1
	maxMetadata     = 1 << 20 // bytes of kernel.json that are read

	// idHashLength is how many hexadecimal digits of the inputs' hash an ID has.
	idHashLength = 12
)

// record is the content of kernel.json: a Kernel with paths relative to the folder, so that a cache can be moved.
type record struct {
	FormatVersion int `json:"format_version"`
	*Kernel
}

// eachPath calls f on every path in k.
func (k *Kernel) eachPath(f func(*string) error) error {
	paths := []*string{&k.Image, &k.Config, &k.SymbolMap, &k.ModulesDir}
	for i := range k.Modules {
		paths = append(paths, &k.Modules[i])
	}
	for _, p := range paths {
		if *p == "" {
			continue
		}
		if err := f(p); err != nil {
			return err
		}
	}
	return nil
}

// publish completes k, whose files are in staging and whose paths are relative to it, and moves everything to its
// final place in the cache.
func (k *Kernel) publish(ctx context.Context, cacheDir, staging string) (*Kernel, error) {
	var err error
	if k.ImageSHA256, k.ImageSize, err = artifact.HashFile(ctx, filepath.Join(staging, k.Image)); err != nil {
		return nil, err
	}
	k.Created = time.Now().UTC().Truncate(time.Second)
	data, err := json.MarshalIndent(record{metadataVersion, k}, "", "  ")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(staging, metadataFile), append(data, '\n'), 0o644); err != nil {
		return nil, err
	}
	final := filepath.Join(cacheDir, kernelsDir, k.ID)
	// The caller holds the lock and could open no such kernel: a folder of this name is damaged.
	if err := os.RemoveAll(final); err != nil {
		return nil, err
	}
	if err := artifact.PublishDir(ctx, staging, final); err != nil {
		return nil, err
	}
	return openDir(final)
}

// openDir reads the kernel in the folder dir and checks that its files exist.
func openDir(dir string) (*Kernel, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	damaged := func(err error) error {
		return fmt.Errorf("%w %s: %w (remove the folder %s and make the kernel again)", ErrDamaged, filepath.Base(dir), err, dir)
	}
	data, err := artifact.ReadFile(filepath.Join(dir, metadataFile), maxMetadata)
	if err != nil {
		return nil, damaged(err)
	}
	k := new(Kernel)
	rec := record{Kernel: k}
	if err := json.Unmarshal(data, &rec); err != nil {
		return nil, damaged(fmt.Errorf("%s: %w", metadataFile, err))
	}
	if rec.FormatVersion != metadataVersion {
		return nil, damaged(fmt.Errorf("%s has format version %d, this program reads %d", metadataFile, rec.FormatVersion, metadataVersion))
	}
	if k.ID != filepath.Base(dir) {
		return nil, damaged(fmt.Errorf("%s names the kernel %q", metadataFile, k.ID))
	}
	if k.Image == "" {
		return nil, damaged(fmt.Errorf("%s names no image", metadataFile))
	}
	err = k.eachPath(func(p *string) error {
		if !filepath.IsLocal(*p) {
			return fmt.Errorf("%s names %q, which is not inside the folder", metadataFile, *p)
		}
		*p = filepath.Join(dir, *p)
		_, err := os.Stat(*p)
		return err
	})
	if err != nil {
		return nil, damaged(err)
	}
	if info, err := os.Stat(k.Image); err != nil || info.Size() != k.ImageSize {
		return nil, damaged(fmt.Errorf("%s has not the %d bytes it was published with", filepath.Base(k.Image), k.ImageSize))
	}
	return k, nil
}

// Verify reads the whole image and compares it with the hash of its publication. The error wraps ErrDamaged if
// they differ.
func (k *Kernel) Verify(ctx context.Context) error {
	sum, _, err := artifact.HashFile(ctx, k.Image)
	if err != nil {
		return err
	}
	if sum != k.ImageSHA256 {
		return fmt.Errorf("%w %s: SHA-256 of %s is %s, was %s when published (remove the folder and make the kernel again)",
			ErrDamaged, k.ID, k.Image, sum, k.ImageSHA256)
	}
	return nil
}

// List returns the kernels in the cache, newest first. A cache that does not exist is empty. It leaves out folders
// without a usable kernel; Open says what is wrong with one.
func List(cacheDir string) ([]*Kernel, error) {
	entries, err := os.ReadDir(filepath.Join(cacheDir, kernelsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing kernels: %w", err)
	}
	var out []*Kernel
	for _, e := range entries {
		if artifact.IsTemp(e.Name()) || !e.IsDir() {
			continue
		}
		k, err := openDir(filepath.Join(cacheDir, kernelsDir, e.Name()))
		if errors.Is(err, ErrDamaged) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b *Kernel) int {
		return cmp.Or(b.Created.Compare(a.Created), strings.Compare(a.ID, b.ID))
	})
	return out, nil
}

// Open returns the kernel with exactly this ID. The error wraps ErrNotFound or ErrDamaged.
func Open(cacheDir, id string) (*Kernel, error) {
	dir := filepath.Join(cacheDir, kernelsDir, id)
	if id == "" || filepath.Base(id) != id || artifact.IsTemp(id) || id == ".." || id == "." {
		return nil, fmt.Errorf("%w: %q is not a kernel ID", ErrNotFound, id)
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s (list them with: drowse kernel ls)", ErrNotFound, id)
	}
	return openDir(dir)
}

// Find returns the kernel with this ID, or the newest of this Kind, or the only one whose ID has this prefix. For
// a kind, it takes a kernel built with options of its maker last: those who want it name it. The error wraps
// ErrNotFound, or ErrDamaged when the ID is that of a damaged kernel.
func Find(cacheDir, idOrKind string) (*Kernel, error) {
	k, err := Open(cacheDir, idOrKind)
	if !errors.Is(err, ErrNotFound) {
		return k, err
	}
	all, listErr := List(cacheDir)
	if listErr != nil {
		return nil, listErr
	}
	var own *Kernel
	for _, k := range all { // newest first
		switch {
		case string(k.Kind) != idOrKind:
		case !k.Own():
			return k, nil
		case own == nil:
			own = k
		}
	}
	if own != nil {
		return own, nil
	}
	switch Kind(idOrKind) {
	case Built:
		return nil, fmt.Errorf("%w: none has been built yet (build one with: drowse kernel build)", ErrNotFound)
	case Debian:
		return nil, fmt.Errorf("%w: none of Debian's has been fetched yet (fetch it with: drowse kernel fetch)", ErrNotFound)
	}
	var matches []*Kernel
	for _, k := range all {
		if idOrKind != "" && strings.HasPrefix(k.ID, idOrKind) {
			matches = append(matches, k)
		}
	}
	switch len(matches) {
	case 0:
		return nil, err
	case 1:
		return matches[0], nil
	}
	return nil, fmt.Errorf("%w: %q is the beginning of %d kernel IDs, among them %s and %s (give more of it)",
		ErrNotFound, idOrKind, len(matches), matches[0].ID, matches[1].ID)
}

// findInputs returns the kernel made from exactly these inputs, or nil.
func findInputs(cacheDir string, kind Kind, hash string) (*Kernel, error) {
	return findNewest(cacheDir, func(k *Kernel) bool { return k.Kind == kind && k.InputsHash == hash })
}

// findNewest returns the newest kernel in the cache for which fits returns true, or nil.
func findNewest(cacheDir string, fits func(*Kernel) bool) (*Kernel, error) {
	all, err := List(cacheDir)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(all, fits); i >= 0 {
		return all[i], nil
	}
	return nil, nil
}

// lockKernel takes the lock for making the kernel of this kind and inputs, and removes what dead makers have left
// in the cache.
func lockKernel(ctx context.Context, cacheDir string, kind Kind, hash string) (unlock func(), err error) {
	lockOf := func(kind Kind, key string) string {
		return filepath.Join(cacheDir, locksDir, string(kind)+"-"+key[max(0, len(key)-idHashLength):])
	}
	artifact.RemoveRemains(filepath.Join(cacheDir, workDir), func(key string) string { return lockOf(Built, key) })
	artifact.RemoveRemains(filepath.Join(cacheDir, kernelsDir), func(key string) string {
		for _, k := range []Kind{Built, Debian} {
			if strings.HasPrefix(key, string(k)+"-") {
				return lockOf(k, key)
			}
		}
		return ""
	})
	return artifact.Lock(ctx, lockOf(kind, hash[:idHashLength]))
}

// once returns the kernel of this kind and inputs: the cache's, or the one that fresh makes. Other callers for the
// same kernel wait for it.
func once(ctx context.Context, cacheDir string, kind Kind, hash string, fresh func() (*Kernel, error)) (*Kernel, error) {
	// First look without the lock: a finished kernel needs no writable cache.
	if k, err := findInputs(cacheDir, kind, hash); k != nil || err != nil {
		return k, err
	}
	unlock, err := lockKernel(ctx, cacheDir, kind, hash)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if k, err := findInputs(cacheDir, kind, hash); k != nil || err != nil {
		return k, err
	}
	return fresh()
}

// symbolCache keeps the parsed symbol map. Copies of a Kernel share it only if it was made before the copy;
// otherwise they parse again, which costs only time.
type symbolCache struct {
	once sync.Once
	syms []symbol
	err  error
}
