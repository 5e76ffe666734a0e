package bench

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
)

func TestBoot_reports_give_a_row_whose_stages_are_the_whole(t *testing.T) {
	s := newSeries(inMs)
	for range 3 {
		report := control.Report{Stages: map[string]float64{
			"boot": 2000, "create_vm": 7, "memory": 8, "prebuilt": 1, "devices": 2, "load": 30, "entry": 4, "network": 50,
		}}
		if err := s.boot(report, 2100*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	r := s.row("boot", map[string]any{"memory_mib": 256})
	if r.Unit != "ms" || r.N != 3 || !near(r.P50, 2000) {
		t.Errorf("%+v", r)
	}
	want := map[string]float64{"prebuilt": 1, "devices": 2, "load": 30, "entry": 4, "guest": 1963, "run": 2100}
	for name, ms := range want {
		if got := r.Stages[name]; !near(got, ms) {
			t.Errorf("stage %s: %v, want %v", name, got, ms)
		}
	}
	// The prebuilt VM's stages run in the background, and a boot has no network.
	if len(r.Stages) != len(want) {
		t.Errorf("%v", r.Stages)
	}
}

// near reports whether got is want, to the three digits of a histogram.
func near(got, want float64) bool { return got >= want*0.998 && got <= want*1.002 }

func TestBoot_report_without_a_boot_gives_error(t *testing.T) {
	for name, stages := range map[string]map[string]float64{"no stages": nil, "of a restore": {"resume_ready": 12}, "no time": {"boot": 0}} {
		s := newSeries(inMs)
		if err := s.boot(control.Report{Stages: stages}, time.Second); err == nil || s.total.TotalCount() != 0 {
			t.Errorf("%s: %v, %d runs", name, err, s.total.TotalCount())
		}
	}
}
