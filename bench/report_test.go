package bench

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/bench/page"
)

// The ranks come from published tables of the sign test.
func TestRankOfMedian_runs_give_rank_of_95_percent(t *testing.T) {
	for n, want := range map[int64]int64{0: 0, 1: 0, 5: 0, 6: 1, 8: 1, 9: 2, 10: 2, 20: 6, 30: 10, 50: 18, 100: 40, 1000: 469} {
		if got := rankOfMedian(n); got != want {
			t.Errorf("%d runs: rank %d, want %d", n, got, want)
		}
	}
}

func TestRow_runs_give_percentiles_bounds_and_histogram(t *testing.T) {
	s := newSeries(inMs)
	for ms := range int64(20) {
		if err := s.total.RecordValue((ms + 1) * perMs); err != nil {
			t.Fatal(err)
		}
	}
	r := s.row("x", map[string]any{"a": 1})
	near := func(name string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > want/500 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	near("p50", r.P50, 10)
	near("p90", r.P90, 18)
	near("p99", r.P99, 20)
	near("low", r.P50Low, 6)
	near("high", r.P50High, 15)
	if len(r.Histogram) != 20 || r.N != 20 {
		t.Fatalf("%d runs: %v", r.N, r.Histogram)
	}
	for i, b := range r.Histogram {
		near("a value", b[0], float64(i+1))
		if b[1] != 1 {
			t.Errorf("%v came %v times", b[0], b[1])
		}
	}
	mib := newSeries(inMiB)
	if err := mib.total.RecordValue(3 << 20); err != nil {
		t.Fatal(err)
	}
	m := mib.row("bytes", nil)
	near("MiB", m.P50, 3)
	if m.Unit != "MiB" || m.P50Low != 0 {
		t.Errorf("%+v", m)
	}
}

func TestBuckets_many_values_give_bounded_pairs_of_all_runs(t *testing.T) {
	h := histogram()
	r := rand.New(rand.NewPCG(1, 2))
	const runs = 50_000
	for range runs {
		if err := h.RecordValue(int64(math.Exp(r.Float64() * 27))); err != nil {
			t.Fatal(err)
		}
	}
	got := buckets(h, perMs)
	if len(got) > MaxBuckets || len(got) < MaxBuckets/2 {
		t.Errorf("%d pairs", len(got))
	}
	sum := 0.0
	for _, b := range got {
		sum += b[1]
	}
	if sum != runs {
		t.Errorf("%v runs, want %v", sum, runs)
	}
	if !slices.IsSortedFunc(got, func(a, b [2]float64) int { return int(math.Copysign(1, a[0]-b[0])) }) {
		t.Error("values do not ascend")
	}
}

func TestReport_goes_to_text_and_page(t *testing.T) {
	s := newSeries(inMs)
	for range 10 {
		if err := s.total.RecordValue(7 * perMs); err != nil {
			t.Fatal(err)
		}
	}
	skipped := Row{Name: "gone", Unit: "ms", Skipped: "there is none"}
	r := NewReport([]Row{s.row("x", map[string]any{"memory_mib": 256}), skipped})
	var text strings.Builder
	r.Text(&text)
	for _, want := range []string{"memory_mib=256", "7.0", "not measured: there is none"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in %s", want, text.String())
		}
	}
	doc, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var p page.Page
	if err := p.Add("file", strings.NewReader(string(doc))); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := p.HTML(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Distributions", "10 runs", "not measured: there is none", r.Commit} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if strings.Contains(out.String(), "left out") {
		t.Error("the page leaves out what a report has")
	}
}

func TestReport_counts_that_are_missing_are_no_zeros_and_have_a_reason(t *testing.T) {
	r := NewReport([]Row{
		{Name: "counted", Unit: "ms", N: 9, P50: 5, Counts: map[string]float64{countCalls: 412, countSyncs: 0}, Uncounted: map[string]string{countExits: "no\nKVM", countEmulated: "no\nKVM"}},
		{Name: "uncounted", Unit: "ms", N: 9, P50: 5, Uncounted: map[string]string{countCalls: "no permission"}},
		{Name: "without", Unit: "ms", N: 9, P50: 5},
		{Name: "skipped", Unit: "ms", Skipped: "why"},
	})
	var text, stat strings.Builder
	r.Text(&text)
	lines := map[string]string{}
	for line := range strings.Lines(text.String()) {
		if f := strings.Fields(line); len(f) > 1 {
			lines[f[0]] = strings.Join(f, " ")
		}
	}
	for name, want := range map[string]string{
		"name": "unit syscalls waits syncs exits emulated MiB", "counted": "ms 412 - 0 - - 0.0", "uncounted": "ms - - - - - 0.0", "without": "ms - - - - - 0.0",
	} {
		if !strings.Contains(lines[name], want) {
			t.Errorf("%s: %q, want %q", name, lines[name], want)
		}
	}
	for _, want := range []string{"counted: exits not counted: no KVM\n", "counted: emulated not counted: no KVM\n", "uncounted: syscalls not counted: no permission\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in %s", want, text.String())
		}
	}
	if err := r.Benchstat(&stat); err != nil {
		t.Fatal(err)
	}
	if want := "BenchmarkCounted 1 0 syncs/op 412 syscalls/op\n"; !strings.Contains(stat.String(), want) || strings.Count(stat.String(), "syscalls") != 1 {
		t.Errorf("not once %q in %s", want, stat.String())
	}
	doc, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(doc), `"counts"`); n != 1 {
		t.Errorf("%d rows have counts: %s", n, doc)
	}
	var p page.Page
	var out strings.Builder
	if err := errors.Join(p.Add("file", strings.NewReader(string(doc))), p.HTML(&out)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`<td class="n">412</td><td class="n">–</td><td class="n">0</td><td class="n">–</td><td class="n">–</td>`, "not counted: no permission"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the page has no %q", want)
		}
	}
}
