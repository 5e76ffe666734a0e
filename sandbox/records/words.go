package records

import "github.com/drowse-vm/drowse/internal/lazyregexp"

// Words translate the Go names in errors and problems for another interface: `Sandbox("dev").Wake` may be "`drowse
// wake dev`" there.
type Words []word

type word struct {
	is   *lazyregexp.Regexp
	says string
}

// NewWords makes Words from pairs: a regular expression for the Go words, and its replacement, as for
// regexp.Regexp.ReplaceAllString. Earlier pairs apply first. The first use of an expression that is invalid panics.
func NewWords(pairs ...[2]string) Words {
	w := make(Words, len(pairs))
	for i, p := range pairs {
		w[i] = word{lazyregexp.New(p[0]), p[1]}
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
