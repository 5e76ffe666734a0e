package archtest

import (
	"bytes"
	"go/ast"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// maxColumns is the maximum width of a line with a comment. A tab counts as one column, as in most linters.
const maxColumns = 120

// longComments returns the lines of a Go file whose comments exceed maxColumns. Directives cannot be wrapped.
func longComments(text []byte) []int {
	var out []int
	lines := bytes.Split(text, []byte("\n"))
	file := token.NewFileSet().AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return slices.Compact(out)
		}
		if tok != token.COMMENT || directive(lit) {
			continue
		}
		first := file.PositionFor(pos, false).Line
		for line := first; line <= first+strings.Count(lit, "\n"); line++ {
			if utf8.RuneCount(lines[line-1]) > maxColumns {
				out = append(out, line)
			}
		}
	}
}

func directive(comment string) bool {
	for _, d := range []string{"//go:", "//nolint", "//line ", "//export "} {
		if strings.HasPrefix(comment, d) {
			return true
		}
	}
	return false
}

func TestComments_are_not_wider_than_the_limit(t *testing.T) {
	for _, s := range sources(t) {
		if ast.IsGenerated(s.file) {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(s.path)))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range longComments(text) {
			t.Errorf("%s:%d: a comment has more than %d columns: wrap it", s.path, line, maxColumns)
		}
	}
}

func TestWide_comments_are_found(t *testing.T) {
	wide := strings.Repeat("é", maxColumns)
	for _, c := range []struct {
		name, text string
		want       []int
	}{
		{"at the limit", "package p\n//" + wide[:2*(maxColumns-2)] + "\n", nil},
		{"beyond it", "package p\n// " + wide + "\n", []int{2}},
		{"beyond it behind code", "package p\nvar x int // " + wide + "\n", []int{2}},
		{"one of three lines", "package p\n/* a\n" + wide + "a\nb */", []int{3}},
		{"code", "package p\nvar x = `" + wide + "`\n", nil},
		{"a string that looks like one", "package p\nvar x = `\n// " + wide + "`\n", nil},
		{"a directive", "package p\n//go:generate " + wide + "\n", nil},
	} {
		if got := longComments([]byte(c.text)); !slices.Equal(got, c.want) {
			t.Errorf("%s: lines %v, want %v", c.name, got, c.want)
		}
	}
}

// oneWord is the maximum length of a test name that does not say what happens, such as TestConformance.
const oneWord = 24

func TestNames_of_tests_say_what_happens_in_words_joined_by_underscores(t *testing.T) {
	test := regexp.MustCompile(`(?m)^func (Test[A-Z]\w*)\(\w+ \*testing\.T\)`)
	for _, s := range sources(t) {
		if !strings.HasSuffix(s.path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(s.path)))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range test.FindAllSubmatch(text, -1) {
			if name := string(m[1]); len(name) > oneWord && !strings.Contains(name, "_") {
				t.Errorf("%s: %s: call it TestSubject_what_happens", s.path, name)
			}
		}
	}
}
