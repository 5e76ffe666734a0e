//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// drowse runs a command line with a state directory.
func drowse(t *testing.T, state string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	code = run(t.Context(), append([]string{"--state", state}, args...), &out, &errs)
	return code, out.String(), errs.String()
}

func TestWrong_command_lines(t *testing.T) {
	tests := []struct {
		args string
		want int
		says string
	}{
		{"bogus", exitUsage, "bogus"},
		{"--bogus", exitUsage, "bogus"},
		{"ps -o yaml", exitUsage, `"yaml": use text or json`},
		{"ps extra", exitUsage, "drowse ps --help"},
		{"inspect", exitUsage, "drowse inspect --help"},
		{"run --vcpus many", exitUsage, "many"},
		{"kernel bogus", exitUsage, "bogus"},
		{"kernel build --jobs -1", exitUsage, "--jobs -1"},
		{"kernel build --config /nonexistent/x", exitFailed, "/nonexistent/x"},
		{"kernel build --config /dev/null", exitUsage, "it is empty"},
		{"kernel inspect", exitUsage, "drowse kernel inspect --help"},
		{"kernel inspect nothing", exitFailed, "no such kernel"},
		{"kernel inspect built", exitFailed, "drowse kernel build"},
		{"image build", exitUsage, "--from debian:SUITE"},
		{"image build --from qcow2:x", exitUsage, "unsupported image source"},
		{"image build --from nothing", exitUsage, "unsupported image source"},
		{"image build --from dir:/ --include git", exitUsage, "debian: sources only"},
		{"image build --from debian:bookworm --tag B/A/D::", exitUsage, "tag"},
		{"image build --from debian:bookworm --max-age -1h", exitUsage, "negative"},
		{"image build --from dir:/nonexistent/x", exitFailed, "/nonexistent/x"},
		{"image rm", exitUsage, "drowse image rm --help"},
		{"image rm nothing", exitFailed, "no such image"},
		{"cp a b", exitUsage, "exactly one"},
		{"inspect nobody", exitFailed, "nobody"},
		{"diff", exitUsage, "drowse diff --help"},
		{"diff --limit 0 nobody", exitUsage, "--limit 0"},
		{"ls extra", exitUsage, "drowse ls --help"},
		{"ls --status dead", exitUsage, "creating, running"},
		{"ls --class eternal", exitUsage, "ephemeral, resumable or workspace"},
		{"ls --limit 1001", exitUsage, "use 1 to 1000"},
		{"ls --limit 0", exitUsage, "use 1 to 1000"},
		{"ls --all --after x", exitUsage, "[all after]"},
		{"policy tag x", exitUsage, "[add remove]"},
		{"history nobody", exitFailed, "nobody"},
		{"history nobody --before noon", exitUsage, "2026-11-22T13:25:42Z"},
		{"history nobody --limit 0", exitUsage, "use 1 to 1000"},
		{"rename nobody somebody", exitFailed, "nobody"},
		{"rename nobody", exitUsage, "drowse rename --help"},
		{"update nobody --owner x", exitFailed, "nobody"},
		{"update nobody --ttl 1h --no-expiry", exitUsage, "[ttl no-expiry]"},
		{"update nobody --tag x --no-tags", exitUsage, "[tag no-tags]"},
		{"update nobody --ttl 0", exitUsage, "at least a second"},
		{"update nobody --drop /a", exitFailed, "nobody"},
		{"update nobody --persist-max 3x", exitUsage, "512m"},
		{"update nobody --persist-max 9999999T", exitUsage, "512m"},
		{"update nobody --persist-all --drop /a", exitFailed, "nobody"},
		{"migrate a", exitUsage, "--to names the host"},
		{"migrate --to b", exitUsage, "name a VM, or give --all"},
		{"migrate nobody --to b", exitUsage, "in no cluster"},
		{"promote", exitUsage, "drowse promote --help"},
		{"promote nobody", exitFailed, "nobody"},
		{"update nobody --keep forever", exitUsage, "last=N"},
		{"update nobody --class eternal", exitUsage, "ephemeral, resumable or workspace"},
		{"run --ttl 1500ms x", exitUsage, "whole seconds"},
		{"run --ttl 0s x", exitUsage, "at least a second"},
		{"run --keep last=-1 x", exitUsage, "use 0 to 1000"},
		{"run --class ephemeral --tag a,b x", exitUsage, "without spaces and commas"},
		{"snapshot tag 0123 x", exitFailed, "drowse snapshot ls"},
		{"restore 0123 --in x --name y", exitUsage, "[in name]"},
		{"limits --memory-overcommit 0", exitUsage, "0.1 to 1000"},
		{"limits --wake-reserve 91", exitUsage, "0 to 90"},
		{"limits --unset", exitUsage, "with --owner"},
		{"limits --owner a --awake -1", exitUsage, "0 (no limit) to"},
		{"prune extra", exitUsage, "drowse prune --help"},
		{"run --sleep-after soon x", exitUsage, `"soon" is no duration`},
		{"run --sleep-after 1500ms x", exitUsage, "whole seconds"},
		{"run --sleep-after -1s x", exitUsage, "or 0 for never"},
		{"run --idle-cpu 101 x", exitUsage, "use 1 to 100"},
		{"restore --idle-cpu 20 x", exitUsage, "needs --sleep-after"},
		{"serve extra", exitUsage, "drowse serve --help"},
		{"serve --pool 257", exitUsage, "use 0 to 256"},
		{"serve --max-connections -1", exitUsage, "use 1 or more"},
		{"exec nobody -- true", exitExec, "nobody"},
		{"exec --secret a=swordfish nobody true", exitUsage, "not by its value"},
		{"exec -i --secret a=- nobody true", exitUsage, "only one of them"},
		{"exec --env-file /nonexistent/x nobody true", exitExec, "/nonexistent/x"},
		{"secret set nobody a=swordfish", exitUsage, "not by its value"},
		{"secret set nobody a=- --mode 999", exitUsage, "octal"},
		{"secret ls nobody", exitFailed, "nobody"},
		{"secret rm nobody a", exitFailed, "nobody"},
		{"service set nobody web", exitUsage, "drowse service set --help"},
		{"service set nobody web true", exitFailed, "nobody"},
		{"service logs nobody web", exitFailed, "nobody"},
		{"service wait nobody", exitUsage, "drowse service wait --help"},
		{"service status nobody", exitUsage, "drowse service status --help"},
		{"service set --ready icmp:x nobody web true", exitUsage, "use tcp:PORT"},
		{"service set --alive 3 nobody web true", exitUsage, "need --ready"},
		{"service ls", exitUsage, "drowse service ls --help"},
		{"port-forward x", exitUsage, "drowse port-forward --help"},
		{"port-forward x 8080", exitUsage, "[BIND:]PORT:[HOST:]PORT"},
		{"port-forward x 8080:80 --max-connections 0", exitUsage, "at least 1"},
		{"port-forward nobody 8080:80", exitFailed, "nobody"},
		{"port-forward nobody 8080:80 --reverse", exitFailed, "nobody"},
		{"ssh", exitUsage, "drowse ssh --help"},
		{"ssh nobody", exitFailed, "nobody"},
		{"ssh-config nobody", exitFailed, "nobody"},
		{"ssh-proxy nobody", exitFailed, "nobody"},
		{"sleep", exitUsage, "name a VM, or give --all"},
		{"sleep nobody --all", exitUsage, "name a VM, or give --all"},
		{"sleep nobody --hooks maybe", exitUsage, `"maybe": use "require"`},
		{"snapshot create nobody --hooks maybe", exitUsage, `"maybe": use "require"`},
		{"run --hook-timeout 301 x", exitUsage, "1 to 300"},
		{"run --volume data x", exitUsage, "NAME:/PATH"},
		{"run --volume data:/proc x", exitUsage, "system"},
		{"run --volume data:/srv x", exitExec, "drowse volume create data"},
		{"run --from-disk abc", exitExec, "drowse snapshot ls"},
		{"volume create ../x", exitUsage, "lower-case"},
		{"volume create x --size 1", exitUsage, "16 to"},
		{"volume create x --size 99999999999999", exitUsage, "16 to"},
		{"volume inspect x", exitFailed, "drowse volume ls"},
		{"volume rm x", exitFailed, "drowse volume ls"},
		{"bench bogus", exitUsage, "drowse bench --help"},
		{"bench concurrent_resume --at-once 0", exitUsage, "1 to 256"},
		{"bench boot --warmup -1", exitUsage, "--warmup"},
		{"bench vsock_rtt --runs 0", exitUsage, "--runs"},
		{"bench blk --file 0", exitUsage, "--file"},
		{"bench resume_exec --depth -1", exitUsage, "--depth"},
		{"bench policy_throughput --rules 0", exitUsage, "--rules"},
		{"bench policy_throughput --link wire", exitUsage, "tap, veth"},
		{"bench policy_throughput --send 1h", exitUsage, "--send"},
		{"bench report /nonexistent/x", exitFailed, "/nonexistent/x"},
	}
	t.Setenv("DROWSE_AGENT", os.Args[0]) // some commands look for it first, and none uses it
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			code, stdout, stderr := drowse(t, t.TempDir(), strings.Fields(tt.args)...)
			if code != tt.want {
				t.Errorf("exit status %d, want %d", code, tt.want)
			}
			if !strings.Contains(stderr, tt.says) || !strings.HasPrefix(stderr, "drowse: ") {
				t.Errorf("stderr says %q, want %q in it", stderr, tt.says)
			}
			if strings.Count(stderr, "\n") != 1 {
				t.Errorf("more than a line on stderr: %q", stderr)
			}
			if stdout != "" {
				t.Errorf("on stdout: %q", stdout)
			}
		})
	}
}

