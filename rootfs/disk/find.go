package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Find describes every layer that lies in the directories, by reading their headers. Files that are
// no layers, damaged or in use for writing are left out, so it is meant for a store whose disks are
// at rest. Data, Zero and Allocated are not filled in.
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
			l, err := e.openLayer(filepath.Join(dir, ent.Name()), os.O_RDONLY, unix.LOCK_SH)
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

// Inspect describes the layer at path by its header alone: Data, Zero and Allocated are not filled in. One that is in use
// for writing is ErrInUse. The error of a file that is not there wraps fs.ErrNotExist.
func Inspect(path string) (LayerInfo, error) {
	l, err := hostEnv().openLayer(path, os.O_RDONLY, unix.LOCK_SH)
	if err != nil {
		return LayerInfo{}, err
	}
	return l.info(), l.close()
}

// Chain puts together the stack whose uppermost layer is top from layers that Find has found. base
// is the path of the raw base if the lowest layer needs one. Where an interrupted merge has left two
// files of one id, the merged one counts.
func Chain(layers []LayerInfo, top ID, base string) (Stack, error) {
	byID := map[ID]LayerInfo{}
	for _, l := range layers {
		if old, ok := byID[l.ID]; ok && old.Merged != (ID{}) {
			continue
		}
		byID[l.ID] = l
	}
	var s Stack
	for id := top; id != (ID{}); {
		l, ok := byID[id]
		if !ok {
			return Stack{}, fmt.Errorf("%w: layer %v was not found", ErrMissingParent, id)
		}
		delete(byID, id) // each at most once: a cycle ends above
		s.Layers = append(s.Layers, l.Path)
		if id = l.Parent; l.OnBase {
			if base == "" {
				return Stack{}, fmt.Errorf("%w: %s needs a raw base", ErrMissingParent, l.Path)
			}
			s.Base = base
			break
		}
	}
	slices.Reverse(s.Layers)
	return s, nil
}
