package builder

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
)

// Kind is the kind of a [Source].
type Kind string

// The kinds of sources.
const (
	KindDebian        Kind = "debian"         // a minimal Debian root made from packages
	KindDir           Kind = "dir"            // a directory tree of the host
	KindTar           Kind = "tar"            // a tar stream of a root filesystem, compressed or not
	KindOCI           Kind = "oci"            // a directory with an OCI image layout
	KindOCIArchive    Kind = "oci-archive"    // a tar archive of such a directory, compressed or not
	KindDockerArchive Kind = "docker-archive" // what `docker save` writes, compressed or not
	KindRegistry      Kind = "docker"         // an image of a registry
)

// stdinPath in place of a file means the standard input.
const stdinPath = "-"

// Source is a parsed --from string.
type Source struct {
	Kind  Kind
	Suite string // of KindDebian: bookworm, trixie, sid, ...
	// Path is absolute and cleaned, with symlinks not yet resolved, for all kinds but KindDebian and KindRegistry.
	// "-" is the standard input, for the kinds that are one file.
	Path string
	// Ref is the full reference, with its registry, for KindRegistry. For KindOCI, KindOCIArchive and KindDockerArchive
	// it is the image's name in the source, or "@" and the digest of its manifest; "" means the only one.
	Ref string
}

// layered reports whether the source is an image of layers with a manifest.
func (s Source) layered() bool {
	switch s.Kind {
	case KindOCI, KindOCIArchive, KindDockerArchive, KindRegistry:
		return true
	}
	return false
}

// String returns the source in the form that [ParseSource] reads.
func (s Source) String() string {
	switch {
	case s.Kind == KindDebian:
		return string(s.Kind) + ":" + s.Suite
	case s.Kind == KindRegistry:
		return string(s.Kind) + "://" + s.Ref
	case s.Ref == "" || strings.HasPrefix(s.Ref, "@"):
		return string(s.Kind) + ":" + s.Path + s.Ref
	}
	return string(s.Kind) + ":" + s.Path + ":" + s.Ref
}

const supportedSources = `supported are "debian:SUITE" (such as debian:bookworm), "dir:PATH", "tar:FILE", "oci:PATH[:NAME]", ` +
	`"oci-archive:FILE[:NAME]", "docker-archive:FILE[:NAME]" and "docker://REFERENCE"`

var suiteRE = lazyregexp.New(`^[a-z][a-z0-9-]{0,63}$`)

// ParseSource reads a --from string: "debian:SUITE", "dir:PATH", "tar:FILE", "oci:PATH[:NAME]",
// "oci-archive:FILE[:NAME]", "docker-archive:FILE[:NAME]", where "@DIGEST" may take the place of ":NAME", or
// "docker://REFERENCE", also written "registry:REFERENCE". The spellings are those of containers-transports(5). A
// relative path starts at the current directory; FILE may be "-", the standard input. A PATH or FILE before
// ":NAME" ends at its first colon. Any other string is an [ErrUnsupportedSource] that lists what is supported.
func ParseSource(from string) (Source, error) {
	scheme, rest, ok := strings.Cut(from, ":")
	switch {
	case from == "":
		return Source{}, fmt.Errorf("%w: the source is empty; %s", image.ErrUnsupportedSource, supportedSources)
	case !ok:
		return Source{}, fmt.Errorf("%w %q: it has no kind in front; %s", image.ErrUnsupportedSource, from, supportedSources)
	}
	s := Source{Kind: Kind(scheme)}
	switch s.Kind {
	case KindDebian:
		if !suiteRE.MatchString(rest) {
			return Source{}, fmt.Errorf("%w %q: %q is not a Debian suite name; use one such as debian:bookworm",
				image.ErrUnsupportedSource, from, rest)
		}
		s.Suite = rest
		return s, nil
	case KindRegistry, "registry":
		ref, ok := strings.CutPrefix(rest, "//")
		if !ok && s.Kind == KindRegistry {
			return Source{}, fmt.Errorf("%w %q: two slashes are missing; use docker://REFERENCE", image.ErrUnsupportedSource, from)
		}
		full, err := oci.FullName(ref)
		if err != nil {
			return Source{}, fmt.Errorf("%w %q: %w", image.ErrUnsupportedSource, from, err)
		}
		return Source{Kind: KindRegistry, Ref: full}, nil
	case KindDir, KindTar:
		s.Path = rest
	case KindOCI, KindOCIArchive, KindDockerArchive:
		if at := strings.LastIndex(rest, "@sha"); at >= 0 && layers.IsDigest(rest[at+1:]) && s.Kind != KindDockerArchive {
			s.Path, s.Ref = rest[:at], rest[at:]
			break
		}
		s.Path, s.Ref, ok = strings.Cut(rest, ":")
		if ok && (s.Ref == "" || len(s.Ref) > fstree.MaxPathBytes || strings.HasPrefix(s.Ref, "@")) {
			return Source{}, fmt.Errorf("%w %q: a name must follow the second colon", image.ErrUnsupportedSource, from)
		}
	default:
		return Source{}, fmt.Errorf("%w %q: the kind %q is not known here; %s", image.ErrUnsupportedSource, from, scheme, supportedSources)
	}
	if s.Path == "" {
		return Source{}, fmt.Errorf("%w %q: the path is empty; use %s:PATH", image.ErrUnsupportedSource, from, scheme)
	}
	if s.Path == stdinPath && s.Kind != KindDir && s.Kind != KindOCI {
		return s, nil
	}
	abs, err := filepath.Abs(s.Path)
	if err != nil {
		return Source{}, fmt.Errorf("make %q absolute: %w", s.Path, err)
	}
	s.Path = abs
	return s, nil
}

