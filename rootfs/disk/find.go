package disk

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Find describes every layer that lies in the directories, by reading their headers. Files that are
// no layers, damaged or in use for writing are left out, so it is meant for a store whose disks are
// at rest.
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
				errors.Is(err, ErrInUse), errors.Is(err, ErrMissingParent): // the last: gone since ReadDir
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

// Inspect describes the layer at path by its header. One that is in use for writing is ErrInUse. The error of a file
// that is not there wraps fs.ErrNotExist.
func Inspect(path string) (LayerInfo, error) {
	l, err := hostEnv().openLayer(path, os.O_RDONLY, osfile.Shared)
	if err != nil {
		return LayerInfo{}, err
	}
	return l.info(), l.close()
}

// Continues says whether the layer in the file path was begun over the uppermost layer of a stack. It is false also if
// there is no such file, or one that was never durable: then nothing in it was either.
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

// Sync makes the file of a layer durable, and its name: a stack that is recorded durably must not name one that is not.
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
