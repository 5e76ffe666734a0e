package drowsefile

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Limits of a list of patterns.
const (
	MaxIgnore   = 64 << 10 // bytes of the file
	maxPatterns = 1024
)

// Ignore says which files of a context are excluded, as a .dockerignore does.
type Ignore struct{ rules []rule }

type rule struct {
	re   *regexp.Regexp
	keep bool // it begins with "!"
}

// ParseIgnore reads patterns, one per line. "#" begins a comment, "!" makes an exception to earlier patterns, "*"
// and "?" stop at a slash, "**" does not. The last pattern that matches a file, or a directory above it, decides.
func ParseIgnore(text string) (*Ignore, error) {
	if len(text) > MaxIgnore {
		return nil, fmt.Errorf("%w: the list of files to ignore has more than %d bytes", ErrSyntax, MaxIgnore)
	}
	ig := &Ignore{}
	n := 0
	for line := range strings.Lines(strings.TrimPrefix(text, "\ufeff")) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		r := rule{keep: line[0] == '!'}
		if r.keep {
			line = strings.TrimSpace(line[1:])
		}
		line = strings.TrimPrefix(path.Clean("/"+line), "/")
		if line == "" {
			continue // the context itself cannot be excluded
		}
		var err error
		if r.re, err = globRE(line); err != nil {
			return nil, fmt.Errorf("%w: the list of files to ignore: line %d: %w", ErrSyntax, n, err)
		}
		if ig.rules = append(ig.rules, r); len(ig.rules) > maxPatterns {
			return nil, fmt.Errorf("%w: the list of files to ignore has more than %d patterns", ErrSyntax, maxPatterns)
		}
	}
	return ig, nil
}

// globRE converts a pattern to a regular expression that also matches everything below its matches.
func globRE(glob string) (*regexp.Regexp, error) {
	var b strings.Builder
	b.WriteString("^")
	for i := 0; i < len(glob); i++ {
		switch c := glob[i]; c {
		case '*':
			if !strings.HasPrefix(glob[i:], "**") {
				b.WriteString("[^/]*")
				continue
			}
			i++
			if strings.HasPrefix(glob[i+1:], "/") {
				i++
				b.WriteString("(?:.*/)?")
			} else {
				b.WriteString(".*")
			}
		case '?':
			b.WriteString("[^/]")
		case '[':
			end := strings.IndexByte(glob[i:], ']')
			if end < 0 {
				return nil, fmt.Errorf("in %s a [ has no end", quoted(glob))
			}
			class := glob[i+1 : i+end]
			not := strings.HasPrefix(class, "^") || strings.HasPrefix(class, "!")
			if not {
				class = class[1:]
			}
			if class == "" {
				return nil, fmt.Errorf("in %s a [] is empty", quoted(glob))
			}
			class = strings.NewReplacer(`\`, `\\`, `[`, `\[`, `^`, `\^`).Replace(class)
			if not {
				class = "^/" + class
			}
			b.WriteString("[" + class + "]")
			i += end
		case '\\':
			if i++; i == len(glob) {
				return nil, fmt.Errorf("%s ends with a \\", quoted(glob))
			}
			b.WriteString(regexp.QuoteMeta(glob[i : i+1]))
		default:
			b.WriteString(regexp.QuoteMeta(glob[i : i+1]))
		}
	}
	b.WriteString("(?:/.*)?$")
	re, err := regexp.Compile("(?s)" + b.String())
	if err != nil {
		return nil, fmt.Errorf("%s is no pattern", quoted(glob))
	}
	return re, nil
}

// Match reports whether a file is excluded from the context. p is relative to it, with slashes.
func (ig *Ignore) Match(p string) bool {
	ignored := false
	for _, r := range ig.rules {
		if r.re.MatchString(p) {
			ignored = !r.keep
		}
	}
	return ignored
}

// Exceptions reports whether the context may still include files below an ignored directory.
func (ig *Ignore) Exceptions() bool {
	return slices.ContainsFunc(ig.rules, func(r rule) bool { return r.keep })
}
