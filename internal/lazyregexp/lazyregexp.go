// Package lazyregexp has regular expressions that are compiled when they are first used. A process is started for each
// VM and for each command, and would wait for all that it does not use.
package lazyregexp

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// Regexp is a regular expression. See regexp.Regexp for the methods, which may be called from any goroutine.
type Regexp struct {
	text string
	once sync.Once
	re   *regexp.Regexp
}

// inTest has a mistake in an expression found by every test of its package.
var inTest = strings.HasSuffix(os.Args[0], ".test")

// New returns the expression text. Its first use panics if it is not valid; in a test, New does.
func New(text string) *Regexp {
	r := &Regexp{text: text}
	if inTest {
		r.compiled()
	}
	return r
}

func (r *Regexp) compiled() *regexp.Regexp {
	r.once.Do(func() { r.re = regexp.MustCompile(r.text) })
	return r.re
}

func (r *Regexp) MatchString(s string) bool              { return r.compiled().MatchString(s) }
func (r *Regexp) FindStringSubmatch(s string) []string   { return r.compiled().FindStringSubmatch(s) }
func (r *Regexp) FindAllString(s string, n int) []string { return r.compiled().FindAllString(s, n) }
func (r *Regexp) ReplaceAllString(src, with string) string {
	return r.compiled().ReplaceAllString(src, with)
}
