package disk

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Find describes every layer in the directories by its header. It leaves out files that are not layers, damaged,
// or in use for writing, so it is meant for a store whose disks are not in use.
func Find(dirs ...string) ([]LayerInfo, error) { return hostEnv().find(dirs...) }

func (e env) find(dirs ...string) (infos []LayerInfo, err error) {
	for _, dir := range dirs {
		ents, err := e.fs.ReadDir(dir)
		if err != nil {
			return nil, ioError("find layers", err)
		}
		for _, ent := range ents {
			if !ent.Type().IsRegular() {
				continue
			}
			l, err := e.openLayer(filepath.Join(dir, ent.Name()), os.O_RDONLY, osfile.Shared)
			switch {
			case errors.Is(err, ErrCorrupt), errors.Is(err, ErrTruncated), errors.Is(err, ErrVersion),
				errors.Is(err, ErrInUse), errors.Is(err, ErrMissingParent): // ErrMissingParent: removed since ReadDir
				continue
			case err != nil:
				return nil, err
			}
			infos = append(infos, l.info())
			if err := l.close(); err != nil {
				return nil, err
			}
		}
	}
	return infos, nil
}

// Inspect describes the layer at path by its header. It fails with ErrInUse if the layer is in use for writing,
// and with an error that wraps fs.ErrNotExist if there is no file.
func Inspect(path string) (LayerInfo, error) {
	l, err := hostEnv().openLayer(path, os.O_RDONLY, osfile.Shared)
	if err != nil {
		return LayerInfo{}, err
	}
	return l.info(), l.close()
}

// Continues reports whether the parent of the layer in the file path is the uppermost layer of s. It also returns
// false if there is no such file, or one that never became durable: then none of its data did either.
func Continues(path string, s Stack) (bool, error) {
	return hostEnv().above(path, s, func(*layer, header) (bool, error) { return true, nil })
}

// Unused reports whether the layer in the file path is a new top over s to which no disk has written: using it is like
// using one that [Fork] makes, but it is durable if it was. An error means that it is not known.
func Unused(path string, s Stack) (bool, error) {
	return hostEnv().above(path, s, func(l *layer, below header) (bool, error) {
		if l.hdr.state != StateOpen || l.hdr.size != below.size {
			return false, nil
		}
		written := false
		err := l.mapRuns(func(run) { written = true }) // it leaves out absent blocks
		return !written, err
	})
}

// above returns what is says of the layer in the file path, if its parent is the uppermost layer of s.
func (e env) above(path string, s Stack, is func(l *layer, below header) (bool, error)) (ok bool, err error) {
	l, err := e.openLayer(path, os.O_RDONLY, osfile.Shared)
	if errors.Is(err, ErrCorrupt) || errors.Is(err, ErrTruncated) || errors.Is(err, ErrMissingParent) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	below, err := e.openLayer(s.Top(), os.O_RDONLY, osfile.Shared)
	if err != nil {
		return false, err
	}
	h := below.hdr
	if err := below.close(); err != nil || l.hdr.parent != h.id {
		return false, err
	}
	return is(l, h)
}

// Sync makes a layer's file and its name durable. A durably recorded stack must name only durable layers.
func Sync(path string) error {
	e := hostEnv()
	f, err := e.fs.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return ioError("sync layer", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return ioError("sync layer "+path, err)
	}
	return ioError("sync directory of "+path, e.fs.SyncDir(filepath.Dir(path)))
}
