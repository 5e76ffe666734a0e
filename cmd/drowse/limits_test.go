//go:build linux

package main

import (
	"strings"
	"testing"
)

func TestLimits_of_owners_are_set_shown_and_removed(t *testing.T) {
	dir := t.TempDir()
	run := func(args string) string {
		t.Helper()
		code, stdout, stderr := drowse(t, dir, append([]string{"limits"}, strings.Fields(args)...)...)
		if code != 0 || stderr != "" {
			t.Fatalf("%s: exit status %d, stderr %q", args, code, stderr)
		}
		return stdout
	}
	run("--sandboxes 20 --awake 5")
	run("--owner= --awake 1")
	run("--owner a --disk-mib 100 --awake-mib 2048 --egress-mib 7")
	run("--owner a --awake-mib 1024") // leaves the disk
	for _, line := range []string{"each owner         20 sandboxes, 5 awake", `owner ""           1 awake`, `owner "a"          1024 MiB awake, 100 MiB of disk, 7 MiB sent a day`} {
		if got := run(""); !strings.Contains(got, line+"\n") {
			t.Errorf("no %q in\n%s", line, got)
		}
	}
	if got := run("--owner a"); !strings.Contains(got, "its awake RAM      0 of 1024 MiB\n") || !strings.Contains(got, "its sandboxes      0\n") {
		t.Error(got)
	}
	var said struct {
		Owners map[string]struct {
			Awake int `json:"awake"`
		} `json:"owners"`
		Use *struct {
			Sandboxes int `json:"sandboxes"`
		} `json:"owner_use"`
	}
	decode(t, run("--owner a --unset -o json"), &said)
	if len(said.Owners) != 1 || said.Owners[""].Awake != 1 || said.Use == nil {
		t.Errorf("%+v", said)
	}
	if got := run("--owner a"); !strings.Contains(got, "its sandboxes      0 of 20\n") {
		t.Error(got)
	}
}
