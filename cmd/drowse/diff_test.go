//go:build linux

package main

import (
	"encoding/json"
	"io/fs"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/api"
)

func TestDiff_lines_have_what_differs_and_nothing_that_drives_a_terminal(t *testing.T) {
	for _, c := range []struct {
		ch         guest.Change
		text, json string
	}{
		{guest.Change{Op: guest.PathAdded, Path: "/a", Mode: 0o755 | fs.ModeSetuid, Size: 5, UID: 7}, "+  file     4755      7:0             5 B  /a", `{"op":"added","path":"/a","kind":"file","mode":"4755","uid":7,"gid":0,"size":5}`},
		{guest.Change{Op: guest.PathChanged, Path: "/d", Mode: 0o700 | fs.ModeDir, Before: 0o755 | fs.ModeSymlink}, "~  dir      0700      0:0               -  /d  (was symlink 0755)", `{"op":"changed","path":"/d","kind":"dir","mode":"0700","before":"symlink 0755","uid":0,"gid":0}`},
		{guest.Change{Op: guest.PathRemoved, Path: "/x\x1b[2J\n\xff", Mode: 0o644}, `-  file     0644      0:0             0 B  "/x\x1b[2J\n\xff"`, `{"op":"removed","path":"\"/x\\x1b[2J\\n\\xff\"","kind":"file","mode":"0644","uid":0,"gid":0,"size":0}`},
	} {
		if got := diffText(api.DiffOf(c.ch)); got != c.text {
			t.Errorf("got  %q\nwant %q", got, c.text)
		}
		if got, err := json.Marshal(diffLine(api.DiffOf(c.ch))); err != nil || string(got) != c.json {
			t.Errorf("got  %s\nwant %s (%v)", got, c.json, err)
		}
	}
}

func TestAudit_of_changes_names_them_and_says_what_is_not_told(t *testing.T) {
	e := audit.Entry{Outcome: &audit.Outcome{Changes: &audit.Changes{Added: []string{"/a", "/b\x1b"}, Removed: []string{audit.PathText("/\xff")}, More: 3, Partial: "it is large"}}}
	want := "    + /a\n    + \"/b\\x1b\"\n    - \"/\\xff\"\n    ... and 3 more\n    not all is known: it is large\n"
	if got := auditChanges(e); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := auditWhat(e); !strings.Contains(got, "(2 added, 0 changed, 1 removed, 3 more, not all is known)") {
		t.Errorf("in a row: %q", got)
	}
}
