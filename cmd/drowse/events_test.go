//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestEventsCommand(t *testing.T) {
	dir := t.TempDir()
	s, err := sandbox.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	j := s.State.Events()
	first, err := j.Append(events.Event{Type: events.Woken, Sandbox: "a", Cause: events.API, Details: events.Details{Milliseconds: 12.5}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Append(events.Event{Type: events.HookFailed, Sandbox: "b", Details: events.Details{Hook: "x\x1b[2J\ny", Problem: "exit 1"}}); err != nil {
		t.Fatal(err)
	}
	do := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"--state", dir, "events"}, args...), &out, &errs)
		return code, out.String(), errs.String()
	}
	code, out, errs := do()
	if code != 0 || strings.Count(out, "\n") != 2 || strings.Contains(out, "\x1b") || !strings.Contains(out, "sandbox.woken") || !strings.Contains(out, "12.5 ms") {
		t.Fatalf("%d %q %s", code, out, errs)
	}
	if code, out, errs := do("-o", "json", "--sandbox", "a"); code != 0 || strings.Count(out, "\n") != 1 || !strings.Contains(out, first.ID) {
		t.Fatalf("%d %q %s", code, out, errs)
	}
	if code, out, errs := do("--since", "1h", "--type", "sandbox.woken"); code != 0 || strings.Count(out, "\n") != 1 {
		t.Fatalf("%d %q %s", code, out, errs)
	}
	if code, out, errs := do("--since", time.Now().Add(time.Hour).Format(time.RFC3339)); code != 0 || out != "" {
		t.Fatalf("%d %q %s", code, out, errs)
	}
	for _, bad := range [][]string{{"--since", "yesterday"}, {"--type", "sandbox.sleept"}, {"more"}} {
		if code, _, errs := do(bad...); code != exitUsage || errs == "" {
			t.Fatalf("%v: %d %s", bad, code, errs)
		}
	}
}

func TestServe_refuses_webhooks_that_cannot_be(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, w := range map[string]webhookFlags{
		"no secret":  {url: "https://example.com/"},
		"plain http": {url: "http://example.com/", secretFile: secret},
		"no file":    {file: secret + "-none"},
		"no JSON":    {file: secret},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := w.hooks(); err == nil {
				t.Fatal("it was taken")
			}
		})
	}
	list := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(list, []byte(`[{"url":"https://a.example/","secret_file":"`+secret+`","types":["sandbox.*"]}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := (&webhookFlags{url: "https://b.example/", secretFile: secret, file: list}).hooks()
	if err != nil || len(got) != 2 || got[0].Filter.Types[0] != "sandbox.*" {
		t.Fatalf("%+v, %v", got, err)
	}
}

func TestTimerFlags(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		at, in, every string
		never         bool
		want          spec.Timer
		bad           bool
	}{
		"in ten minutes":        {in: "10m", want: spec.Timer{At: now.Add(10 * time.Minute)}},
		"at a time":             {at: "2026-02-01T00:00:00Z", want: spec.Timer{At: time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)}},
		"every day":             {every: "24h", want: spec.Timer{At: now.Add(24 * time.Hour), Every: 86400}},
		"every day, soon first": {in: "1m", every: "1d", want: spec.Timer{At: now.Add(time.Minute), Every: 86400}},
		"never":                 {never: true},
		"at and in":             {at: "2026-02-01T00:00:00Z", in: "1m", bad: true},
		"never, but in":         {in: "1m", never: true, bad: true},
		"every moment":          {every: "0s", bad: true},
		"no time":               {at: "noon", bad: true},
		"no duration":           {in: "soon", bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := timer(now, c.at, c.in, c.every, c.never)
			if (err != nil) != c.bad || err == nil && got != c.want {
				t.Fatalf("%+v, %v", got, err)
			}
		})
	}
}
