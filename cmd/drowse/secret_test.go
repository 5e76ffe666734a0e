//go:build linux

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestReadSecrets(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, size int) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), size), 0o600); err != nil {
			t.Fatal(err)
		}
		return "@" + path
	}
	small, full, large := file("small", 3), file("full", spec.MaxSecret), file("large", spec.MaxSecret+1)
	list, err := readSecrets([]string{"A=" + small, "b=-", "c=" + full}, strings.NewReader("from stdin\n"))
	if err != nil || len(list) != 3 || string(list[0].Value) != "xxx" || string(list[1].Value) != "from stdin\n" || len(list[2].Value) != spec.MaxSecret || list[1].Name != "b" {
		t.Fatalf("got %d secrets, %v", len(list), err)
	}
	for name, words := range map[string][]string{
		"a value on the command line": {"a=swordfish"},
		"no value":                    {"a"},
		"no file name":                {"a=@"},
		"twice":                       {"a=" + small, "a=" + small},
		"stdin twice":                 {"a=-", "b=-"},
		"a bad name":                  {"a/b=" + small},
	} {
		_, err := readSecrets(words, strings.NewReader(""))
		var usage usageError
		if !errors.As(err, &usage) || strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%s: got %v, want a usage error without the value", name, err)
		}
	}
	for name, words := range map[string][]string{"too large": {"a=" + large}, "no such file": {"a=@" + filepath.Join(dir, "none")}} {
		list, err := readSecrets(words, nil)
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		for _, l := range list {
			if len(bytes.Trim(l.Value, "\x00")) > 0 {
				t.Errorf("%s: what was read is still there", name)
			}
		}
	}
}

func TestAsTheyAre_secrets_that_a_VM_has_keep_their_looks(t *testing.T) {
	list := []spec.Secret{{SecretFile: spec.SecretFile{Name: "a"}, Value: []byte("1")}, {SecretFile: spec.SecretFile{Name: "b"}, Value: []byte("2")}}
	there := []spec.SecretState{{SecretFile: spec.SecretFile{Name: "b", Mode: 0o400, UID: 7}, Kept: true}}
	out, others := asTheyAre(list, there, true)
	if len(out) != 2 || !out[0].Transient || out[1].Transient || out[1].Mode != 0o400 || out[1].UID != 7 || string(out[1].Value) != "2" {
		t.Errorf("got %+v", out)
	}
	if len(others) != 1 || others[0] != "a" {
		t.Errorf("lent %v", others)
	}
}

func TestReadEnv(t *testing.T) {
	got, err := readEnv("-", strings.NewReader("A=1\n# no\n\nB=x = y\r\nC="))
	if err != nil || strings.Join(got, "|") != "A=1|B=x = y|C=" {
		t.Errorf("got %q, %v", got, err)
	}
	for _, text := range []string{"A B", "=x", "A B=x"} {
		var usage usageError
		if _, err := readEnv("-", strings.NewReader("X=1\n"+text)); !errors.As(err, &usage) || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%q: got %v, want a usage error for line 2", text, err)
		}
	}
	if _, err := readEnv(filepath.Join(t.TempDir(), "none"), nil); err == nil {
		t.Error("no such file: no error")
	}
}
