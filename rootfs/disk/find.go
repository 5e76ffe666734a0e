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
	e := hostEnv()
	var ids [2]header
	for i, p := range []string{path, s.Top()} {
		l, err := e.openLayer(p, os.O_RDONLY, osfile.Shared)
		if i == 0 && (errors.Is(err, ErrCorrupt) || errors.Is(err, ErrTruncated) || errors.Is(err, ErrMissingParent)) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		ids[i] = l.hdr
		if err := l.close(); err != nil {
			return false, err
		}
	}
	return ids[0].parent == ids[1].id, nil
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
