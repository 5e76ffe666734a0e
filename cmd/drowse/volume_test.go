//go:build linux

package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestVolumeCommands_make_list_resize_and_remove(t *testing.T) {
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	state := t.TempDir()
	must := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := drowse(t, state, args...)
		if code != 0 {
			t.Fatalf("%q: exit status %d: %s", args, code, stderr)
		}
		return stdout
	}
	if got := must("volume", "create", "data", "--size", "16"); got != "data\n" {
		t.Errorf("create says %q", got)
	}
	if code, _, stderr := drowse(t, state, "volume", "create", "data", "--size", "16"); code != exitFailed || !strings.Contains(stderr, "drowse volume rm data") {
		t.Errorf("a second one: exit status %d, %q", code, stderr)
	}
	var list []struct {
		Name   string
		Size   int64
		UsedBy []string `json:"used_by"`
	}
	decode(t, must("volume", "ls", "-o", "json"), &list)
	if len(list) != 1 || list[0].Name != "data" || list[0].Size != 16<<20 || list[0].UsedBy == nil {
		t.Errorf("listed as %+v", list)
	}
	if got := must("volume", "ls"); strings.Count(got, "\n") != 2 {
		t.Errorf("ls says %q", got)
	}
	var one map[string]any
	decode(t, must("volume", "inspect", "data"), &one)
	if one["name"] != "data" || one["id"] == "" {
		t.Errorf("inspected as %v", one)
	}
	if got := must("volume", "resize", "data", "20m"); got != "data\n" {
		t.Errorf("resize says %q", got)
	}
	decode(t, must("volume", "ls", "-o", "json"), &list)
	if len(list) != 1 || list[0].Size != 20<<20 {
		t.Errorf("resized to %+v", list)
	}
	for _, size := range []string{"16", "20x", "99999999999999", "-1"} {
		if code, _, stderr := drowse(t, state, "volume", "resize", "data", "--", size); code != exitUsage {
			t.Errorf("resize to %s: exit status %d: %s", size, code, stderr)
		}
	}
	must("volume", "rm", "data")
	if got := must("volume", "ls", "-o", "json"); strings.TrimSpace(got) != "[]" {
		t.Errorf("after rm: %q", got)
	}
}
