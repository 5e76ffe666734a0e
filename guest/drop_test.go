package guest_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestDrop_removes_what_was_there_at_the_look_and_leaves_what_has_come_since(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	dir := t.TempDir()
	write := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	paths := []string{dir, filepath.Join(dir, "none"), filepath.Join(dir, "old")}
	seen, err := c.Look(t.Context(), paths)
	if err != nil || len(seen) != 3 || seen[0].State != guest.DropDirectory || seen[1].State != guest.DropAbsent || seen[2].State != guest.DropFile {
		t.Fatalf("the look says %+v, %v", seen, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "old")); err != nil || v.machine.trims != 0 {
		t.Errorf("a look has changed something: %v, %d trims", err, v.machine.trims)
	}
	write("new")
	got, err := c.Drop(t.Context(), []guest.DropPath{{Path: dir, Seen: &seen[0]}}, time.Minute, true)
	if err != nil || len(got) != 1 || got[0].State != guest.DropDirectory || got[0].Entries != 1 || got[0].Kept != 1 || got[0].Bytes == 0 {
		t.Errorf("dropped %+v, %v", got, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "new" {
		t.Errorf("left are %v, %v", left, err)
	}
	if v.machine.trims != 1 {
		t.Errorf("trimmed %d times", v.machine.trims)
	}
	v.machine.trimErr = errors.New("no \x1b[31mroom")
	if _, err = c.Drop(t.Context(), nil, time.Minute, true); err == nil || strings.Contains(err.Error(), "\x1b") || !strings.Contains(err.Error(), "room") {
		t.Errorf("a trim that fails: %q", err)
	}
}

func TestDrop_answers_of_a_hostile_guest_are_refused_or_made_harmless(t *testing.T) {
	path := []guest.DropPath{{Path: "/cache"}}
	c := hostileGuest(t, response(1, &agentpb.DropResponse{}))
	if _, err := c.Drop(t.Context(), path, time.Minute, false); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("an answer about no path: %v, want ErrProtocol", err)
	}
	c = hostileGuest(t, response(1, &agentpb.DropResponse{Paths: []*agentpb.DroppedPath{{State: "directory"}}}))
	if _, err := c.Look(t.Context(), []string{"/cache"}); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("a look without a time: %v, want ErrProtocol", err)
	}
	c = hostileGuest(t, response(1, &agentpb.DropResponse{Paths: []*agentpb.DroppedPath{{State: "\x1b[2J", Problem: "\x1b" + strings.Repeat("p", 10_000)}}}))
	got, err := c.Drop(t.Context(), path, time.Minute, false)
	if err != nil || got[0].State != guest.DropOther || strings.Contains(got[0].Problem, "\x1b") || len(got[0].Problem) > 2*agentpb.MaxDropProblem {
		t.Errorf("got %+v, %v", got, err)
	}
}
