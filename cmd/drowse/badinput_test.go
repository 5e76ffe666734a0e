//go:build linux

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { guesttest.Main(m) }

// A user's mistake ends in one line that says what to do, and leaves nothing.
func TestRun_with_bad_input_is_one_line_and_leaves_nothing(t *testing.T) {
	e := guesttest.New(t)
	status := e.Store.State.Dir()
	t.Setenv("DROWSE_AGENT", e.Launcher.Agent)
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}

	code, stdout, stderr := drowse(t, status, "image", "ls", "-o", "json")
	if code != 0 {
		t.Fatalf("image ls: %s", stderr)
	}
	type listed struct {
		Path string
		Tags []string
	}
	var images []listed
	decode(t, stdout, &images)
	// The store may have other images, of tests that take long.
	used := slices.IndexFunc(images, func(i listed) bool { return slices.Contains(i.Tags, guesttest.ImageTag+":latest") })
	if used < 0 {
		t.Fatalf("there is no image %s to run, only %v", guesttest.ImageTag, images)
	}
	kernels, err := filepath.Glob(filepath.Join(status, "kernels", "built-*", "vmlinux"))
	if err != nil || len(kernels) == 0 {
		t.Fatalf("there is no kernel to run: %v", err)
	}
	kernel, err := os.ReadFile(kernels[0])
	if err != nil {
		t.Fatal(err)
	}

	for _, tt := range []struct {
		name string
		args []string
		want int
		says string
	}{
		{"missing kernel", []string{"--kernel", filepath.Join(status, "none")}, exitExec, "no such file"},
		{"kernel that is no ELF file", []string{"--kernel", file("kernel", "#!/bin/sh\n")}, exitExec, "vmlinux"},
		{"kernel that is cut off", []string{"--kernel", file("vmlinux", string(kernel[:len(kernel)/2]))}, exitExec, "vmlinux"},
		{"unknown field in the config", []string{"--config", file("vm.json", `{"name":"x","cpus":2}`)}, exitUsage, `"cpus"`},
		{"config that is no JSON", []string{"--config", file("vm.json", `name: x`)}, exitUsage, "config"},
		{"more memory than a VM can have", []string{"--memory", "16385"}, exitUsage, "64 to 16384"},
		{"too many vCPUs", []string{"--vcpus", "9"}, exitUsage, "1 to 8"},
		{"bad name", []string{"--name", "../x"}, exitUsage, "lower-case"},
		{"a policy's tag and no network", []string{"--config", file("untagged.json", `{"tags":["db"]}`)}, exitUsage, "network"},
		{"a tag that is none", []string{"--net", "tap", "--config", file("tags.json", `{"tags":["db"]}`), "--tag", "a b"}, exitUsage, "a b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, stdout, stderr := drowse(t, status, slices.Concat([]string{"run", "-d"}, tt.args, []string{guesttest.ImageTag})...)
			if code != tt.want || stdout != "" {
				t.Errorf("exit status %d, want %d; stdout %q", code, tt.want, stdout)
			}
			oneLine(t, stderr, tt.says)
			leavesNothing(t, status)
		})
	}

	t.Run("truncated image", func(t *testing.T) {
		// A short path, since that of a Unix socket is limited.
		own, err := os.MkdirTemp("", "dt")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(own) })
		if err := os.CopyFS(filepath.Join(own, "images"), os.DirFS(filepath.Join(status, "images"))); err != nil {
			t.Fatal(err)
		}
		rel, err := filepath.Rel(evalSymlinks(t, filepath.Join(status, "images")), evalSymlinks(t, images[used].Path))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(status, "kernels"), filepath.Join(own, "kernels")); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(own, "images", rel)
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, fi.Size()-4096); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := drowse(t, own, "run", "-d", guesttest.ImageTag)
		if code != exitExec || stdout != "" {
			t.Errorf("exit status %d, want %d; stdout %q", code, exitExec, stdout)
		}
		oneLine(t, stderr, "remove it and build it again")
		leavesNothing(t, own)
	})

	t.Run("name that is taken", func(t *testing.T) {
		vm := filepath.Join(status, "vms", "taken")
		if err := os.MkdirAll(vm, 0o700); err != nil {
			t.Fatal(err)
		}
		record := `{"version":1,"id":"0123456789abcdef0123456789abcdef","spec":{"name":"taken"},"created":"2026-01-01T00:00:00Z","phase":"stopped","boot":{},"disk":{},"next_layer":0}`
		path := filepath.Join(vm, "vm.json")
		if err := os.WriteFile(path, []byte(record), 0o600); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := drowse(t, status, "run", "-d", "--name", "taken", guesttest.ImageTag)
		if code != exitExec || stdout != "" {
			t.Errorf("exit status %d, want %d; stdout %q", code, exitExec, stdout)
		}
		oneLine(t, stderr, "drowse rm taken")
		if r, err := e.Store.State.Get("taken"); err != nil || r.Phase != state.Stopped {
			t.Errorf("the first VM of that name is %+v (%v)", r, err)
		}
	})
}

