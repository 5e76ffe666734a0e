package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
)

// fakeBuild is a program that notes its arguments in log, and answers with what.
func fakeBuild(t *testing.T, dir, name, log, what string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	script := fmt.Sprintf("#!/bin/sh\nshift 2\necho %s \"$1\" >> %s\n%s\n", name, log, what)
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func execEnv(t *testing.T, program string) Env {
	t.Helper()
	host, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return Env{Store: host, Program: program, Image: "i"}
}

func TestExecs_of_two_builds_are_measured_in_turn_and_give_rows_of_their_own(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	e := execEnv(t, fakeBuild(t, dir, "new", log, "echo drowse-42"))
	o := Options{
		N: 2, Warmup: 1, MemoryMiB: []int{256}, Ways: []string{wayCLI}, ToRun: []string{"builtin"}, Create: true, Template: true,
		Beside: fakeBuild(t, dir, "old", log, "echo drowse-42"), BesideState: dir,
	}
	rows, err := Execs(t.Context(), e, o)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int64{}
	for _, r := range rows {
		got[fmt.Sprint(r.Name, " ", r.Params["build"], " ", r.Params["template"])] = r.N
		if r.P50 <= 0 || r.Stages["end"] < r.P50 {
			t.Errorf("%s: %v ms, and at the end %v", r.Name, r.P50, r.Stages["end"])
		}
	}
	want := map[string]int64{
		"create_exec this true": 2, "exec_asleep this <nil>": 2, "exec_awake this <nil>": 2,
		"create_exec beside false": 2, "exec_asleep beside <nil>": 2, "exec_awake beside <nil>": 2,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("rows %v, want %v", got, want)
	}
	said, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	once := "run rm sleep exec exec"
	calls := func(build string) string { return build + " " + strings.ReplaceAll(once, " ", " "+build+" ") }
	order := []string{"new run old run", calls("new"), calls("old"), calls("old"), calls("new"), calls("new"), calls("old")}
	if s := strings.Join(strings.Fields(string(said)), " "); !strings.HasPrefix(s, strings.Join(order, " ")) {
		t.Errorf("the calls were %s", s)
	}
	if left := strings.Count(string(said), "rm"); left != 2*3+2 {
		t.Errorf("%d removals, want one for each sandbox", left)
	}
}

func TestExecs_command_that_fails_or_prints_something_else_gives_error_and_its_sandbox_is_removed(t *testing.T) {
	for name, what := range map[string]string{
		"other output": `case "$1" in exec) echo drowse-41;; esac`,
		"failure":      `case "$1" in exec) echo no guest >&2; exit 125;; esac`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			log := filepath.Join(dir, "log")
			e := execEnv(t, fakeBuild(t, dir, "new", log, what))
			rows, err := Execs(t.Context(), e, Options{N: 1, MemoryMiB: []int{256}, Ways: []string{wayCLI}, ToRun: []string{"builtin"}})
			if err == nil || rows != nil {
				t.Fatalf("got %v, %v", rows, err)
			}
			if want := map[string]string{"other output": "did not print", "failure": "no guest"}[name]; !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want that it says %q", err, want)
			}
			said, err := os.ReadFile(log)
			if err != nil || !strings.HasSuffix(string(said), "new rm\n") {
				t.Errorf("%s, %v", said, err)
			}
		})
	}
}
