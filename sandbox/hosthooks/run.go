package hosthooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/events"
)

// Words that tell hooks what they run for: their only argument.
const (
	Create = "create"
	Sleep  = "sleep"
	Wake   = "wake"
	Fork   = "fork"
	Expire = "expire"
	Remove = "remove"
)

// Word returns the word for a type of event; empty if hooks do not run for it.
func Word(t events.Type) string {
	switch t {
	case events.Created:
		return Create
	case events.Sleeping:
		return Sleep
	case events.Woken, events.SleepFailed:
		return Wake
	case events.Forked:
		return Fork
	case events.Expired:
		return Expire
	case events.Removed:
		return Remove
	}
	return ""
}

// backwards reports whether hooks run in reverse order, so that what was stopped last starts first.
func backwards(word string) bool { return word == Wake || word == Remove }

// Bounds of hooks.
const (
	// DefaultEach is the time for one hook, and DefaultAll for all hooks of one event together.
	DefaultEach = 10 * time.Second
	DefaultAll  = 30 * time.Second
	// MaxOutput is how many bytes at the end of a hook's output are kept.
	MaxOutput = 1 << 10
	// maxProblem is the most bytes of a failure's description.
	maxProblem = 1 << 10
)

// Func is a hook that is a function of the program.
type Func struct {
	// Name is the function's name in reports.
	Name string
	// Run gets the events that hooks run for: events.Created, Sleeping, Woken, SleepFailed, Forked, Expired and
	// Removed. It must return when ctx ends, and may be called from several goroutines, for different sandboxes at
	// once. An error refuses a sleep; for other events it is reported. A function that panics has failed. One that
	// does not return has failed as well, and is left behind.
	Run func(ctx context.Context, e events.Event) error
}

// Hooks are the hooks found at one time.
type Hooks struct {
	all []hook
	// each and limit are the times for one hook and for all.
	each, limit time.Duration
}

// hook is a function or an executable.
type hook struct {
	name string
	run  func(ctx context.Context, c call) (problem, output string)
}

// call is what a hook gets.
type call struct {
	word  string
	event events.Event
	input []byte // the event
	env   []string
}

// None reports whether there are no hooks.
func (h Hooks) None() bool { return len(h.all) == 0 }

// Find returns the functions, followed by the hooks of a directory.
func Find(d Dir, funcs []Func) (Hooks, error) {
	h := Hooks{each: DefaultEach, limit: DefaultAll}
	for _, f := range funcs {
		h.all = append(h.all, hook{f.Name, f.call})
	}
	found, err := d.Look()
	for _, name := range found.Hooks {
		h.all = append(h.all, hook{name, func(ctx context.Context, c call) (problem, output string) { return d.run(ctx, name, c) }})
	}
	return h, err
}

// Before runs the hooks before something happens. The first failure ends it, unless ignore is set. It returns the
// hooks that it started, which the caller must tell if the thing does not happen, and the failures.
func (h Hooks) Before(ctx context.Context, e events.Event, ignore bool) (started Hooks, failures []report.HookFailure) {
	return h.tell(ctx, e, func() bool { return !ignore })
}

// After runs all hooks after something happened, whatever fails.
func (h Hooks) After(ctx context.Context, e events.Event) []report.HookFailure {
	_, failures := h.tell(ctx, e, func() bool { return false })
	return failures
}

func (h Hooks) tell(ctx context.Context, e events.Event, stop func() bool) (started Hooks, failures []report.HookFailure) {
	started = Hooks{each: h.each, limit: h.limit}
	if h.None() {
		return started, nil
	}
	word := Word(e.Type)
	fail := func(name, problem, output string) {
		failures = append(failures, report.HookFailure{Name: name, Event: report.HookEvent(word), Problem: line(problem, maxProblem), Output: line(output, MaxOutput)})
	}
	input, err := json.Marshal(e)
	if err != nil {
		fail("*", err.Error(), "")
		return started, failures
	}
	c := call{word: word, event: e, input: append(input, '\n'), env: []string{"DROWSE_SANDBOX=" + e.Sandbox, "DROWSE_SANDBOX_ID=" + e.SandboxID}}
	ctx, cancel := context.WithTimeoutCause(ctx, h.limit, fmt.Errorf("the %v for all hooks are over", h.limit))
	defer cancel()
	all := h.all
	if backwards(word) {
		all = slices.Clone(all)
		slices.Reverse(all)
	}
	for _, one := range all {
		if ctx.Err() != nil {
			fail(one.name, "not run: "+context.Cause(ctx).Error(), "")
		} else {
			started.all = append(started.all, one)
			limited, done := context.WithTimeoutCause(ctx, h.each, fmt.Errorf("not done within %v", h.each))
			problem, output := one.run(limited, c)
			done()
			if problem == "" {
				continue
			}
			fail(one.name, problem, output)
		}
		if stop() {
			break
		}
	}
	if backwards(word) {
		slices.Reverse(started.all)
	}
	return started, failures
}

// call runs the function.
func (f Func) call(ctx context.Context, c call) (problem, _ string) {
	ended := make(chan string, 1)
	go func() {
		problem := "it has ended its goroutine"
		defer func() {
			if v := recover(); v != nil {
				problem = fmt.Sprintf("it has panicked: %v", v)
			}
			ended <- problem
		}()
		err := f.Run(ctx, c.event)
		if problem = ""; err != nil {
			problem = "it has failed: " + err.Error()
		}
	}()
	select {
	case problem := <-ended:
		return problem, ""
	case <-ctx.Done():
	}
	t := time.NewTimer(killTime)
	defer t.Stop()
	select {
	case <-ended:
	case <-t.C:
		return context.Cause(ctx).Error() + ", and has not returned", ""
	}
	return context.Cause(ctx).Error(), ""
}

// killTime is how long a late hook gets to return. A variable, so that tests can shorten it.
var killTime = 2 * time.Second

// line makes a text fit for a line of a log, and cuts off its beginning if it is too long.
func line(s string, n int) string {
	s = strings.TrimSpace(strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?")))
	if len(s) > n {
		s = strings.ToValidUTF8(s[len(s)-n:], "")
	}
	return s
}

// program returns the file of a hook.
func (d Dir) program(name string) string { return filepath.Join(d.path, name) }

var errNoHook = errors.New("it is not executable any more")