// decode reads exactly one JSON document.
func decode(t *testing.T, text string, v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	if err := d.Decode(v); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Fatalf("more than one document: %q", text)
	}
}

func TestEmpty_lists_are_lists_in_JSON(t *testing.T) {
	for _, args := range []string{"kernel ls", "image ls", "ps", "snapshot ls", "volume ls", "ssh-config"} {
		t.Run(args, func(t *testing.T) {
			code, stdout, stderr := drowse(t, t.TempDir(), append(strings.Fields(args), "-o", "json")...)
			if code != 0 || stderr != "" {
				t.Fatalf("exit status %d, stderr %q", code, stderr)
			}
			var list []any
			if decode(t, stdout, &list); list == nil || len(list) != 0 {
				t.Errorf("stdout %q, want an empty list", stdout)
			}
		})
	}
}

func TestHelp_fits_a_terminal_and_has_one_word_for_the_value_of_a_flag(t *testing.T) {
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		for line := range strings.Lines(c.Short + "\n" + c.Long) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 100 {
				t.Errorf("%s: a line of its help has %d columns: %s", c.CommandPath(), n, line)
			}
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			// The word in backquotes names the value.
			if name, _ := pflag.UnquoteUsage(f); strings.Contains(name, " ") {
				t.Errorf("%s --%s: its value is called %q", c.CommandPath(), f.Name, name)
			}
		})
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check((&app{}).root())
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		code, stdout, stderr := drowse(t, t.TempDir(), "completion", shell)
		if code != 0 || stderr != "" || !strings.Contains(stdout, "__complete") {
			t.Errorf("%s: exit status %d, %d bytes, stderr %q", shell, code, len(stdout), stderr)
		}
	}
}

