package artifact

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRequireStatic(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := RequireStatic(text); err != nil {
		t.Errorf("a script: %v", err)
	}
	if err := RequireStatic("/bin/sh"); err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
		t.Errorf("a program of Debian's, which needs a linker: %v", err)
	}
}
