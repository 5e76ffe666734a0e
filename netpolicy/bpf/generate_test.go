package bpf

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The clang that made the committed objects, from Debian bookworm.
const (
	compiler        = "clang-14"
	compilerVersion = "Debian clang version 14.0.6"
)

// go generate makes the committed objects from the source, byte for byte. The test is skipped, which CI counts as a
// failure, if the compiler is absent or another version. The tests of package netpolicy/link run the committed
// objects in any case.
func TestGenerate_makes_the_committed_objects(t *testing.T) {
	version, err := exec.Command(compiler, "--version").Output()
	if err != nil || !strings.HasPrefix(string(version), compilerVersion) {
		t.Skipf("the objects are made with %s: run `scripts/deps bpf` on Debian bookworm (%s, %v)", compilerVersion, version, err)
	}
	dir := t.TempDir()
	for _, name := range []string{"endpoint.c", "doc.go"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tool := filepath.Join(dir, "bpf2go")
	if out, err := exec.Command("go", "build", "-o", tool, "github.com/cilium/ebpf/cmd/bpf2go").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	args := generateArgs(t, filepath.Join(dir, "doc.go"))
	if !slices.Contains(args, compiler) {
		t.Fatalf("go generate does not use %s: %q", compiler, args)
	}
	cmd := exec.Command(tool, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, name := range []string{"endpoint_x86_bpfel.go", "endpoint_x86_bpfel.o"} {
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what go generate makes of endpoint.c: run it and commit what it makes", name)
		}
	}
}

// generateArgs returns the arguments of bpf2go in the go:generate line.
func generateArgs(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, line, ok := strings.Cut(string(text), "cmd/bpf2go ")
	if !ok {
		t.Fatal("no go:generate line")
	}
	line, _, _ = strings.Cut(line, "\n")
	var args []string
	for i, part := range strings.Split(line, `"`) {
		if i%2 == 1 {
			args = append(args, part)
		} else {
			args = append(args, strings.Fields(part)...)
		}
	}
	return args
}
