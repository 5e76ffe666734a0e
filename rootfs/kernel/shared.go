package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// sharedKernels is how many kernels a shared folder keeps: the newest ones.
const sharedKernels = 4

// takeShared copies the shared kernel with these inputs into this cache and returns it, or nil if there is no
// intact one. The caller holds this cache's lock.
func (b *builder) takeShared(ctx context.Context, hash string) (*Kernel, error) {
	if b.opts.SharedDir == "" {
		return nil, nil
	}
	k, err := findInputs(b.opts.SharedDir, Built, hash)
	if err == nil && k != nil {
		if err = k.Verify(ctx); err == nil {
			k, err = k.copyTo(ctx, b.opts.CacheDir)
		}
	}
	if err != nil {
		// It may be damaged, or another process may have just removed it: it can be built here.
		b.note("taking the kernel from %s: %v", b.opts.SharedDir, err)
		return nil, ctx.Err()
	}
	return k, nil
}

// offer shares a kernel of this cache, unless it is already shared.
func (b *builder) offer(ctx context.Context, k *Kernel) {
	if b.opts.SharedDir == "" {
		return
	}
	if there, err := findInputs(b.opts.SharedDir, Built, k.InputsHash); there == nil && err == nil {
		b.share(ctx, k)
	}
}

// share copies a built kernel to the shared folder. A failure is not an error of the build.
func (b *builder) share(ctx context.Context, k *Kernel) {
	if b.opts.SharedDir == "" {
		return
	}
	err := func() error {
		unlock, err := lockKernel(ctx, b.opts.SharedDir, Built, k.InputsHash)
		if err != nil {
			return err
		}
		defer unlock()
		if _, err := k.copyTo(ctx, b.opts.SharedDir); err != nil {
			return err
		}
		all, err := List(b.opts.SharedDir)
		if err != nil {
			return err
		}
		for _, old := range all[min(sharedKernels, len(all)):] {
			err = errors.Join(err, os.RemoveAll(filepath.Dir(old.Image)))
		}
		return err
	}()
	if err != nil {
		b.note("sharing the kernel in %s: %v", b.opts.SharedDir, err)
	}
}

// note writes a line to the build's log.
func (b *builder) note(format string, args ...any) {
	if b.log != nil {
		fmt.Fprintf(b.log, format+"\n", args...)
	}
}

// copyTo publishes a copy of a built kernel in another cache. The caller holds that cache's lock for it. The copy
// replaces a folder of the same name.
func (k *Kernel) copyTo(ctx context.Context, cacheDir string) (*Kernel, error) {
	staging, err := artifact.StagingDir(filepath.Join(cacheDir, kernelsDir), k.ID)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(staging)
	c := &Kernel{ID: k.ID, Kind: k.Kind, Version: k.Version, Arch: k.Arch, InputsHash: k.InputsHash, Inputs: k.Inputs}
	for _, f := range []struct {
		from string
		to   *string
	}{{k.Image, &c.Image}, {k.Config, &c.Config}, {k.SymbolMap, &c.SymbolMap}} {
		*f.to = filepath.Base(f.from)
		if err := copyFile(ctx, filepath.Join(staging, *f.to), f.from); err != nil {
			return nil, err
		}
	}
	if sum, _, err := artifact.HashFile(ctx, filepath.Join(staging, c.Image)); err != nil {
		return nil, err
	} else if sum != k.ImageSHA256 {
		return nil, fmt.Errorf("%w %s: it changed while it was copied", ErrDamaged, k.ID)
	}
	return c.publish(ctx, cacheDir, staging)
}

func copyFile(ctx context.Context, to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return artifact.WriteFile(to, func(f *os.File) error {
		_, err := io.Copy(f, artifact.NewReader(ctx, in))
		return err
	})
}
