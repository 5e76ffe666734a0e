package jailproofs

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/net/tap"
)

// Each case leaves one thing. The census must find it under its kind.
func TestCensus_finds_what_is_left_of_each_kind(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making namespaces, devices and programs needs root")
	}
	process := func(t *testing.T, flags uintptr) {
		t.Helper()
		cmd := exec.Command("sh", "-c", "echo; read x")
		cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: flags}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	plant := func(t *testing.T, path string) {
		t.Helper()
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil {
			err = os.WriteFile(path, nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		kind  string
		leave func(t *testing.T, h host)
	}{
		{"processes", func(t *testing.T, _ host) { process(t, 0) }},
		{"namespaces", func(t *testing.T, _ host) { process(t, unix.CLONE_NEWUTS) }},
		{"mounts", func(t *testing.T, _ host) { process(t, unix.CLONE_NEWNS) }},
		{"links", func(t *testing.T, _ host) {
			dev, err := tap.Create("census0")
			if err != nil {
				t.Skip(err) // a host without /dev/net/tun
			}
			t.Cleanup(func() { dev.Close() })
		}},
		{"eBPF maps", func(t *testing.T, _ host) {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "census", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
			if err != nil {
				t.Skip(err) // a host that lacks bpf(2)
			}
			t.Cleanup(func() { m.Close() })
		}},
		{"files", func(t *testing.T, h host) { plant(t, filepath.Join(h.store, "vms/a/vm.json")) }},
		{"files", func(t *testing.T, h host) { plant(t, filepath.Join(h.dirs[0], "x")) }},
		{"descriptors", func(t *testing.T, _ host) {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
		}},
		{"sockets", func(t *testing.T, _ host) {
			s, err := net.Listen("unix", "@census-of-"+t.Name())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
		}},
		{"goroutines", func(t *testing.T, _ host) {
			end := make(chan struct{})
			go func() { <-end }()
			t.Cleanup(func() { close(end) })
		}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			h := host{store: t.TempDir(), dirs: []string{t.TempDir()}}
			plant(t, filepath.Join(h.store, "removed/1-a.json"))
			before, err := h.count()
			if err != nil {
				t.Fatal(err)
			}
			c.leave(t, h)
			plant(t, filepath.Join(h.store, "removed/2-a.json"))
			after, err := h.count()
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for _, line := range after.more(before) {
				// Other programs of this host come and go.
				found = found || strings.HasPrefix(line, c.kind+": ")
				if strings.Contains(line, "removed/") {
					t.Errorf("history counts: %s", line)
				}
			}
			if !found {
				t.Errorf("%s: it has found only %q", c.kind, after.more(before))
			}
		})
	}
}
