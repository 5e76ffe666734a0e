package sandbox_test

import (
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// statsOfAGuest checks the stats of a clone with one vCPU and 256 MiB that has woken from a snapshot.
func statsOfAGuest(t *testing.T, e *guesttest.Env, name string) {
	r, err := e.Store.State.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	st, err := e.Store.Sandbox(name).Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	h, g := st.Host, st.Guest
	if st.Name != name || h.PID != r.PID || h.AwakeMs <= 0 || h.CPUUserMs+h.CPUSystemMs <= 0 || h.MemoryPrivate == 0 || h.Faults == 0 || h.MiBTouched <= 0 || h.Hung {
		t.Errorf("the host has %+v", st)
	}
	if g == nil {
		t.Fatalf("the guest says nothing: %s", st.Problem)
	}
	t.Logf("host %+v, guest %+v", h, *g)
	if g.UptimeMs <= 0 || g.CPUs != 1 || g.CPU.User+g.CPU.System <= 0 || g.Tasks == 0 || g.Forks == 0 || g.OOMKills != 0 {
		t.Errorf("the guest has %+v", g)
	}
	if m := g.Memory; m.Total < 128<<20 || m.Total > 256<<20 || m.Free == 0 || m.Free > m.Total || m.Available == 0 {
		t.Errorf("its memory is %+v", m)
	}
	if len(g.FileSystems) == 0 || g.FileSystems[0].Path != "/" || g.FileSystems[0].Size == 0 || g.FileSystems[0].Free == 0 {
		t.Errorf("its file systems are %+v", g.FileSystems)
	}
	var read uint64
	for _, d := range g.Disks {
		read += d.ReadBytes
	}
	if len(g.Disks) < 2 || read == 0 {
		t.Errorf("its disks are %+v", g.Disks)
	}
	// The earlier forwards went through the guest's loopback.
	if len(g.Interfaces) == 0 || g.Interfaces[0].Name != "lo" || g.Interfaces[0].ReceivedBytes == 0 {
		t.Errorf("its interfaces are %+v", g.Interfaces)
	}
	diskOfAGuest(t, e, name)
	again, err := e.Store.Sandbox(name).Stats(t.Context())
	if err != nil || again.Guest == nil || again.Guest.Forks <= g.Forks || again.Guest.UptimeMs <= g.UptimeMs || again.Host.CPUUserMs < h.CPUUserMs {
		t.Errorf("after a command: %+v, %v", again, err)
	}
}
