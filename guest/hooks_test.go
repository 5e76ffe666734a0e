package guest_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// patient has limits that no hook of these tests reaches.
var patient = guest.HookLimits{Each: time.Minute, All: 2 * time.Minute}

// hook writes a hook that notes its name and arguments and then runs the script more. It returns the file with the
// notes.
func (v *vm) hook(t *testing.T, name, more string) (notes string) {
	t.Helper()
	notes = filepath.Join(filepath.Dir(v.hooks), "notes")
	write(t, filepath.Join(v.hooks, name), "#!/bin/sh\necho "+name+" $* >>"+notes+"\n"+more+"\n", 0o755)
	return notes
}

// noted returns what the hooks have noted, and removes the notes.
func noted(t *testing.T, notes string) []string {
	t.Helper()
	b, err := os.ReadFile(notes)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(notes); err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

func TestHooks_without_any_do_nothing(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	for _, dir := range []string{"missing", "empty"} {
		if got, err := c.Hooks(t.Context(), guest.HookSleep, patient); err != nil || got.Ran != 0 || got.Refused {
			t.Errorf("%s: %+v, %v", dir, got, err)
		}
		r, err := c.Resume(t.Context(), guest.Resume{})
		if err != nil || r.HooksWait {
			t.Errorf("%s: %+v, %v", dir, r, err)
		}
		if err := os.MkdirAll(v.hooks, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestHooks_run_in_order_before_and_in_reverse_after(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	notes := v.hook(t, "20-second", "")
	v.hook(t, "10-first", "")
	write(t, filepath.Join(v.hooks, "README"), "not executable", 0o644)
	write(t, filepath.Join(v.hooks, "10-first~"), "#!/bin/sh\nexit 1", 0o755)
	write(t, filepath.Join(v.hooks, ".hidden"), "#!/bin/sh\nexit 1", 0o755)
	if err := os.Mkdir(filepath.Join(v.hooks, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, pair := range [][2]guest.HookEvent{{guest.HookSleep, guest.HookWake}, {guest.HookSnapshot, guest.HookClone}} {
		before, after := pair[0], pair[1]
		got, err := c.Hooks(t.Context(), before, patient)
		if err != nil || got.Ran != 2 || len(got.Failures) != 0 {
			t.Fatalf("%s: %+v, %v", before, got, err)
		}
		// At this point the clock would stop. The agent itself remembers the hooks.
		if r, err := c.Resume(t.Context(), guest.Resume{}); err != nil || !r.HooksWait {
			t.Fatalf("after %s: %+v, %v", before, r, err)
		}
		if got, err := c.Hooks(t.Context(), after, patient); err != nil || got.Ran != 2 {
			t.Fatalf("%s: %+v, %v", after, got, err)
		}
		want := []string{
			fmt.Sprint("10-first ", before), fmt.Sprint("20-second ", before),
			fmt.Sprint("20-second ", after, " ", before), fmt.Sprint("10-first ", after, " ", before),
		}
		if got := noted(t, notes); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		if r, err := c.Resume(t.Context(), guest.Resume{}); err != nil || r.HooksWait {
			t.Errorf("when all is done: %+v, %v", r, err)
		}
		if got, err := c.Hooks(t.Context(), after, patient); err != nil || got.Ran != 0 {
			t.Errorf("a second %s: %+v, %v", after, got, err)
		}
	}
}

func TestHooks_failure_before_refuses_and_those_started_go_on(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	notes := v.hook(t, "1", "")
	v.hook(t, "2", "[ $1 = wake ] && exit 0; echo out; echo no luck >&2; exit 3")
	v.hook(t, "3", "")
	got, err := c.Hooks(t.Context(), guest.HookSleep, patient)
	if err != nil || !got.Refused || got.Ran != 4 || len(got.Failures) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if f := got.Failures[0]; f.Name != "2" || f.Event != guest.HookSleep || f.Problem != "exit status 3" ||
		!strings.Contains(f.Output, "out") || !strings.Contains(f.Output, "no luck") { // two pipes: either order
		t.Errorf("failure %+v", f)
	}
	if got, want := noted(t, notes), []string{"1 sleep", "2 sleep", "2 wake sleep", "1 wake sleep"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if r, err := c.Resume(t.Context(), guest.Resume{}); err != nil || r.HooksWait {
		t.Errorf("after the refusal: %+v, %v", r, err)
	}

	ignore := patient
	ignore.IgnoreFailures = true
	got, err = c.Hooks(t.Context(), guest.HookSleep, ignore)
	if err != nil || got.Refused || got.Ran != 3 || len(got.Failures) != 1 {
		t.Errorf("ignoring failures: %+v, %v", got, err)
	}
	if got, want := noted(t, notes), []string{"1 sleep", "2 sleep", "3 sleep"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestHooks_late_one_is_killed_with_its_children(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	child := filepath.Join(filepath.Dir(v.hooks), "child")
	v.hook(t, "late", "[ $1 = wake ] && exit 0; sleep 1000 & echo $! >"+child+".tmp; mv "+child+".tmp "+child+"; wait")
	v.hook(t, "never", "")
	// The first limits may be too short for the hook to write the file.
	var pid int
	for limit := 250 * time.Millisecond; pid == 0; limit *= 2 {
		got, err := c.Hooks(t.Context(), guest.HookSleep, guest.HookLimits{Each: limit, All: time.Minute})
		if err != nil || !got.Refused || len(got.Failures) == 0 {
			t.Fatalf("%+v, %v", got, err)
		}
		if f := got.Failures[0]; f.Name != "late" || !strings.Contains(f.Problem, "not done within "+limit.String()) {
			t.Fatalf("failure %+v", f)
		}
		if b, err := os.ReadFile(child); err == nil {
			if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "the end of the late hook's child", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(b), ") Z ") || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}

func TestHooks_time_for_all_of_them_is_bounded(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	v.hook(t, "1", "[ $1 = wake ] || sleep 1000")
	v.hook(t, "2", "")
	var got guest.Hooked
	// The first limits may be too short to start the first hook.
	for limit := 250 * time.Millisecond; got.Ran != 1; limit *= 2 {
		var err error
		got, err = c.Hooks(t.Context(), guest.HookSleep, guest.HookLimits{Each: time.Minute, All: limit, IgnoreFailures: true})
		if err != nil || len(got.Failures) < 2 {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	for i, want := range []string{"the time for all hooks is up: killed", "not run: the time for all hooks is up"} {
		if got.Failures[i].Problem != want {
			t.Errorf("failure %d: %+v, want %q", i, got.Failures[i], want)
		}
	}
}

func TestHooks_output_keeps_its_end_and_is_bounded(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	v.hook(t, "loud", "i=0; while [ $i -lt 20000 ]; do echo line $i of what nobody wants to read; i=$((i+1)); done; echo the reason; exit 1")
	got, err := c.Hooks(t.Context(), guest.HookSnapshot, patient)
	if err != nil || len(got.Failures) != 2 { // it fails as "wake", too
		t.Fatalf("%+v, %v", got, err)
	}
	if out := got.Failures[0].Output; !strings.HasSuffix(out, `\nthe reason`) || len(out) > 2*agentpb.MaxHookOutput {
		t.Errorf("%d bytes that end with %q", len(out), out[max(0, len(out)-40):])
	}
}

func TestHooks_more_than_the_limit_are_refused_and_none_is_run(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	for i := range 65 {
		v.hook(t, fmt.Sprintf("%02d", i), "")
	}
	got, err := c.Hooks(t.Context(), guest.HookSleep, patient)
	if err != nil || !got.Refused || got.Ran != 0 || len(got.Failures) != 1 || !strings.Contains(got.Failures[0].Problem, "65 hooks, at most 64") {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestHooks_refuses_events_and_times_that_make_no_sense(t *testing.T) {
	c := startVM(t).dial(t)
	for name, call := range map[string]func() error{
		"an unknown event": func() error { _, err := c.Hooks(t.Context(), "party", patient); return err },
		"no time":          func() error { _, err := c.Hooks(t.Context(), guest.HookSleep, guest.HookLimits{}); return err },
		"an hour": func() error {
			_, err := c.Hooks(t.Context(), guest.HookSleep, guest.HookLimits{Each: time.Hour, All: time.Hour})
			return err
		},
		"frozen for an hour": func() error { _, err := c.Freeze(t.Context(), time.Hour, patient); return err },
	} {
		var re *guest.RemoteError
		if err := call(); !errors.As(err, &re) || re.Code != codes.InvalidArgument {
			t.Errorf("%s: %v, want InvalidArgument", name, err)
		}
	}
}

func TestFreeze_is_between_its_hooks_and_ends_by_thaw(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	notes := v.hook(t, "1", "")
	v.hook(t, "2", "")
	if got, err := c.Freeze(t.Context(), time.Minute, patient); err != nil || got.Refused || !v.machine.isFrozen() {
		t.Fatalf("%+v, %v, frozen %v", got, err, v.machine.isFrozen())
	}
	if _, err := c.Freeze(t.Context(), time.Minute, patient); err == nil {
		t.Error("it was frozen twice")
	}
	if _, err := c.Thaw(t.Context(), patient); err != nil || v.machine.isFrozen() {
		t.Errorf("thaw: %v, frozen %v", err, v.machine.isFrozen())
	}
	if got, want := noted(t, notes), []string{"1 freeze", "2 freeze", "2 thaw freeze", "1 thaw freeze"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := c.Thaw(t.Context(), patient); !errors.Is(err, guest.ErrFrozenTooLong) {
		t.Errorf("a second thaw: %v, want ErrFrozenTooLong", err)
	}
}

func TestFreeze_ends_by_itself_and_the_host_is_told(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	notes := v.hook(t, "1", "")
	if _, err := c.Freeze(t.Context(), time.Millisecond, patient); err != nil {
		t.Fatal(err)
	}
	c.Close() // the host goes away
	eventually(t, "the thaw by the agent itself", func() bool { return !v.machine.isFrozen() })
	if _, err := v.dial(t).Thaw(t.Context(), patient); !errors.Is(err, guest.ErrFrozenTooLong) {
		t.Errorf("thaw: %v, want ErrFrozenTooLong", err)
	}
	if got, want := noted(t, notes), []string{"1 freeze", "1 thaw freeze"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestFreeze_that_a_hook_or_the_kernel_refuses_leaves_nothing_frozen(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	v.machine.refuseFreeze(syscall.EOPNOTSUPP)
	notes := v.hook(t, "1", "")
	if _, err := c.Freeze(t.Context(), time.Minute, patient); err == nil {
		t.Error("no error, though the kernel refused")
	}
	v.machine.refuseFreeze(nil)
	v.hook(t, "2", "[ $1 = thaw ]")
	if got, err := c.Freeze(t.Context(), time.Minute, patient); err != nil || !got.Refused || v.machine.isFrozen() {
		t.Errorf("%+v, %v, frozen %v", got, err, v.machine.isFrozen())
	}
	want := []string{"1 freeze", "1 thaw freeze", "1 freeze", "2 freeze", "2 thaw freeze", "1 thaw freeze"}
	if got := noted(t, notes); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestFreeze_that_was_captured_ends_with_the_resume(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	if _, err := c.Freeze(t.Context(), time.Minute, patient); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Resume(t.Context(), guest.Resume{}); err != nil {
		t.Fatal(err)
	}
	if v.machine.isFrozen() {
		t.Error("the resumed guest is frozen")
	}
}

func TestHostile_hook_answers_are_bounded_and_printable(t *testing.T) {
	var many []*agentpb.HookFailure
	for range 100 {
		many = append(many, &agentpb.HookFailure{Name: strings.Repeat("\x1b", 1000), Event: "sleep\nforged", Problem: strings.Repeat("p", 1000), Output: strings.Repeat("o", 2000)})
	}
	c := hostileGuest(t, response(1, &agentpb.HooksResponse{Ran: 1 << 31, Failures: many}))
	got, err := c.Hooks(t.Context(), guest.HookSleep, patient)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range got.Failures {
		if len(f.Problem) != agentpb.MaxHookProblem || len(f.Output) != agentpb.MaxHookOutput || strings.ContainsAny(f.String(), "\n\x1b") {
			t.Fatalf("not bounded or not printable: %q", f)
		}
	}
	var flood []*agentpb.HookFailure
	for range 1000 {
		flood = append(flood, &agentpb.HookFailure{Name: "x"})
	}
	c = hostileGuest(t, response(1, &agentpb.FreezeResponse{Failures: flood}))
	if got, err := c.Freeze(t.Context(), time.Minute, patient); err != nil || len(got.Failures) != agentpb.MaxHookFailures {
		t.Errorf("%d failures (%v), want %d", len(got.Failures), err, agentpb.MaxHookFailures)
	}
}

func TestServeHooks_takes_two_lines_and_nothing_else(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "hooks"))
	if err != nil {
		t.Fatal(err)
	}
	var said []bool // only the server uses it until the server has ended
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		guest.ServeHooks(l, func(present bool) { said = append(said, present) })
	}()
	for _, tt := range []struct {
		line     string
		answered bool
	}{
		{"", false}, {"hooks 2\n", false}, {"hooks 1", false}, {"ready 1\n", false}, {strings.Repeat("x", 1<<16), false},
		{"hooks 1\n", true}, {"hooks 0\n", true}, {"hooks 1\nhooks 0\n", true},
	} {
		c, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, tt.line) // the server may cut it off in the middle
		_ = c.(*net.UnixConn).CloseWrite()
		var b [2]byte
		n, _ := io.ReadFull(c, b[:])
		if want := map[bool]int{false: 0, true: 1}[tt.answered]; n != want {
			t.Errorf("%.20q: %d bytes in answer, want %d", tt.line, n, want)
		}
		c.Close()
	}
	l.Close()
	<-ended
	if want := []bool{true, false, true}; !slices.Equal(said, want) {
		t.Errorf("the guest said %v, want %v", said, want)
	}
}
