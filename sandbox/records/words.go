package records

import "regexp"

// Words translate the Go names in errors and problems for another interface: `Sandbox("dev").Wake` may be "`drowse
// wake dev`" there.
type Words []word

type word struct {
	is   *regexp.Regexp
	says string
}

// NewWords makes Words from pairs: a regular expression for the Go words, and its replacement, as for
// regexp.Regexp.ReplaceAllString. Earlier pairs apply first. It panics if an expression is invalid.
func NewWords(pairs ...[2]string) Words {
	w := make(Words, len(pairs))
	for i, p := range pairs {
		w[i] = word{regexp.MustCompile(p[0]), p[1]}
	}
	return w
}

// In returns a text in these words.
func (w Words) In(text string) string {
	for _, r := range w {
		text = r.is.ReplaceAllString(text, r.says)
	}
	return text
}
