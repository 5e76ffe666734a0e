package drowsefile

import (
	"fmt"
	"strings"
)

// maxExpanded bounds one instruction after the expansion of variables, in bytes.
const maxExpanded = 1 << 20

// maxNested bounds ${a:-${b:-...}}.
const maxNested = 16

// expander replaces variables and removes quotes as the shell does (POSIX XCU 2.2 and 2.6.2). It knows $NAME,
// ${NAME}, ${NAME:-WORD}, ${NAME-WORD}, ${NAME:+WORD} and ${NAME+WORD}.
type expander struct {
	get func(name string) (string, bool)
	s   string
	at  int
	// out is the current word. begun is set once there is one, even an empty one as in "".
	out   strings.Builder
	begun bool
}

// expand returns the whole of s, expanded, as one word.
func expand(s string, get func(string) (string, bool)) (string, error) {
	e := &expander{get: get, s: s}
	words, err := e.words(false)
	if err != nil || len(words) == 0 {
		return "", err
	}
	return words[0], nil
}

// expandWords splits s into words at unquoted blanks. It does not split the values of variables.
func expandWords(s string, get func(string) (string, bool)) ([]string, error) {
	e := &expander{get: get, s: s}
	return e.words(true)
}

// expandText replaces variables in a text without quoting, as the shell does in a here-document.
func expandText(s string, get func(string) (string, bool)) (string, error) {
	e := &expander{get: get, s: s}
	for e.at < len(e.s) {
		if err := e.quotedByte("$`\\\n"); err != nil {
			return "", err
		}
	}
	return e.out.String(), nil
}

func (e *expander) words(split bool) ([]string, error) {
	var out []string
	for e.at < len(e.s) {
		switch c := e.s[e.at]; {
		case split && (c == ' ' || c == '\t' || c == '\n'):
			e.at++
			if e.begun {
				out = append(out, e.out.String())
				e.out.Reset()
				e.begun = false
			}
			continue
		case c == '\'':
			end := strings.IndexByte(e.s[e.at+1:], '\'')
			if end < 0 {
				return nil, fmt.Errorf("a ' has no end")
			}
			if err := e.put(e.s[e.at+1 : e.at+1+end]); err != nil {
				return nil, err
			}
			e.at += end + 2
		case c == '"':
			if err := e.doubleQuoted(); err != nil {
				return nil, err
			}
		case c == '\\':
			if e.at++; e.at == len(e.s) {
				return nil, fmt.Errorf("a \\ stands at the end")
			}
			if err := e.put(e.s[e.at : e.at+1]); err != nil {
				return nil, err
			}
			e.at++
		case c == '$':
			if err := e.variable(0); err != nil {
				return nil, err
			}
		default:
			if err := e.put(e.s[e.at : e.at+1]); err != nil {
				return nil, err
			}
			e.at++
		}
		e.begun = true
	}
	if e.begun {
		out = append(out, e.out.String())
	}
	return out, nil
}

func (e *expander) put(s string) error {
	if e.out.Len()+len(s) > maxExpanded {
		return fmt.Errorf("with its variables it has more than %d bytes", maxExpanded)
	}
	e.out.WriteString(s)
	return nil
}

func (e *expander) doubleQuoted() error {
	for e.at++; e.at < len(e.s); {
		if e.s[e.at] == '"' {
			e.at++
			return nil
		}
		if err := e.quotedByte("$`\"\\\n"); err != nil {
			return err
		}
	}
	return fmt.Errorf("a \" has no end")
}

// quotedByte takes one byte, or a variable. A \ is special only before the bytes in escaped.
func (e *expander) quotedByte(escaped string) error {
	switch c := e.s[e.at]; {
	case c == '$':
		return e.variable(0)
	case c == '\\' && e.at+1 < len(e.s) && strings.IndexByte(escaped, e.s[e.at+1]) >= 0:
		e.at += 2
		return e.put(e.s[e.at-1 : e.at])
	}
	e.at++
	return e.put(e.s[e.at-1 : e.at])
}

func nameByte(c byte, first bool) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || !first && c >= '0' && c <= '9'
}

// variable takes a variable, which begins with $.
func (e *expander) variable(depth int) error {
	v, err := e.value(depth)
	if err != nil {
		return err
	}
	return e.put(v)
}

func (e *expander) value(depth int) (string, error) {
	e.at++ // $
	if e.at == len(e.s) {
		return "$", nil
	}
	if e.s[e.at] != '{' {
		name := e.name()
		if name == "" {
			return "$", nil
		}
		v, _ := e.get(name)
		return v, nil
	}
	if depth == maxNested {
		return "", fmt.Errorf("more than %d ${ lie in each other", maxNested)
	}
	e.at++
	name := e.name()
	if name == "" {
		return "", fmt.Errorf("${ is not followed by the name of a variable")
	}
	rest := e.s[e.at:]
	v, set := e.get(name)
	if strings.HasPrefix(rest, "}") {
		e.at++
		return v, nil
	}
	colon := strings.HasPrefix(rest, ":")
	if colon {
		rest = rest[1:]
		e.at++
		set = set && v != ""
	}
	if rest == "" || rest[0] != '-' && rest[0] != '+' {
		return "", fmt.Errorf("${%s is followed by what is not supported; supported are ${NAME}, ${NAME:-WORD} and ${NAME:+WORD}", name)
	}
	alternative := rest[0] == '+'
	e.at++
	word, err := e.braced(depth)
	switch {
	case err != nil:
		return "", err
	case set == alternative:
		return word, nil
	case alternative:
		return "", nil
	}
	return v, nil
}

func (e *expander) name() string {
	start := e.at
	for e.at < len(e.s) && nameByte(e.s[e.at], e.at == start) {
		e.at++
	}
	return e.s[start:e.at]
}

// braced takes the word of ${NAME:-WORD} and the closing brace.
func (e *expander) braced(depth int) (string, error) {
	var b strings.Builder
	for e.at < len(e.s) {
		switch c := e.s[e.at]; {
		case c == '}':
			e.at++
			return b.String(), nil
		case c == '\\' && e.at+1 < len(e.s):
			b.WriteByte(e.s[e.at+1])
			e.at += 2
		case c == '$':
			v, err := e.value(depth + 1)
			if err != nil {
				return "", err
			}
			if b.WriteString(v); b.Len() > maxExpanded {
				return "", fmt.Errorf("with its variables it has more than %d bytes", maxExpanded)
			}
		default:
			b.WriteByte(c)
			e.at++
		}
	}
	return "", fmt.Errorf("a ${ has no end")
}
