package sandbox

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// findShares refuses early what cannot be shared.
func (s *Host) findShares(shares []spec.Share) error {
	if len(shares) == 0 {
		return nil
	}
	state, err := filepath.EvalSymlinks(s.State.Dir())
	if err != nil {
		return err
	}
	for _, sh := range shares {
		d, err := instance.OpenShare(osfile.OS, sh)
		if err != nil {
			return err
		}
		if err := d.Close(); err != nil {
			return err
		}
		source, err := filepath.EvalSymlinks(sh.Source)
		if err != nil {
			return fmt.Errorf("%w: %w", spec.ErrShare, err)
		}
		if within(source, state) || within(state, source) {
			return fmt.Errorf("%w: %s has to do with the state directory %s, where a guest must not be: share another directory", spec.ErrShare, sh.Source, s.State.Dir())
		}
	}
	return nil
}

// within reports whether a clean path is dir or below it.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
