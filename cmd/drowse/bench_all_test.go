//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/bench"
)

// fakes are benchmarks on the host. Each has a row with its name, and fails with its entry in fails.
type fakes struct {
	benches
	out, log strings.Builder
	began    []string // what ran, in order
	runs     map[string]*int
	fails    map[string]error
	then     func(name string) // called as a benchmark ends
}

func newFakes(t *testing.T, names ...string) *fakes {
	t.Helper()
	commit := bench.Commit
	bench.Commit = "0123456789abcdef"
	t.Cleanup(func() { bench.Commit = commit })
	f := &fakes{runs: map[string]*int{}, fails: map[string]error{}, then: func(string) {}}
	f.app = &app{stdout: &f.out, stderr: io.Discard, output: "json", log: slog.New(slog.NewTextHandler(&f.log, nil))}
	f.env = &bench.Env{}
	for _, name := range names {
		f.runs[name] = new(int)
		b := f.add(name+" "+name+"_bytes", "", 0, "", func(context.Context, bench.Env, bench.Options) ([]bench.Row, error) {
			f.began = append(f.began, name)
			rows := []bench.Row{{Name: name, Params: map[string]any{"runs": *f.runs[name]}, Unit: "ms", N: int64(*f.runs[name]), P50: 1}}
			f.then(name)
			return rows, f.fails[name]
		})
		b.onHost = true
		if name != "uncounted" {
			b.Flags().IntVar(f.runs[name], "runs", 20, "")
		}
	}
	return f
}

// printed returns the names of the rows of a report, with ! after those that failed.
func printed(t *testing.T, doc string) string {
	t.Helper()
	r, err := bench.ReadReport(strings.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	var words []string
	for _, row := range r.Rows {
		if row.Failed {
			row.Name += "!"
		}
		words = append(words, row.Name)
	}
	return strings.Join(words, " ")
}

func TestBenchAll_patterns_choose_benchmarks(t *testing.T) {
	tests := map[string]struct {
		only, skip []string
		want       string
		says       string
	}{
		"none":                        {nil, nil, "sleep policy_a policy_b uncounted", ""},
		"only a name":                 {[]string{"sleep"}, nil, "sleep", ""},
		"only a pattern":              {[]string{"policy_*"}, nil, "policy_a policy_b", ""},
		"only another name of it":     {[]string{"sleep_bytes"}, nil, "sleep", ""},
		"several, in their own order": {[]string{"uncounted", "policy_?", "sleep"}, []string{"policy_b"}, "sleep policy_a uncounted", ""},
		"skip":                        {nil, []string{"policy_*", "sleep"}, "uncounted", ""},
		"no such name":                {[]string{"sleep", "bogus"}, nil, "", `"bogus": there are sleep, policy_a`},
		"no such name to skip":        {nil, []string{"bogus*"}, "", `"bogus*"`},
		"no pattern":                  {[]string{"["}, nil, "", "syntax error"},
		"nothing left":                {[]string{"sleep"}, []string{"s*"}, "", "leave no benchmark"},
	}
	for name, tt := range tests {
		f := newFakes(t, "sleep", "policy_a", "policy_b", "uncounted")
		err := f.runAll(t.Context(), &allOptions{only: tt.only, skip: tt.skip})
		var usage usageError
		if tt.says == "" && err != nil || tt.says != "" && (!errors.As(err, &usage) || !strings.Contains(err.Error(), tt.says)) {
			t.Errorf("%s: %v, want %q", name, err, tt.says)
		}
		if got := strings.Join(f.began, " "); got != tt.want {
			t.Errorf("%s: ran %q, want %q", name, got, tt.want)
		}
	}
}

func TestBenchAll_runs_are_those_of_all_that_count_them(t *testing.T) {
	f := newFakes(t, "sleep", "uncounted")
	if err := f.runAll(t.Context(), &allOptions{runs: 7}); err != nil {
		t.Fatal(err)
	}
	r, err := bench.ReadReport(strings.NewReader(f.out.String()))
	if err != nil {
		t.Fatal(err)
	}
	if r.Rows[0].N != 7 || r.Rows[0].Command != "drowse bench sleep --runs=7" || r.Rows[1].Command != "drowse bench uncounted" {
		t.Errorf("%+v", r.Rows)
	}
	var usage usageError
	if err := f.runAll(t.Context(), &allOptions{runs: -1}); !errors.As(err, &usage) {
		t.Errorf("-1 runs: %v", err)
	}
}

func TestBenchAll_benchstat_has_the_runs(t *testing.T) {
	f := newFakes(t, "sleep", "blk")
	f.app.output = benchstat
	if err := f.runAll(t.Context(), &allOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"BenchmarkSleep/runs=20 1 1e+06 ns/op\n", "BenchmarkBlk/runs=20 "} {
		if !strings.Contains(f.out.String(), want) {
			t.Errorf("no %q in %s", want, f.out.String())
		}
	}
}

func TestBenchAll_failure_keeps_all_rows_and_gives_error(t *testing.T) {
	f := newFakes(t, "a", "b", "c")
	f.fails["b"] = errors.New("broken")
	out := filepath.Join(t.TempDir(), "out.json")
	err := f.runAll(t.Context(), &allOptions{out: out})
	if err == nil || !strings.Contains(err.Error(), "measuring b: broken") {
		t.Errorf("error %v", err)
	}
	// The report has what b measured before it failed.
	if got := printed(t, f.out.String()); got != "a b b! c" {
		t.Errorf("rows %s", got)
	}
	if doc, err := os.ReadFile(out); err != nil || string(doc) != f.out.String() {
		t.Errorf("the file is not what was printed: %v", err)
	}
}

func TestBenchAll_interrupt_keeps_what_was_measured(t *testing.T) {
	f := newFakes(t, "a", "b", "c", "d")
	ctx, interrupt := context.WithCancel(t.Context())
	f.then = func(name string) {
		if name == "b" {
			interrupt()
			f.fails["b"] = ctx.Err()
		}
	}
	err := f.runAll(ctx, &allOptions{})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "interrupted before c") {
		t.Errorf("error %v", err)
	}
	if got := printed(t, f.out.String()); got != "a b b!" {
		t.Errorf("rows %s", got)
	}
}

