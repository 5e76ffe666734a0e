package bpf

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// compilerVersion is the clang that made the committed objects: Debian bookworm's.
const compilerVersion = "Debian clang version 14.0.6"

// The committed objects are what go generate makes of the source, byte for byte. Where
// the compiler is not there, or is another one, only what can be compared is: the test of
// package netpolicy runs the committed objects in any case.
func TestGenerate_makes_the_committed_objects(t *testing.T) {
	version, err := exec.Command("clang", "--version").Output()
	if err != nil || !strings.HasPrefix(string(version), compilerVersion) {
		t.Logf("not compared: the objects are made with %s (apt-get install clang llvm libbpf-dev on Debian bookworm)", compilerVersion)
		return
	}
	dir := t.TempDir()
	for _, name := range []string{"agent.c", "doc.go"} {
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
	cmd := exec.Command(tool, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, name := range []string{"agent_x86_bpfel.go", "agent_x86_bpfel.o"} {
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what go generate makes of agent.c: run it and commit what it makes", name)
		}
	}
}

// generateArgs are the arguments of bpf2go in the go:generate line.
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
