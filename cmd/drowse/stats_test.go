//go:build linux

package main

import (
	"math"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestWriteVMStats_prints_what_there_is(t *testing.T) {
	st := sandbox.Stats{Name: "vm", Host: spec.HostStats{PID: 42, AwakeMs: 90_000, CPUUserMs: 1500, MemoryPrivate: 3 << 20}}
	var b strings.Builder
	writeVMStats(&b, st)
	if got := b.String(); !strings.Contains(got, "pid 42, for 1m30s, processor 1.5s user") || !strings.Contains(got, "3.0 MiB private") || strings.Contains(got, "guest") || strings.Contains(got, "came back") {
		t.Errorf("without the guest: %s", got)
	}
	st.Host.Faults = 7
	st.Guest = &guest.Stats{
		CPUs: 2, Load1: 0.5, OOMKills: 3, Memory: guest.MemoryUse{Total: math.MaxUint64},
		// The numbers of a lying guest make no sense, but do no harm.
		FileSystems: []guest.FileSystem{{Path: "/", Type: "overlay", Size: 1 << 20, Free: 1 << 30}},
		Disks:       []guest.Disk{{Name: "vda", ReadBytes: 2 << 10}},
		Interfaces:  []guest.Interface{{Name: "eth0", SentDropped: 9}},
	}
	b.Reset()
	writeVMStats(&b, st)
	for _, want := range []string{"7 page faults", "2 CPUs, load 0.50", "3 killed for want of memory", "overlay  1.0 MiB  0 B", "vda", "2.0 KiB", "eth0"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in %s", want, b.String())
		}
	}
}
