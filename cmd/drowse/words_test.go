//go:build linux

package main

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// named matches the Go calls that errors and problems name.
var named = regexp.MustCompile(`\b((Sandbox(\(%q\))?|Host|Fleet|Store|Volumes\(\))\.[A-Z]\w+|kernel\.(Build|Fetch|List)\b)( of (%q|"%\.12s"))?( with [A-Z][\w.]*)?`)

func TestErrors_that_name_a_call_of_Go_name_a_command_here(t *testing.T) {
	seen := 0
	for _, dir := range []string{"sandbox", "rootfs", "vmm"} {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "test/") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			var s scanner.Scanner
			s.Init(token.NewFileSet().AddFile(path, -1, len(text)), text, nil, 0)
			for {
				_, tok, lit := s.Scan()
				if tok == token.EOF {
					return nil
				}
				if tok != token.STRING || filepath.Base(path) == "words.go" {
					continue
				}
				if lit, err = strconv.Unquote(lit); err != nil {
					return err
				}
				for _, call := range named.FindAllString(lit, -1) {
					seen++
					call = strings.NewReplacer("%q", `"x"`, "%.12s", "x").Replace(call)
					if is := commands.In(call); !strings.Contains(is, "`drowse ") {
						t.Errorf("%s names %s, which is %s here", path, call, is)
					}
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if seen < 30 {
		t.Errorf("%d calls were found: are errors looked for where they are?", seen)
	}
}

func TestCommands_that_errors_name_are_there(t *testing.T) {
	root := (&app{}).root()
	command := regexp.MustCompile("`drowse ([a-z ]+)")
	for _, call := range []string{
		`Sandbox("x").Wake`, `Sandbox("x").Start with DiscardMemory`, `Sandbox("x").ServiceLog of "y"`, "Host.List", `Host.Clone of "0123"`, `Fleet.Update of "x" with Expires`,
		"Fleet.Prune", "Store.Snapshots", "Store.Volumes", "kernel.Build", "image.List", "netpolicy.Parse", "Sandbox.RemoveSecrets",
	} {
		is := commands.In("do it with " + call)
		m := command.FindStringSubmatch(is)
		if m == nil {
			t.Errorf("%s is %q", call, is)
			continue
		}
		if c, _, err := root.Find(strings.Fields(m[1])); err != nil || c == root {
			t.Errorf("%s is %q, and there is no such command (%v)", call, is, err)
		}
	}
}
