//go:build linux

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
)

func TestAuditRow_says_what_by_whom_and_how_it_ended(t *testing.T) {
	code, login := 3, uint32(1000)
	by := &audit.Process{PID: 42, UID: 0, Comm: "drowse", LoginUID: &login}
	begin := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.Local)
	for name, tt := range map[string]struct {
		e    audit.Entry
		want string
	}{
		"a command that failed": {
			audit.Entry{Status: audit.Ended, Begin: begin, Elapsed: 1500, By: by, Action: audit.Action{Kind: audit.KindExec, Argv: []string{"sh", "-c", "echo 'x'"}, User: "root"}, Outcome: &audit.Outcome{Exit: &code, BytesIn: 1, BytesOut: 2048}},
			`2026-01-02 03:04:05.006|1.5s|exit 3|1 B|2.0 KiB|drowse[42] uid 0 (login 1000)|root|exec sh -c 'echo '\''x'\'''`,
		},
		"what a terminal would take for a command is quoted": {
			audit.Entry{Status: audit.Running, Begin: begin, Action: audit.Action{Kind: audit.KindExec, Argv: []string{"\x1b[2J\n"}}},
			`2026-01-02 03:04:05.006|-|running|-|-|-|-|exec "\x1b[2J\n"`,
		},
		"one whose caller was killed": {
			audit.Entry{Status: audit.Unknown, Begin: begin, Action: audit.Action{Kind: audit.KindShell, Via: "ssh", Pty: true, User: "u"}},
			`2026-01-02 03:04:05.006|-|unknown|-|-|-|u|shell by ssh (terminal)`,
		},
		"a signal": {
			audit.Entry{Status: audit.Ended, Begin: begin, Action: audit.Action{Kind: audit.KindExec, Argv: []string{"a", ""}}, Outcome: &audit.Outcome{Exit: &code, ExitSignal: 9}},
			`2026-01-02 03:04:05.006|0s|signal 9|0 B|0 B|-|-|exec a ''`,
		},
		"a detached process": {
			audit.Entry{Status: audit.Ended, Begin: begin, Action: audit.Action{Kind: audit.KindExec, Argv: []string{"a"}, Detach: true}, Outcome: &audit.Outcome{Started: "job"}},
			`2026-01-02 03:04:05.006|0s|detached|0 B|0 B|-|-|exec a as job`,
		},
		"connections": {
			audit.Entry{Status: audit.Ended, Begin: begin, Action: audit.Action{Kind: audit.KindForward, Network: "tcp", Address: "127.0.0.1:80"}, Outcome: &audit.Outcome{Connections: 7}},
			`2026-01-02 03:04:05.006|0s|ok|0 B|0 B|-|-|forward tcp 127.0.0.1:80 (7 connections)`,
		},
		"a copy that failed, with the guest's words": {
			audit.Entry{Status: audit.Ended, Begin: begin, Action: audit.Action{Kind: audit.KindCopyIn, Path: "/a", HostPath: "/b c"}, Outcome: &audit.Outcome{Error: "no\x1b room"}},
			"2026-01-02 03:04:05.006|0s|failed|0 B|0 B|-|-|copy-in '/b c' /a : no\uFFFD room",
		},
		"an end without its beginning": {
			audit.Entry{Status: audit.Ended, Outcome: &audit.Outcome{Exit: &code}},
			`-|0s|exit 3|0 B|0 B|-|-|something whose beginning was dropped`,
		},
		"a damaged line": {audit.Entry{Status: audit.Damaged}, `-|-|damaged|-|-|-|-|a line of the trail cannot be read`},
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.ReplaceAll(auditRow(tt.e), "\t", "|")
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if strings.Count(got, "|") != strings.Count(auditColumns, "\t") {
				t.Errorf("%d columns", strings.Count(got, "|")+1)
			}
		})
	}
}

func TestSinceTime(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for in, want := range map[string]time.Time{
		"":                     {},
		"10m":                  now.Add(-10 * time.Minute),
		"2026-01-01T00:00:00Z": time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		if got, err := sinceTime(in, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: got %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"yesterday", "-5m", "10", "2026-01-01"} {
		if got, err := sinceTime(in, now); err == nil {
			t.Errorf("%q gives %v", in, got)
		}
	}
}
