package hosthooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/events"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is one with an empty directory of hooks.
func store(t *testing.T) Dir {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	for _, d := range []string{dir, filepath.Join(dir, DirName)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return In(dir)
}

func put(t *testing.T, d Dir, name, text string, mode os.FileMode) {
	t.Helper()
	path := d.program(name)
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

// script puts a hook.
func script(t *testing.T, d Dir, name, text string) {
	t.Helper()
	put(t, d, name, "#!/bin/sh\n"+text+"\n", 0o755)
}

// patient are the hooks with more time than a test takes.
func patient(t *testing.T, d Dir, funcs ...Func) Hooks {
	t.Helper()
	h, err := Find(d, funcs)
	if err != nil {
		t.Fatal(err)
	}
	h.each, h.limit = time.Hour, time.Hour
	return h
}

func TestLook(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("giving files to others needs root")
	}
	hook := func(t *testing.T, d Dir) { script(t, d, "a", "") }
	for name, c := range map[string]struct {
		with  func(t *testing.T, d Dir)
		hooks []string
		left  []string
		fails string
	}{
		"an empty directory is none":             {with: func(*testing.T, Dir) {}},
		"no directory is none":                   {with: func(_ *testing.T, d Dir) { os.Remove(d.path) }},
		"hooks come by name":                     {with: func(t *testing.T, d Dir) { script(t, d, "b", ""); script(t, d, "10-a", ""); script(t, d, "B", "") }, hooks: []string{"10-a", "B", "b"}},
		"hidden files and backups are no hooks":  {with: func(t *testing.T, d Dir) { hook(t, d); put(t, d, ".x", "", 0o777); put(t, d, "a~", "", 0o777) }, hooks: []string{"a"}},
		"what cannot be executed is left out":    {with: func(t *testing.T, d Dir) { hook(t, d); put(t, d, "README", "", 0o644) }, hooks: []string{"a"}, left: []string{"README"}},
		"a link is refused":                      {with: func(_ *testing.T, d Dir) { os.Symlink("/bin/true", d.program("a")) }, fails: "a: it is not run: it is no regular file"},
		"a directory is refused":                 {with: func(_ *testing.T, d Dir) { os.Mkdir(d.program("a"), 0o700) }, fails: "no regular file"},
		"a pipe is refused":                      {with: func(_ *testing.T, d Dir) { unix.Mkfifo(d.program("a"), 0o700) }, fails: "no regular file"},
		"a hook that its group may write":        {with: func(t *testing.T, d Dir) { put(t, d, "a", "", 0o775) }, fails: "others may write to it (mode 0775)"},
		"a hook that all may write":              {with: func(t *testing.T, d Dir) { put(t, d, "a", "", 0o757) }, fails: "mode 0757"},
		"a file that all may write":              {with: func(t *testing.T, d Dir) { put(t, d, "a", "", 0o666) }, fails: "mode 0666"},
		"a hook of somebody else":                {with: func(t *testing.T, d Dir) { hook(t, d); os.Chown(d.program("a"), 4242, 0) }, fails: "it belongs to user 4242"},
		"one of the user that runs it":           {with: func(t *testing.T, d Dir) { hook(t, d); os.Chown(d.program("a"), 0, 4242) }, hooks: []string{"a"}},
		"a directory of somebody else":           {with: func(t *testing.T, d Dir) { hook(t, d); os.Chown(d.path, 4242, 0) }, fails: "hooks.d: it is not run: it belongs to user 4242"},
		"a directory that its group may write":   {with: func(t *testing.T, d Dir) { hook(t, d); os.Chmod(d.path, 0o770) }, fails: "mode 0770"},
		"a store of somebody else":               {with: func(t *testing.T, d Dir) { hook(t, d); os.Chown(d.store, 4242, 0) }, fails: "belongs to user 4242"},
		"a store that all may write":             {with: func(t *testing.T, d Dir) { hook(t, d); os.Chmod(d.store, 0o777|os.ModeSticky) }, fails: "mode 1777"},
		"a link to a directory":                  {with: func(_ *testing.T, d Dir) { os.Rename(d.path, d.path+"2"); os.Symlink(d.path+"2", d.path) }, fails: "it is no directory"},
		"a file in place of the directory":       {with: func(_ *testing.T, d Dir) { os.Remove(d.path); os.WriteFile(d.path, nil, 0o755) }, fails: "it is no directory"},
		"64 hooks are run":                       {with: func(t *testing.T, d Dir) { many(t, d, MaxHooks) }, hooks: numbered(MaxHooks)},
		"65 are not":                             {with: func(t *testing.T, d Dir) { many(t, d, MaxHooks+1) }, fails: "has 65 hooks, and at most 64 are run"},
		"1024 files are looked at":               {with: func(_ *testing.T, d Dir) { hidden(d, maxNames) }},
		"more are not, whatever they are called": {with: func(_ *testing.T, d Dir) { hidden(d, maxNames+1) }, fails: "more than 1024 files"},
	} {
		t.Run(name, func(t *testing.T) {
			d := store(t)
			c.with(t, d)
			found, err := d.Look()
			if c.fails != "" {
				if err == nil || !strings.Contains(err.Error(), c.fails) || len(found.Hooks) > 0 {
					t.Fatalf("found %v, %v; want an error with %q and nothing", found, err, c.fails)
				}
				return
			}
			if err != nil || !slices.Equal(found.Hooks, c.hooks) || !slices.Equal(found.LeftOut, c.left) {
				t.Fatalf("found %v, %v; want %v, left out %v", found, err, c.hooks, c.left)
			}
		})
	}
}

func numbered(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("%04d", i))
	}
	return names
}

