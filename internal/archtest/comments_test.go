package archtest

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// maxColumns is how wide a line with a comment may be, a tab being one column as in most linters.
const maxColumns = 120

// longFile lists the files that have wider comments from before there was this limit. It only gets shorter.
const longFile = "testdata/long-comments.txt"

var update = flag.Bool("update", false, "bring "+longFile+" up to date: drop files that hold the limit, follow those that were moved")

// longComments returns the lines of a Go file where a comment goes beyond maxColumns. Directives cannot be wrapped.
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

// checkLong compares the files with wide comments, and the lines of these, with the list. It returns what is wrong, and
// the list as it is to be: without files that are gone or hold the limit, and with those that have the name of one that
// is gone.
func checkLong(long map[string][]int, listed []string) (wrong, should []string) {
	moved := map[string]bool{}
	for _, f := range listed {
		if long[f] == nil {
			wrong = append(wrong, f+" has no wide comments any more, or is gone")
			moved[path.Base(f)] = true
		} else {
			should = append(should, f)
		}
	}
	for f, lines := range long {
		switch {
		case slices.Contains(listed, f):
		case moved[path.Base(f)]:
			wrong = append(wrong, f+" was moved")
			should = append(should, f)
		default:
			for _, line := range lines {
				wrong = append(wrong, fmt.Sprintf("%s:%d: a comment has more than %d columns: wrap it", f, line, maxColumns))
			}
		}
	}
	slices.Sort(wrong)
	slices.Sort(should)
	return wrong, should
}

func TestCommentsAreNotWiderThanTheLimit(t *testing.T) {
	long := map[string][]int{}
	for _, s := range sources(t) {
		if ast.IsGenerated(s.file) {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(s.path)))
		if err != nil {
			t.Fatal(err)
		}
		if lines := longComments(text); lines != nil {
			long[s.path] = lines
		}
	}
	text, err := os.ReadFile(longFile)
	if err != nil {
		t.Fatal(err)
	}
	wrong, should := checkLong(long, strings.Fields(string(text)))
	if *update {
		if err := os.WriteFile(longFile, []byte(strings.Join(append(should, ""), "\n")), fs.FileMode(0o644)); err != nil {
			t.Fatal(err)
		}
		wrong, _ = checkLong(long, should)
	}
	for _, w := range wrong {
		t.Error(w)
	}
	if wrong != nil {
		t.Log("go test ./internal/archtest -update brings the list " + longFile + " up to date, which only gets shorter")
	}
}

func TestWideCommentsAreFound(t *testing.T) {
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

func TestListOfWideCommentsOnlyGetsShorter(t *testing.T) {
	long := map[string][]int{"a.go": {1}, "new/b.go": {2}, "c.go": {3}}
	wrong, should := checkLong(long, []string{"a.go", "old/b.go", "d.go"})
	if want := []string{"a.go", "new/b.go"}; !slices.Equal(should, want) {
		t.Errorf("the list is to be %q, want %q", should, want)
	}
	if len(wrong) != 4 {
		t.Errorf("wrong are %q, want a new file, a moved one, its old place and one that is gone", wrong)
	}
	if wrong, _ := checkLong(long, should); len(wrong) != 1 || !strings.HasPrefix(wrong[0], "c.go:3:") {
		t.Errorf("after the update: %q, want the new file", wrong)
	}
}
