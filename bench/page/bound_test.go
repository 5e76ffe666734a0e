package page

import (
	"math"
	"strings"
	"testing"
)

// add makes a page of one report of one row.
func add(t *testing.T, kvm, row string) *Page {
	t.Helper()
	var p Page
	if err := p.Add("file", strings.NewReader(`{"machine": {"kvm": "`+kvm+`"}, "rows": [`+row+`]}`)); err != nil {
		t.Fatal(err)
	}
	return &p
}

func TestBounds_rows_give_largest_stage_and_what_bounds_it(t *testing.T) {
	tests := map[string]struct {
		kvm, doc  string
		stage, by string
		share     float64 // in percent; 0 is none
		native    float64 // 0 is none
		sum       []string
	}{
		"interpreted instructions": {
			"soft", `{"name": "resume_ready", "unit": "ms", "p50": 25, "stages": {"entry": 3, "guest": 20, "agent_answer": 19, "vcpus": 40}, "faults": {"emulated": 30000, "read": 4, "write": 1, "kvm_pages": 45, "exits": 120}}`,
			"guest", "guest instructions", 80, 15.1,
			[]string{"30000 instructions × 330 ns = 9.9 ms", "5 pages waited for × 130 µs = 0.65 ms", "40 other pages touched × 35 µs = 1.4 ms", "host work otherwise 8.05 ms (120 exits); of 20 ms in the guest"},
		},
		"faults": {
			"soft", `{"name": "resume_ready", "unit": "ms", "p50": 20, "stages": {"entry": 3, "guest": 10}, "faults": {"emulated": 1000, "read": 60}}`,
			"guest", "page faults", 50, 19.67, []string{"60 pages waited for × 130 µs = 7.8 ms"},
		},
		"host work while the guest waits": {
			"soft", `{"name": "resume_ready", "unit": "ms", "p50": 12, "stages": {"entry": 3, "guest": 6.8}, "faults": {"emulated": 800, "read": 4}}`,
			"guest", "host work", 56.667, 11.736, []string{"host work otherwise 6.016 ms"},
		},
		"counters that went on after the end": {
			"soft", `{"name": "resume_ready", "unit": "ms", "p50": 12, "stages": {"guest": 6}, "faults": {"emulated": 100000}}`,
			"guest", "guest instructions", 50, 6, []string{"= 33 ms", "host work otherwise 0 ms"},
		},
		"stages of a guest together": {
			"soft", `{"name": "resume_exec", "unit": "ms", "p50": 500, "stages": {"guest": 5, "dial": 220, "attach": 115, "command": 140}, "faults": {"emulated": 1000000}}`,
			"dial", "guest instructions", 44, 170, []string{"of 480 ms in the guest"},
		},
		"host stage": {
			"soft", `{"name": "resume_entry", "unit": "ms", "p50": 4, "stages": {"entry": 2, "import": 1, "guest": 0, "create_vm": 9}, "faults": {"emulated": 60000}}`,
			"entry", "host work", 50, 0, nil,
		},
		"hardware": {
			"hardware", `{"name": "resume_ready", "unit": "ms", "p50": 4, "stages": {"entry": 1, "guest": 2}, "faults": {"emulated": 100}}`,
			"guest", "the guest, or host work for it", 50, 0, nil,
		},
		"guest without counters": {
			"soft", `{"name": "fork_ready", "unit": "ms", "p50": 400, "stages": {"child": 240, "ahead": 16, "durable": 900, "save": 500}, "faults": {}}`,
			"child", "the guest: nothing is counted", 60, 0, nil,
		},
		"a boot, whose call takes longer": {
			"soft", `{"name": "boot", "unit": "ms", "p50": 1000, "stages": {"load": 20, "guest": 950, "run": 1100}}`,
			"guest", "the guest: nothing is counted", 95, 0, nil,
		},
		"stage of the same name that is a part": {
			"soft", `{"name": "sleep", "unit": "ms", "p50": 100, "stages": {"pause": 5, "save": 75}}`, "save", "host work", 75, 0, nil,
		},
		"stages that are no parts": {
			"soft", `{"name": "snapshot_pause", "unit": "ms", "p50": 2, "stages": {"save": 14}, "goal": {"p50": 10, "met": true}}`, "", "", 0, 0, nil,
		},
		"memory": {
			"soft", `{"name": "policy_attach_memory", "unit": "KiB", "p50": 600, "stages": {"flows": 450, "table": 4}}`, "flows", "", 75, 0, nil,
		},
		"processors": {
			"soft", `{"name": "concurrent_resume", "params": {"at_once": 20, "cpus": 2}, "unit": "ms", "p50": 800, "stages": {"first": 500, "last": 950, "cpu": 80}}`,
			"cpu", "processors", 10, 0, []string{"20 VMs × 80 ms of processor time / 2 CPUs = 800 ms for the last"},
		},
		"as many VMs as processors": {
			"soft", `{"name": "concurrent_resume", "params": {"at_once": 1, "cpus": 2}, "unit": "ms", "p50": 40, "stages": {"last": 40, "cpu": 30}}`,
			"cpu", "host work", 75, 0, nil,
		},
		"a row that nothing is known of": {
			"soft", `{"name": "new", "unit": "ns", "p50": 10, "stages": {"a": 2, "b": 5}}`, "b", "host work", 50, 0, nil,
		},
		"a median of 0": {"soft", `{"name": "new", "unit": "ms", "p50": 0, "stages": {"a": 2}}`, "a", "host work", 0, 0, nil},
	}
	near := func(got *float64, want float64) bool {
		return got == nil && want == 0 || got != nil && math.Abs(*got-want) < want/1000
	}
	for name, tt := range tests {
		p := add(t, tt.kvm, tt.doc)
		got := p.bounds([]*row{&p.rows[0]})
		if len(got) != 1 {
			t.Errorf("%s: %d bounds, want 1", name, len(got))
			continue
		}
		b := got[0]
		if b.Stage != tt.stage || b.By != tt.by || !near(b.Share, tt.share) || !near(b.Native, tt.native) {
			t.Errorf("%s: %+v, share %v, native %v", name, b, optional(b.Share), optional(b.Native))
		}
		for _, want := range tt.sum {
			if !strings.Contains(b.Sum, want) {
				t.Errorf("%s: no %q in %q", name, want, b.Sum)
			}
		}
		if tt.sum == nil && b.Sum != "" {
			t.Errorf("%s: %q, want nothing", name, b.Sum)
		}
	}
}

