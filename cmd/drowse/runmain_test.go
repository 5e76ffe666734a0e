//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
)

// shareImages gives a test's state its own image directory, with links to the images that all tests share.
func shareImages(t *testing.T, state string) {
	t.Helper()
	dir := filepath.Join(state, "images")
	shared, err := os.Readlink(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(shared)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, i := range entries {
		if err := os.Symlink(filepath.Join(shared, i.Name()), filepath.Join(dir, i.Name())); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRun_starts_what_the_image_says(t *testing.T) {
	e := guesttest.New(t)
	t.Setenv("DROWSE_AGENT", e.Launcher.Agent)
	state := e.Store.State.Dir()
	shareImages(t, state)
	file := filepath.Join(t.TempDir(), "Drowsefile")
	text := "FROM " + guesttest.ImageTag + `
ENV GREETING=hello WHO=nobody
WORKDIR /srv/app
USER nobody
ENTRYPOINT ["/bin/sh", "-c", "echo $GREETING $WHO $(id -un) $PWD $0 $1 | tee /tmp/said; exec sleep 1000"]
CMD ["one", "two"]
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := drowse(t, state, "image", "build", "--file", file, "--tag", "app"); code != 0 {
		t.Fatal(stderr)
	}

	code, stdout, stderr := drowse(t, state, "run", "--detach", "--name", "web", "-e", "WHO=world", "app", "three")
	if code != 0 || stdout != "web\n" {
		t.Fatalf("detached: exit status %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		if _, stdout, _ = drowse(t, state, "exec", "web", "cat", "/tmp/said"); stdout != "" || time.Now().After(deadline) {
			break
		}
	}
	if stdout != "hello world nobody /srv/app three\n" {
		t.Errorf("the entrypoint said %q", stdout)
	}
	procs, err := e.Agent("web").List(t.Context())
	if err != nil || len(procs) != 1 || procs[0].ID != mainID || !procs[0].Detached || procs[0].Exit != nil {
		t.Errorf("the processes are %+v (%v)", procs, err)
	}

	e.Template(sandbox.Spec{})
	code, stdout, stderr = drowse(t, state, "run", "--rm", "--name", "once", "--memory", "256", "--disk", "256", "-w", "/srv", "-u", "root", "--entrypoint", "sh", guesttest.ImageTag, "-c", "echo $(id -un) $PWD; exit 3")
	if code != 3 || stdout != "root /srv\n" || strings.Contains(stderr, "goes on") {
		t.Errorf("a command: exit status %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	if _, stdout, _ = drowse(t, state, "ps"); strings.Contains(stdout, "once") || !strings.Contains(stdout, "web") {
		t.Errorf("there are\n%s", stdout)
	}
}
