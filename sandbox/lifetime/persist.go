package lifetime

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Persist says what does not persist over a sandbox's sleeps. With the zero value everything persists.
type Persist struct {
	// Drop are directories in the guest whose contents are removed before each sleep: absolute, clean paths.
	Drop []string `json:"drop,omitempty"`
	// Promote are files and directories in the guest. They are copied to the host before the drops.
	Promote []Promotion `json:"promote,omitempty"`
	// MaxBytes is how much data its writable disk may have when it sleeps; 0 is no limit.
	MaxBytes int64 `json:"max_bytes,omitempty"`
}

// Promotion is a copy to the host.
type Promotion struct {
	// Path is a file or a directory in the guest.
	Path string `json:"path"`
	// To is a directory of the host: copies are in To/NAME/TIME.
	To string `json:"to"`
}

// Limits of a Persist.
const (
	MaxDrops      = 32
	MaxPromotions = 16
	// MaxPersistPath bounds a path, and MaxPersistPaths all of them together, in bytes.
	MaxPersistPath  = 1024
	MaxPersistPaths = 4096
)

// Empty reports whether everything persists.
func (p Persist) Empty() bool { return len(p.Drop) == 0 && len(p.Promote) == 0 && p.MaxBytes == 0 }

// Clone returns a copy that shares nothing.
func (p Persist) Clone() Persist {
	p.Drop, p.Promote = slices.Clone(p.Drop), slices.Clone(p.Promote)
	return p
}

// notOfDisk are directories in a guest without files that a sleep would store.
var notOfDisk = []string{"/proc", "/sys", "/dev", "/run"}

// Check returns an error for values out of bounds.
func (p Persist) Check() error {
	switch {
	case len(p.Drop) > MaxDrops:
		return fmt.Errorf("%w: %d directories to drop: use %d at most", ErrKeep, len(p.Drop), MaxDrops)
	case len(p.Promote) > MaxPromotions:
		return fmt.Errorf("%w: %d paths to promote: use %d at most", ErrKeep, len(p.Promote), MaxPromotions)
	case p.MaxBytes < 0:
		return fmt.Errorf("%w: at most %d bytes persist: use 1 or more, or 0 for no limit", ErrKeep, p.MaxBytes)
	}
	all := 0
	for i, d := range p.Drop {
		all += len(d)
		if err := checkPath("to drop", d); err != nil {
			return err
		}
		for _, not := range notOfDisk {
			if within(d, not) {
				return fmt.Errorf("%w: to drop %s: what is in %s is not the disk's", ErrKeep, d, not)
			}
		}
		if slices.Contains(p.Drop[:i], d) {
			return fmt.Errorf("%w: to drop %s is said twice", ErrKeep, d)
		}
	}
	for i, m := range p.Promote {
		all += len(m.Path) + len(m.To)
		if err := checkPath("to promote", m.Path); err != nil {
			return err
		}
		if err := checkPath("to promote to", m.To); err != nil {
			return err
		}
		for _, other := range p.Promote[:i] {
			if m.To == other.To && (within(m.Path, other.Path) || within(other.Path, m.Path)) {
				return fmt.Errorf("%w: to promote %s and %s to %s: one has the other in it", ErrKeep, other.Path, m.Path, m.To)
			}
		}
	}
	if all > MaxPersistPaths {
		return fmt.Errorf("%w: paths to drop and to promote have %d bytes together: use %d at most", ErrKeep, all, MaxPersistPaths)
	}
	return nil
}

// checkPath returns an error for a path that does not name one thing below a root.
func checkPath(what, p string) error {
	switch {
	case len(p) > MaxPersistPath:
		return fmt.Errorf("%w: %s a path of %d bytes: use %d at most", ErrKeep, what, len(p), MaxPersistPath)
	case !utf8.ValidString(p) || strings.ContainsFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("%w: %s %q: use printable characters", ErrKeep, what, p)
	case !path.IsAbs(p) || path.Clean(p) != p || p == "/":
		return fmt.Errorf("%w: %s %q: use an absolute path without .., // and a / at its end, and not the root", ErrKeep, what, p)
	}
	return nil
}

// within reports whether p is dir or below it. Both must be clean.
func within(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

// Promoted reports whether a dropped directory contains something promoted, or is inside it.
func (p Persist) Promoted(drop string) bool {
	return slices.ContainsFunc(p.Promote, func(m Promotion) bool { return within(m.Path, drop) || within(drop, m.Path) })
}

// ParsePromotion reads "PATH=HOSTDIR".
func ParsePromotion(text string) (Promotion, error) {
	from, to, ok := strings.Cut(text, "=")
	if !ok || from == "" || to == "" {
		return Promotion{}, fmt.Errorf("%w: to promote %q: use PATH=HOSTDIR, as /work/out=/srv/artifacts", ErrKeep, text)
	}
	return Promotion{Path: from, To: to}, nil
}
