package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
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
	a := &app{}
	m := &benches{app: a}
	seen := 0
	for _, c := range []*cobra.Command{
		m.instruction(), m.boot(), m.entry(), m.ready(), m.exec(), m.sleep(), m.snapshot(), m.delta(), m.depth(), m.fork(), m.forkDensity(), m.density(), m.concurrent(), m.touch(), m.vsock(), m.blk(),
		m.policyPacket(), m.policySwap(), m.policyAttach(), m.policyThroughput(),
	} {
		options, ok := quick[c.Name()]
		if !ok {
			t.Errorf("nothing makes %s quick", c.Name())
		}
		seen++
		for flag, value := range options {
			if err := c.Flags().Set(flag, value); err != nil {
				t.Errorf("%s: %v", c.Name(), err)
			}
		}
	}
	if seen != len(quick) || seen != len(m.all) || seen != len(usualMinutes) {
		t.Errorf("%d benchmarks of %d, %d quick ones, %d weights", seen, len(m.all), len(quick), len(usualMinutes))
	}
	// All that there are, and what is none.
	if got := len((&app{}).benchCommand().Commands()); got != seen+3 {
		t.Errorf("bench has %d commands, want %d", got, seen+4)
	}
}