func TestBounds_cost_that_the_report_has_measured_counts(t *testing.T) {
	guest := `{"name": "resume_ready", "unit": "ms", "p50": 25, "stages": {"guest": 20}, "faults": {"emulated": 10000}}`
	cost := func(unit, mix string) string {
		return `{"name": "guest_instruction", "params": {"mix": "` + mix + `"}, "unit": "` + unit + `", "p50": 800}, ` + guest
	}
	for name, tt := range map[string]struct{ doc, want string }{
		"measured":                              {cost("ns", "mixed"), "10000 instructions as measured × 800 ns = 8 ms"},
		"another mix":                           {cost("ns", "registers"), "10000 instructions × 330 ns = 3.3 ms"},
		"another unit":                          {cost("ms", "mixed"), "10000 instructions × 330 ns = 3.3 ms"},
		"not measured":                          {guest, "10000 instructions × 330 ns = 3.3 ms"},
		"of another machine":                    {guest + `]} {"machine": {"kvm": "soft", "cpu": "b", "kernel": "6"}, "rows": [` + cost("ns", "mixed"), "10000 instructions × 330 ns = 3.3 ms"},
		"of the same machine":                   {guest + `]} {"machine": {"kvm": "soft", "cpu": "a", "kernel": "6"}, "rows": [` + cost("ns", "mixed"), "10000 instructions as measured × 800 ns = 8 ms"},
		"of a machine of which nothing is said": {guest + `]} {"machine": {"kvm": "soft"}, "rows": [` + cost("ns", "mixed"), "10000 instructions × 330 ns = 3.3 ms"},
	} {
		p := add(t, `soft", "cpu": "a", "kernel": "6`, tt.doc)
		var rows []*row
		for i := range p.rows {
			rows = append(rows, &p.rows[i])
		}
		if got := p.bounds(rows)[0].Sum; !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestBounds_rows_without_stages_and_goal_give_none(t *testing.T) {
	for name, doc := range map[string]string{
		"neither":      `{"name": "vsock_rtt", "unit": "ms", "p50": 2, "stages": {}}`,
		"not measured": `{"name": "resume_ready", "unit": "ms", "skipped": "why", "stages": {"guest": 1}, "goal": {"p50": 1, "met": true}}`,
		"no median":    `{"name": "resume_ready", "unit": "ms", "stages": {"guest": 1}}`,
	} {
		p := add(t, "soft", doc)
		if got := p.bounds([]*row{&p.rows[0]}); len(got) != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestGoal_of_a_row_gives_words_and_odd_ones_a_note(t *testing.T) {
	tests := map[string]struct{ goal, want, note string }{
		"met":                    {`{"p50": 10, "p99": 20, "met": true}`, "met: p50 ≤ 10, p99 ≤ 20", ""},
		"missed":                 {`{"p50": 1, "met": false, "few_runs": true}`, "missed: p50 ≤ 1 (few runs)", ""},
		"by the fastest":         {`{"within": 6.5, "over": "depth<b>", "met": true}`, "met: p50 ≤ 6.5 (by the fastest in depth<b>)", ""},
		"at least":               {`{"at_least": 5, "met": true}`, "met: p50 ≥ 5", ""},
		"less than figures deny": {`{"at_least": 5.5, "met": true}`, "missed: p50 ≥ 5.5", "its figures do not"},
		"what the figures deny":  {`{"p50": 4, "met": true}`, "missed: p50 ≤ 4", "its figures do not"},
		"a percentile not there": {`{"p99": 4, "within": 4, "met": true}`, "missed: p50 ≤ 4 (by the fastest in ), p99 ≤ 4", "its figures do not"},
		"no verdict":             {`{"p50": 10}`, "", "does not say whether"},
		"a verdict in words":     {`{"p50": 10, "met": "yes"}`, "", "does not say whether"},
		"no object":              {`7`, "", "does not say whether"},
		"a limit in words":       {`{"p50": "x", "met": true}`, "met: ", `"p50" is not 0 or a number`},
	}
	for name, tt := range tests {
		p := add(t, "soft", `{"name": "x", "unit": "ms", "p50": 5, "p99": 15, "goal": `+tt.goal+`}`)
		got := ""
		if g := p.rows[0].Goal; g != nil {
			got = g.String()
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		if notes := strings.Join(p.notes, "\n"); !strings.Contains(notes, tt.note) || (tt.note == "") != (notes == "") {
			t.Errorf("%s: notes %q, want %q", name, notes, tt.note)
		}
		var out strings.Builder
		if err := p.HTML(&out); err != nil {
			t.Fatal(err)
		}
		check(t, out.String())
	}
}
