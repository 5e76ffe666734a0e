//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBenchReport_files_give_one_page(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in.json"), filepath.Join(dir, "out.html")
	if err := os.WriteFile(in, []byte(`{"commit": "c0ffee", "rows": [{"name": "x<y", "p50": 5, "unit": "ms"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := drowse(t, dir, "bench", "report", in, in)
	if code != 0 || stderr != "" {
		t.Fatalf("exit status %d: %s", code, stderr)
	}
	for _, want := range []string{"Report 2", "c0ffee", "x&lt;y"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if code, stdout, stderr := drowse(t, dir, "bench", "report", in, in, "--out", out); code != 0 || stdout != "" || stderr != "" {
		t.Fatalf("exit status %d: %s%s", code, stdout, stderr)
	}
	if got, err := os.ReadFile(out); err != nil || string(got) != stdout {
		t.Errorf("the file is not what stdout gets: %v", err)
	}
}

func TestBenchReport_benchstat_gives_a_line_for_each_run(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in.json")
	if err := os.WriteFile(in, []byte(`{"rows": [{"name": "sleep", "p50": 5, "unit": "ms", "histogram": [[5, 2]]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := drowse(t, dir, "bench", "report", "-o", "benchstat", in)
	if want := "BenchmarkSleep 1 5e+06 ns/op\n"; code != 0 || strings.Count(stdout, want) != 2 {
		t.Errorf("exit status %d: not twice %q in %s%s", code, want, stdout, stderr)
	}
	if code, _, stderr := drowse(t, dir, "ps", "-o", "benchstat"); code != exitUsage || !strings.Contains(stderr, "use text or json") {
		t.Errorf("ps: exit status %d: %s", code, stderr)
	}
	if code, _, stderr := drowse(t, dir, "bench", "sleep", "-o", "yaml"); code != exitUsage || !strings.Contains(stderr, "use text or json or benchstat") {
		t.Errorf("yaml: exit status %d: %s", code, stderr)
	}
}

func TestBenchReport_what_is_no_report_gives_error_and_no_file(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in.json")
	if err := os.WriteFile(in, []byte(`{"pid": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := drowse(t, dir, "bench", "report", in, "--out", filepath.Join(dir, "out"))
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "has no rows") {
		t.Errorf("exit status %d: %s%s", code, stdout, stderr)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*out*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestBenchAll_quick_has_valid_options_for_each(t *testing.T) {
	m := &benches{app: &app{}}
	m.suite()
	names := map[string]bool{}
	for _, b := range m.all {
		names[b.Name()] = true
		if b.quick == "" || b.minutes <= 0 {
			t.Errorf("nothing makes %s quick, or says how long it takes", b.Name())
		}
		if err := b.check(); err != nil {
			t.Errorf("%s with its defaults: %v", b.Name(), err)
		}
		if err := (&allOptions{quick: true}).set(b); err != nil {
			t.Error(err)
		}
	}
	// All benchmarks, and four commands that are none.
	if got := len((&app{}).benchCommand().Commands()); got != len(names)+4 || len(names) != 25 {
		t.Errorf("bench has %d commands, and there are %d benchmarks", got, len(names))
	}
}

func TestBench_options_out_of_bounds_are_named(t *testing.T) {
	for line, want := range map[string]string{
		"boot --warmup -1": "--warmup -1: use 0 or more", "resume_entry --memory 256,0": "--memory 0: use 1 or more", "resume_entry --pool maybe": `--pool "maybe": there are no, yes`,
		"resume_ready --peer bochs": `--peer "bochs": there are qemu`, "resume_ready --peer qemu --peer-used 300": "--peer-used must be at most half", "resume_ready --used-percent 51": "use 0 to 50",
		"delta_bytes --written 1 --left 2": "--left must be at most --written", "fork_density --forks 0": "--forks 0: use 1 to", "density --asleep 2 --awake 3": "no more than --asleep 2",
		"density --idle 10ms": "--idle 10ms: use 1s or more", "policy_swap --agents 5000": "--agents 5000: use 0 to 4096", "policy_attach --rules 0": "--rules 0: use 1 to",
		"all --runs -1": "--runs -1: use 0 or more", "blk --requests 2000000": "use 1 to 1048576",
	} {
		code, stdout, stderr := drowse(t, t.TempDir(), append([]string{"bench"}, strings.Fields(line)...)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: exit status %d, stdout %q, stderr %q, want %q", line, code, stdout, stderr, want)
		}
	}
}
