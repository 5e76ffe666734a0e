package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
)

// Goal is an upper or lower limit that docs/SPECIFICATION.md sets for a number. A limit of 0 is none.
type Goal struct {
	// Name is the name of the rows. The limits are in their unit.
	Name string
	// Params choose among the rows: a row must have all of them. The value nil means that the row must not have
	// the parameter.
	Params map[string]any
	// P50 and P99 are the limits of the median and of the 99th percentile.
	P50, P99 float64
	// AtLeast is the lower limit of the median.
	AtLeast float64
	// Times is the limit of the median as a multiple of the smallest median among rows that differ only in the
	// parameter Over.
	Times float64
	Over  string
}

// Goals are all goals. If several choose a row, the last one counts.
var Goals = []Goal{
	{Name: "resume_entry", Params: map[string]any{"pool": true}, P50: 1.5, P99: 5, Times: 1.2, Over: "memory_mib"},
	{Name: "resume_ready", Params: map[string]any{"cache": cacheWarm, "peer": nil}, P50: 25, P99: 50},
	{Name: "resume_ready", Params: map[string]any{"cache": cacheCold, "peer": nil}, P50: 50, P99: 100},
	{Name: "resume_answer_ratio", Params: map[string]any{"peer": peerQEMU, "peer_process": "counted"}, AtLeast: 3},
	{Name: "resume_answer_ratio", Params: map[string]any{"peer": peerQEMUShared, "peer_process": "counted"}, AtLeast: 3},
	{Name: "resume_answer_ratio", Params: map[string]any{"peer": peerQEMUAhead, "peer_process": "counted"}, AtLeast: 3},
	{Name: "create_exec", Params: map[string]any{"template": true}, P50: 1200},
	{Name: "exec_asleep", P50: 500},
	{Name: "exec_awake", P50: 450},
	{Name: "concurrent_resume_ratio", Params: map[string]any{"at_once": 20}, P50: 1.3},
	{Name: "wake_touch_added", Params: map[string]any{"pool": true}, P50: 5},
	{Name: "snapshot_pause", Params: map[string]any{"dirty_mib": 64}, P50: 10},
	{Name: "delta_bytes", Params: map[string]any{"work": "idle", "seconds": 1}, P50: 1},
	// 1.3 times the files that stay.
	{Name: "delta_bytes", Params: map[string]any{"work": "install", "written_mib": 100, "left_mib": 5}, P50: 6.5},
	{Name: "restore_depth", Times: 1.2, Over: "depth"},
	{Name: "fork_pause", P50: 10},
	{Name: "growth_slope", Params: map[string]any{"op": opWake}, P50: 1.2},
	{Name: "growth_slope", Params: map[string]any{"op": opExec}, P50: 1.2},
	{Name: "growth_slope", Params: map[string]any{"op": opSleep}, P50: 1.2},
	{Name: "growth_slope", Params: map[string]any{"op": opDelete}, P50: 1.2},
	{Name: "density_cpu", P50: 1},
	{Name: "policy_packet", Params: map[string]any{"rules": 1000, "flow": "known"}, P50: 300},
	{Name: "policy_packet", Params: map[string]any{"rules": 1000, "flow": "answer"}, P50: 300},
	{Name: "policy_swap", Params: map[string]any{"rules": 1000}, P50: 1, P99: 1},
	// At most 5% of the rate is lost.
	{Name: "policy_throughput_ratio", Params: map[string]any{"rules": 1000}, AtLeast: 0.95},
	{Name: "policy_attach", Params: map[string]any{"process": "own"}, P50: 20},
	{Name: "policy_attach", Params: map[string]any{"process": "same"}, P50: 20},
}

// RowGoal is the goal of a row, and whether the row meets it. Limits are in the row's unit, and 0 is none.
type RowGoal struct {
	P50 float64 `json:"p50,omitempty"`
	P99 float64 `json:"p99,omitempty"`
	// AtLeast is the lower limit of the median.
	AtLeast float64 `json:"at_least,omitempty"`
	// Within is another limit of the median: a multiple of the smallest median among the rows of the same report
	// that differ only in the parameter Over.
	Within float64 `json:"within,omitempty"`
	Over   string  `json:"over,omitempty"`
	// Met means that every limit holds.
	Met bool `json:"met"`
	// FewRuns means that a percentile with a limit comes from too few runs to differ from the slowest: fewer than
	// 100 for the 99th, and fewer than 6 for bounds of the median.
	FewRuns bool `json:"few_runs,omitempty"`
}

// Fewer runs than these make no percentile.
const fewForP99, fewForP50 = 100, 6

// applyGoals gives each row its goal, or none. The rows come from one run of the program, or from the same build
// on the same machine.
func applyGoals(rows []Row, goals []Goal) {
	for i := range rows {
		rows[i].Goal = nil
	}
	for _, g := range goals {
		for i := range rows {
			if r := &rows[i]; r.Skipped == "" && r.N > 0 && g.isFor(*r) {
				r.Goal = g.of(*r, rows)
			}
		}
	}
}

func (g Goal) isFor(r Row) bool {
	if r.Name != g.Name {
		return false
	}
	for name, want := range g.Params {
		if got, ok := r.Params[name]; ok != (want != nil) || ok && !same(got, want) {
			return false
		}
	}
	return true
}

// same compares parameters as JSON: numbers read back from JSON have another type.
func same(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// of returns the goal of a row, or nil if it has no row to compare with.
func (g Goal) of(r Row, all []Row) *RowGoal {
	out := &RowGoal{P50: g.P50, P99: g.P99, AtLeast: g.AtLeast}
	if least, ok := g.least(r, all); ok {
		out.Within, out.Over = g.Times*least, g.Over
	}
	if out.P50 == 0 && out.P99 == 0 && out.AtLeast == 0 && out.Within == 0 {
		return nil
	}
	holds := func(v, limit float64) bool { return limit == 0 || v <= limit }
	out.Met = holds(r.P50, out.P50) && holds(r.P50, out.Within) && holds(r.P99, out.P99) && r.P50 >= out.AtLeast
	out.FewRuns = out.P99 > 0 && r.N < fewForP99 || r.N < fewForP50
	return out
}

// least returns the smallest median of the rows that differ only in one parameter. There must be at least two.
func (g Goal) least(r Row, all []Row) (least float64, ok bool) {
	if g.Times == 0 {
		return 0, false
	}
	least = r.P50
	key := likeness(r, g.Over)
	for _, other := range all {
		if other.Skipped != "" || other.N == 0 || !g.isFor(other) || likeness(other, g.Over) != key {
			continue
		}
		least = min(least, other.P50)
		ok = ok || !same(other.Params[g.Over], r.Params[g.Over])
	}
	return least, ok
}

// likeness is the same for rows that differ only in one parameter.
func likeness(r Row, but string) string {
	params := maps.Clone(r.Params)
	delete(params, but)
	return r.Name + " " + sorted(params)
}

// String returns the goal as text for a table: its limits, and whether they hold.
func (g *RowGoal) String() string {
	if g == nil {
		return "-"
	}
	verdict := "missed"
	if g.Met {
		verdict = "met"
	}
	var limits []string
	for _, l := range []struct {
		name  string
		limit float64
	}{{"p50 ≤", g.P50}, {"p50 ≤", g.Within}, {"p99 ≤", g.P99}, {"p50 ≥", g.AtLeast}} {
		if l.limit > 0 {
			limits = append(limits, fmt.Sprintf("%s %.4g", l.name, l.limit))
		}
	}
	verdict += ": " + strings.Join(limits, ", ")
	if g.FewRuns {
		verdict += " (few runs)"
	}
	return verdict
}