var (
	notTagNameRE  = lazyregexp.New(`[^a-z0-9]+`)
	trailingVerRE = lazyregexp.New(`[0-9.]+$`)
)

// defaultTag derives the tag of an image from its source: "debian:latest" without packages, else
// "debian-PACKAGE:latest" with the first package that the caller named, without its version digits (python3 gives
// debian-python:latest); "dir-NAME:latest" for a directory; oci.LocalTag for a registry's image; for a file
// its name, and the requested name in it if that can be a version.
func defaultTag(s Source, include []string) string {
	name, first, version := "debian", "", "latest"
	switch s.Kind {
	case KindRegistry:
		if tag, err := oci.LocalTag(s.Ref); err == nil {
			return tag
		}
		name = "image"
	case KindTar, KindOCI, KindOCIArchive, KindDockerArchive:
		if tag, err := image.NormalizeTag(s.Ref); err == nil && s.Kind == KindDockerArchive {
			return tag
		}
		if _, err := image.NormalizeTag("x:" + s.Ref); err == nil {
			version = s.Ref
		}
		name = "image"
		if s.Path == stdinPath {
			break
		}
		base := strings.ToLower(filepath.Base(s.Path))
		for _, suffix := range []string{".gz", ".tgz", ".zst", ".xz", ".bz2", ".tar"} {
			base = strings.TrimSuffix(base, suffix)
		}
		if base = strings.Trim(notTagNameRE.ReplaceAllString(base, "-"), "-"); base != "" {
			name = base[:min(len(base), image.MaxTagName/2)]
			name = strings.Trim(name, "-")
		}
	case KindDir:
		name, first = "dir", strings.ToLower(filepath.Base(s.Path))
	case KindDebian:
		for _, item := range include {
			fields := strings.FieldsFunc(item, func(r rune) bool { return strings.ContainsRune(", \t\n", r) })
			if len(fields) > 0 {
				first = fields[0]
				break
			}
		}
		first, _, _ = strings.Cut(first, "=")
		first, _, _ = strings.Cut(first, "/")
		first, _, _ = strings.Cut(first, ":")
		if short := trailingVerRE.ReplaceAllString(first, ""); short != "" {
			first = short
		}
	}
	first = strings.Trim(notTagNameRE.ReplaceAllString(first, "-"), "-")
	if len(first) > image.MaxTagName/2 {
		first = strings.Trim(first[:image.MaxTagName/2], "-")
	}
	if first != "" {
		name += "-" + first
	}
	return name + ":" + version
}
