package metrics

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMetrics_say_what_was_done_and_what_is_there(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	var c supervisor.Counters
	c.Connections.Store(3)
	c.Refused.Store(4)
	c.Held.Store(5)
	c.Dropped.Store(6)
	m := New(h, &c, "test")
	h = h.WithObservers(m.Observe)
	ctx := t.Context()
	for _, name := range []string{"a", "b"} {
		if _, err := h.Create(ctx, sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sandbox("a").Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second one finds it awake
		if _, err := h.Sandbox("a").Wake(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sandbox("none").Wake(ctx); err == nil {
		t.Fatal("one that is not there woke")
	}
	if _, err := h.Sandbox("b").Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	rep := control.Report{Begun: begun.Add(time.Millisecond), Stages: map[string]float64{"load": 21, "a_stage_of_the_guests": 1}}
	m.note(&control.Operation{Kind: control.OpWake, Begun: begun, Took: time.Second, Report: rep})
	rep.Begun = begun.Add(-time.Second) // the second one finds it awake
	m.note(&control.Operation{Kind: control.OpWake, Begun: begun, Took: time.Second, Report: rep})
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
		`drowse_resume_stage_duration_seconds_bucket{stage="load",le="0.025"} 1`, `drowse_resume_stage_duration_seconds_bucket{stage="load",le="0.01"} 0`,
		`drowse_listener_connections 3`, `drowse_listener_refused_total 4`, `drowse_packet_waker_packets_held_total 5`, `drowse_packet_waker_packets_dropped_total 6`,
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
	h := (&sandboxtest.VMs{}).Host(t)
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "web", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	m := New(h, &supervisor.Counters{}, "test")
	m.note(&control.Operation{Kind: control.OpWake, Took: time.Millisecond, Report: control.Report{Stages: map[string]float64{"resume_entry": 1}}})
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// asked are figures of any VM but one, which does not answer.
func asked(_ context.Context, name string) (spec.NetworkStats, error) {
	if name == "slow" {
		return spec.NetworkStats{}, errors.New("no answer")
	}
	return spec.NetworkStats{
		Name: "another", DNS: netpolicy.ResolverStats{Refused: 3}, TLS: netpolicy.TLSStats{Passed: 4},
		Process:  spec.NetworkProcess{Starts: 3, Refused: 1, Failed: 2, CPUSeconds: 0.25},
		Counters: []netpolicy.Counter{{Direction: netpolicy.Egress, Verdict: netpolicy.Deny, Reason: netpolicy.ReasonDefault, Count: netpolicy.Count{Packets: 7, Bytes: 420}}},
	}, nil
}

func TestMetrics_of_networks_are_those_of_VMs_that_run_and_have_one(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	for name, network := range map[string]string{"web": spec.NetworkTAP, "slow": spec.NetworkTAP, "asleep": spec.NetworkTAP, "alone": spec.NetworkNone} {
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image, Network: network}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sandbox("asleep").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(&network{list: h.State.List, ask: asked})
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	text := rec.Body.String()
	for _, want := range []string{
		`drowse_network_packets_total{direction="egress",reason="default",sandbox="web",verdict="deny"} 7`,
		`drowse_network_bytes_total{direction="egress",reason="default",sandbox="web",verdict="deny"} 420`,
		`drowse_network_dns_queries_total{outcome="refused",sandbox="web"} 3`, `drowse_network_tls_connections_total{outcome="passed",sandbox="web"} 4`,
		`drowse_network_process_starts_total{sandbox="web"} 3`, `drowse_network_process_ends_total{reason="refused",sandbox="web"} 1`,
		`drowse_network_process_ends_total{reason="failed",sandbox="web"} 2`, `drowse_network_process_cpu_seconds_total{sandbox="web"} 0.25`,
		`drowse_network_sandboxes_left_out 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %s", want)
		}
	}
	for _, not := range []string{`sandbox="asleep"`, `sandbox="alone"`, `sandbox="slow"`, `sandbox="another"`} {
		if strings.Contains(text, not) {
			t.Errorf("it speaks of %s", not)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// weighed counts how often it is looked at.
type weighed struct {
	looks int
	fails bool
}

func (w *weighed) usage(context.Context) (state.Usage, error) {
	w.looks++
	if w.fails {
		return state.Usage{Layers: 999}, errors.New("a directory cannot be read")
	}
	return state.Usage{Layers: 1, Snapshots: 2, Kept: 3, Images: 4, Pages: 5, Volumes: int64(100 * w.looks)}, nil
}

func TestMetrics_of_the_disk_are_read_once_a_minute_at_most_and_stay_when_they_cannot_be(t *testing.T) {
	now := time.Unix(1000, 0)
	store := &weighed{}
	quotas := func(context.Context) ([]state.QuotaUse, error) {
		return []state.QuotaUse{{Name: "a", Quota: 700, Used: 30}}, nil
	}
	d := &disk{ask: store.usage, quotas: quotas, now: func() time.Time { return now }}
	registry := prometheus.NewRegistry()
	registry.MustRegister(d)
	scrape := func(want string) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "drowse_store_bytes"); err != nil {
			t.Error(err)
		}
	}
	defer func() {
		const want = "# HELP drowse_sandbox_disk_used_bytes What a sandbox with a disk quota has made the host store, as that counts.\n" +
			"# TYPE drowse_sandbox_disk_used_bytes gauge\ndrowse_sandbox_disk_used_bytes{sandbox=\"a\"} 30\n"
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "drowse_sandbox_disk_used_bytes"); err != nil {
			t.Error(err)
		}
	}()
	figures := func(volumes string) string {
		const help = "# HELP drowse_store_bytes What the store takes on disk: layers of disks, snapshots that sandboxes come back from, others that are kept, images, decompressed pages, volumes.\n# TYPE drowse_store_bytes gauge\n"
		return help + `drowse_store_bytes{kind="images"} 4
drowse_store_bytes{kind="kept"} 3
drowse_store_bytes{kind="layers"} 1
drowse_store_bytes{kind="pages"} 5
drowse_store_bytes{kind="snapshots"} 2
drowse_store_bytes{kind="volumes"} ` + volumes + "\n"
	}
	readable := func(want float64) {
		t.Helper()
		got, err := testutil.GatherAndCount(registry, "drowse_store_bytes_readable")
		if err != nil || got != 1 {
			t.Fatal(got, err)
		}
		if d.failed != (want == 0) {
			t.Errorf("the last look failed: %v", d.failed)
		}
	}
	for range 3 {
		scrape(figures("100"))
		now = now.Add(weighEvery / 4)
	}
	now = now.Add(weighEvery / 4)
	scrape(figures("200"))
	if store.looks != 2 {
		t.Errorf("it was looked %d times in a minute and a bit, not twice", store.looks)
	}
	readable(1)
	store.fails = true
	now = now.Add(weighEvery)
	scrape(figures("200"))
	readable(0)
	if store.looks != 3 {
		t.Errorf("it was looked %d times, not 3", store.looks)
	}
}

func TestMetrics_have_none_of_a_pool_that_is_not_there(t *testing.T) {
	m := New((&sandboxtest.VMs{}).Host(t), &supervisor.Counters{}, "test")
	if n, err := testutil.GatherAndCount(m.registry, "drowse_pool_size", "drowse_pool_ready", "drowse_pool_taken_total", "drowse_pool_missed_total", "drowse_pool_failed_total"); n != 0 || err != nil {
		t.Errorf("%d figures of no pool (%v)", n, err)
	}
}
