package pool

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// A program that stands in for a VM's process writes down its environment.
func TestAttack_process_of_a_VM_has_the_secrets_of_its_callers_environment(t *testing.T) {
	for name, value := range map[string]string{
		"OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter2", "OTEL_SERVICE_NAME": "hunter2", "TRACEPARENT": "hunter2", "TRACESTATE": "hunter2", "BAGGAGE": "hunter2",
		"AWS_SECRET_ACCESS_KEY": "hunter2", "HOME": "hunter2", "DROWSE_TOKEN": "hunter2",
		control.GoMaxProcsEnv: "7", control.RequireJailEnv: "8",
	} {
		t.Setenv(name, value)
	}
	said := filepath.Join(t.TempDir(), "said")
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nenv > "+said+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := Launcher{Command: []string{program}}
	check := func(t *testing.T) {
		t.Helper()
		text, err := os.ReadFile(said)
		if err != nil || !strings.Contains(string(text), control.GoMaxProcsEnv+"=7") ||
			!strings.Contains(string(text), control.RequireJailEnv+"=8") || strings.Contains(string(text), "hunter2") {
			t.Errorf("its environment is (%v)\n%s", err, text)
		}
		if err := os.Remove(said); err != nil {
			t.Error(err)
		}
	}
	t.Run("one that is started for it", func(t *testing.T) {
		null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer null.Close()
		p, err := startProcess(s, l, control.Order{Name: "a"}, []*os.File{null, null})
		if err != nil {
			t.Fatal(err)
		}
		p.Wait(0)
		check(t)
	})
	t.Run("one that stands by", func(t *testing.T) {
		p := &Pool{launcher: l, store: s}
		// The program is not a VM's process, and ends without reporting that it is ready.
		if _, err := p.make(t.Context(), spec.Shape{MemoryMiB: 256, VCPUs: 1}); err == nil {
			t.Error("a program that is none stands by")
		}
		check(t)
	})
}

func TestPool_counts_what_was_taken_missed_and_failed(t *testing.T) {
	p := &Pool{o: Options{Processes: 3}}
	shape := spec.Shape{MemoryMiB: 256, VCPUs: 1}
	p.ready = []*standby{{shape: shape}, {shape: shape, what: "of size 7"}}
	for n := range 3 {
		if got := p.pop(shape); (got != nil) != (n < 2) {
			t.Fatalf("of two that stood by the one at %d is %v", n, got)
		}
	}
	p.ready = []*standby{{shape: shape}}
	other := program("of size 8")
	if p.popIf(shape, &other) != nil {
		t.Fatal("one of another program was taken")
	}
	if got, want := p.Stats(), (Stats{Size: 3, Ready: 1, Taken: 2, Missed: 2}); got != want {
		t.Errorf("it says %+v, want %+v", got, want)
	}
}
