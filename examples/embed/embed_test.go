package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

func TestMain(m *testing.M) { guesttest.Main(m) }

// asModule makes a module of the program alone, which uses drowse as any other program does, and builds it.
func asModule(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	const own = "github.com/drowse-vm/drowse"
	dir := t.TempDir()
	mod := strings.Replace(read(filepath.Join(root, "go.mod")), "module "+own, "module example.org/embed", 1)
	mod += "\nrequire " + own + " v0.0.0\nreplace " + own + " => " + root + "\n"
	for name, text := range map[string]string{"main.go": read("main.go"), "go.mod": mod, "go.sum": read(filepath.Join(root, "go.sum"))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	build(t, dir, filepath.Join(dir, "embed"), ".")
	return filepath.Join(dir, "embed")
}

func build(t *testing.T, dir, to, pkg string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-trimpath", "-o", to, pkg)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", pkg, err, out)
	}
}

func TestEmbed_another_module_builds_it_short_as_it_is_and_it_runs(t *testing.T) {
	program := asModule(t)
	text, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	lines := 0
	_, body, _ := strings.Cut(string(text), "\nfunc main()")
	for line := range strings.Lines(body) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "//") {
			lines++
		}
	}
	if lines > 40 {
		t.Errorf("the program has %d lines, and 40 are to do", lines)
	}
	t.Run("in a guest", func(t *testing.T) { inGuest(t, program) })
}

func inGuest(t *testing.T, program string) {
	e := guesttest.New(t)
	dir := t.TempDir()
	build(t, "../..", filepath.Join(dir, "drowse-vmm"), "./cmd/drowse-vmm")
	if err := os.Symlink(e.Launcher.Agent, filepath.Join(dir, "drowse-agent")); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), program, e.Store.State.Dir(), filepath.Join(dir, "drowse")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const want = "the original has what was written before the sleep\nthe fork has what was written before the sleep\n"
	if string(out) != want {
		t.Errorf("it says %q, want %q", out, want)
	}
	if left, err := e.Store.List(); err != nil || len(left) != 0 {
		t.Errorf("%d sandboxes are left (%v)", len(left), err)
	}
}