func many(t *testing.T, d Dir, n int) {
	t.Helper()
	for _, name := range numbered(n) {
		put(t, d, name, "", 0o755)
	}
}

func hidden(d Dir, n int) {
	os.WriteFile(d.store+"/x", nil, 0o600)
	for _, name := range numbered(n) {
		os.Link(d.store+"/x", d.program("."+name))
	}
}

// What a hook finds is what is documented, and nothing of this process's.
func TestA_program_gets_the_event_and_little_else(t *testing.T) {
	d := store(t)
	t.Setenv("SECRET_OF_THE_HOST", "x")
	// What the process of a VM does first thing; what whoever runs this test has left open does not count.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	got := filepath.Join(d.store, "got")
	script(t, d, "a", `exec >"$DROWSE_STATE/got"; echo "$# $1"; pwd; env -u PWD -u _ -u SHLVL -u OLDPWD | sort; ls /proc/self/fd | tr '\n' ' '; echo; cat`)
	e := events.Event{
		Version: 1, Cursor: 7, ID: "id", Time: time.Unix(1, 0).UTC(), Type: events.Removed, Sandbox: "b'x; $(reboot)", SandboxID: "90f2", Owner: "o\n\"",
		Tags: []string{"t"}, Cause: events.CLI, Details: events.Details{Bytes: 5},
	}
	if failures := patient(t, d).After(t.Context(), e); len(failures) > 0 {
		t.Fatal(failures)
	}
	data, err := os.ReadFile(got)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"1 remove", "/", "DROWSE_SANDBOX=" + e.Sandbox, "DROWSE_SANDBOX_ID=90f2", "DROWSE_STATE=" + d.store, "HOME=/", "LANG=C.UTF-8", "PATH=" + hookPath, "0 1 2 3 ", "",
	}, "\n")
	text, isThat := strings.CutPrefix(string(data), want)
	if !isThat {
		t.Fatalf("the hook got\n%s\nwant it to begin with\n%s", data, want)
	}
	var back events.Event
	if err := json.Unmarshal([]byte(text), &back); err != nil || strings.Count(text, "\n") != 1 {
		t.Fatalf("%v: %q", err, text)
	}
	if again, _ := json.Marshal(back); string(again)+"\n" != text || back.Sandbox != e.Sandbox || back.Owner != e.Owner || back.Cursor != 7 {
		t.Fatalf("the event came as %s", text)
	}
}

func TestFailures_of_programs_are_said(t *testing.T) {
	for name, c := range map[string]struct {
		text, problem, output string
		mode                  os.FileMode
	}{
		"success":                        {text: "#!/bin/sh\necho fine"},
		"its input is not read":          {text: "#!/bin/sh\nexec <&-\nexit 0"},
		"an exit status, with its words": {text: "#!/bin/sh\necho out; echo err >&2; exit 3", problem: "exit status 3", output: "out err"},
		"a signal":                       {text: "#!/bin/sh\nkill -9 $$", problem: "ended by signal 9"},
		"no program":                     {text: "neither", problem: "starting it: ", output: ""},
		"an interpreter that is missing": {text: "#!/nonexistent\n", problem: "starting it: "},
		"much output: its end":           {text: "#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x; echo the end; exit 1", problem: "exit status 1", output: "the end"},
		"output that drives a terminal":  {text: "#!/bin/sh\nprintf '\\033[2J\\377\\n\\nx'; exit 1", problem: "exit status 1", output: "?[2J?  x"},
		"others keep its output":         {text: "#!/bin/sh\nsleep 1000 & echo $! >\"$DROWSE_STATE/pid\""},
	} {
		t.Run(name, func(t *testing.T) {
			d := store(t)
			put(t, d, "a", c.text, 0o755)
			failures := patient(t, d).After(t.Context(), events.Event{Type: events.Woken})
			if pid, err := os.ReadFile(filepath.Join(d.store, "pid")); err == nil {
				n, _ := strconv.Atoi(strings.TrimSpace(string(pid)))
				if unix.Kill(n, unix.SIGKILL) != nil {
					t.Error("what a hook has left in the background is gone")
				}
			}
			if c.problem == "" {
				if len(failures) > 0 {
					t.Fatal(failures)
				}
				return
			}
			if len(failures) != 1 {
				t.Fatal(failures)
			}
			f := failures[0]
			if f.Name != "a" || f.Event != Wake || !strings.HasPrefix(f.Problem, c.problem) || !strings.HasSuffix(f.Output, c.output) || len(f.Output) > MaxOutput {
				t.Fatalf("got %q, output %q; want %q, %q", f.Problem, f.Output, c.problem, c.output)
			}
		})
	}
}

