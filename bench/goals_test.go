package bench

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func TestApplyGoals_rows_give_limits_and_verdicts(t *testing.T) {
	goals := []Goal{
		{Name: "a", Params: map[string]any{"pool": true, "peer": nil}, P50: 10, P99: 20},
		{Name: "a", Params: map[string]any{"rules": 1000}, P50: 5},
		{Name: "b", Times: 1.2, Over: "mib"},
		{Name: "d", AtLeast: 0.95},
	}
	type params = map[string]any
	tests := map[string]struct {
		rows []Row // the goal of the first row is checked
		want string
	}{
		"within both limits":           {[]Row{{Name: "a", Params: params{"pool": true}, N: 100, P50: 10, P99: 20}}, "met: p50 ≤ 10, p99 ≤ 20"},
		"median above":                 {[]Row{{Name: "a", Params: params{"pool": true}, N: 100, P50: 10.1, P99: 20}}, "missed: p50 ≤ 10, p99 ≤ 20"},
		"99th percentile above":        {[]Row{{Name: "a", Params: params{"pool": true}, N: 100, P50: 1, P99: 20.1}}, "missed: p50 ≤ 10, p99 ≤ 20"},
		"fewer runs than a percentile": {[]Row{{Name: "a", Params: params{"pool": true}, N: 99, P50: 1, P99: 2}}, "met: p50 ≤ 10, p99 ≤ 20 (few runs)"},
		"few runs for a median":        {[]Row{{Name: "a", Params: params{"rules": 1000}, N: 5, P50: 1, P99: 2}}, "met: p50 ≤ 5 (few runs)"},
		"enough runs for a median":     {[]Row{{Name: "a", Params: params{"rules": 1000}, N: 6, P50: 1, P99: 200}}, "met: p50 ≤ 5"},
		"a number from JSON":           {[]Row{{Name: "a", Params: params{"rules": 1000.0}, N: 6, P50: 6}}, "missed: p50 ≤ 5"},
		"other value of a parameter":   {[]Row{{Name: "a", Params: params{"pool": false}, N: 100, P50: 1}}, "-"},
		"number in place of a string":  {[]Row{{Name: "a", Params: params{"rules": "1000"}, N: 100, P50: 1}}, "-"},
		"parameter missing":            {[]Row{{Name: "a", N: 100, P50: 1}}, "-"},
		"parameter that must not be":   {[]Row{{Name: "a", Params: params{"pool": true, "peer": "qemu"}, N: 100, P50: 1}}, "-"},
		"other name":                   {[]Row{{Name: "c", Params: params{"pool": true}, N: 100, P50: 1}}, "-"},
		"not measured":                 {[]Row{{Name: "a", Params: params{"pool": true}, Skipped: "why"}}, "-"},
		"as much as the least":         {[]Row{{Name: "d", N: 6, P50: 0.95}}, "met: p50 ≥ 0.95"},
		"less than the least":          {[]Row{{Name: "d", N: 6, P50: 0.949, P99: 2}}, "missed: p50 ≥ 0.95"},
		"few runs for the least":       {[]Row{{Name: "d", N: 5, P50: 1}}, "met: p50 ≥ 0.95 (few runs)"},
		"as fast as the fastest": {[]Row{
			{Name: "b", Params: params{"mib": 256}, N: 6, P50: 10}, {Name: "b", Params: params{"mib": 4096}, N: 6, P50: 50},
		}, "met: p50 ≤ 12"},
		"slower than the fastest by more": {[]Row{
			{Name: "b", Params: params{"mib": 4096}, N: 6, P50: 12.1}, {Name: "b", Params: params{"mib": 256}, N: 6, P50: 10},
		}, "missed: p50 ≤ 12"},
		"nothing to compare with": {[]Row{
			{Name: "b", Params: params{"mib": 4096}, N: 6, P50: 12}, {Name: "b", Params: params{"mib": 256}, Skipped: "why"},
			{Name: "b", Params: params{"mib": 512, "pool": true}, N: 6, P50: 1},
		}, "-"},
	}
	for name, tt := range tests {
		applyGoals(tt.rows, goals)
		if got := tt.rows[0].Goal.String(); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

func TestGoals_each_is_stated_in_the_specification(t *testing.T) {
	spec, err := os.ReadFile("../docs/SPECIFICATION.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range Goals {
		if !strings.Contains(string(spec), "`"+g.Name+"`") {
			t.Errorf("the specification has no %s", g.Name)
		}
		if g.P50 == 0 && g.P99 == 0 && g.AtLeast == 0 && g.Times == 0 || (g.Times != 0) != (g.Over != "") {
			t.Errorf("%+v limits nothing", g)
		}
	}
}

func TestReport_goal_goes_to_JSON_and_text(t *testing.T) {
	params := map[string]any{"pool": true, "memory_mib": 256}
	r := NewReport([]Row{{Name: "resume_entry", Params: params, Unit: "ms", N: 100, P50: 1.7, P99: 3.6}, {Name: "blk_rand_read", Unit: "IOPS", N: 100, P50: 1}})
	doc, err := json.Marshal(r.Rows)
	if err != nil {
		t.Fatal(err)
	}
	if want := `"goal":{"p50":1.5,"p99":5,"met":false}`; strings.Count(string(doc), want) != 1 || strings.Count(string(doc), `"goal"`) != 1 {
		t.Errorf("not once %s in %s", want, doc)
	}
	var text strings.Builder
	r.Text(&text)
	if want := "missed: p50 ≤ 1.5, p99 ≤ 5"; !strings.Contains(text.String(), want) {
		t.Errorf("no %q in %s", want, text.String())
	}
}