func TestDoctorJSON(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	t.Setenv("DROWSE_AGENT", filepath.Join(t.TempDir(), "nothing"))
	code, stdout, stderr := drowse(t, state, "doctor", "-o", "json")
	if code != exitFailed || stderr != "" {
		t.Errorf("without an agent: exit status %d, stderr %q", code, stderr)
	}
	var r struct {
		KVM struct {
			Kind         string  `json:"kind"`
			VendorModule *string `json:"vendor_module"`
		} `json:"kvm"`
		Checks []struct{ Name, Status, Detail, Consequence string } `json:"checks"`
		CanRun *bool                                                `json:"can_run"`
	}
	decode(t, stdout, &r)
	if r.KVM.Kind == "" || r.KVM.VendorModule == nil || r.CanRun == nil || *r.CanRun || len(r.Checks) == 0 {
		t.Errorf("report %s", stdout)
	}
	if _, err := os.Stat(state); err == nil {
		t.Error("the state directory was made")
	}
	code, stdout, _ = drowse(t, state, "doctor")
	if code != exitFailed || !strings.Contains(stdout, "VMs cannot run here.") {
		t.Errorf("exit status %d, table %q", code, stdout)
	}
}

func TestImage_life_cycle(t *testing.T) {
	state, dir := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hello"), []byte("world"), 0o644); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := drowse(t, state, "image", "build", "--from", "dir:"+dir, "--tag", "mine", "-o", "json")
	if code != 0 {
		t.Fatalf("exit status %d, stderr %q", code, stderr)
	}
	var built struct {
		ID   string
		Tags []string
		Path string
	}
	decode(t, stdout, &built)
	if _, err := os.Stat(built.Path); err != nil || len(built.Tags) != 1 || built.Tags[0] != "mine:latest" {
		t.Errorf("built %+v: %v", built, err)
	}
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "image build: ") {
			t.Errorf("progress line %q", line)
		}
	}
	if !strings.Contains(stderr, "image build: write\n") {
		t.Errorf("no line for writing in %q", stderr)
	}

	vm := filepath.Join(state, "vms", "user")
	if err := os.MkdirAll(vm, 0o700); err != nil {
		t.Fatal(err)
	}
	record := `{"version":1,"id":"x","spec":{"name":"user"},"phase":"stopped","boot":{"image_id":"` + built.ID + `"},"disk":{},"next_layer":0}`
	if err := os.WriteFile(filepath.Join(vm, "vm.json"), []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr = drowse(t, state, "image", "rm", "mine")
	if code != exitFailed || !strings.Contains(stderr, "VM user") {
		t.Errorf("removing an image that a stopped VM needs: exit status %d, stderr %q", code, stderr)
	}
	if _, err := os.Stat(built.Path); err != nil {
		t.Error(err)
	}

	if err := os.WriteFile(filepath.Join(vm, "vm.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, _ = drowse(t, state, "image", "rm", "mine"); code != exitFailed {
		t.Errorf("removing an image that an unreadable VM may need: exit status %d", code)
	}

	if err := os.RemoveAll(vm); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr = drowse(t, state, "image", "rm", "mine", "nothing", "-o", "json")
	var removed struct {
		Removed []struct {
			ID      string
			Deleted bool
		}
	}
	decode(t, stdout, &removed)
	if code != exitFailed || !strings.Contains(stderr, "no such image") || len(removed.Removed) != 1 || removed.Removed[0].ID != built.ID || !removed.Removed[0].Deleted {
		t.Errorf("exit status %d, stdout %s, stderr %q", code, stdout, stderr)
	}
	if _, err := os.Stat(built.Path); err == nil {
		t.Error("the image is still there")
	}
}

func TestProgress_off_terminals_is_a_line_for_each_stage(t *testing.T) {
	var out strings.Builder
	a := &app{stderr: &out}
	p := a.newProgress("work")
	p.report("read", 0, 0)
	p.report("read", 10, 100)
	p.report("write", 1, 2)
	p.report("write", 2, 2)
	p.finish(nil)
	p.report("late", 1, 1)
	if got, want := out.String(), "work: read\nwork: write\n"; got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
}

// withStdin runs f with a file as standard input.
func withStdin(t *testing.T, content []byte, f func()) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "stdin")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	old := os.Stdin
	os.Stdin = in
	defer func() { os.Stdin = old }()
	f()
}

