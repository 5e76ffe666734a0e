//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/drowse-vm/drowse/guest/fakeguest"
)

// openPair returns the two sides of a terminal (pty(7)).
func openPair(t *testing.T) (user, program *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no terminals here: ", err)
	}
	t.Cleanup(func() { user.Close() })
	if err := unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	if err := unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100}); err != nil {
		t.Fatal(err)
	}
	return user, program
}

func TestRun_at_a_terminal_passes_keys_and_leaves_at_ctrl_p_ctrl_q(t *testing.T) {
	noContexts(t)
	dir, h, vms := inMemory(t)
	at, token := serveTCP(t, h)
	t.Setenv("DROWSE_TOKEN", token)
	vms.Commands["keys"] = func(_ context.Context, p *fakeguest.Process) int {
		fmt.Fprint(p.Stdout, "ready>")
		b := make([]byte, 1)
		for {
			if _, err := p.Stdin.Read(b); err != nil {
				return 1
			}
			fmt.Fprintf(p.Stdout, "<%d>", b[0])
			if b[0] == 'x' {
				return 7
			}
		}
	}
	for _, tt := range []struct {
		name, keys string
		want       int
		shows      []string
		left       bool // the VM goes on
		where      []string
	}{
		{"one", "a\x03\x1c\x10bx", 7, []string{"<97>", "<3>", "<28>", "<16>", "<98>", "<120>"}, false, []string{"--state", dir}},
		{"two", "a\x10\x11", 0, nil, true, []string{"--state", dir}},
		{"three", "a\x03\x1c\x10bx", 7, []string{"<97>", "<3>", "<28>", "<16>", "<98>", "<120>"}, false, []string{"--host", at}},
		{"four", "a\x10\x11", 0, nil, true, []string{"--host", at}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			user, program := openPair(t)
			before, err := term.GetState(int(program.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			wasIn, wasOut := os.Stdin, os.Stdout
			os.Stdin, os.Stdout = program, program
			defer func() { os.Stdin, os.Stdout = wasIn, wasOut }()
			var mu sync.Mutex
			var shown bytes.Buffer
			typed := false
			go func() { // the user types once the program is there
				b := make([]byte, 4096)
				for {
					n, err := user.Read(b)
					if err != nil {
						return
					}
					mu.Lock()
					shown.Write(b[:n])
					if !typed && strings.Contains(shown.String(), "ready>") {
						typed = true
						_, _ = io.WriteString(user, tt.keys)
					}
					mu.Unlock()
				}
			}()
			code := run(t.Context(), append(tt.where, "run", "-it", "--rm", "--name", tt.name, "test", "keys"), program, program)
			if code != tt.want {
				t.Errorf("exit status %d, want %d", code, tt.want)
			}
			after, err := term.GetState(int(program.Fd()))
			if err != nil || *after != *before {
				t.Errorf("the terminal is %+v (%v), was %+v", after, err, before)
			}
			mu.Lock()
			for _, s := range tt.shows {
				if !strings.Contains(shown.String(), s) {
					t.Errorf("the terminal shows %q, want %q in it", shown.String(), s)
				}
			}
			if tt.left && strings.Contains(shown.String(), "<16>") {
				t.Errorf("the keys that detach went to the command: %q", shown.String())
			}
			mu.Unlock()
			if _, err := h.State.Get(tt.name); (err == nil) != tt.left {
				t.Errorf("the VM: %v, want it to be there: %v", err, tt.left)
			}
		})
	}
}

func TestKeyReader_holds_back_only_the_keys_that_detach(t *testing.T) {
	keys, err := parseDetachKeys("ctrl-p,ctrl-q")
	if err != nil || string(keys) != "\x10\x11" {
		t.Fatalf("%q (%v)", keys, err)
	}
	for _, bad := range []string{"ctrl-", "ctrl-1", "ab", "a,,b", "ctrl-pp", "\n"} {
		if got, err := parseDetachKeys(bad); err == nil {
			t.Errorf("%q is %q", bad, got)
		}
	}
	if got, err := parseDetachKeys("a,ctrl-@,ctrl-]"); err != nil || string(got) != "a\x00\x1d" {
		t.Errorf("%q (%v)", got, err)
	}
	for in, want := range map[string]string{
		"plain":            "plain",
		"\x10":             "\x10",
		"a\x10b":           "a\x10b",
		"\x10\x10\x11 no":  "\x10",
		"\x11\x10\x12 yes": "\x11\x10\x12 yes",
		"a\x10\x11b":       "a",
	} {
		for _, slow := range []bool{false, true} {
			var r io.Reader = strings.NewReader(in)
			if slow {
				r = iotest.OneByteReader(r)
			}
			done := make(chan struct{})
			close(done)
			got, err := io.ReadAll(&keyReader{r: r, keys: keys, left: make(chan struct{}), done: done})
			if string(got) != want || err != nil {
				t.Errorf("%q: %q (%v), want %q", in, got, err, want)
			}
		}
	}
}
