package metrics

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Bounds of asking VMs.
const (
	// maxNetworks is the most running VMs with a network that have figures: the first by name. Each has some
	// twenty series, and is asked through its control socket.
	maxNetworks = 500
	askedAtOnce = 8
	askTime     = 2 * time.Second
)

var (
	packetsDesc = prometheus.NewDesc("drowse_network_packets_total",
		"Packets that the policy of a running sandbox has judged since its last wake, by direction (egress is out of the guest), verdict and reason.",
		[]string{"sandbox", "direction", "verdict", "reason"}, nil)
	bytesDesc = prometheus.NewDesc("drowse_network_bytes_total",
		"Bytes of the packets that the policy of a running sandbox has judged since its last wake.", []string{"sandbox", "direction", "verdict", "reason"}, nil)
	dnsDesc = prometheus.NewDesc("drowse_network_dns_queries_total",
		"Queries to the resolver of a running sandbox since its last wake, by what became of them.", []string{"sandbox", "outcome"}, nil)
	tlsDesc = prometheus.NewDesc("drowse_network_tls_connections_total",
		"Connections of a running sandbox whose names were checked since its last wake, by what became of them.", []string{"sandbox", "outcome"}, nil)
	startsDesc = prometheus.NewDesc("drowse_network_process_starts_total",
		"Starts of the network process of a running sandbox since its last wake: the first comes with the first query or connection.", []string{"sandbox"}, nil)
	endsDesc = prometheus.NewDesc("drowse_network_process_ends_total",
		"Network processes of a running sandbox that have ended untold since its last wake: refused were killed for a system call outside their list.",
		[]string{"sandbox", "reason"}, nil)
	processCPUDesc = prometheus.NewDesc("drowse_network_process_cpu_seconds_total",
		"Processor time of the network processes of a running sandbox since its last wake.", []string{"sandbox"}, nil)
	leftOutDesc = prometheus.NewDesc("drowse_network_sandboxes_left_out",
		"Running sandboxes with a network of which there are no figures: they did not answer, or there are too many.", nil, nil)
)

// network holds figures that the processes of running VMs report.
type network struct {
	list func() ([]*state.Record, error)
	ask  func(ctx context.Context, name string) (spec.NetworkStats, error)

	mu      sync.Mutex // guards what follows, and is held while VMs are asked
	at      time.Time
	stats   []spec.NetworkStats
	leftOut int
}

func (*network) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{packetsDesc, bytesDesc, dnsDesc, tlsDesc, startsDesc, endsDesc, processCPUDesc, leftOutDesc} {
		ch <- d
	}
}

func (n *network) Collect(ch chan<- prometheus.Metric) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); n.at.IsZero() || now.Sub(n.at) > lookEvery {
		n.look()
		n.at = time.Now()
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for i := range n.stats {
		s := &n.stats[i]
		for _, c := range s.Counters {
			labels := []string{s.Name, string(c.Direction), string(c.Verdict), c.Reason.String()}
			count(packetsDesc, c.Packets, labels...)
			count(bytesDesc, c.Bytes, labels...)
		}
		for outcome, v := range map[string]uint64{
			"answered": s.DNS.Answered, "refused": s.DNS.Refused, "rebound": s.DNS.Rebound, "dropped": s.DNS.Dropped, "failed": s.DNS.Failed,
		} {
			count(dnsDesc, v, s.Name, outcome)
		}
		for outcome, v := range map[string]uint64{"passed": s.TLS.Passed, "refused": s.TLS.Refused, "cut": s.TLS.Cut, "failed": s.TLS.Failed} {
			count(tlsDesc, v, s.Name, outcome)
		}
		count(startsDesc, s.Process.Starts, s.Name)
		count(endsDesc, s.Process.Refused, s.Name, "refused")
		count(endsDesc, s.Process.Failed, s.Name, "failed")
		ch <- prometheus.MustNewConstMetric(processCPUDesc, prometheus.CounterValue, s.Process.CPUSeconds, s.Name)
	}
	ch <- prometheus.MustNewConstMetric(leftOutDesc, prometheus.GaugeValue, float64(n.leftOut))
}

// look asks the VMs. The mutex is held.
func (n *network) look() {
	n.stats, n.leftOut = nil, 0
	all, err := n.list()
	if err != nil && len(all) == 0 {
		return // drowse_files_readable reports it
	}
	var names []string
	for _, r := range all {
		if r.Phase == state.Running && r.Spec.Network == spec.NetworkTAP {
			names = append(names, r.Spec.Name)
		}
	}
	slices.Sort(names)
	if len(names) > maxNetworks {
		n.leftOut = len(names) - maxNetworks
		names = names[:maxNetworks]
	}
	var group errgroup.Group
	var mu sync.Mutex // guards stats and leftOut
	group.SetLimit(askedAtOnce)
	for _, name := range names {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), askTime)
			defer cancel()
			s, err := n.ask(ctx, name)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				s.Name = name // the process also sends a name, which is not trusted as a label
				n.stats = append(n.stats, s)
			case !errors.Is(err, sandbox.ErrNotRunning) && !errors.Is(err, sandbox.ErrNotFound):
				n.leftOut++
			}
			return nil
		})
	}
	_ = group.Wait() // there is no error
}
