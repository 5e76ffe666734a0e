package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

const openFiles = 1 << 20 // RLIMIT_NOFILE of the command

// run runs one command to its end. Every process that it leaves behind is killed: the machine ends with the command.
func run(cmd wire.Command, in *wire.Reader, out *wire.Writer) wire.Result {
	if len(cmd.Args) == 0 {
		return wire.Result{Error: "no command"}
	}
	tv := syscall.NsecToTimeval(cmd.Time)
	if err := syscall.Settimeofday(&tv); err != nil {
		return wire.Result{Error: "set the clock: " + err.Error()}
	}
	if err := os.Chdir(cmd.Dir); err != nil {
		return wire.Result{Error: fmt.Sprintf("%v (inside the machine /proc, /sys, /dev and /run are its own, not the host's)", err)}
	}
	path, err := lookPath(cmd.Args[0], cmd.Env)
	if err != nil {
		return startError(err)
	}
	for resource, limit := range map[int]uint64{
		syscall.RLIMIT_NOFILE: openFiles,
		rlimitMemlock:         ^uint64(0),
	} {
		if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: limit, Max: limit}); err != nil {
			return wire.Result{Error: "set resource limits: " + err.Error()}
		}
	}
	p, err := start(path, cmd)
	if err != nil {
		return startError(err)
	}
	if err := out.Send(wire.Started, nil); err != nil {
		return wire.Result{Error: err.Error()}
	}
	ended := make(chan struct{})
	defer close(ended)
	go sayAlive(out, ended)
	var copies sync.WaitGroup
	copies.Go(func() { copyOut(p.stdout, wire.Stdout, out) })
	copies.Go(func() { copyOut(p.stderr, wire.Stderr, out) })
	stdin := make(chan []byte, wire.StdinWindow)
	go copyIn(p.stdin, stdin, out)
	go p.receive(in, stdin)

	status, err := p.reap()
	if err != nil {
		return wire.Result{Error: err.Error()}
	}
	// Nobody but PID 1 is left after this, so the pipes end and the copies with them. Zombies need no reaping now.
	if err := syscall.Kill(-1, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return wire.Result{Error: "kill what the command left behind: " + err.Error()}
	}
	copies.Wait()
	if status.Signaled() {
		return wire.Result{Signal: int(status.Signal())}
	}
	return wire.Result{Code: status.ExitStatus()}
}

// sayAlive tells the host that the machine has not hung, until ended is closed.
func sayAlive(out *wire.Writer, ended <-chan struct{}) {
	tick := time.NewTicker(wire.AliveInterval)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			if out.Send(wire.Alive, nil) != nil {
				return
			}
		}
	}
}

const rlimitMemlock = 8 // RLIMIT_MEMLOCK on x86-64

func startError(err error) wire.Result {
	return wire.Result{
		Error:         err.Error(),
		NotFound:      errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist),
		NotExecutable: errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOEXEC) || errors.Is(err, syscall.EISDIR),
	}
}

// lookPath finds the program by the PATH of the command's environment, not init's.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, e := range env {
		v, ok := strings.CutPrefix(e, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(v) {
			p := filepath.Join(dir, name)
			if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
				return p, nil
			}
		}
	}
	return "", &exec.Error{Name: name, Err: exec.ErrNotFound}
}

type process struct {
	pid            int
	stdin          *os.File // write end
	stdout, stderr *os.File // read ends

	mu   sync.Mutex // guards dead
	dead bool       // no signal may be sent any more: the process id may be another's
}

func start(path string, cmd wire.Command) (*process, error) {
	var theirs, ours [3]*os.File
	for i := range theirs {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		theirs[i], ours[i] = w, r
		if i == 0 {
			theirs[i], ours[i] = r, w
		}
	}
	pid, err := syscall.ForkExec(path, cmd.Args, &syscall.ProcAttr{
		Env:   cmd.Env,
		Files: []uintptr{theirs[0].Fd(), theirs[1].Fd(), theirs[2].Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, &os.PathError{Op: "exec", Path: path, Err: err}
	}
	for _, f := range theirs {
		f.Close()
	}
	return &process{pid: pid, stdin: ours[0], stdout: ours[1], stderr: ours[2]}, nil
}

// reap waits for every process, as PID 1 has to, until the command itself has ended.
func (p *process) reap() (syscall.WaitStatus, error) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for the command: %w", err)
		case pid == p.pid:
			p.mu.Lock()
			p.dead = true
			p.mu.Unlock()
			return status, nil
		}
	}
}

// signal sends a signal to the process group of the command.
func (p *process) signal(n syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		// ESRCH means that it ended a moment ago: reap will tell.
		_ = syscall.Kill(-p.pid, n)
	}
}

// receive takes what the host sends. StdinWindow bounds what is queued in stdin.
func (p *process) receive(in *wire.Reader, stdin chan<- []byte) {
	open := true
	for {
		t, b, err := in.Next()
		if err != nil {
			return
		}
		switch t {
		case wire.Stdin:
			if open && len(b) > 0 {
				stdin <- append([]byte(nil), b...)
			}
		case wire.StdinEOF:
			if open {
				close(stdin)
				open = false
			}
		case wire.Nudge:
			// Its interrupt has done what it is for.
		case wire.Signal:
			if n, err := wire.Uint32(b); err == nil {
				p.signal(syscall.Signal(n))
			}
		}
	}
}

// copyIn feeds the command. When it closes its end, the rest is acknowledged and dropped.
func copyIn(w *os.File, data <-chan []byte, out *wire.Writer) {
	defer w.Close()
	broken := false
	for b := range data {
		if !broken {
			if _, err := w.Write(b); err != nil {
				broken = true
			}
		}
		if err := out.SendUint32(wire.StdinAck, uint32(len(b))); err != nil {
			return
		}
	}
}

func copyOut(r io.Reader, t wire.Type, out *wire.Writer) {
	buf := make([]byte, wire.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := out.Send(t, buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