func TestImage_from_stdin_inspected_and_exported(t *testing.T) {
	state, dir := t.TempDir(), t.TempDir()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "hello", Mode: 0o644, Size: 5}), second(w.Write([]byte("world"))), w.Close()); err != nil {
		t.Fatal(err)
	}
	id := ""
	withStdin(t, b.Bytes(), func() {
		code, stdout, stderr := drowse(t, state, "image", "build", "--from", "tar:-", "--tag", "mine", "-o", "json")
		var built struct{ ID string }
		if decode(t, stdout, &built); code != 0 || !strings.Contains(stderr, "image build: read\n") {
			t.Fatalf("exit status %d, stderr %q", code, stderr)
		}
		id = built.ID
	})
	code, stdout, stderr := drowse(t, state, "image", "inspect", "mine")
	if code != 0 || !strings.Contains(stdout, id) || !strings.Contains(stdout, "tar:-") {
		t.Errorf("inspect: exit status %d, %q, stderr %q", code, stdout, stderr)
	}
	archive := filepath.Join(dir, "mine.oci")
	if code, _, stderr = drowse(t, state, "image", "export", "mine", archive, "--format", "oci-archive"); code != 0 {
		t.Fatalf("export: exit status %d, stderr %q", code, stderr)
	}
	code, stdout, stderr = drowse(t, state, "image", "build", "--from", "oci-archive:"+archive, "-o", "json")
	var again struct {
		ID       string
		Tags     []string
		Manifest string
		Layers   []struct {
			DiffID string `json:"diff_id"`
		}
	}
	if decode(t, stdout, &again); code != 0 || again.ID != id || len(again.Layers) != 1 || again.Manifest == "" {
		t.Errorf("build again: exit status %d, %+v, want %s, stderr %q", code, again, id, stderr)
	}
	if code, stdout, _ = drowse(t, state, "image", "inspect", "mine"); code != 0 || !strings.Contains(stdout, again.Layers[0].DiffID[:7]) || !strings.Contains(stdout, "manifest") {
		t.Errorf("inspect again: exit status %d, %q", code, stdout)
	}
	if code, stdout, _ = drowse(t, state, "image", "export", "mine", "-", "--format", "tar"); code != 0 || !strings.Contains(stdout, "world") {
		t.Errorf("export to stdout: exit status %d, %d bytes", code, len(stdout))
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("beside the archive there is %v (%v)", entries, err)
	}
	code, stdout, stderr = drowse(t, state, "image", "prune", "-o", "json")
	var pruned struct{ Builds, Layers *int }
	if decode(t, stdout, &pruned); code != 0 || pruned.Layers == nil || *pruned.Layers != 0 {
		t.Errorf("prune: exit status %d, %q, stderr %q", code, stdout, stderr)
	}
}

