package artifact

import (
	"iter"
	"slices"
	"strings"
)

// Stanzas returns the stanzas of a text in Debian's control format (deb822(5)), in order. Each has the fields in
// names, which are in lower case; a stanza without any of them is skipped. Further lines of a field are joined
// with newlines. A line that is not a field has the name "". Values are copies, not substrings of the text.
func Stanzas(text string, names ...string) iter.Seq[map[string]string] {
	return func(yield func(map[string]string) bool) {
		fields, name := map[string]string{}, ""
		start, at := 0, 0 // of the field's value, and of the line
		end := func() bool {
			if len(fields) == 0 {
				return true
			}
			out := fields
			for k, v := range out {
				out[k] = unfold(v)
			}
			fields = map[string]string{}
			return yield(out)
		}
		for line := range strings.Lines(text) {
			next := at + len(line)
			switch {
			case strings.TrimSpace(line) == "":
				if !end() {
					return
				}
			case line[0] == '#':
			case line[0] == ' ' || line[0] == '\t':
				if _, ok := fields[name]; ok {
					fields[name] = text[start:next]
				}
			default:
				key, _, ok := strings.Cut(line, ":")
				if name, start = strings.ToLower(strings.TrimSpace(key)), at+len(key)+1; !ok {
					name, start = "", at
				}
				if slices.Contains(names, name) {
					fields[name] = text[start:next]
				}
			}
			at = next
		}
		end()
	}
}

// unfold joins the lines of a value, without comments.
func unfold(value string) string {
	var b strings.Builder
	for line := range strings.Lines(value) {
		if line[0] != '#' {
			b.WriteString(strings.TrimSpace(line) + "\n")
		}
	}
	return strings.TrimSpace(b.String())
}
