//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// counted are networks that count at each look 100 more bytes to the guest and 10 more denied packets.
type counted struct{ looks map[string]uint64 }

func (c counted) ask(_ context.Context, name string) (spec.NetworkStats, error) {
	c.looks[name]++
	n := c.looks[name]
	return spec.NetworkStats{Counters: []netpolicy.Counter{
		{Direction: netpolicy.Ingress, Verdict: netpolicy.Allow, Count: netpolicy.Count{Packets: n, Bytes: 100 * n}},
		{Direction: netpolicy.Egress, Verdict: netpolicy.Deny, Count: netpolicy.Count{Packets: 10 * n, Bytes: 1e6 * n}},
	}}, nil
}

// numbered returns records of VMs with the given pids.
func numbered(h *sandbox.Host, pids map[string]int) func(string) (*state.Record, error) {
	return func(name string) (*state.Record, error) {
		r, err := h.State.Get(name)
		if err == nil && r.PID != 0 {
			r.PID = pids[name]
		}
		return r, err
	}
}

func TestTop_says_what_was_used_between_two_looks(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	for name, network := range map[string]string{"quiet": spec.NetworkNone, "busy": spec.NetworkTAP, "asleep": spec.NetworkNone} {
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image, Network: network}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sandbox("asleep").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	const busy = 100
	looks, clock := 0, time.Unix(1000, 0)
	top := topper{fleet: fleet.New(h, fleet.Options{}), record: numbered(h, map[string]int{"busy": busy, "quiet": 101}), network: counted{map[string]uint64{}}.ask, now: func() time.Time { return clock }}
	top.use = func(pid int) (time.Duration, int64, error) {
		if pid == busy {
			return time.Duration(looks) * time.Second, 64 << 20, nil
		}
		return time.Hour, 32 << 20, nil
	}
	first, err := top.look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range first.Sandboxes {
		if r.CPU != 0 || r.In != 0 || r.Denied != 0 {
			t.Errorf("without a look before, there is %+v", r)
		}
	}
	looks++
	clock = clock.Add(2 * time.Second)
	d, err := top.look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Sandboxes) != 2 || d.Counts["running"] != 2 || d.Counts["asleep"] != 1 || d.Ms != 2000 {
		t.Fatalf("it has seen %+v", d)
	}
	if r := d.Sandboxes[0]; r.Name != "busy" || r.CPU != 0.5 || r.Memory != 64<<20 || r.In != 50 || r.Out != 0 || r.Denied != 5 {
		t.Errorf("the busy one is %+v", r)
	}
	if r := d.Sandboxes[1]; r.Name != "quiet" || r.CPU != 0 {
		t.Errorf("the quiet one is %+v", r)
	}
	var b strings.Builder
	d.write(&b, 1)
	if text := b.String(); !strings.HasPrefix(text, "2 running, 1 asleep\n") || !strings.Contains(text, "50.0%") || strings.Contains(text, "quiet") {
		t.Errorf("it prints %q", text)
	}
	// Another process starts from zero, and one that is gone is not listed.
	top.record = numbered(h, map[string]int{"busy": busy, "quiet": 102})
	top.use = func(pid int) (time.Duration, int64, error) {
		if pid == busy {
			return 0, 0, os.ErrNotExist
		}
		return 2 * time.Hour, 0, nil
	}
	clock = clock.Add(time.Second)
	if d, err = top.look(t.Context()); err != nil || len(d.Sandboxes) != 1 || d.Sandboxes[0].CPU != 0 {
		t.Errorf("it has seen %+v, %v", d, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := top.run(ctx, time.Hour, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("called off, it says %v", err)
	}
}

func TestProcessUse_is_that_of_proc(t *testing.T) {
	for begin := time.Now(); time.Since(begin) < 50*time.Millisecond; {
		_ = strings.Repeat("x", 100)
	}
	cpu, memory, err := processUse(os.Getpid())
	if err != nil || cpu <= 0 || cpu > time.Hour || memory < 1<<20 || memory > 16<<30 {
		t.Errorf("this process has used %v and %d bytes: %v", cpu, memory, err)
	}
	if _, _, err := processUse(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of no process it says %v", err)
	}
}
