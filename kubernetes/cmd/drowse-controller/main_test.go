package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestNode_has_a_token_of_its_own_or_the_one_of_all(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"tokens/token": "all\n", "tokens/n1": "one\n", "outside": "none\n"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for node, want := range map[string]string{"n1": "one", "n2": "all", "../outside": "all"} {
		if got, err := tokenOf(filepath.Join(dir, "tokens/token"), node); got != want || err != nil {
			t.Errorf("node %q: %q, %v, want %q", node, got, err, want)
		}
	}
}
