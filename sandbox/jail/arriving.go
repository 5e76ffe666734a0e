package jail

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/snapshot"
)

const (
	// maxEnsure is how much a process may ask for at once, in bytes.
	maxEnsure = 1 << 20
	// ensuresAtOnce leaves calls for all else.
	ensuresAtOnce = maxCalls / 2
	// ArrivalTime is how long a guest waits for a part of its memory or disk that is on its way, and Patience after how
	// much of it the VM is frozen. In the end the VM ends. It is less than fileTimeout, and, with what a lease may add
	// to it, than times.silent.
	ArrivalTime = 4 * time.Minute
	Patience    = 10 * time.Second
)

// openSnapshot opens the files of the snapshot in dir, or of one that is on its way there. It returns nil in place of
// a, which may be nil, if that has arrived.
func (j *Jail) openSnapshot(dir string, a *instance.Arriving) (files []*os.File, at *instance.Arriving, err error) {
	if a != nil {
		if files, err = snapshot.OpenFiles(a.Dir, j.toRead); err == nil {
			return files, a, nil
		}
		_ = closeAll(files)
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, a, err
		}
	}
	files, err = snapshot.OpenFiles(dir, j.toRead)
	return files, nil, err
}

// openLayer calls open with where a layer of the disk is: with its snapshot while that is on its way. coming says so.
func (v *VM) openLayer(name string, open func(at string) error) (coming bool, err error) {
	if a := v.parts.Arriving; a != nil {
		// In this order: a layer that has arrived is moved to its name.
		if err = open(filepath.Join(a.Dir, filepath.Base(name))); !errors.Is(err, fs.ErrNotExist) {
			return true, err
		}
	}
	return false, open(name)
}

// ensure judges what a process asks for of what is on its way.
func (v *VM) ensure(ctx context.Context, o ensureOrder) error {
	a := v.parts.Arriving
	size, known := v.arriving[o.File]
	if a == nil || !known || o.Off < 0 || o.Len <= 0 || o.Len > maxEnsure || o.Off > size-o.Len {
		return errRefused
	}
	ctx, cancel := context.WithTimeout(ctx, v.times.arrival)
	defer cancel()
	defer v.waits()()
	return a.Ensure(ctx, o.File, o.Off, o.Len)
}

// Arrived tells the process that all is there: it need not ask any more.
func (v *VM) Arrived() error { return v.callSoon(callArrived, none{}, nil) }

// ensure asks the keeper for a part of a memory file or layer.
func (c *child) ensure(ctx context.Context, file string, off, n int64) error {
	// The keeper answers in time.
	ctx, cancel := context.WithTimeout(ctx, ArrivalTime+fileTimeout)
	defer cancel()
	select {
	case c.ensures <- struct{}{}:
		defer func() { <-c.ensures }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if _, err := c.keeper().Call(ctx, callEnsure, ensureOrder{file, off, n}, nil); err != nil {
		return fmt.Errorf("what is on its way to this host: %w", err)
	}
	return nil
}

// arrivingFiles returns the memory files among those of a snapshot, by name, with their sizes.
func arrivingFiles(files []*os.File) (map[string]int64, error) {
	out := map[string]int64{}
	for _, f := range files {
		size, err := sizeOf(f)
		if err != nil {
			return nil, err
		}
		if name := filepath.Base(f.Name()); name != snapshot.ManifestName {
			out[name] = size
		}
	}
	return out, nil
}

func sizeOf(f *os.File) (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
