package archtest

import (
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The limits of a package that is not in largePackages: lines of code, and files, both without tests.
const maxCode, maxFiles = 4000, 25

// largePackages exceed a limit, for a reason.
var largePackages = map[string]string{
	"cmd/drowse":    "a file for each command, which nothing else shares",
	"bench":         "a file for each published number",
	"sandbox/state": "what may be deleted is decided over records, metadata, snapshots and layers, under one order of locks",
	"sandbox/api":   "a row for each route of the document, over one table that checks callers, owners and bounds",
}

// codeLines counts the lines of a Go file that have code.
func codeLines(text []byte) int {
	file := token.NewFileSet().AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, lit := s.Scan()
		switch {
		case tok == token.EOF:
			return len(lines)
		case tok == token.SEMICOLON && lit == "\n": // inserted by the scanner
			continue
		}
		for i := range 1 + strings.Count(lit, "\n") {
			lines[file.Line(pos)+i] = true
		}
	}
}

func TestPackages_are_small_or_have_a_reason(t *testing.T) {
	code, files := map[string]int{}, map[string]int{}
	for _, s := range sources(t) {
		text, err := os.ReadFile(filepath.Join("../..", s.path))
		if err != nil {
			t.Fatal(err)
		}
		if s.isTest() || ast.IsGenerated(s.file) {
			continue
		}
		code[s.pkg()] += codeLines(text)
		files[s.pkg()]++
	}
	for pkg, n := range code {
		large := n > maxCode || files[pkg] > maxFiles
		switch reason := largePackages[pkg]; {
		case large && reason == "":
			t.Errorf("%s has %d lines of code in %d files, and the limits are %d and %d: split it, or say why not in largePackages", pkg, n, files[pkg], maxCode, maxFiles)
		case !large && reason != "":
			t.Errorf("%s is within the limits: take it out of largePackages", pkg)
		}
	}
	for pkg := range largePackages {
		if code[pkg] == 0 {
			t.Errorf("there is no package %s: take it out of largePackages", pkg)
		}
	}
}

func TestCodeLines_are_those_with_code(t *testing.T) {
	const text = "// Package p is one.\npackage p\n\n/* two\n\nlines */\nvar s = `a\n\nb` // with a comment\n"
	if got := codeLines([]byte(text)); got != 4 {
		t.Errorf("%d lines, want 4", got)
	}
}

// maxNames bounds the exported names of package sandbox, methods included, so that users find their way.
const maxNames = 80

func TestPackage_sandbox_has_few_names(t *testing.T) {
	names := 0
	add := func(id *ast.Ident) {
		if id.IsExported() {
			names++
		}
	}
	for _, s := range sources(t) {
		if s.pkg() != "sandbox" || s.isTest() {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../..", s.path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv != nil {
					recv := d.Recv.List[0].Type
					if star, ok := recv.(*ast.StarExpr); ok {
						recv = star.X
					}
					if id, ok := recv.(*ast.Ident); ok && !id.IsExported() {
						continue
					}
				}
				add(d.Name)
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						add(spec.Name)
					case *ast.ValueSpec:
						for _, id := range spec.Names {
							add(id)
						}
					}
				}
			}
		}
	}
	t.Logf("%d names", names)
	if names == 0 || names > maxNames {
		t.Errorf("package sandbox exports %d names, and the limit is %d", names, maxNames)
	}
}
