package hostileguest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The compiler that made the committed guest, from Debian bookworm.
const (
	compiler        = "gcc-12"
	compilerVersion = "gcc-12 (Debian 12.2.0"
)

// go generate makes the committed guest from the source, byte for byte.
func TestGenerate_makes_the_committed_guest(t *testing.T) {
	version, err := exec.Command(compiler, "--version").Output()
	if err != nil || !strings.HasPrefix(string(version), compilerVersion) {
		t.Skipf("the guest is made with %s: run `scripts/deps test` on Debian bookworm (%s, %v)", compilerVersion, version, err)
	}
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, line, ok := strings.Cut(string(text), "//go:generate sh -c ")
	if !ok {
		t.Fatal("no go:generate line")
	}
	line, _, _ = strings.Cut(line, "\n")
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "guest"), os.DirFS("guest")); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(dir, "guest", "guest.elf")
	if err := os.Remove(made); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", strings.Trim(line, `"`))
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(guestFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what go generate makes of the source: run it and commit what it makes", guestFile)
	}
}
