package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// Bounds of measuring what a store takes on disk, which is a call for each file.
const (
	// weighEvery is how long figures are reused at least. If a measurement takes long, they are reused for
	// weighPart times as long.
	weighEvery = time.Minute
	weighPart  = 20
	// weighTime bounds one measurement. A longer one leaves the figures unchanged, and drowse_store_bytes_readable
	// reports that.
	weighTime = 10 * time.Second
	// maxQuotas is the most sandboxes with a disk quota that have figures.
	maxQuotas = 10_000
)

var (
	storeBytesDesc = prometheus.NewDesc("drowse_store_bytes",
		"What the store takes on disk: layers of disks, snapshots that sandboxes come back from, others that are kept, images, decompressed pages, volumes.",
		[]string{"kind"}, nil)
	quotaDesc     = prometheus.NewDesc("drowse_sandbox_disk_quota_bytes", "The disk quota of a sandbox that has one.", []string{"sandbox"}, nil)
	quotaUsedDesc = prometheus.NewDesc("drowse_sandbox_disk_used_bytes", "What a sandbox with a disk quota has made the host store, as that counts.", []string{"sandbox"}, nil)
	storeReadDesc = prometheus.NewDesc("drowse_store_bytes_readable", "1 if drowse_store_bytes is of the last look, and 0 if that failed and it is of an earlier one.", nil, nil)
)

// disk holds the figures of what a store takes, as of the last measurement.
type disk struct {
	ask    func(ctx context.Context) (state.Usage, error)
	quotas func(ctx context.Context) ([]state.QuotaUse, error)
	now    func() time.Time

	mu     sync.Mutex // guards what follows, and is held during a measurement
	next   time.Time
	usage  state.Usage
	used   []state.QuotaUse
	known  bool
	failed bool
}

func (*disk) Describe(ch chan<- *prometheus.Desc) {
	ch <- storeBytesDesc
	ch <- storeReadDesc
	ch <- quotaDesc
	ch <- quotaUsedDesc
}

func (d *disk) Collect(ch chan<- prometheus.Metric) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if begin := d.now(); !begin.Before(d.next) {
		d.look()
		took := d.now().Sub(begin)
		d.next = begin.Add(max(weighEvery, weighPart*took))
	}
	readable := 1.0
	if d.failed {
		readable = 0
	}
	ch <- prometheus.MustNewConstMetric(storeReadDesc, prometheus.GaugeValue, readable)
	if !d.known {
		return
	}
	for _, u := range d.used {
		ch <- prometheus.MustNewConstMetric(quotaDesc, prometheus.GaugeValue, float64(u.Quota), u.Name)
		ch <- prometheus.MustNewConstMetric(quotaUsedDesc, prometheus.GaugeValue, float64(u.Used), u.Name)
	}
	for kind, n := range map[string]int64{
		"layers": d.usage.Layers, "snapshots": d.usage.Snapshots, "kept": d.usage.Kept, "images": d.usage.Images, "pages": d.usage.Pages, "volumes": d.usage.Volumes,
	} {
		ch <- prometheus.MustNewConstMetric(storeBytesDesc, prometheus.GaugeValue, float64(n), kind)
	}
}

// look asks the store. The mutex is held.
func (d *disk) look() {
	ctx, cancel := context.WithTimeout(context.Background(), weighTime)
	defer cancel()
	u, err := d.ask(ctx)
	var used []state.QuotaUse
	if err == nil {
		used, err = d.quotas(ctx)
	}
	if d.failed = err != nil; !d.failed {
		used = used[:min(len(used), maxQuotas)]
		d.usage, d.used, d.known = u, used, true
	}
}

var (
	poolSizeDesc   = prometheus.NewDesc("drowse_pool_size", "Processes that the pool is to keep ready.", nil, nil)
	poolReadyDesc  = prometheus.NewDesc("drowse_pool_ready", "Processes of the pool that stand by.", nil, nil)
	poolTakenDesc  = prometheus.NewDesc("drowse_pool_taken_total", "Processes of the pool that became those of VMs that were woken, restored or forked.", nil, nil)
	poolMissedDesc = prometheus.NewDesc("drowse_pool_missed_total", "How often the pool had no process for such a VM.", nil, nil)
	poolFailedDesc = prometheus.NewDesc("drowse_pool_failed_total", "How often a process of the pool could not be made, or ended while it stood by.", nil, nil)
)

// pool collects the figures of a supervisor's pool, if there is one.
type pool struct{ counters *supervisor.Counters }

func (pool) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{poolSizeDesc, poolReadyDesc, poolTakenDesc, poolMissedDesc, poolFailedDesc} {
		ch <- d
	}
}

func (p pool) Collect(ch chan<- prometheus.Metric) {
	s, ok := p.counters.Pool()
	if !ok {
		return
	}
	ch <- prometheus.MustNewConstMetric(poolSizeDesc, prometheus.GaugeValue, float64(s.Size))
	ch <- prometheus.MustNewConstMetric(poolReadyDesc, prometheus.GaugeValue, float64(s.Ready))
	ch <- prometheus.MustNewConstMetric(poolTakenDesc, prometheus.CounterValue, float64(s.Taken))
	ch <- prometheus.MustNewConstMetric(poolMissedDesc, prometheus.CounterValue, float64(s.Missed))
	ch <- prometheus.MustNewConstMetric(poolFailedDesc, prometheus.CounterValue, float64(s.Failed))
}