func TestA_late_program_is_killed_with_its_group(t *testing.T) {
	d := store(t)
	script(t, d, "a", `echo waiting; sleep 1000 & echo $! >"$DROWSE_STATE/pid.new"; mv "$DROWSE_STATE/pid.new" "$DROWSE_STATE/pid"; sleep 1000`)
	h := patient(t, d)
	// Its time is up when it is known to run.
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var pid int
	go func() {
		for {
			data, err := os.ReadFile(filepath.Join(d.store, "pid"))
			if err == nil {
				pid, _ = strconv.Atoi(strings.TrimSpace(string(data)))
				cancel(errors.New("not done within a test"))
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	failures := h.After(ctx, events.Event{Type: events.Created})
	if len(failures) != 1 || failures[0].Problem != "not done within a test: killed" || failures[0].Output != "waiting" {
		t.Fatal(failures)
	}
	for unix.Kill(pid, 0) == nil && !zombie(pid) {
		time.Sleep(time.Millisecond)
	}
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestTimes_are_bounded(t *testing.T) {
	d := store(t)
	script(t, d, "a", "sleep 1000")
	h := patient(t, d)
	h.each = 10 * time.Millisecond
	if f := h.After(t.Context(), events.Event{Type: events.Forked}); len(f) != 1 || f[0].Problem != "not done within 10ms: killed" {
		t.Fatal(f)
	}
	script(t, d, "b", "sleep 1000")
	h = patient(t, d)
	h.limit = 10 * time.Millisecond
	f := h.After(t.Context(), events.Event{Type: events.Forked})
	if len(f) != 2 || f[0].Problem != "the 10ms for all hooks are over: killed" || f[1].Problem != "not run: the 10ms for all hooks are over" {
		t.Fatal(f)
	}
}

// notes has hooks that note what they are told, and one of them fail.
func notes(t *testing.T, d Dir, fails string, names ...string) (read func() string) {
	t.Helper()
	for _, name := range names {
		script(t, d, name, `echo `+name+` $1 >>"$DROWSE_STATE/notes"; [ $1 != "`+fails+`" ] || [ `+name+` != b ]`)
	}
	return func() string {
		path := filepath.Join(d.store, "notes")
		data, _ := os.ReadFile(path)
		os.Remove(path)
		return strings.ReplaceAll(strings.TrimSpace(string(data)), "\n", ", ")
	}
}

func TestBefore_ends_with_the_first_failure_and_tells_those_that_were_started(t *testing.T) {
	d := store(t)
	read := notes(t, d, Sleep, "a", "b", "c")
	h := patient(t, d)
	started, failures := h.Before(t.Context(), events.Event{Type: events.Sleeping}, false)
	if got := read(); got != "a sleep, b sleep" || len(failures) != 1 || failures[0].Name != "b" || failures[0].Event != Sleep {
		t.Fatalf("%s; %v", got, failures)
	}
	if failures := started.After(t.Context(), events.Event{Type: events.SleepFailed}); len(failures) > 0 {
		t.Fatal(failures)
	}
	if got := read(); got != "b wake, a wake" {
		t.Fatal(got)
	}
	started, failures = h.Before(t.Context(), events.Event{Type: events.Sleeping}, true)
	if got := read(); got != "a sleep, b sleep, c sleep" || len(failures) != 1 || started.None() {
		t.Fatalf("%s; %v", got, failures)
	}
	started.After(t.Context(), events.Event{Type: events.SleepFailed})
	if got := read(); got != "c wake, b wake, a wake" {
		t.Fatal(got)
	}
}

func TestAfter_runs_all_in_their_order(t *testing.T) {
	d := store(t)
	read := notes(t, d, Wake, "a", "b", "c")
	for typ, want := range map[events.Type]string{
		events.Created: "a create, b create, c create",
		events.Woken:   "c wake, b wake, a wake", // b fails
		events.Forked:  "a fork, b fork, c fork",
		events.Expired: "a expire, b expire, c expire",
		events.Removed: "c remove, b remove, a remove",
	} {
		failures := patient(t, d).After(t.Context(), events.Event{Type: typ})
		if got := read(); got != want || len(failures) != map[bool]int{true: 1}[typ == events.Woken] {
			t.Errorf("%s: %s; %v", typ, got, failures)
		}
	}
}

func TestWhat_changes_after_it_was_found_is_not_run(t *testing.T) {
	d := store(t)
	read := notes(t, d, "", "a", "b", "c")
	h := patient(t, d)
	if err := errors.Join(os.Chmod(d.program("a"), 0o777), os.Chmod(d.program("b"), 0o644), os.Remove(d.program("c"))); err != nil {
		t.Fatal(err)
	}
	failures := h.After(t.Context(), events.Event{Type: events.Created})
	if got := read(); got != "" || len(failures) != 3 {
		t.Fatalf("%s; %v", got, failures)
	}
}

func TestFunctions(t *testing.T) {
	before := killTime
	killTime = 10 * time.Millisecond
	t.Cleanup(func() { killTime = before })
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	for name, c := range map[string]struct {
		run     func(ctx context.Context, e events.Event) error
		problem string
	}{
		"it succeeds":       {run: func(context.Context, events.Event) error { return nil }},
		"it fails":          {run: func(context.Context, events.Event) error { return errors.New("no") }, problem: "it has failed: no"},
		"it panics":         {run: func(context.Context, events.Event) error { panic("oh") }, problem: "it has panicked: oh"},
		"it is none":        {problem: "it has panicked: runtime error: invalid memory address or nil pointer dereference"},
		"its goroutine":     {run: func(context.Context, events.Event) error { runtime.Goexit(); return nil }, problem: "it has ended its goroutine"},
		"it is late":        {run: func(ctx context.Context, _ events.Event) error { <-ctx.Done(); return nil }, problem: "not done within 10ms"},
		"it never returns":  {run: func(context.Context, events.Event) error { <-release; return nil }, problem: "not done within 10ms, and has not returned"},
		"it gets the event": {run: func(_ context.Context, e events.Event) error { return errors.New(e.Sandbox) }, problem: "it has failed: box"},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := Find(In(t.TempDir()), []Func{{Name: "f", Run: c.run}})
			if err != nil {
				t.Fatal(err)
			}
			h.each, h.limit = time.Hour, time.Hour
			if strings.Contains(c.problem, "10ms") {
				h.each = 10 * time.Millisecond
			}
			_, failures := h.Before(t.Context(), events.Event{Type: events.Sleeping, Sandbox: "box"}, false)
			switch {
			case c.problem == "" && len(failures) == 0:
			case len(failures) != 1 || failures[0] != report.HookFailure{Name: "f", Event: Sleep, Problem: c.problem}:
				t.Fatalf("%+v, want %q", failures, c.problem)
			}
		})
	}
}

func TestFunctions_come_before_programs_and_stay_when_those_are_refused(t *testing.T) {
	d := store(t)
	read := notes(t, d, "", "a")
	note := Func{"f", func(context.Context, events.Event) error {
		f, err := os.OpenFile(filepath.Join(d.store, "notes"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = f.WriteString("f\n")
		return errors.Join(err, f.Close())
	}}
	h := patient(t, d, note)
	h.After(t.Context(), events.Event{Type: events.Created})
	if got := read(); got != "f, a create" {
		t.Fatal(got)
	}
	h.After(t.Context(), events.Event{Type: events.Removed})
	if got := read(); got != "a remove, f" {
		t.Fatal(got)
	}
	if err := os.Chmod(d.program("a"), 0o777); err != nil {
		t.Fatal(err)
	}
	h, err := Find(d, []Func{note})
	if !errors.Is(err, ErrUnsafe) {
		t.Fatal(err)
	}
	h.After(t.Context(), events.Event{Type: events.Created})
	if got := read(); got != "f" {
		t.Fatal(got)
	}
}

func BenchmarkFindNone(b *testing.B) {
	d := In(b.TempDir())
	for b.Loop() {
		if h, err := Find(d, nil); err != nil || !h.None() {
			b.Fatal(err)
		}
	}
}
