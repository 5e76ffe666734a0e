package bench

import (
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// clean makes this build look like one of an unchanged commit.
func clean(t *testing.T) {
	t.Helper()
	before := Commit
	Commit = "0123456789abcdef"
	t.Cleanup(func() { Commit = before })
}

func TestReadReport_reads_what_a_report_is_written_as(t *testing.T) {
	clean(t)
	want := NewReport([]Row{
		{Name: "resume_entry", Params: map[string]any{"memory_mib": 256, "pool": true}, Unit: "ms", N: 100, P50: 1.7, P99: 3, Stages: map[string]float64{"entry": 1}, Histogram: [][2]float64{{1.7, 100}}},
		{Name: "density", Skipped: "why", Failed: true, Command: "drowse bench density"},
	})
	doc, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadReport(strings.NewReader(string(doc)))
	if err != nil {
		t.Fatal(err)
	}
	if err := want.GoesOn(got); err != nil {
		t.Error(err)
	}
	again, err := json.Marshal(got)
	if err != nil || string(again) != string(doc) {
		t.Errorf("%v: %s became %s", err, doc, again)
	}
	// The goal is found by the parameters, although JSON changes the type of their numbers.
	if g := NewReport(got.Rows).Rows[0].Goal; g == nil || g.Met {
		t.Errorf("the goal is %v", g)
	}
}

func TestReadReport_what_is_none_gives_ErrReport(t *testing.T) {
	for name, in := range map[string]string{"empty": "", "no JSON": "x", "another document": `{"pid": 1}`, "two": `{"rows": []} {"rows": []}`, "rows are none": `{"rows": 7}`} {
		if _, err := ReadReport(strings.NewReader(in)); !errors.Is(err, ErrReport) {
			t.Errorf("%s: %v, want ErrReport", name, err)
		}
	}
}

func TestGoesOn_what_differs_gives_ErrOther_and_its_name(t *testing.T) {
	clean(t)
	now := NewReport(nil)
	tests := map[string]struct {
		change func(*Report)
		says   string
	}{
		"another commit":  {func(r *Report) { r.Commit = "f00" }, "commit"},
		"another CPU":     {func(r *Report) { r.Machine.CPU += "x" }, "CPU"},
		"other CPUs":      {func(r *Report) { r.Machine.CPUs++ }, "number of CPUs"},
		"other memory":    {func(r *Report) { r.Machine.MemoryMiB++ }, "memory"},
		"another kernel":  {func(r *Report) { r.Machine.Kernel += "x" }, "kernel"},
		"another KVM":     {func(r *Report) { r.Machine.KVM = "none" }, "kind of KVM"},
		"another Go":      {func(r *Report) { r.Machine.GoVersion += "x" }, "version of Go"},
		"load and time":   {func(r *Report) { r.Machine.Load++; r.Machine.Time = r.Machine.Time.AddDate(0, 0, 1) }, ""},
		"nothing differs": {func(*Report) {}, ""},
	}
	for name, tt := range tests {
		before := now
		tt.change(&before)
		err := now.GoesOn(before)
		if tt.says == "" && err != nil || tt.says != "" && (!errors.Is(err, ErrOther) || !strings.Contains(err.Error(), tt.says)) {
			t.Errorf("%s: %v, want one that names %q", name, err, tt.says)
		}
	}
	for _, c := range []string{unknownCommit, "f00" + changedTree} {
		r := now
		r.Commit = c
		if err := r.GoesOn(r); !errors.Is(err, ErrOther) {
			t.Errorf("commit %s: %v, want ErrOther", c, err)
		}
	}
}

func TestBy_rows_of_a_command_count_unless_it_failed(t *testing.T) {
	r := Report{Rows: []Row{
		{Name: "a", Command: "x"}, {Name: "b", Command: "x", Skipped: "no such peer"}, {Name: "c", Command: "y"},
		{Name: "d", Command: "z"}, {Name: "e", Command: "z", Skipped: "broken", Failed: true}, {Name: "f"},
	}}
	names := func(rows []Row) (out string) {
		for _, row := range rows {
			out += row.Name
		}
		return out
	}
	for command, want := range map[string]string{"x": "ab", "y": "c", "z": "", "w": ""} {
		if got := names(r.By(command)); got != want {
			t.Errorf("%s: rows %q, want %q", command, got, want)
		}
	}
	before := slices.Clone(r.Rows)
	if got := names(r.Without("z").Rows); got != "abcf" {
		t.Errorf("without z: %q", got)
	}
	if names(r.Rows) != names(before) {
		t.Error("Without has changed the report")
	}
}

func TestRun_value_out_of_bounds_gives_error_and_the_row(t *testing.T) {
	s := newSeries(inMs)
	s.add(7 * perMs)
	s.stage("whole", math.MaxInt64)
	rows, err := Run("drowse bench x", func() ([]Row, error) { return []Row{s.row("x", nil)}, nil })
	if err == nil || !strings.Contains(err.Error(), "recording a run") || len(rows) != 1 || rows[0].N != 1 {
		t.Errorf("%+v, %v", rows, err)
	}
}

func TestRun_stamps_rows_also_after_an_error(t *testing.T) {
	broken := errors.New("broken")
	rows, err := Run("drowse bench x", func() ([]Row, error) { return []Row{{Name: "x"}}, broken })
	if !errors.Is(err, broken) || len(rows) != 1 || rows[0].Command != "drowse bench x" || rows[0].Began.IsZero() {
		t.Errorf("%+v, %v", rows, err)
	}
}
