package process

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// meteredNetwork is a network that says what its guest has sent.
type meteredNetwork struct {
	Network
	out      uint64
	policy   *netpolicy.Policy
	warnings []string
}

func (n *meteredNetwork) Bytes() (in, out uint64)                 { return 1 << 40, n.out }
func (n *meteredNetwork) SetPolicy(p *netpolicy.Policy) error     { n.policy = p; return nil }
func (n *meteredNetwork) Warn(text string)                        { n.warnings = append(n.warnings, text) }
func (n *meteredNetwork) Close() error                            { return nil }
func (n *meteredNetwork) denies(own *netpolicy.Policy) (all bool) { return n.policy != own }

type meteredMachines struct {
	Machines
	n *meteredNetwork
}

func (m meteredMachines) Network(c network.Config) (Network, error) {
	m.n.policy = c.Policy
	return m.n, nil
}

func TestEgress_of_an_owner_ends_for_the_day_in_all_its_VMs_and_is_counted_over_sleeps(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	own := &netpolicy.Policy{}
	const mib = 1 << 20
	start := func(name string) (*process, *meteredNetwork) {
		t.Helper()
		n := &meteredNetwork{}
		r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name, Network: spec.NetworkTAP, Policy: own}}
		if _, err := s.Load(name); err != nil {
			l, err := s.Create(r)
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
		}
		p := &process{store: s, r: r, machines: meteredMachines{n: n}, log: slog.New(slog.DiscardHandler)}
		if err := p.connect(ServeOptions{}); err != nil {
			t.Fatal(err)
		}
		return p, n
	}
	limit := func(mib int) {
		t.Helper()
		l := limits.Default
		l.DefaultOwner.EgressMiBPerDay = mib
		if err := l.Write(s.Dir()); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	a, an := start("a")
	an.out = 100 * mib // without a limit nothing is counted
	a.limitEgress(now)
	limit(10)
	b, bn := start("b")
	an.out, bn.out = 104*mib, 5*mib
	a.limitEgress(now)
	b.limitEgress(now)
	if an.denies(own) || bn.denies(own) {
		t.Fatal("9 of 10 MiB are too much")
	}
	bn.out += mib
	if err := b.close(); err != nil { // as in a sleep, before its next look
		t.Fatal(err)
	}
	if u, err := s.OwnerUse(t.Context(), ""); err != nil || u.EgressMiB != 10 {
		t.Errorf("%+v, %v", u, err)
	}
	a.limitEgress(now)
	if !an.denies(own) || len(an.warnings) != 1 || !strings.Contains(an.warnings[0], "10 MiB") {
		t.Errorf("10 of 10 MiB: %+v", an)
	}
	b, bn = start("b")
	if !bn.denies(own) || len(bn.warnings) != 1 {
		t.Errorf("a wake beyond the limit: %+v", bn)
	}
	limit(20)
	b.limitEgress(now)
	if bn.denies(own) {
		t.Error("the limit was raised, and it still denies everything")
	}
	bn.out = 10 * mib
	b.limitEgress(now)
	if !bn.denies(own) {
		t.Error("20 of 20 MiB are too little")
	}
	b.limitEgress(now.Add(24 * time.Hour))
	if bn.denies(own) {
		t.Error("it denies everything on the next day")
	}
}
