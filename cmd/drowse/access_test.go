//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// A fakeVM is a VM as commands reach it, without an agent.
type fakeVM struct {
	t     *testing.T
	phase state.Phase
	pid   int
	wakes int
}

func (v *fakeVM) access() *agentAccess {
	d := &agentAccess{
		name: "dev",
		get:  func() (*state.Record, error) { return &state.Record{Phase: v.phase, PID: v.pid}, nil },
		wake: func(ctx context.Context) (*guest.Client, error) {
			if v.phase != state.Running {
				v.phase = state.Running
				v.pid++
				v.wakes++
			}
			return guest.Dial(ctx, func(context.Context, uint32) (net.Conn, error) {
				c, far := net.Pipe()
				far.Close()
				return c, nil
			})
		},
	}
	v.t.Cleanup(d.close)
	return d
}

func TestDoor_a_VM_that_falls_asleep_in_between_is_woken_and_tried_again(t *testing.T) {
	vm := &fakeVM{t: t, phase: state.Asleep}
	d := vm.access()
	calls := 0
	err := d.use(t.Context(), func(*guest.Client) error {
		if calls++; calls == 1 {
			vm.phase = state.Asleep
			return fmt.Errorf("cut: %w", guest.ErrConnectionLost)
		}
		return nil
	})
	if err != nil || calls != 2 || vm.wakes != 2 {
		t.Errorf("%d calls, %d wakes, %v", calls, vm.wakes, err)
	}
}

func TestDoor_one_client_serves_until_the_VM_has_another_process(t *testing.T) {
	vm := &fakeVM{t: t, phase: state.Running, pid: 7}
	d := vm.access()
	open := func() *guest.Client {
		c, err := d.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := open()
	if open() != first {
		t.Error("a second client for the same process")
	}
	vm.pid++
	if open() == first {
		t.Error("the client of a process that has gone")
	}
}

func TestDoor_other_errors_and_too_many_tries_end_it(t *testing.T) {
	vm := &fakeVM{t: t, phase: state.Running, pid: 7}
	d := vm.access()
	for _, tt := range []struct {
		err  error
		want int
	}{
		{errors.New("refused"), 1},
		{guest.ErrConnectionLost, maxOpenTries},
		{guest.ErrUnavailable, maxOpenTries},
	} {
		calls := 0
		err := d.use(t.Context(), func(*guest.Client) error { calls++; return tt.err })
		if !errors.Is(err, tt.err) || calls != tt.want {
			t.Errorf("%v: %d calls, want %d, and %v", tt.err, calls, tt.want, err)
		}
	}
}

// ssh must read the configuration as it was meant, whatever the paths look like.
func TestSSHOptions_are_read_by_ssh_as_they_were_meant(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a state's 100% dir")
	s, err := sandbox.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_AGENT", "/an agent")
	a := &app{}
	options, err := a.sshOptions(s, "dev")
	if err != nil {
		t.Fatal(err)
	}
	text := "Host drowse-dev\n"
	args := []string{"-G", "-F", "none"}
	for _, o := range options {
		text += "  " + o.key + " " + o.value + "\n"
		args = append(args, "-o", o.key+" "+o.value)
	}
	config := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"as a file":   {"-G", "-F", config, "drowse-dev"},
		"as options":  append(args, "drowse-dev"),
		"of a tunnel": {"-G", "-F", config, "-W", "127.0.0.1:80", "drowse-dev"},
	} {
		out, err := exec.Command("ssh", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
		got := make(map[string]string)
		for line := range strings.Lines(string(out)) {
			key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			got[key] = strings.ReplaceAll(value, "%%", "%") // some versions expand it
		}
		self, _ := os.Executable()
		for key, want := range map[string]string{
			"user": "root", "hostkeyalias": "drowse", "stricthostkeychecking": "true", "userknownhostsfile": dir + "/ssh/known_hosts",
			"proxycommand": "env DROWSE_AGENT='/an agent' " + shellQuote(self) + " --state '" + strings.ReplaceAll(dir, "'", `'\''`) + "' ssh-proxy dev",
		} {
			if got[key] != want {
				t.Errorf("%s: %s is %q, want %q", name, key, got[key], want)
			}
		}
	}
	if fi, err := os.Stat(filepath.Join(dir, "ssh")); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the directory of the key: %v, %v", fi, err)
	}
}

func TestProxyCommand_is_run_as_ssh_runs_it(t *testing.T) {
	self := filepath.Join(t.TempDir(), "a drowse")
	if err := os.WriteFile(self, []byte("#!/bin/sh\nprintf '%s|' \"$DROWSE_AGENT\" \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, agent := range []string{"", "/an agent"} {
		cmd := exec.Command("sh", "-c", "exec "+proxyCommand(self, "/a state's", "dev", agent))
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
		out, err := cmd.CombinedOutput()
		if want := agent + "|--state|/a state's|ssh-proxy|dev|"; err != nil || string(out) != want {
			t.Errorf("got %q, %v, want %q", out, err, want)
		}
	}
}

func TestShellQuote_words_come_out_of_a_shell_as_they_went_in(t *testing.T) {
	for _, word := range []string{"", "plain", "/a/b-c_d.e", "two words", "it's", `"$HOME" \ *`, "~", "a\nb", "#x", "=a"} {
		out, err := exec.Command("sh", "-c", "printf %s "+shellQuote(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q has become %q, %v", word, out, err)
		}
	}
}

func TestStdio_closing_ends_a_read_of_a_pipe(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c := &stdio{in: polled(r), out: polled(w)}
	done := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		done <- err
	}()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil || errors.Is(err, io.EOF) {
		t.Errorf("read %v, want an error", err)
	}
}
