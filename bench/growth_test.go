package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// growthEnv has VMs in memory.
func growthEnv(t *testing.T) (Env, *sandboxtest.VMs) {
	t.Helper()
	vms := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{"/bin/true": fakeguest.Builtin["true"]}}
	return Env{Store: vms.Host(t), Image: sandboxtest.Image}, vms
}

func TestGrowth_gives_a_row_for_each_operation_and_size_and_the_slopes(t *testing.T) {
	e, vms := growthEnv(t)
	o := Options{N: 2, Warmup: 1, MemoryMiB: []int{64}, Sandboxes: []int{24, 16, 24}, Snapshots: 4}
	rows, err := e.growth(t.Context(), o, time.Now, vms.Open)
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	slopes := 0
	for _, r := range rows {
		if r.Name == "growth" {
			got = append(got, fmt.Sprint(r.Params["op"], " ", r.Params["sandboxes"], " ", r.N))
			if r.P50 <= 0 || (r.Counts[countCalls] == 0) != (r.Uncounted[countCalls] != "") {
				t.Errorf("%s: %v ms, counts %v, without %v", got[len(got)-1], r.P50, r.Counts, r.Uncounted)
			}
			continue
		}
		slopes++
		if r.Skipped != "" && r.Params["of"] == ofTime || r.Skipped == "" && (r.N != 2 || r.P50 <= 0) || r.Params["from"] != 16 || r.Params["to"] != 24 {
			t.Errorf("%+v", r)
		}
	}
	for _, op := range growthOps {
		want = append(want, op+" 16 2", op+" 24 2")
	}
	if fmt.Sprint(got) != fmt.Sprint(want) || slopes != len(growthOps)*len(slopesOf) {
		t.Errorf("rows %v, want %v; %d slopes", got, want, slopes)
	}
	if left, _ := filepath.Glob(filepath.Join(e.Store.State.Dir(), "growth-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// What a wake must not depend on: here the VM takes longer with more others.
func TestGrowth_operation_that_takes_longer_with_more_others_misses_its_goal(t *testing.T) {
	e, vms := growthEnv(t)
	// No time passes but by the clock's calls and in the large store's restore: a busy machine adds nothing.
	var clock atomic.Int64
	now := func() time.Time { return time.UnixMilli(clock.Add(1)) }
	large := &sandboxtest.VMs{Commands: vms.Commands, Fail: func(op, _ string) error {
		if op == "restore" {
			clock.Add(10)
			for range 20_000 {
				if _, err := os.Stat("/"); err != nil {
					return err
				}
			}
		}
		return nil
	}}
	t.Cleanup(func() { large.Close() })
	rows, err := e.growth(t.Context(), Options{N: 1, MemoryMiB: []int{64}, Sandboxes: []int{16, 17}, Snapshots: 4}, now, func(dir string) (*sandbox.Host, error) {
		if filepath.Base(dir) == "17" {
			return large.Open(dir)
		}
		return vms.Open(dir)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range NewReport(rows).Rows {
		if r.Name != "growth_slope" || r.Params["op"] != opWake || r.Params["of"] == countSyncs || r.Skipped != "" {
			continue
		}
		if r.P50 < 1.5 || r.Goal == nil || r.Goal.Met {
			t.Errorf("slope of %v: %v, goal %v", r.Params["of"], r.P50, r.Goal)
		}
	}
}

func TestGrowth_slope_that_says_nothing_is_not_measured(t *testing.T) {
	e, vms := growthEnv(t)
	for name, tt := range map[string]struct {
		o    Options
		op   string
		want string
	}{
		"one size":            {Options{Sandboxes: []int{1}, Snapshots: 1}, opWake, "two sizes"},
		"a store that sweeps": {Options{Sandboxes: []int{1, 2}, Snapshots: 1}, opDelete, "also sweeps"},
	} {
		tt.o.N, tt.o.MemoryMiB = 1, []int{64}
		rows, err := e.growth(t.Context(), tt.o, time.Now, vms.Open)
		if err != nil {
			t.Fatal(name, err)
		}
		said := 0
		for _, r := range rows {
			if r.Name == "growth_slope" && r.Params["op"] == tt.op {
				said++
				if !strings.Contains(r.Skipped, tt.want) || r.P50 != 0 {
					t.Errorf("%s: %+v", name, r)
				}
			}
		}
		if said != len(slopesOf) {
			t.Errorf("%s: %d rows", name, said)
		}
	}
}

// The product must take the others for what they stand for.
func TestGrown_others_are_whole_sandboxes_to_the_store(t *testing.T) {
	e, _ := growthEnv(t)
	if _, err := e.Store.Create(t.Context(), sandbox.Spec{Name: vmName(), MemoryMiB: 64, Image: e.Image}, sandbox.CreateOptions{Boot: true}); err != nil {
		t.Fatal(err)
	}
	g := &grown{host: e.Store, others: 3}
	if err := g.fill(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	list, err := fleet.New(e.Store, fleet.Options{}).List(t.Context(), records.Filter{})
	if err != nil || len(list.Sandboxes) != 4 || len(list.Problems) > 0 {
		t.Fatalf("%+v, %v", list, err)
	}
	for _, s := range list.Sandboxes {
		if s.Status != records.Asleep {
			t.Errorf("%s: %s", s.Name, s.Status)
		}
	}
	snapshots, err := e.Store.State.Snapshots()
	if err != nil || len(snapshots) != 3*5+1 {
		t.Fatalf("%d snapshots, %v", len(snapshots), err)
	}
	for _, s := range snapshots {
		if !strings.HasPrefix(s.VM, "other-") {
			continue
		}
		if err := e.Store.State.VerifySnapshot(t.Context(), s.ID); err != nil || s.Problem != "" {
			t.Errorf("%+v: %v", s, err)
		}
	}
	e.Store.State.Grace = 0
	if freed, err := e.Store.State.Sweep(t.Context()); err != nil || freed.Snapshots+freed.Layers > 0 {
		t.Errorf("a sweep finds something to delete: %+v, %v", freed, err)
	}
	for _, op := range []string{opList, opSweep, opDelete} {
		if err := g.do(t.Context(), op, 0); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(g.other(t.Context(), 0), g.do(t.Context(), opDelete, 0)); err != nil {
		t.Error(err)
	}
}

func TestRoom_without_space_or_names_is_refused(t *testing.T) {
	dir := t.TempDir()
	if err := room(dir, []int{1, 2}, 2); err != nil {
		t.Error(err)
	}
	if err := room(dir, []int{1 << 40}, 10); err == nil || !strings.Contains(err.Error(), "smaller --sandboxes") {
		t.Error(err)
	}
}
