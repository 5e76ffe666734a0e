package bench

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy/link"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loading eBPF programs needs root")
	}
}

func TestPolicyPacket_gives_a_row_for_each_policy_and_flow(t *testing.T) {
	needRoot(t)
	rows, err := PolicyPacket(t.Context(), Env{}, Options{N: 2, Packets: 100, Rules: []int{1, MaxRules}})
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 8 {
		t.Fatalf("%d rows, want 8", len(rows))
	}
	// Two short runs beside other tests may be slower where there is nothing to judge, but not in all rows.
	slower := 0
	for _, r := range rows {
		if r.Unit != "ns" || r.N != 2 || r.P50 <= 0 || r.Stages["empty"] <= 0 || r.Stages["judged"] < 0 {
			t.Errorf("%+v", r)
		}
		if r.P50 > r.Stages["empty"] {
			slower++
		}
	}
	if slower == 0 {
		t.Errorf("no packet takes longer than where there is nothing to judge: %+v", rows)
	}
}

func TestPolicySwap_counts_the_packets_that_were_judged_meanwhile(t *testing.T) {
	needRoot(t)
	rows, err := PolicySwap(t.Context(), Env{}, Options{N: 2, Warmup: 1, Rules: []int{10}, Agents: []int{0, 2}})
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 2 {
		t.Fatalf("%d rows, want 2", len(rows))
	}
	for i, r := range rows {
		cpu := r.Params["cpu_p99_ms"].(float64)
		if r.N != 2 || r.P50 <= 0 || cpu <= 0 || r.Params["packets"].(int64) == 0 || r.Params["agents"] != 2*i {
			t.Errorf("%+v", r)
		}
	}
	if _, err := os.Stat(attachRoot()); !os.IsNotExist(err) {
		t.Errorf("pins are left: %v", err)
	}
}

func TestPolicyAttach_leaves_nothing_behind(t *testing.T) {
	needRoot(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(attachHelperEnv, "1")
	// The pins of a killed benchmark. No process has such a pid.
	left := attachRootPrefix + "99999999"
	// link.Remove mounts the file system for them.
	if err := link.Remove(link.Config{Endpoint: "b0", Interface: "none0", Root: left}); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(left, "b0"), 0o700); err != nil {
		t.Fatal(err)
	}
	rows, err := PolicyAttach(t.Context(), Env{}, Options{Agents: []int{2}, Processes: 1, Rules: []int{10}, Helper: []string{self}})
	if err != nil {
		t.Fatal(err)
	}
	processes := map[any]int64{}
	for _, r := range rows {
		if r.Name == "policy_attach" {
			processes[r.Params["process"]] = r.N
		}
		if r.P50 <= 0 {
			t.Errorf("%+v", r)
		}
	}
	if len(rows) != 4 || processes["first"] != 1 || processes["same"] != 2 || processes["own"] != 1 {
		t.Errorf("%v, %+v", processes, rows)
	}
	for _, root := range []string{attachRoot(), left} {
		if _, err := os.Stat(root); !os.IsNotExist(err) {
			t.Errorf("pins are left: %v", err)
		}
	}
}
