// Package metrics reports to Prometheus what sandboxes do: how many have which status, and what the process that
// serves them has done itself. docs/reference/telemetry.md has a line on each metric.
package metrics

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// lookEvery is how long figures from the files are reused before the files are read again, however often a client
// asks.
const lookEvery = 15 * time.Second

// buckets of times in seconds: from 1 ms, in which a stage of a resume is done, to the minutes that a boot takes on a
// soft KVM.
var buckets = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120}

// stages are the stages of a resume that have a histogram. Any other name would be a label that another process
// chooses.
var stages = map[string]bool{
	"create_vm": true, "memory": true, "irqchip": true, "vcpus": true, "kvm_state": true, "prebuilt": true, "devices": true, "load": true, "import": true, "entry": true,
	"agent_reached": true, "agent_answer": true, "resume_entry": true, "resume_ready": true, "network": true,
}

// Metrics are the metrics of one process. Its methods may be called from any goroutine. Make it with New.
type Metrics struct {
	registry   *prometheus.Registry
	operations *prometheus.HistogramVec
	stages     *prometheus.HistogramVec
}

// New returns the metrics of a process that serves a host. The host's observer must call Observe. counters are
// those of the process's supervisor.
func New(h *sandbox.Host, counters *supervisor.Counters, version string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		operations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "drowse_operation_duration_seconds", Buckets: buckets,
			Help: "What this process has done with sandboxes, for the API, connections and packets, by operation and outcome: ok, or the code of the error.",
		}, []string{"operation", "outcome"}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "drowse_resume_stage_duration_seconds", Buckets: buckets,
			Help: "Stages of the wakes that this process has done, as the VM's process reports them.",
		}, []string{"stage"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{Name: "drowse_build_info", Help: "1, with the version of the program.", ConstLabels: prometheus.Labels{"version": version}})
	build.Set(1)
	number := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	count := func(name, help string, f func() uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	m.registry.MustRegister(
		m.operations, m.stages, build, &files{store: h.State, fleet: fleet.New(h, fleet.Options{})},
		number("drowse_listener_connections", "Connections to published TCP ports that are carried now.", func() float64 { return float64(counters.Connections.Load()) }),
		count("drowse_listener_refused_total", "Connections to published TCP ports that found no way to their VM.", counters.Refused.Load),
		count("drowse_packet_waker_packets_held_total", "Packets to sandboxes that sleep which were kept while these woke.", counters.Held.Load),
		count("drowse_packet_waker_packets_dropped_total", "Packets to sandboxes that sleep which were let go.", counters.Dropped.Load),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	m.registry.MustRegister(pool{counters}, &disk{ask: h.State.Usage, quotas: h.State.QuotaUses, now: time.Now}, &network{list: h.State.List, ask: func(ctx context.Context, name string) (spec.NetworkStats, error) {
		return h.Sandbox(name).NetworkStats(ctx)
	}})
	return m
}

// Handler returns a handler that answers with the metrics.
func (m *Metrics) Handler() http.Handler {
	const atOnce = 4
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: atOnce, Timeout: time.Minute})
}

// Observe counts operations on sandboxes: a sandbox.Host's observer (control.Observer). Operations that found
// their work done are not counted.
func (m *Metrics) Observe(ctx context.Context, _ control.OperationKind, _ string) (context.Context, func(*control.Operation)) {
	return ctx, m.note
}

func (m *Metrics) note(op *control.Operation) {
	if op.Joined() || op.Kind == control.OpExec { // the time of a command says nothing of this process
		return
	}
	kind, outcome := op.Kind, "ok"
	switch _, booted := op.Report.Stages["boot"]; {
	case op.Err != nil:
		outcome = string(fleet.CodeOf(op.Err)) // from a fixed set
	case kind == control.OpWake && booted:
		kind = control.OpStart // it had crashed
	case kind == control.OpWake:
		for stage, ms := range op.Report.Stages {
			if stages[stage] {
				m.stages.WithLabelValues(stage).Observe(ms / 1000)
			}
		}
	}
	m.operations.WithLabelValues(string(kind), outcome).Observe(op.Took.Seconds())
}

// files holds the figures from the files of the VMs, whichever process changed them.
type files struct {
	store *state.Store
	fleet *fleet.Fleet

	mu        sync.Mutex // guards what follows, and is held while the files are read
	at        time.Time
	statuses  map[records.Status]int
	snapshots map[string]int
	stored    int64
	failed    bool
}

var (
	sandboxesDesc = prometheus.NewDesc("drowse_sandboxes", "Sandboxes of the store by status.", []string{"status"}, nil)
	snapshotsDesc = prometheus.NewDesc("drowse_snapshots", "Snapshots of the store by kind.", []string{"kind"}, nil)
	storedDesc    = prometheus.NewDesc("drowse_snapshot_stored_bytes", "What no two snapshots have in common takes on disk.", nil, nil)
	readDesc      = prometheus.NewDesc("drowse_files_readable", "1 if all files that these figures are from could be read, else 0.", nil, nil)
)

// kinds are the kinds of snapshots; others count as "other".
var kinds = []string{"sleep", "named", "disk", "fork", "other"}

func (*files) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sandboxesDesc, snapshotsDesc, storedDesc, readDesc} {
		ch <- d
	}
}

func (f *files) Collect(ch chan<- prometheus.Metric) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); f.statuses == nil || now.Sub(f.at) > lookEvery {
		f.look()
		f.at = now
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, s := range records.Statuses {
		gauge(sandboxesDesc, float64(f.statuses[s]), string(s))
	}
	for _, k := range kinds {
		gauge(snapshotsDesc, float64(f.snapshots[k]), k)
	}
	gauge(storedDesc, float64(f.stored))
	readable := 1.0
	if f.failed {
		readable = 0
	}
	gauge(readDesc, readable)
}

// look reads the files. The mutex is held.
func (f *files) look() {
	f.statuses, f.snapshots, f.stored, f.failed = map[records.Status]int{}, map[string]int{}, 0, false
	ctx, cancel := context.WithTimeout(context.Background(), lookEvery)
	defer cancel()
	for after := ""; ; {
		page, err := f.fleet.List(ctx, records.Filter{After: after, Limit: records.MaxPage})
		for _, s := range page.Sandboxes {
			f.statuses[s.Status]++
		}
		f.failed = f.failed || err != nil || len(page.Problems) > 0
		if after = page.Next; err != nil || after == "" {
			break
		}
	}
	all, err := f.store.Snapshots()
	f.failed = f.failed || err != nil
	for _, s := range all {
		kind := "other"
		for _, k := range kinds {
			if s.Kind == k {
				kind = k
			}
		}
		f.snapshots[kind]++
		f.stored += s.Exclusive
	}
}
