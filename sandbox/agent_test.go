package sandbox_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// selfProgram is the command by which root in a guest makes requests of the host.
const selfProgram = "/run/drowse/agent self "

// told collects the events of a watch.
type told struct {
	mu   sync.Mutex
	list []guest.WatchEvent
	more chan struct{}
}

func (w *told) add(e guest.WatchEvent) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, e)
	select {
	case w.more <- struct{}{}:
	default:
	}
	return nil
}

// until waits for an event, and fails if the watch overflowed.
func (w *told) until(t *testing.T, kind, path string) {
	t.Helper()
	limit := time.After(5 * time.Minute)
	for {
		w.mu.Lock()
		found := false
		for _, e := range w.list {
			if e.Kind == guest.WatchOverflow {
				t.Errorf("something was missed: %+v", e)
			}
			found = found || e.Kind == kind && e.Path == path
		}
		w.mu.Unlock()
		if found || t.Failed() {
			return
		}
		select {
		case <-w.more:
		case <-limit:
			t.Fatalf("%s of %s was not told, only %+v", kind, path, w.list)
		}
	}
}

// workThatASleepCuts puts the VM to sleep and wakes it while a watch, a terminal and, with -agent-copies, a copy
// are under way. All of them must continue.
func workThatASleepCuts(t *testing.T, e *guesttest.Env, name string) {
	ctx, cancel := context.WithCancel(t.Context())
	if err := e.Agent(name).Mkdir(ctx, "/root/watched", 0, true); err != nil {
		t.Fatal(err)
	}
	events := &told{more: make(chan struct{}, 1)}
	watched := make(chan error, 1)
	ready := make(chan struct{}, 2)
	go func() {
		watched <- e.Store.Sandbox(name).Watch(ctx, sandbox.WatchOptions{Paths: []string{"/root/watched"}, Recursive: true, Ready: func() { ready <- struct{}{} }}, events.add)
	}()
	defer func() {
		cancel()
		if err := <-watched; !errors.Is(err, context.Canceled) {
			t.Errorf("the watch ended with %v", err)
		}
	}()
	select {
	case <-ready:
	case err := <-watched:
		watched <- context.Canceled
		t.Fatalf("watching: %v", err)
	}
	// A terminal with something on its screen.
	screen := newScreen()
	s, err := e.Agent(name).Start(t.Context(), guest.Cmd{
		Argv: []string{"/bin/sh", "-c", `stty -echo; printf '\033[2J\033[31mhere I am\033[0m'; read line; echo "got $line"`},
		Pty:  &guest.Pty{Size: guest.Size{Rows: 24, Cols: 80}}, Detach: true, ID: "screen", IO: guest.IO{Stdout: screen},
	})
	if err != nil {
		t.Fatal(err)
	}
	const shown = "\033[2J\033[31mhere I am\033[0m"
	screen.until(t, shown)

	if *agentCopies {
		copyThatASleepCuts(t, e, name)
	} else {
		e.Write(name, "before", "/root/watched/before")
		e.Sleep(name)
		e.Wake(name)
		e.Write(name, "after", "/root/watched/data")
	}
	if _, err := s.Wait(); !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("the terminal that the sleep cuts: %v", err)
	}
	events.until(t, guest.WatchCreated, "/root/watched/before")
	events.until(t, guest.WatchWritten, "/root/watched/before")

	in, typing := io.Pipe()
	again := newScreen()
	if s, err = e.Agent(name).Attach(t.Context(), "screen", 0, guest.IO{Stdin: in, Stdout: again}); err != nil {
		t.Fatal(err)
	}
	again.until(t, shown)
	if _, err := io.WriteString(typing, "typed\n"); err != nil {
		t.Error(err)
	}
	if st, err := s.Wait(); err != nil || st.Code != 0 {
		t.Errorf("the terminal's end: %v", err)
	}
	typing.Close()
	again.until(t, shown+"got typed\r\n")
	if !*agentCopies {
		events.until(t, guest.WatchWritten, "/root/watched/data")
	}
}

// agentCopies enables a copy of 6 MiB that a sleep cuts. A guest with an interpreted kernel takes minutes for it.
var agentCopies = flag.Bool("agent-copies", false, "have a sleep cut the copy of a large file, and go on")

// copyThatASleepCuts copies a file, puts the VM to sleep midway, and resumes the copy after the wake.
func copyThatASleepCuts(t *testing.T, e *guesttest.Env, name string) {
	const size = 6 << 20
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{7}).Read(data)
	src := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(src, data, 0o600); err != nil {
		t.Fatal(err)
	}
	slept := false
	_, err := e.Agent(name).CopyIn(t.Context(), src, "/root/watched/data", guest.CopyOptions{Progress: func(n int64) {
		if n > size/2 && !slept {
			slept = true
			e.Sh(name, "echo before > /root/watched/before")
			e.Sleep(name)
		}
	}})
	if !slept || !errors.Is(err, guest.ErrConnectionLost) {
		t.Fatalf("the copy that the sleep cuts: %v", err)
	}
	e.Wake(name)
	c := e.Agent(name)
	res, err := c.CopyIn(t.Context(), src, "/root/watched/data", guest.CopyOptions{Resume: true})
	if err != nil {
		t.Fatal(err)
	}
	if res.Kept < size/4 || res.Kept+res.Bytes != size {
		t.Errorf("%d bytes were kept and %d copied, of %d", res.Kept, res.Bytes, size)
	}
	if got := e.Sh(name, "sha256sum < /root/watched/data; ls -A /root/watched | wc -l"); got != fmt.Sprintf("%x  -\n2", sha256.Sum256(data)) {
		t.Errorf("in the guest there is %q", got)
	}
	back := filepath.Join(t.TempDir(), "back")
	if res, err = c.CopyOut(t.Context(), "/root/watched/data", back, guest.CopyOptions{}); err != nil || res.Bytes != size {
		t.Errorf("%+v, %v", res, err)
	}
	if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, data) {
		t.Errorf("what came back is another file, %v", err)
	}
}

