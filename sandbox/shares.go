package sandbox

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/devices/fs"
	"github.com/drowse-vm/drowse/vmm"
)

// ShareSpec is a directory of the host that a VM finds mounted.
type ShareSpec struct {
	// Source is the directory on the host: absolute, and neither the state directory nor
	// above or below that. Symbolic links on the way to it are followed at each start.
	Source string `json:"source"`
	// Path is where the guest finds it, as in VolumeMount.
	Path string `json:"path"`
	// Writable lets the guest change what is in it. Otherwise the host refuses that,
	// whatever the guest does.
	Writable bool `json:"writable,omitempty"`
}

// Limits of the shares of a VM.
const (
	MaxShares      = 8
	maxShareSource = 1024 // bytes
	// maxMounts bounds volumes and shares together: each is a device, besides system disk, image,
	// disk, vsock, rng, balloon and net.
	maxMounts = vmm.MaxDevices - 7
)

// featureShares is what a kernel must have for shares: package kernel.
const featureShares = "shares"

// deviceShare and a share's index name its device, and are the tag that the guest mounts it by.
const deviceShare = "share-"

func shareTag(i int) string { return deviceShare + strconv.Itoa(i) }

// ErrShare says that the directory of a share cannot be shared.
var ErrShare = errors.New("unusable share")

// ParseShare reads HOSTDIR:/PATH, HOSTDIR:/PATH:ro or HOSTDIR:/PATH:rw. A relative HOSTDIR is
// one below the working directory.
func ParseShare(s string) (ShareSpec, error) {
	bad := fmt.Errorf("%w: share %q: use HOSTDIR:/PATH, HOSTDIR:/PATH:ro or HOSTDIR:/PATH:rw", ErrSpec, s)
	rest, mode := s, "ro"
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && (rest[i+1:] == "ro" || rest[i+1:] == "rw") {
		rest, mode = rest[:i], rest[i+1:]
	}
	// A directory of the host may have a colon in its name, that in the guest may not.
	i := strings.LastIndexByte(rest, ':')
	if i <= 0 {
		return ShareSpec{}, bad
	}
	source, err := filepath.Abs(rest[:i])
	if err != nil {
		return ShareSpec{}, fmt.Errorf("share %q: %w", s, err)
	}
	return ShareSpec{Source: source, Path: rest[i+1:], Writable: mode == "rw"}, nil
}

func checkShares(shares []ShareSpec, volumes []VolumeMount) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrSpec, fmt.Sprintf(format, args...))
	}
	if len(shares) > MaxShares {
		return bad("%d shares: use at most %d", len(shares), MaxShares)
	}
	if n := len(shares) + len(volumes); n > maxMounts {
		return bad("%d volumes and shares: use at most %d", n, maxMounts)
	}
	used := map[string]bool{}
	for _, v := range volumes {
		used[v.Path] = true
	}
	for _, sh := range shares {
		if !filepath.IsAbs(sh.Source) || filepath.Clean(sh.Source) != sh.Source || len(sh.Source) > maxShareSource || strings.ContainsRune(sh.Source, 0) {
			return bad("share of %.100q: use an absolute path without \"..\", at most %d bytes", sh.Source, maxShareSource)
		}
		if err := checkMountPath("share", sh.Path); err != nil {
			return err
		}
		if used[sh.Path] {
			return bad("share on %s: each path once", sh.Path)
		}
		used[sh.Path] = true
	}
	return nil
}

// findShares says early what cannot be shared.
func (s *Store) findShares(shares []ShareSpec) error {
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

func openShare(sh ShareSpec) (*fs.Dir, error) {
	d, err := fs.Open(sh.Source, sh.Writable)
	if err != nil {
		return nil, fmt.Errorf("%w for %s in the guest: %w: put the directory there; its content is not part of a snapshot", ErrShare, sh.Path, err)
	}
	return d, nil
}