func second[T any](_ T, err error) error { return err }

func TestImage_export_that_fails_leaves_no_file(t *testing.T) {
	state, dir := t.TempDir(), t.TempDir()
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "hello"), []byte("world"), 0o644); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := drowse(t, state, "image", "build", "--from", "dir:"+tree, "--tag", "mine"); code != 0 {
		t.Fatal(stderr)
	}
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"image", "export", "mine", filepath.Join(dir, "x"), "--format", "iso"}, exitUsage},
		{[]string{"image", "export", "other", filepath.Join(dir, "x")}, exitFailed},
		{[]string{"image", "inspect", "other"}, exitFailed},
		{[]string{"image", "build", "--from", "docker:debian"}, exitUsage},
		{[]string{"image", "build", "--from", "dir:" + tree, "--max-size", "0"}, exitUsage},
		{[]string{"image", "build", "--from", "dir:/", "--platform", "linux/amd64"}, exitUsage},
		{[]string{"image", "build", "--from", "oci-archive:" + filepath.Join(dir, "nothing")}, exitFailed},
	} {
		if code, _, stderr := drowse(t, state, c.args...); code != c.want || !strings.Contains(stderr, "drowse: ") {
			t.Errorf("%v: exit status %d, want %d, stderr %q", c.args, code, c.want, stderr)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left: %v (%v)", entries, err)
	}
}

func TestPrintable_leaves_no_commands_for_a_terminal(t *testing.T) {
	for in, want := range map[string]string{
		"two\nlines\tand Größe": "two\nlines\tand Größe",
		"\x1b[2J\r\x07a":        "\ufffd[2J\ufffd\ufffda",
		"\u202egnp.exe":         "\ufffdgnp.exe",
		"\xff":                  "\ufffd",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestRun_that_a_signal_ends_says_so(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	for _, args := range [][]string{{"prune"}, {"pull", "registry.invalid/x"}} {
		var stderr bytes.Buffer
		code := run(ctx, append([]string{"--state", t.TempDir()}, args...), io.Discard, &stderr)
		if said := stderr.String(); code != exitFailed || !strings.HasSuffix(said, ": interrupted\n") || strings.Contains(said, "context") {
			t.Errorf("%v ended with %d: %s", args, code, said)
		}
	}
}

func TestPatientReader_gives_up_with_the_context(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	in := &patientReader{ctx, r}
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	if n, err := in.Read(b); n != 1 || err != nil {
		t.Fatalf("read %d bytes: %v", n, err)
	}
	cause := errors.New("enough")
	done := make(chan error)
	go func() {
		_, err := in.Read(b) // the pipe is empty
		done <- err
	}()
	cancel(cause)
	if err := <-done; !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
	in.ctx = t.Context()
	w.Close()
	if n, err := in.Read(b); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d bytes, %v", n, err)
	}
}
