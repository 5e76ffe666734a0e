package sandbox_test

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestUser_without_root_has_confined_sandboxes(t *testing.T) {
	if !guesttest.AsUser(t) {
		for _, dir := range []string{"/run/drowse", "/sys/fs/cgroup"} {
			if left := ofUser(dir); left != nil {
				t.Errorf("left: %v", left)
			}
		}
		return
	}
	e := guesttest.New(t)
	create := func(s sandbox.Spec) error {
		s.Image = guesttest.ImageTag
		_, err := e.Store.With(e.Launcher).Create(t.Context(), s, sandbox.CreateOptions{})
		return err
	}
	if err := create(sandbox.Spec{Name: "tap", Network: spec.NetworkTAP}); !says(err, "only root may") {
		t.Errorf("a network: %v", err)
	}
	share := []spec.Share{{Source: t.TempDir(), Path: "/shared"}}
	if err := create(sandbox.Spec{Name: "share", Shares: share}); !errors.Is(err, spec.ErrShare) || !says(err, "root") {
		t.Errorf("a share: %v", err)
	}

	e.Run(sandbox.Spec{Name: "own"})
	confined(e, "own")
	if got := e.Do("own", "/bin/echo", "hello"); got != "hello" {
		t.Errorf("exec: %q", got)
	}
	e.Write("own", "kept", "/run/memory", "/root/disk")
	e.Sleep("own")
	e.Wake("own")
	confined(e, "own")
	forks(e, "own", sandbox.ForkOptions{Name: "child"})
	for _, name := range []string{"own", "child"} {
		confined(e, name)
		if got := e.Read(name, "/run/memory", "/root/disk"); got != "kept\nkept" {
			t.Errorf("%s has %q", name, got)
		}
		if err := e.Store.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
	if _, err := e.Store.State.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	for _, file := range files(t, e.Store) {
		if !strings.Contains(file, "ext4") { // an empty file system, for later VMs
			t.Errorf("left: %s", file)
		}
	}
}

func says(err error, what string) bool { return err != nil && strings.Contains(err.Error(), what) }

// confined checks that a guest is in a confined process.
func confined(e *guesttest.Env, name string) {
	e.T.Helper()
	if s, err := e.Store.Sandbox(name).Stats(e.T.Context()); err != nil || !s.Host.Confined {
		e.T.Errorf("%s is not confined: %+v, %v", name, s.Host, err)
	}
}

// ofUser returns files that belong to the user of AsUser, or are called so.
func ofUser(dir string) (found []string) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // it has gone
		}
		i, err := d.Info()
		if err != nil {
			return nil
		}
		if i.Sys().(*syscall.Stat_t).Uid == guesttest.User || strings.Contains(path, fmt.Sprint(guesttest.User)) {
			found = append(found, path)
		}
		return nil
	})
	return found
}
