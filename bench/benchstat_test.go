package bench

import (
	"slices"
	"strings"
	"testing"
)

func TestBenchstat_rows_give_a_line_for_each_run(t *testing.T) {
	r := Report{Commit: "f00\nBenchmarkX 1 1 ns/op", Machine: Machine{CPU: "Example CPU", KVM: "soft"}, Rows: []Row{
		{Name: "resume_ready", Params: map[string]any{"cache": "warm", "memory_mib": 512, "peer_cpu": "host, a/b"}, Unit: "ms", N: 3, P50: 10, Histogram: [][2]float64{{9.5, 1}, {12, 2}}},
		{Name: "blk_seq_read", Unit: "MiB/s", N: 1, Histogram: [][2]float64{{2, 1}}},
		{Name: "policy_swap", Params: map[string]any{"rules": 10, "packets": 123456}, Unit: "ns", P50: 7},
		{Name: "density_cpu", Unit: "%", Histogram: [][2]float64{{1.5, 1}}},
		{Name: "new", Unit: "a unit", Histogram: [][2]float64{{1, 1}}},
		{Name: "gone", Unit: "ms", Skipped: "there is\nnone"},
	}}
	var out strings.Builder
	if err := r.Benchstat(&out); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")[1:]
	want := []string{
		"goos: linux", "goarch: amd64", "pkg: github.com/drowse-vm/drowse/bench", "cpu: Example CPU", "kvm: soft",
		"Unit B/s better=higher", "Unit IOPS better=higher",
		"BenchmarkResumeReady/cache=warm/memory_mib=512/peer_cpu=host,_a_b 1 9.5e+06 ns/op",
		"BenchmarkResumeReady/cache=warm/memory_mib=512/peer_cpu=host,_a_b 1 1.2e+07 ns/op",
		"BenchmarkResumeReady/cache=warm/memory_mib=512/peer_cpu=host,_a_b 1 1.2e+07 ns/op",
		"BenchmarkBlkSeqRead 1 2.097152e+06 B/s",
		"BenchmarkPolicySwap/rules=10 1 7 ns/op",
		"BenchmarkDensityCpu 1 1.5 percent",
		"BenchmarkNew 1 1 a_unit",
		"# BenchmarkGone: not measured: there is none",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestSamples_many_runs_give_bounded_ones_of_the_same_distribution(t *testing.T) {
	r := Row{Histogram: [][2]float64{{1, 90_000}, {2, 9_000}, {3, 1_000}}}
	got := r.samples()
	if len(got) != MaxSamples || !slices.IsSorted(got) {
		t.Fatalf("%d samples", len(got))
	}
	count := map[float64]int{}
	for _, v := range got {
		count[v]++
	}
	if count[1] != 1800 || count[2] != 180 || count[3] != 20 {
		t.Errorf("%v", count)
	}
}
