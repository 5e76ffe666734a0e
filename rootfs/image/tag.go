package image

import (
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

var (
	tagNameRE    = lazyregexp.New(`^[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]{1,5}/[a-z0-9]+([._-]+[a-z0-9]+)*)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	tagVersionRE = lazyregexp.New(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
)

// MaxTagName bounds the name of a tag, in bytes.
const MaxTagName = 200

// NormalizeTag checks a tag and completes it: "name" becomes "name:latest". Names are lower-case letters, digits
// and single separators (. _ - /), as in docker, after a registry's port if there is one: localhost:5000/app.
func NormalizeTag(tag string) (string, error) {
	name, version := tag, "latest"
	if i := strings.LastIndexByte(tag, ':'); i > strings.LastIndexByte(tag, '/') {
		name, version = tag[:i], tag[i+1:]
	}
	if len(name) > MaxTagName || !tagNameRE.MatchString(name) || !tagVersionRE.MatchString(version) {
		return "", fmt.Errorf("%w: %q is not a tag; use NAME or NAME:VERSION with lower-case letters, digits and . _ - / in NAME",
			ErrInvalidOption, tag)
	}
	return name + ":" + version, nil
}
