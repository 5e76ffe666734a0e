package events

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("EVENTS_TEST_WRITER"); dir != "" {
		j := Open(dir, Options{SegmentBytes: 8 << 10, Segments: 1000})
		for i := range 200 {
			if _, err := j.Append(Event{Type: Updated, Sandbox: fmt.Sprintf("p%d", os.Getpid()), Details: Details{Bytes: int64(i)}}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func mustAppend(t *testing.T, j *Journal, names ...string) []Event {
	t.Helper()
	var out []Event
	for _, n := range names {
		e, err := j.Append(Event{Type: Woken, Sandbox: n, SandboxID: "id-" + n, Cause: CLI})
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// all returns the names of sandboxes, with "lost" for lost events, and the cursor to continue from.
func all(t *testing.T, j *Journal, o ReadOptions) (names []string, next uint64) {
	t.Helper()
	next, err := j.Read(t.Context(), o, func(e Event) error {
		if e.Type == Lost {
			names = append(names, "lost")
			return nil
		}
		names = append(names, e.Sandbox)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names, next
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

func TestRead_goes_on_from_a_cursor_over_segments(t *testing.T) {
	j := Open(t.TempDir(), Options{SegmentBytes: 700, Segments: 100})
	var names []string
	for i := range 40 {
		names = append(names, fmt.Sprint("s", i))
	}
	es := mustAppend(t, j, names...)
	if segs, err := j.segments(); err != nil || len(segs) < 5 {
		t.Fatalf("%d segments, %v", len(segs), err)
	}
	for i := 1; i < len(es); i++ {
		if es[i].Cursor <= es[i-1].Cursor || es[i].Cursor >= 1<<53 {
			t.Fatalf("cursor %d after %d", es[i].Cursor, es[i-1].Cursor)
		}
	}
	got, next := all(t, j, ReadOptions{})
	want(t, got, names...)
	if newest, err := j.Newest(); err != nil || newest != next || next != es[39].Cursor {
		t.Fatalf("newest %d, next %d, last %d, %v", newest, next, es[39].Cursor, err)
	}
	for i := range es {
		got, _ := all(t, j, ReadOptions{Since: es[i].Cursor})
		want(t, got, names[i+1:]...)
	}
}

func TestA_line_that_a_killed_writer_left_is_repaired_and_nothing_before_it_is_lost(t *testing.T) {
	for _, torn := range []string{"{", `{"version":1,"cursor":`, strings.Repeat("x", 3000)} {
		j := Open(t.TempDir(), Options{})
		mustAppend(t, j, "a", "b")
		segs, _ := j.segments()
		f, err := os.OpenFile(filepath.Join(j.dir, segs[0].name), os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(torn); err != nil {
			t.Fatal(err)
		}
		f.Close()
		got, next := all(t, j, ReadOptions{})
		want(t, got, "a", "b")
		es := mustAppend(t, j, "c")
		if es[0].Cursor != next+1 {
			t.Fatalf("cursor %d after %d", es[0].Cursor, next)
		}
		got, _ = all(t, j, ReadOptions{Since: next})
		want(t, got, "c")
		data, _ := os.ReadFile(filepath.Join(j.dir, segs[0].name))
		if strings.Contains(string(data), torn+"{") || data[len(data)-1] != '\n' {
			t.Fatalf("not repaired: %q", data)
		}
	}
}

func TestDamaged_lines_are_skipped_and_cursors_go_on_after_them(t *testing.T) {
	j := Open(t.TempDir(), Options{})
	es := mustAppend(t, j, "a", "b")
	segs, _ := j.segments()
	path := filepath.Join(j.dir, segs[0].name)
	f, _ := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	_, _ = f.WriteString(strings.Repeat("\x00", 3*MaxLine) + "\nno event\n{\"cursor\":7}\n" + strings.Repeat("\x00", 3*MaxLine))
	f.Close()
	es = append(es, mustAppend(t, j, "c", "d")...)
	if es[2].Cursor != es[1].Cursor+1 {
		t.Fatalf("cursor %d after %d", es[2].Cursor, es[1].Cursor)
	}
	got, _ := all(t, j, ReadOptions{})
	want(t, got, "a", "b", "c", "d")
}

func TestA_reader_is_told_when_events_were_deleted_before_it_read_them(t *testing.T) {
	j := Open(t.TempDir(), Options{SegmentBytes: 700, Segments: 3})
	first := mustAppend(t, j, "first")[0]
	for i := range 60 {
		mustAppend(t, j, fmt.Sprint("s", i))
	}
	if segs, _ := j.segments(); len(segs) != 3 {
		t.Fatalf("%d segments are kept", len(segs))
	}
	got, _ := all(t, j, ReadOptions{Since: first.Cursor})
	if got[0] != "lost" || slices.Contains(got[1:], "lost") || got[len(got)-1] != "s59" {
		t.Fatalf("got %v", got)
	}
	// A reader without a cursor starts with the oldest event, and has lost nothing.
	if got, _ := all(t, j, ReadOptions{}); slices.Contains(got, "lost") {
		t.Fatalf("got %v", got)
	}
	// A filter does not hide the Lost event.
	got, _ = all(t, j, ReadOptions{Since: first.Cursor, Filter: Filter{Sandbox: "s59"}})
	want(t, got, "lost", "s59")
}

func TestOld_segments_are_deleted_but_the_newest_stays(t *testing.T) {
	now := time.Now()
	j := Open(t.TempDir(), Options{SegmentBytes: 300, now: func() time.Time { return now }})
	es := mustAppend(t, j, "a", "b", "c", "d")
	now = now.Add(Keep + time.Hour)
	if err := j.Trim(); err != nil {
		t.Fatal(err)
	}
	segs, _ := j.segments()
	if len(segs) != 1 {
		t.Fatalf("%d segments", len(segs))
	}
	if e := mustAppend(t, j, "e")[0]; e.Cursor <= es[3].Cursor {
		t.Fatalf("cursor %d after %d", e.Cursor, es[3].Cursor)
	}
}

func TestAfter_a_power_loss_a_cursor_is_not_given_twice(t *testing.T) {
	boot := "one"
	now := time.Unix(1_000_000, 0) // the clock stands still
	j := Open(t.TempDir(), Options{boot: func() string { return boot }, now: func() time.Time { return now }})
	es := mustAppend(t, j, "a", "b", "c")
	segs, _ := j.segments()
	path := filepath.Join(j.dir, segs[0].name)
	data, _ := os.ReadFile(path)
	lines := strings.SplitAfter(string(data), "\n")
	if err := os.WriteFile(path, []byte(strings.Join(lines[:2], "")), 0o600); err != nil { // without b and c
		t.Fatal(err)
	}
	boot = "two"
	d := mustAppend(t, j, "d")[0]
	if d.Cursor <= es[2].Cursor {
		t.Fatalf("cursor %d after %d", d.Cursor, es[2].Cursor)
	}
	got, _ := all(t, j, ReadOptions{Since: es[2].Cursor})
	want(t, got, "d")
}

func TestA_cursor_of_a_journal_that_is_gone_is_said(t *testing.T) {
	j := Open(t.TempDir(), Options{})
	last := mustAppend(t, j, "a")[0]
	var got []Event
	next, err := j.Read(t.Context(), ReadOptions{Since: last.Cursor + 100}, func(e Event) error { got = append(got, e); return nil })
	if err != nil || len(got) != 1 || got[0].Type != Lost || !got[0].Details.Reset || next != last.Cursor {
		t.Fatalf("%+v, next %d, %v", got, next, err)
	}
}

func TestWriters_of_many_processes_share_a_journal_and_a_follower_gets_all(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "events")
	j := Open(dir, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sub := j.Subscribe(ctx, ReadOptions{})
	const writers, each = 4, 200
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "EVENTS_TEST_WRITER="+dir)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	var last uint64
	of := map[string]int64{}
	for range writers * each {
		e := <-sub.C
		if e.Cursor <= last || e.Details.Bytes != of[e.Sandbox] {
			t.Fatalf("%+v after cursor %d, want number %d", e, last, of[e.Sandbox])
		}
		last = e.Cursor
		of[e.Sandbox]++
	}
	wg.Wait()
	cancel()
	if e, open := <-sub.C; open {
		t.Fatalf("one too many: %+v", e)
	}
	if !errors.Is(sub.Err(), context.Canceled) {
		t.Fatal(sub.Err())
	}
}

func TestAn_event_is_cut_to_its_bounds(t *testing.T) {
	j := Open(t.TempDir(), Options{})
	tags := make([]string, 200)
	for i := range tags {
		tags[i] = strings.Repeat("\x01", 64)
	}
	if _, err := j.Append(Event{Type: Updated, Sandbox: "a", Tags: tags, Details: Details{Problem: strings.Repeat("\xff\n", 1<<20)}}); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, j, "b")
	got, _ := all(t, j, ReadOptions{})
	want(t, got, "a", "b")
}

func TestFilters(t *testing.T) {
	e := Event{Type: Slept, Sandbox: "a", SandboxID: "1", Owner: "o", Tags: []string{"x", "y"}}
	for name, c := range map[string]struct {
		f    Filter
		want bool
	}{
		"everything":       {Filter{}, true},
		"its type":         {Filter{Types: []string{"sandbox.woken", "sandbox.slept"}}, true},
		"another type":     {Filter{Types: []string{"sandbox.woken"}}, false},
		"a family":         {Filter{Types: []string{"sandbox.*"}}, true},
		"another family":   {Filter{Types: []string{"policy.*"}}, false},
		"its name":         {Filter{Sandbox: "a"}, true},
		"its id":           {Filter{Sandbox: "1"}, true},
		"another name":     {Filter{Sandbox: "b"}, false},
		"its owner":        {Filter{Owner: "o"}, true},
		"another owner":    {Filter{Owner: "p"}, false},
		"both tags":        {Filter{Tags: []string{"x", "y"}}, true},
		"a tag it has not": {Filter{Tags: []string{"x", "z"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.f.Check(); err != nil {
				t.Fatal(err)
			}
			if got := c.f.Match(e); got != c.want {
				t.Fatalf("got %v", got)
			}
		})
	}
	if err := (Filter{Types: []string{"sandbox.sleept"}}).Check(); !errors.Is(err, ErrInvalid) {
		t.Fatal(err)
	}
}

func TestA_writer_does_not_wait_for_ever_for_a_lock(t *testing.T) {
	j := Open(t.TempDir(), Options{})
	l, err := j.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := j.Append(Event{Type: Woken}); !errors.Is(err, ErrBusy) {
		t.Fatal(err)
	}
}

func BenchmarkAppend(b *testing.B) {
	j := Open(b.TempDir(), Options{})
	for b.Loop() {
		if _, err := j.Append(Event{Type: Woken, Sandbox: "a", SandboxID: "0123456789abcdef0123456789abcdef", Cause: CLI}); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("{\"drowse_events\":1,\"boot\":\"x\",\"prev\":0}\n{\"version\":1,\"cursor\":5,\"type\":\"sandbox.woken\"}\n"))
	f.Add([]byte("\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "00000000000000000005.jsonl"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		j := Open(dir, Options{})
		newest, err := j.Newest()
		if err != nil {
			t.Fatal(err)
		}
		if newest > 1<<60 {
			t.Skip() // no journal writes such a cursor
		}
		e, err := j.Append(Event{Type: Woken, Sandbox: "after"})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		if _, err := j.Read(t.Context(), ReadOptions{}, func(got Event) error {
			if got.ID == e.ID {
				n++
			}
			return nil
		}); err != nil || n != 1 {
			t.Fatalf("found %d times, %v", n, err)
		}
	})
}