func TestBenchAll_file_has_what_was_measured_after_each(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.json")
	f := newFakes(t, "a", "b", "c")
	var seen []string
	f.then = func(name string) {
		if name == "a" {
			return
		}
		doc, err := os.ReadFile(out)
		if err != nil {
			t.Error(err)
			return
		}
		seen = append(seen, printed(t, string(doc)))
	}
	if err := f.runAll(t.Context(), &allOptions{out: out}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(seen, []string{"a", "a b"}) {
		t.Errorf("the file had %q", seen)
	}
}

func TestBenchAll_resume_measures_only_what_is_missing(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.json")
	o := allOptions{out: out, resume: out}
	first := newFakes(t, "a", "b", "c", "d")
	first.fails["b"] = errors.New("broken")
	// The file does not exist yet.
	if err := first.runAll(t.Context(), &o); err == nil {
		t.Error("no error")
	}
	second := newFakes(t, "a", "b", "c", "d")
	second.then = func(string) {
		doc, err := os.ReadFile(out)
		if err != nil || printed(t, string(doc)) != "a b b! c d" {
			t.Errorf("what was there is gone before there is more: %s %v", doc, err)
		}
	}
	if err := second.runAll(t.Context(), &o); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(second.began, []string{"b"}) || printed(t, second.out.String()) != "a c d b" {
		t.Errorf("ran %q, rows %s", second.began, printed(t, second.out.String()))
	}
	// Other options make another measurement. The rest stays.
	third := newFakes(t, "a", "b", "c", "d")
	other := o
	other.runs, other.only = 5, []string{"c"}
	if err := third.runAll(t.Context(), &other); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(third.began, []string{"c"}) || printed(t, third.out.String()) != "a c d b c" {
		t.Errorf("ran %q, rows %s", third.began, printed(t, third.out.String()))
	}
	// Nothing is missing.
	fourth := newFakes(t, "a", "b", "c", "d")
	if err := fourth.runAll(t.Context(), &o); err != nil || len(fourth.began) > 0 {
		t.Errorf("ran %q: %v", fourth.began, err)
	}
}

func TestBenchAll_resume_of_what_cannot_be_gone_on_with_gives_error_and_measures_nothing(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	f := newFakes(t, "a")
	r := bench.NewReport(nil)
	r.Commit = "f00"
	doc, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path string
		want error
	}{
		{filepath.Join(dir, "missing"), os.ErrNotExist},
		{file("rubbish", "x"), bench.ErrReport},
		{file("other", string(doc)), bench.ErrOther},
	} {
		if err := f.runAll(t.Context(), &allOptions{resume: tt.path}); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.path, err, tt.want)
		}
	}
	if len(f.began) > 0 {
		t.Errorf("ran %q", f.began)
	}
}

func TestEstimate_says_how_far_and_about_how_long(t *testing.T) {
	f := newFakes(t, "density", "vsock_rtt", "blk", "other")
	for i, minutes := range []float64{6, 1, 5, 0} {
		f.all[i].minutes = minutes
	}
	o := allOptions{}
	for i, tt := range []struct {
		after time.Duration
		want  string
	}{
		{0, "measuring density, 1 of 4"},
		// Six of 13 estimated minutes took three, so the other seven take three and a half.
		{3 * time.Minute, "measuring vsock_rtt, 2 of 4, after 3m; about 4m are left"},
		{3*time.Minute + 30*time.Second, "measuring blk, 3 of 4, after 4m; about 3m are left"},
		{6 * time.Minute, "measuring other, 4 of 4, after 6m; about 30s are left"},
	} {
		if got := o.estimate(f.all, i, tt.after); got != tt.want {
			t.Errorf("after %v: %q, want %q", tt.after, got, tt.want)
		}
	}
}

func TestBenchCommand_line_has_options_that_are_not_the_default(t *testing.T) {
	a := &app{}
	root := a.benchCommand()
	cmd, _, err := root.Find([]string{"resume_ready"})
	if err != nil {
		t.Fatal(err)
	}
	b := &benchmark{Command: cmd}
	if got := b.line(); got != "drowse bench resume_ready" {
		t.Errorf("%s", got)
	}
	if err := root.PersistentFlags().Set("image", "other"); err != nil {
		t.Fatal(err)
	}
	for flag, value := range map[string]string{"memory": "256,512", "runs": "100", "peer": "qemu", "cache": "warm,cold"} {
		if err := cmd.Flags().Set(flag, value); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.line(); got != "drowse bench resume_ready --image=other --memory=256,512 --peer=qemu" {
		t.Errorf("%s", got)
	}
}
