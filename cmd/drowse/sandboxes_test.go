//go:build linux

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// writeVM writes the files of a sleeping VM into a state directory.
func writeVM(t *testing.T, state, name, id, label string) {
	t.Helper()
	dir := filepath.Join(state, "vms", name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	record := `{"version":1,"id":"` + id + `","spec":{"name":"` + name + `","image":"app","vcpus":1,"memory_mib":256,"disk_mib":512,"network":"none"},
		"created":"2026-11-22T12:00:00Z","phase":"asleep","boot":{"kernel_id":"","kernel":"","cmdline":"","image_id":"","image":""},"disk":{"Layers":null},"next_layer":1}`
	if err := os.WriteFile(filepath.Join(dir, "vm.json"), []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	if label != "" {
		if err := os.WriteFile(filepath.Join(dir, "sandbox.json"), []byte(label), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// ls returns the name, status and class of each sandbox that a command line lists.
func ls(t *testing.T, state string, args ...string) (out []string, stderr string) {
	t.Helper()
	code, stdout, stderr := drowse(t, state, append([]string{"ls", "-o", "json"}, args...)...)
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, stderr)
	}
	var doc struct {
		Version   int
		Sandboxes []struct{ Name, Status, Class string }
	}
	if decode(t, stdout, &doc); doc.Version != 1 || doc.Sandboxes == nil {
		t.Fatalf("stdout %q", stdout)
	}
	for _, s := range doc.Sandboxes {
		out = append(out, s.Name+" "+s.Status+" "+s.Class)
	}
	return out, stderr
}

func TestSandboxes_are_listed_by_what_their_files_say(t *testing.T) {
	state := t.TempDir()
	writeVM(t, state, "a", strings.Repeat("a", 32), "")
	writeVM(t, state, "b", strings.Repeat("b", 32), `{"version":1,"class":"resumable","owner":"build","tags":["ci"]}`)
	writeVM(t, state, "c", strings.Repeat("c", 32), `{"version":1,"class":"resumable","owner":"build","expires":"2020-01-01T00:00:00Z"}`)
	all := []string{"a asleep workspace", "b asleep resumable", "c expired resumable"}
	check := func(t *testing.T) {
		t.Helper()
		for _, tt := range []struct {
			args string
			want []string
		}{
			{"", all}, {"--owner build", all[1:]}, {"--owner build --tag ci", all[1:2]}, {"--status expired", all[2:]},
			{"--class workspace", all[:1]}, {"--limit 1", all[:1]}, {"--limit 1 --after b", all[2:]}, {"--all", all}, {"--owner tests", nil},
		} {
			got, stderr := ls(t, state, strings.Fields(tt.args)...)
			if !slices.Equal(got, tt.want) {
				t.Errorf("ls %s: %q, want %q", tt.args, got, tt.want)
			}
			if strings.Contains(stderr, "lack") {
				t.Errorf("ls %s: stderr %q", tt.args, stderr)
			}
		}
	}
	t.Run("as they are", check)
	t.Run("with metadata that is damaged", func(t *testing.T) {
		writeVM(t, state, "d", strings.Repeat("d", 32), "{")
		if got, _ := ls(t, state, "--after", "c"); !slices.Equal(got, []string{"d asleep workspace"}) {
			t.Errorf("it lists %q", got)
		}
	})
}

func TestSandbox_is_changed_renamed_and_removed(t *testing.T) {
	state := t.TempDir()
	writeVM(t, state, "a", strings.Repeat("a", 32), "")
	for _, line := range []string{
		"update a --class resumable --owner build --purpose words --tag x --tag y --ttl 1d --keep last=2,for=1h",
		"rename a b", "rename a b", "update b --no-expiry --no-tags --sleep-after 10m",
	} {
		if code, _, stderr := drowse(t, state, strings.Fields(line)...); code != 0 {
			t.Fatalf("%s: exit status %d: %s", line, code, stderr)
		}
	}
	for line, want := range map[string]string{
		"update b --drop cache": "absolute", "update b --promote /a": "PATH=HOSTDIR", "update b --persist-all --drop /a": "--persist-all",
		"promote b": "--promote PATH=HOSTDIR",
	} {
		if code, _, stderr := drowse(t, state, strings.Fields(line)...); code != exitUsage && line != "promote b" || code == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit status %d: %s", line, code, stderr)
		}
	}
	for _, line := range []string{"update b --drop /a --drop /b --promote /b=/srv --persist-max 2GiB", "update b --drop /c", "update b --promote /d=out"} {
		if code, _, stderr := drowse(t, state, strings.Fields(line)...); code != 0 {
			t.Fatalf("%s: exit status %d: %s", line, code, stderr)
		}
	}
	var listed struct {
		Sandboxes []struct{ Persist lifetime.Persist }
	}
	code, stdout, stderr := drowse(t, state, "ls", "-o", "json")
	if code != 0 {
		t.Fatal(code, stderr)
	}
	decode(t, stdout, &listed)
	if p := listed.Sandboxes[0].Persist; len(p.Drop) != 1 || p.Drop[0] != "/c" || len(p.Promote) != 1 || p.Promote[0].Path != "/d" ||
		!filepath.IsAbs(p.Promote[0].To) || p.MaxBytes != 2<<30 {
		t.Errorf("what does not persist is %+v", p)
	}
	if code, _, stderr := drowse(t, state, "update", "b", "--persist-all"); code != 0 {
		t.Fatal(code, stderr)
	}
	code, stdout, stderr = drowse(t, state, "ls", "-o", "json")
	if strings.Contains(stdout, "persist") {
		t.Errorf("all of it is to persist: %s", stdout)
	}
	for _, want := range []string{`"name": "b"`, `"owner": "build"`, `"purpose": "words"`, `"tags": []`, `"last": 2`, `"for_seconds": 3600`, `"idle_seconds": 600`} {
		if !strings.Contains(stdout, want) {
			t.Errorf("exit status %d, %s: no %s in %s", code, stderr, want, stdout)
		}
	}
	if strings.Contains(stdout, "expires") {
		t.Errorf("it expires: %s", stdout)
	}
	if code, _, stderr := drowse(t, state, "update", "b", "--class", "ephemeral"); code != exitUsage || !strings.Contains(stderr, "does not sleep") {
		t.Errorf("ephemeral while it sleeps: exit status %d, %q", code, stderr)
	}
	if err := os.WriteFile(filepath.Join(state, "records.db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := drowse(t, state, "rm", "b"); code != 0 || strings.Contains(stderr, "not all") {
		t.Fatal(code, stderr)
	}
	if _, err := os.Stat(filepath.Join(state, "records.db")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the database of an earlier version is still there: %v", err)
	}
	var h struct {
		Sandbox struct{ Name, Removed string }
		Runs    []any
	}
	if code, stdout, stderr = drowse(t, state, "history", "b", "-o", "json"); code != 0 {
		t.Fatal(code, stderr)
	}
	if decode(t, stdout, &h); h.Sandbox.Name != "b" || h.Sandbox.Removed == "" || h.Runs == nil {
		t.Errorf("its history: %s", stdout)
	}
	if code, stdout, stderr = drowse(t, state, "prune", "--dry-run", "-o", "json"); code != 0 || !strings.Contains(stdout, `"dry_run": true`) || !strings.Contains(stdout, `"old_sleeps": []`) {
		t.Errorf("prune: %d %s %s", code, stdout, stderr)
	}
}
