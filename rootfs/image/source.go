package image

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Kind is the kind of a [Source].
type Kind string

// The kinds of sources.
const (
	KindDebian Kind = "debian" // a minimal Debian root made from packages
	KindDir    Kind = "dir"    // a directory tree of the host
)

// Source is a parsed --from string.
type Source struct {
	Kind  Kind
	Suite string // of KindDebian: bookworm, trixie, sid, ...
	Path  string // of KindDir: absolute, cleaned, symlinks not yet resolved
}

// String gives the source in the form that [ParseSource] reads.
func (s Source) String() string {
	if s.Kind == KindDebian {
		return "debian:" + s.Suite
	}
	return "dir:" + s.Path
}

const supportedSources = `supported are "debian:SUITE" (such as debian:bookworm) and "dir:PATH"`

var (
	suiteRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,63}$`)
	// Debian policy 5.6.1 (Package), plus an optional architecture, and an optional version or suite as apt-get takes them.
	packageRE = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+|/[a-z][a-z0-9-]*)?$`)
)

// ParseSource reads a --from string: "debian:SUITE" or "dir:PATH". A relative path is taken from the current directory.
// All other strings give an error that is [ErrUnsupportedSource] and says what is supported.
func ParseSource(from string) (Source, error) {
	scheme, rest, ok := strings.Cut(from, ":")
	switch {
	case from == "":
		return Source{}, fmt.Errorf("%w: the source is empty; %s", ErrUnsupportedSource, supportedSources)
	case !ok:
		return Source{}, fmt.Errorf("%w %q: it has no kind in front; %s", ErrUnsupportedSource, from, supportedSources)
	}
	switch Kind(scheme) {
	case KindDebian:
		if !suiteRE.MatchString(rest) {
			return Source{}, fmt.Errorf("%w %q: %q is not a Debian suite name; use one such as debian:bookworm",
				ErrUnsupportedSource, from, rest)
		}
		return Source{Kind: KindDebian, Suite: rest}, nil
	case KindDir:
		if rest == "" {
			return Source{}, fmt.Errorf("%w %q: the path is empty; use dir:PATH", ErrUnsupportedSource, from)
		}
		abs, err := filepath.Abs(rest)
		if err != nil {
			return Source{}, fmt.Errorf("make %q absolute: %w", rest, err)
		}
		return Source{Kind: KindDir, Path: abs}, nil
	}
	return Source{}, fmt.Errorf("%w %q: the kind %q is not known here; %s", ErrUnsupportedSource, from, scheme, supportedSources)
}

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
// debian-python:latest); "dir-NAME:latest" for a directory.
func defaultTag(s Source, include []string) string {
	name, first := "debian", ""
	switch s.Kind {
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
	return name + ":latest"
}
