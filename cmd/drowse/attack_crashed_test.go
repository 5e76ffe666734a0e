//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestAttack_crashed_vm_is_hidden_or_shown_as_asleep(t *testing.T) {
	status := t.TempDir()
	s, err := sandbox.Open(status)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(s.State.Dir(), "vms", "a")
	record, err := json.Marshal(state.Record{
		Version: 1, ID: strings.Repeat("a", 32), Spec: sandbox.Spec{Name: "a"}, Phase: state.Crashed, Snapshot: strings.Repeat("b", 32), Problem: "its process was killed",
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vm.json"), record, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"ps", "ls", "inspect a"} {
		code, stdout, stderr := drowse(t, status, strings.Fields(line)...)
		if code != 0 || !strings.Contains(stdout, "crashed") || strings.Contains(stdout, "asleep") {
			t.Errorf("%s: exit status %d, %s%s", line, code, stdout, stderr)
		}
	}
}