// screen collects the output of a terminal.
type screen struct {
	mu   sync.Mutex
	text []byte
	more chan struct{}
}

func newScreen() *screen { return &screen{more: make(chan struct{}, 1)} }

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = append(s.text, p...)
	select {
	case s.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (s *screen) until(t *testing.T, want string) {
	t.Helper()
	limit := time.After(5 * time.Minute)
	for {
		s.mu.Lock()
		got := string(s.text)
		s.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-s.more:
		case <-limit:
			t.Fatalf("the terminal shows %q, want %q", got, want)
		}
	}
}

// guestForksItself has a guest request a fork, in which the child continues in the middle of the request, and then
// one fork more than its limit.
func guestForksItself(t *testing.T, e *guesttest.Env, name string) {
	// drowse serve does the same.
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan []error, 1)
	go func() {
		var errs []error
		for ctx.Err() == nil {
			if err := e.Store.With(e.Launcher).Sandbox(name).ForkAsked(ctx); err != nil {
				errs = append(errs, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
		served <- errs
	}()
	// A detached command outlives the connection that started it.
	p, err := e.Agent(name).Start(t.Context(), guest.Cmd{Detach: true, Argv: []string{"/bin/sh", "-c",
		selfProgram + "fork > /run/child; echo $? > /run/forked; " + selfProgram + "fork 2> /run/why; echo $? > /run/again"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	// A look at a file keeps an interpreted guest busy for most of a second.
	wait := func(name, path string) string {
		t.Helper()
		for end := time.Now().Add(15 * time.Minute); ; time.Sleep(2 * time.Second) {
			got := ""
			if e.Exists(name, path) {
				got = e.Read(name, path)
			}
			if got != "" || time.Now().After(end) {
				return got
			}
		}
	}
	if again, why := wait(name, "/run/again"), e.Read(name, "/run/why"); again != "1" || !strings.Contains(why, control.ErrSelfLimit.Error()) {
		t.Errorf("asking again has ended with %q: %s", again, why)
	}
	stop()
	if errs := <-served; len(errs) != 1 || !errors.Is(errs[0], control.ErrSelfLimit) {
		t.Errorf("serving two requests: %v", errs)
	}
	if got := e.Read(name, "/run/forked"); got != "0" {
		t.Fatalf("asking has ended with %q", got)
	}
	child, err := e.Store.State.Get(e.Read(name, "/run/child"))
	if err != nil {
		t.Fatal(err)
	}
	if child.Fork == nil || !child.Fork.Asked || child.Fork.Parent != name || strings.Contains(strings.Join(child.Spec.Self.Allow, " "), guest.SelfFork) {
		t.Errorf("the child is %+v, and may ask for %v", child.Fork, child.Spec.Self.Allow)
	}
	if got := wait(child.Spec.Name, "/run/forked"); got != "3" {
		t.Errorf("in the child, asking has ended with %q, want 3", got)
	}
	if err := e.Store.Sandbox(child.Spec.Name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Error(err)
	}
}

// guestAsksItsHost has a guest make requests that it may make, and one that it may not.
func guestAsksItsHost(t *testing.T, e *guesttest.Env, name string) {
	id := e.Sh(name, selfProgram+"snapshot 'made by me'")
	list, err := e.Store.State.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, s := range list {
		if s.ID == id {
			found = true
			if s.Note != "asked for by the guest: made by me" || s.Kind != "named" {
				t.Errorf("the snapshot is %+v", s)
			}
		}
	}
	if !found {
		t.Errorf("it is told of a snapshot %q, which is not there", id)
	} else if err := e.Store.State.RemoveSnapshot(t.Context(), id); err != nil {
		t.Error(err)
	}
	guestForksItself(t, e, name)
	// The requesting program continues after the wake. A hold blocks only automatic sleeps.
	s, err := e.Agent(name).Start(t.Context(), guest.Cmd{
		Argv: []string{"/bin/sh", "-c", selfProgram + "hold 60s && " + selfProgram + "sleep"}, Detach: true, ID: "asks",
	})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = s.Wait() // the sleep cuts it
	e.WaitPhase(name, state.Asleep, 5*time.Minute)
	e.Wake(name)
	var said bytes.Buffer
	if s, err = e.Agent(name).Attach(t.Context(), "asks", 0, guest.IO{Stdout: &said, Stderr: &said}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Wait(); err != nil {
		t.Errorf("asking for a sleep has ended with %v: %s", err, said.String())
	}
	var asked []string
	if _, err := e.Store.State.Audit(t.Context(), name, audit.ReadOptions{}, func(en audit.Entry) error {
		if en.Kind == audit.KindSelf {
			asked = append(asked, strings.Join(en.Argv, " "))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(asked, "|"); got != "snapshot made by me|fork|fork|hold 1m0s|sleep" {
		t.Errorf("recorded: %q", got)
	}
}
