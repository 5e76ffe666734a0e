package image

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
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

// stdinPath in the place of a file means the standard input.
const stdinPath = "-"

// Source is a parsed --from string.
type Source struct {
	Kind  Kind
	Suite string // of KindDebian: bookworm, trixie, sid, ...
	// Path is absolute, cleaned, symlinks not yet resolved; of all kinds but KindDebian and KindRegistry. "-" is the
	// standard input, of the kinds that are one file.
	Path string
	// Ref is, of KindRegistry, the whole reference with its registry; of KindOCI, KindOCIArchive and KindDockerArchive
	// the name of the image in it, or "@" and the digest of its manifest; "" means the only one.
	Ref string
}

// layered says that the source is an image of layers with a manifest.
func (s Source) layered() bool {
	switch s.Kind {
	case KindOCI, KindOCIArchive, KindDockerArchive, KindRegistry:
		return true
	}
	return false
}

// String gives the source in the form that [ParseSource] reads.
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

var (
	suiteRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,63}$`)
	// Debian policy 5.6.1 (Package), plus an optional architecture, and an optional version or suite as apt-get takes
	// them.
	packageRE = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+|/[a-z][a-z0-9-]*)?$`)
)

// ParseSource reads a --from string: "debian:SUITE", "dir:PATH", "tar:FILE", "oci:PATH[:NAME]",
// "oci-archive:FILE[:NAME]", "docker-archive:FILE[:NAME]", where "@DIGEST" may stand in place of ":NAME", or
// "docker://REFERENCE", also written "registry:REFERENCE". The spellings are those of containers-transports(5). A
// relative path is taken from the current directory; FILE may be "-", the standard input. A PATH or FILE before ":NAME"
// ends at its first colon. All other strings give an error that is [ErrUnsupportedSource] and says what is supported.
func ParseSource(from string) (Source, error) {
	scheme, rest, ok := strings.Cut(from, ":")
	switch {
	case from == "":
		return Source{}, fmt.Errorf("%w: the source is empty; %s", ErrUnsupportedSource, supportedSources)
	case !ok:
		return Source{}, fmt.Errorf("%w %q: it has no kind in front; %s", ErrUnsupportedSource, from, supportedSources)
	}
	s := Source{Kind: Kind(scheme)}
	switch s.Kind {
	case KindDebian:
		if !suiteRE.MatchString(rest) {
			return Source{}, fmt.Errorf("%w %q: %q is not a Debian suite name; use one such as debian:bookworm",
				ErrUnsupportedSource, from, rest)
		}
		s.Suite = rest
		return s, nil
	case KindRegistry, "registry":
		ref, ok := strings.CutPrefix(rest, "//")
		if !ok && s.Kind == KindRegistry {
			return Source{}, fmt.Errorf("%w %q: two slashes are missing; use docker://REFERENCE", ErrUnsupportedSource, from)
		}
		r, err := parseReference(ref, false)
		if err != nil {
			return Source{}, fmt.Errorf("%w %q: %w", ErrUnsupportedSource, from, err)
		}
		return Source{Kind: KindRegistry, Ref: r.Name()}, nil
	case KindDir, KindTar:
		s.Path = rest
	case KindOCI, KindOCIArchive, KindDockerArchive:
		if at := strings.LastIndex(rest, "@sha"); at >= 0 && digestRE.MatchString(rest[at+1:]) && s.Kind != KindDockerArchive {
			s.Path, s.Ref = rest[:at], rest[at:]
			break
		}
		s.Path, s.Ref, ok = strings.Cut(rest, ":")
		if ok && (s.Ref == "" || len(s.Ref) > fstree.MaxPathBytes || strings.HasPrefix(s.Ref, "@")) {
			return Source{}, fmt.Errorf("%w %q: a name must follow the second colon", ErrUnsupportedSource, from)
		}
	default:
		return Source{}, fmt.Errorf("%w %q: the kind %q is not known here; %s", ErrUnsupportedSource, from, scheme, supportedSources)
	}
	if s.Path == "" {
		return Source{}, fmt.Errorf("%w %q: the path is empty; use %s:PATH", ErrUnsupportedSource, from, scheme)
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

var digestRE = regexp.MustCompile(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)

// maxPackages bounds the list of packages of one spec.
const maxPackages = 1000

// normalizePackages splits items at commas and blanks, checks each name, sorts, and drops repetitions.
func normalizePackages(include []string) ([]string, error) {
	var out []string
	for _, item := range include {
		for _, p := range strings.FieldsFunc(item, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' }) {
			if !packageRE.MatchString(p) {
				return nil, fmt.Errorf("%w: %q is not a Debian package name", ErrInvalidOption, p)
			}
			out = append(out, p)
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) > maxPackages {
		return nil, fmt.Errorf("%w: %d packages are listed, at most %d are possible", ErrInvalidOption, len(out), maxPackages)
	}
	return out, nil
}

var (
	tagNameRE     = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	tagVersionRE  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
	notTagNameRE  = regexp.MustCompile(`[^a-z0-9]+`)
	trailingVerRE = regexp.MustCompile(`[0-9.]+$`)
)

const maxTagName = 200

// NormalizeTag checks a tag and completes it: "name" becomes "name:latest". Names are lower-case letters, digits and
// single separators (. _ - /), as docker has them.
func NormalizeTag(tag string) (string, error) {
	name, version, ok := strings.Cut(tag, ":")
	if !ok {
		version = "latest"
	}
	if len(name) > maxTagName || !tagNameRE.MatchString(name) || !tagVersionRE.MatchString(version) {
		return "", fmt.Errorf("%w: %q is not a tag; use NAME or NAME:VERSION with lower-case letters, digits and . _ - / in NAME",
			ErrInvalidOption, tag)
	}
	return name + ":" + version, nil
}

// defaultTag derives the tag of an image from what it is made of: "debian:latest" without packages, else
// "debian-PACKAGE:latest" with the package that the caller named first, its version digits cut off (python3 gives
// debian-python:latest); "dir-NAME:latest" for a directory; repository and tag for an image of a registry; for a file
// its name, and the name that is asked for in it if that can be a version.
func defaultTag(s Source, include []string) string {
	name, first, version := "debian", "", "latest"
	switch s.Kind {
	case KindRegistry:
		if tag := registryTag(s.Ref); tag != "" {
			return tag
		}
		name = "image"
	case KindTar, KindOCI, KindOCIArchive, KindDockerArchive:
		if tag, err := NormalizeTag(s.Ref); err == nil && s.Kind == KindDockerArchive {
			return tag
		}
		if tagVersionRE.MatchString(s.Ref) {
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
			name = base[:min(len(base), maxTagName/2)]
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
	if len(first) > maxTagName/2 {
		first = strings.Trim(first[:maxTagName/2], "-")
	}
	if first != "" {
		name += "-" + first
	}
	return name + ":" + version
}

// registryTag is the repository of a reference, without its registry and docker's "library/", and its tag; "latest"
// when it has a digest. It is "" when that makes no tag.
func registryTag(ref string) string {
	r, err := parseReference(ref, false)
	if err != nil {
		return ""
	}
	version := "latest"
	if t, ok := r.(name.Tag); ok {
		version = t.TagStr()
	}
	tag, err := NormalizeTag(strings.TrimPrefix(r.Context().RepositoryStr(), "library/") + ":" + version)
	if err != nil {
		return ""
	}
	return tag
}
