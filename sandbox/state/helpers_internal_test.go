package state

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// startingVM makes a VM in its own store. It has no process, or a made-up one.
func startingVM(t *testing.T, phase Phase, pid, maker int) *Store {
	t.Helper()
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Create(&Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: phase, PID: pid, Maker: maker})
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	return s
}

// holder starts a process that holds the lock of the VM until it is killed.
func holder(t *testing.T, s *Store) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", `exec 9>>"$0" && flock 9 && echo held && exec sleep 1000`, filepath.Join(s.VMDir("a"), "lock"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "held\n" {
		t.Fatal(line, err)
	}
	return cmd
}

// putKernel puts a kernel with a configuration into a store.
func putKernel(t *testing.T, s *Store, id string, kind kernel.Kind, config string) {
	t.Helper()
	dir := filepath.Join(s.KernelDir(), "kernels", id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(map[string]any{
		"format_version": 1, "id": id, "kind": kind, "version": "6.1", "arch": "amd64", "image": "vmlinux", "image_size": 1,
		"config": "config", "created": time.Unix(1e9, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"kernel.json": string(record), "vmlinux": "x", "config": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// remove is Remove without the report of what it freed.
func (s *Store) remove(ctx context.Context, name string, damaged bool) error {
	_, err := s.Remove(ctx, name, damaged)
	return err
}
