// Command loc prints how many lines of Go each package has: code, comments and tests,
// and apart from these what is generated. A line with code and a comment counts as code,
// a line of a test file as a test, and an empty line as none. Packages that only tests
// use come last, with a total of their own.
package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// lines are the figures of a package.
type lines struct{ code, comments, tests, generated int }

func (l *lines) add(m lines) {
	l.code += m.code
	l.comments += m.comments
	l.tests += m.tests
	l.generated += m.generated
}

// generated is the line by which tools mark what they write (go help generate).
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func main() {
	if err := run(os.Stdout, "."); err != nil {
		fmt.Fprintln(os.Stderr, "loc:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, root string) error {
	packages := map[string]*lines{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
			return fs.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		if packages[rel] == nil {
			packages[rel] = new(lines)
		}
		packages[rel].add(count(name, text))
		return nil
	})
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	row := func(l lines, name string) {
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t  %s\n", l.code, l.comments, l.tests, l.generated, name)
	}
	fmt.Fprintln(t, "code\tcomments\ttests\tgenerated\t  package")
	for _, group := range []string{"production", "test support"} {
		var total lines
		n := 0
		for _, name := range slices.Sorted(maps.Keys(packages)) {
			if isTestSupport(name) == (group == "test support") {
				row(*packages[name], name)
				total.add(*packages[name])
				n++
			}
		}
		row(total, fmt.Sprintf("total of %d packages: %s", n, group))
	}
	return t.Flush()
}

// isTestSupport tells by its path whether only tests use a package. Imports do not say so: nothing here imports what
// only embedders use either.
func isTestSupport(pkg string) bool {
	return strings.HasPrefix(pkg, "internal/test/") || strings.HasSuffix(pkg, "test") || strings.HasPrefix(path.Base(pkg), "fake")
}

// count counts the lines of one file.
func count(name string, text []byte) lines {
	fset := token.NewFileSet()
	file := fset.AddFile(name, -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments) // of what is no Go it reads on
	code, comments := map[int]bool{}, map[int]bool{}
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			break
		}
		if tok == token.SEMICOLON && lit == "\n" { // the scanner's own
			continue
		}
		on := code
		if tok == token.COMMENT {
			on = comments
		}
		first := file.PositionFor(pos, false).Line
		for i := range 1 + strings.Count(strings.TrimSuffix(lit, "\n"), "\n") {
			on[first+i] = true
		}
	}
	maps.DeleteFunc(comments, func(line int, _ bool) bool { return code[line] })
	switch all := len(code) + len(comments); {
	case generated.Match(text):
		return lines{generated: all}
	case strings.HasSuffix(name, "_test.go"):
		return lines{tests: all}
	}
	return lines{code: len(code), comments: len(comments)}
}
