package records

import "regexp"

// Words are how another interface than Go's calls what errors and problems name: `Sandbox("dev").Wake` may be
// "`drowse wake dev`" there.
type Words []word

type word struct {
	is   *regexp.Regexp
	says string
}

// NewWords makes Words of pairs: a regular expression for the words of Go, and what is said instead, as
// regexp.Regexp.ReplaceAllString takes it. Those that come first are looked for first. It panics if one is no regular
// expression.
func NewWords(pairs ...[2]string) Words {
	w := make(Words, len(pairs))
	for i, p := range pairs {
		w[i] = word{regexp.MustCompile(p[0]), p[1]}
	}
	return w
}

// In is a text in these words.
func (w Words) In(text string) string {
	for _, r := range w {
		text = r.is.ReplaceAllString(text, r.says)
	}
	return text
}
