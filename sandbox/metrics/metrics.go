// Package metrics says in figures, for Prometheus, what sandboxes do: how many there are in which status, and what the
// process that serves them has done itself. docs/reference/telemetry.md has a line on each.
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

// lookEvery is for how long the figures that are read from the files are given out before they are read again, however
// often somebody asks.
const lookEvery = 15 * time.Second

// buckets of times in seconds: from 1 ms, in which a stage of a resume is done, to the minutes that a boot takes on a
// soft KVM.
var buckets = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120}

// stages are those of a resume that have a histogram: a name that is not here would be a label that somebody else
// chooses.
var stages = map[string]bool{
	"create_vm": true, "memory": true, "irqchip": true, "vcpus": true, "kvm_state": true, "prebuilt": true, "devices": true, "load": true, "import": true, "entry": true,
	"agent_reached": true, "agent_answer": true, "resume_entry": true, "resume_ready": true, "network": true,
}

// Metrics are those of one process. Its methods may be called from any goroutine. Make it with New.
type Metrics struct {
	registry   *prometheus.Registry
	operations *prometheus.HistogramVec
	stages     *prometheus.HistogramVec
}

// Store is what is asked besides VMs: OfHost. Its methods may be called from several goroutines.
type Store interface {
	Networks
	// Usage is what the store takes on disk.
	Usage(ctx context.Context) (state.Usage, error)
}

// OfHost asks a host.
func OfHost(h *sandbox.Host) Store { return hostStore{h.State, h} }

type hostStore struct {
	*state.Store
	host *sandbox.Host
}

func (s hostStore) NetworkStats(ctx context.Context, name string) (spec.NetworkStats, error) {
	return s.host.Sandbox(name).NetworkStats(ctx)
}

// New makes the metrics of a process that serves VMs. counters are those of its supervisor; store, if not nil, is asked
// what it takes on disk, and what the networks of running VMs have done.
func New(vms fleet.VMs, store Store, counters *supervisor.Counters, version string) *Metrics {
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
		m.operations, m.stages, build, &files{vms: vms},
		number("drowse_listener_connections", "Connections to published TCP ports that are carried now.", func() float64 { return float64(counters.Connections.Load()) }),
		count("drowse_listener_refused_total", "Connections to published TCP ports that found no way to their VM.", counters.Refused.Load),
		count("drowse_packet_waker_packets_held_total", "Packets to sandboxes that sleep which were kept while these woke.", counters.Held.Load),
		count("drowse_packet_waker_packets_dropped_total", "Packets to sandboxes that sleep which were let go.", counters.Dropped.Load),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	m.registry.MustRegister(pool{counters})
	if store != nil {
		m.registry.MustRegister(&network{vms: vms, ask: store}, &disk{ask: store, now: time.Now})
	}
	return m
}

// Handler answers with the metrics.
func (m *Metrics) Handler() http.Handler {
	const atOnce = 4
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: atOnce, Timeout: time.Minute})
}

// Woken notes a wake for a connection, a packet or a timer: supervisor.Options.Woken.
func (m *Metrics) Woken(_ context.Context, w supervisor.Wake) {
	if w.Err == nil && !w.Report.Begun.IsZero() && w.Report.Begun.Before(w.Begun.Round(0)) {
		return // it was awake, or was being woken for somebody else
	}
	m.observe("wake", w.Took, w.Err)
	if w.Err == nil {
		m.woken(w.Report)
	}
}

// observe notes an operation that has ended.
func (m *Metrics) observe(operation string, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = string(fleet.CodeOf(err)) // of a fixed set
	}
	m.operations.WithLabelValues(operation, outcome).Observe(took.Seconds())
}

// woken notes the stages of a wake. One that ran already has none of its own.
func (m *Metrics) woken(rep control.Report) {
	for stage, ms := range rep.Stages {
		if stages[stage] {
			m.stages.WithLabelValues(stage).Observe(ms / 1000)
		}
	}
}

// watched are VMs whose operations are noted.
type watched struct {
	fleet.VMs
	m *Metrics
}

// Watch are the VMs with what is done to them noted.
func (m *Metrics) Watch(vms fleet.VMs) fleet.VMs { return watched{vms, m} }

func (w watched) Run(ctx context.Context, spec sandbox.Spec, label state.Metadata) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.Run(ctx, spec, label)
	w.m.observe("create", time.Since(begin), err)
	return rep, err
}

func (w watched) Start(ctx context.Context, name string) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.Start(ctx, name)
	w.m.observe("start", time.Since(begin), err)
	return rep, err
}

func (w watched) Wake(ctx context.Context, name string) (control.Report, error) {
	return w.wake(ctx, name, w.VMs.Wake)
}

func (w watched) BringUp(ctx context.Context, name string) (control.Report, error) {
	return w.wake(ctx, name, w.VMs.BringUp)
}

func (w watched) wake(ctx context.Context, name string, up func(context.Context, string) (control.Report, error)) (control.Report, error) {
	r, gerr := w.Get(name)
	begin := time.Now()
	rep, err := up(ctx, name)
	if err == nil && gerr == nil && (r.Phase == state.Running || r.Phase == state.Starting) {
		return rep, nil // it was awake, and what is reported is of an earlier wake
	}
	if gerr == nil && r.Phase == state.Crashed {
		w.m.observe("start", time.Since(begin), err)
		return rep, err
	}
	w.m.observe("wake", time.Since(begin), err)
	if err == nil {
		w.m.woken(rep)
	}
	return rep, err
}

func (w watched) SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error) {
	begin := time.Now()
	res, err := w.VMs.SleepWith(ctx, name, o)
	w.m.observe("sleep", time.Since(begin), err)
	return res, err
}

func (w watched) SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error) {
	begin := time.Now()
	res, err := w.VMs.SnapshotWith(ctx, name, o)
	w.m.observe("snapshot", time.Since(begin), err)
	return res, err
}

func (w watched) Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error) {
	begin := time.Now()
	res, err := w.VMs.Fork(ctx, name, o)
	w.m.observe("fork", time.Since(begin), err)
	return res, err
}

// files are the figures that are read from the files of the VMs, whoever has changed them.
type files struct {
	vms fleet.VMs

	mu        sync.Mutex // guards what follows, and is held while they are read
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

// kinds are those of snapshots; others count as "other".
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
	fl := fleet.New(f.vms, fleet.Options{})
	for after := ""; ; {
		page, err := fl.List(ctx, records.Filter{After: after, Limit: records.MaxPage})
		for _, s := range page.Sandboxes {
			f.statuses[s.Status]++
		}
		f.failed = f.failed || err != nil || len(page.Problems) > 0
		if after = page.Next; err != nil || after == "" {
			break
		}
	}
	all, err := f.vms.Snapshots()
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