func oneLine(t *testing.T, stderr, says string) {
	t.Helper()
	if !strings.HasPrefix(stderr, "drowse: ") || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, says) {
		t.Errorf("stderr says %q, want one line with %q in it", stderr, says)
	}
	t.Logf("%s", stderr)
}

func leavesNothing(t *testing.T, state string) {
	t.Helper()
	for _, dir := range []string{"vms", "layers"} {
		left, err := filepath.Glob(filepath.Join(state, dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range left {
			// The store keeps the empty file systems that disks begin with.
			if base := filepath.Base(f); !strings.HasPrefix(base, "ext4-") && base != ".ext4.lock" {
				t.Errorf("%s is left", f)
			}
		}
	}
}

func evalSymlinks(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A misspelt state directory must not be created, nor pass for an empty one.
func TestAttack_misspelt_state_directory_is_made_and_nothing_said(t *testing.T) {
	for _, args := range []string{
		"ps", "ls", "top --once", "history a", "events", "inspect a", "logs a", "audit a", "stats a", "diff a", "watch a /x", "exec a true", "cp a:/x y", "cp x a:/y",
		"ssh a", "ssh-config", "port-forward a 80:80", "start a", "stop a", "sleep a", "wake a", "attach a", "port a", "kill a", "df", "info", "images", "rmi i", "migrate a --to b", "promote a", "rename a b", "update a --owner b", "rm a", "restore s", "fork a",
		"prune", "snapshot ls", "snapshot tree", "snapshot inspect s", "snapshot create a", "snapshot rm s", "snapshot export s", "snapshot compact s",
		"image ls", "image inspect i", "image rm i", "image export i -", "image prune", "kernel ls", "kernel inspect built", "volume ls", "volume inspect v", "volume rm v",
		"volume resize v 1", "policy show a", "policy flows a", "secret ls a", "secret rm a s", "service ls a", "service logs a s", "service rm a s", "token ls", "token rm t",
	} {
		t.Run(args, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "typo")
			code, stdout, stderr := drowse(t, state, strings.Fields(args)...)
			if code == 0 || stdout != "" {
				t.Errorf("exit status %d, stdout %q: want it to fail", code, stdout)
			}
			if !strings.Contains(stderr, state) || !strings.Contains(stderr, "--state") {
				t.Errorf("stderr %q does not say what is missing", stderr)
			}
			if _, err := os.Lstat(state); err == nil {
				t.Error("the directory was made")
			}
		})
	}
}

func TestCommands_that_begin_something_make_the_state_directory(t *testing.T) {
	for args, want := range map[string]int{"volume create v --size 16": 0, "token create t": 0, "snapshot import /dev/null": exitFailed, "run --image none": exitUsage} {
		state := filepath.Join(t.TempDir(), "new", "state")
		if code, _, stderr := drowse(t, state, strings.Fields(args)...); code != want {
			t.Errorf("%s: exit status %d, want %d: %s", args, code, want, stderr)
		}
		if _, err := os.Lstat(filepath.Join(state, "vms")); err != nil && want != exitUsage {
			t.Errorf("%s: %v", args, err)
		}
	}
}
