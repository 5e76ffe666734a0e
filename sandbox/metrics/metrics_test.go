package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMetrics_say_what_was_done_and_what_is_there(t *testing.T) {
	vms := fleettest.New()
	var c supervisor.Counters
	c.Connections.Store(3)
	c.Refused.Store(4)
	c.Held.Store(5)
	c.Dropped.Store(6)
	m := New(vms, &c, "test")
	w := m.Watch(vms)
	ctx := t.Context()
	for _, name := range []string{"a", "b"} {
		if _, err := w.Run(ctx, sandbox.Spec{Name: name, Image: "app"}, sandbox.Label{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.SleepWith(ctx, "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second one finds it awake
		if _, err := w.Wake(ctx, "a"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Wake(ctx, "none"); err == nil {
		t.Fatal("one that is not there woke")
	}
	if _, err := w.SleepWith(ctx, "b", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	m.Woken(time.Second, sandbox.Report{Stages: map[string]float64{"resume_entry": 21, "a_stage_of_the_guests": 1}}, nil)
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	text := rec.Body.String()
	for _, want := range []string{
		`drowse_sandboxes{status="running"} 1`, `drowse_sandboxes{status="asleep"} 1`, `drowse_sandboxes{status="failed"} 0`,
		`drowse_snapshots{kind="sleep"} 2`, `drowse_snapshots{kind="named"} 0`, `drowse_files_readable 1`,
		`drowse_operation_duration_seconds_count{operation="create",outcome="ok"} 2`,
		`drowse_operation_duration_seconds_count{operation="wake",outcome="ok"} 2`,
		`drowse_operation_duration_seconds_count{operation="wake",outcome="not-found"} 1`,
		`drowse_operation_duration_seconds_count{operation="sleep",outcome="ok"} 2`,
		`drowse_resume_stage_duration_seconds_bucket{stage="resume_entry",le="0.025"} 1`, `drowse_resume_stage_duration_seconds_bucket{stage="resume_entry",le="0.01"} 0`,
		`drowse_door_connections 3`, `drowse_door_refused_total 4`, `drowse_gate_packets_held_total 5`, `drowse_gate_packets_dropped_total 6`,
		`drowse_build_info{version="test"} 1`, `go_goroutines `, `process_open_fds `,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %s", want)
		}
	}
	if strings.Contains(text, "a_stage_of_the_guests") {
		t.Error("a stage that nobody knows has a label")
	}
	if t.Failed() {
		t.Log(text)
	}
}

func TestMetrics_have_names_and_help_as_Prometheus_wants_them(t *testing.T) {
	m := New(fleettest.New(), &supervisor.Counters{}, "test")
	m.observe("wake", time.Millisecond, nil)
	m.woken(sandbox.Report{Stages: map[string]float64{"resume_entry": 1}})
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}
