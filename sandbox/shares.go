package sandbox

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/devices/fs"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// deviceShare and a share's index name its device, and are the tag that the guest mounts it by.
const deviceShare = "share-"

func shareTag(i int) string { return deviceShare + strconv.Itoa(i) }

// findShares says early what cannot be shared.
func (s *Store) findShares(shares []spec.Share) error {
	if len(shares) == 0 {
		return nil
	}
	state, err := filepath.EvalSymlinks(s.dir)
	if err != nil {
		return err
	}
	for _, sh := range shares {
		d, err := openShare(sh)
		if err != nil {
			return err
		}
		if err := d.Close(); err != nil {
			return err
		}
		source, err := filepath.EvalSymlinks(sh.Source)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrShare, err)
		}
		if within(source, state) || within(state, source) {
			return fmt.Errorf("%w: %s has to do with the state directory %s, where a guest must not be: share another directory", ErrShare, sh.Source, s.dir)
		}
	}
	return nil
}

// within says whether a clean path is dir or below it.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

func openShare(sh spec.Share) (*fs.Dir, error) {
	d, err := fs.Open(sh.Source, sh.Writable)
	if err != nil {
		return nil, fmt.Errorf("%w for %s in the guest: %w: put the directory there; its content is not part of a snapshot", ErrShare, sh.Path, err)
	}
	return d, nil
}
