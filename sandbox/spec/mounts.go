package spec

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// Share is a directory of the host that is mounted in a VM.
type Share struct {
	// Source is the directory on the host: an absolute path, and not the state directory or a directory above or
	// below it. Symbolic links on the way to it are followed at each start.
	Source string `json:"source"`
	// Path is the mount point in the guest, as in VolumeMount.
	Path string `json:"path"`
	// Writable lets the guest change the directory. Otherwise the host refuses every change.
	Writable bool `json:"writable,omitempty"`
}

// Limits of the shares of a VM.
const (
	MaxShares      = 8
	maxShareSource = 1024 // bytes
	// MaxMounts bounds volumes and shares together. Each is a device, beside system disk, image, disk, vsock, rng,
	// balloon and net.
	MaxMounts = 12
)

// ParseShare reads HOSTDIR:/PATH, HOSTDIR:/PATH:ro or HOSTDIR:/PATH:rw. A relative HOSTDIR is below the working
// directory.
func ParseShare(s string) (Share, error) {
	bad := fmt.Errorf("%w: share %q: use HOSTDIR:/PATH, HOSTDIR:/PATH:ro or HOSTDIR:/PATH:rw", ErrInvalid, s)
	rest, mode := s, "ro"
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && (rest[i+1:] == "ro" || rest[i+1:] == "rw") {
		rest, mode = rest[:i], rest[i+1:]
	}
	// A directory of the host may have a colon in its name; a path in the guest may not.
	i := strings.LastIndexByte(rest, ':')
	if i <= 0 {
		return Share{}, bad
	}
	source, err := filepath.Abs(rest[:i])
	if err != nil {
		return Share{}, fmt.Errorf("share %q: %w", s, err)
	}
	return Share{Source: source, Path: rest[i+1:], Writable: mode == "rw"}, nil
}

// ValidateShares checks the shares of a VM with these volumes.
func ValidateShares(shares []Share, volumes []VolumeMount) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
	}
	if len(shares) > MaxShares {
		return bad("%d shares: use at most %d", len(shares), MaxShares)
	}
	if n := len(shares) + len(volumes); n > MaxMounts {
		return bad("%d volumes and shares: use at most %d", n, MaxMounts)
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

// VolumeMount is a volume in a VM.
type VolumeMount struct {
	// Name is the name of the volume.
	Name string `json:"name"`
	// Path is the mount point in the guest: absolute, of letters, digits and "._-/", at most 100 bytes, and not
	// one of the guest's system directories.
	Path string `json:"path"`
	// ReadOnly volumes may be in many VMs at once.
	ReadOnly bool `json:"read_only,omitempty"`
}

// Limits of the volumes of a VM.
const (
	MaxVolumes    = 8
	maxVolumePath = 100
)

var volumePathRE = lazyregexp.New(`^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$`)

// systemDirs are mounted already, or would hide what the guest needs to come up.
var systemDirs = []string{"/dev", "/proc", "/sys", "/run", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/tmp"}

// ParseVolumeMount reads NAME:/PATH or NAME:/PATH:ro.
func ParseVolumeMount(s string) (VolumeMount, error) {
	name, rest, ok := strings.Cut(s, ":")
	path, mode, _ := strings.Cut(rest, ":")
	if !ok || mode != "" && mode != "ro" && mode != "rw" {
		return VolumeMount{}, fmt.Errorf("%w: volume %q: use NAME:/PATH or NAME:/PATH:ro", ErrInvalid, s)
	}
	return VolumeMount{Name: name, Path: path, ReadOnly: mode == "ro"}, nil
}

func checkMounts(mounts []VolumeMount) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
	}
	if len(mounts) > MaxVolumes {
		return bad("%d volumes: use at most %d", len(mounts), MaxVolumes)
	}
	for i, m := range mounts {
		if !ValidName(m.Name) {
			return bad("volume name %q: use 1 to 40 lower-case letters, digits and inner hyphens", m.Name)
		}
		if err := checkMountPath("volume", m.Path); err != nil {
			return err
		}
		for _, o := range mounts[:i] {
			if o.Name == m.Name || o.Path == m.Path {
				return bad("volume %s on %s: each name and each path once", m.Name, m.Path)
			}
		}
	}
	return nil
}

// checkMountPath checks where a volume or share is to be found in a guest.
func checkMountPath(what, path string) error {
	if !volumePathRE.MatchString(path) || len(path) > maxVolumePath {
		return fmt.Errorf("%w: %s path %q: use an absolute path of letters, digits and ._-, at most %d bytes", ErrInvalid, what, path, maxVolumePath)
	}
	for _, dir := range systemDirs {
		// In /etc and /tmp there is room for more.
		if path == dir || strings.HasPrefix(path, dir+"/") && dir != "/etc" && dir != "/tmp" && dir != "/usr" {
			return fmt.Errorf("%w: %s path %s: it is a directory of the guest's system", ErrInvalid, what, path)
		}
	}
	return nil
}
