package sshd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/drowse-vm/drowse/guest"
)

// session is one channel of the type "session": a command, a shell or a subsystem.
type session struct {
	*conn
	ctx context.Context // done when the channel is closed
	ch  ssh.Channel

	env      []string
	envBytes int
	pty      *guest.Pty
	started  bool
	failed   error // why the start failed, until its request is answered

	sizes   chan guest.Size // the latest size not yet forwarded
	signals chan int
}

// maxSignals bounds the signals that wait to be sent; more are dropped.
const maxSignals = 16

// session serves a channel until it ends.
func (c *conn) session(nc ssh.NewChannel) {
	ch, requests, err := nc.Accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	s := &session{conn: c, ctx: ctx, ch: ch, sizes: make(chan guest.Size, 1), signals: make(chan int, maxSignals)}
	defer ch.Close()
	for r := range requests {
		ok := s.request(r)
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
		if s.failed != nil {
			s.giveUp()
		}
	}
}

// giveUp reports why no command was started, and closes the channel without a status, as if a command had been lost.
// The server does not refuse the request: OpenSSH's client would then end without showing the message.
func (s *session) giveUp() {
	_, _ = io.WriteString(s.ch.Stderr(), "drowse: "+s.failed.Error()+"\r\n")
	s.failed = nil
	_ = s.ch.Close()
}

// request serves one request: RFC 4254, section 6. It does not wait for the guest once the command has started.
func (s *session) request(r *ssh.Request) bool {
	switch r.Type {
	case "pty-req":
		return s.requestPty(r.Payload)
	case "env":
		var m struct{ Name, Value string }
		if s.started || ssh.Unmarshal(r.Payload, &m) != nil {
			return false
		}
		size := len(m.Name) + len(m.Value)
		if m.Name == "" || strings.ContainsAny(m.Name, "=\x00") || strings.Contains(m.Value, "\x00") || len(s.env) >= MaxEnv || s.envBytes+size > MaxEnvBytes {
			return false
		}
		s.env, s.envBytes = append(s.env, m.Name+"="+m.Value), s.envBytes+size
		return true
	case "shell":
		return s.start(guest.Cmd{Login: true})
	case "exec":
		var m struct{ Command string }
		if ssh.Unmarshal(r.Payload, &m) != nil || len(m.Command) > MaxCommand {
			return false
		}
		return s.start(guest.Cmd{Login: true, Argv: []string{m.Command}})
	case "subsystem":
		var m struct{ Name string }
		if ssh.Unmarshal(r.Payload, &m) != nil || m.Name != "sftp" {
			return false
		}
		s.pty = nil
		return s.start(guest.Cmd{Subsystem: guest.SubsystemSFTP})
	case "window-change":
		var m struct{ Cols, Rows, Width, Height uint32 }
		if s.pty == nil || ssh.Unmarshal(r.Payload, &m) != nil {
			return false
		}
		s.resize(guest.Size{Rows: int(m.Rows), Cols: int(m.Cols)})
		return true
	case "signal":
		var m struct{ Name string }
		if ssh.Unmarshal(r.Payload, &m) != nil {
			return false
		}
		for n, name := range signalNames {
			if name == m.Name && name != "" {
				select {
				case s.signals <- n:
					return true
				default:
					return false
				}
			}
		}
		return false
	}
	// Others include forwarding of an agent or of X11, which would give the guest access to the host's.
	return false
}

func (s *session) requestPty(payload []byte) bool {
	var m struct {
		Term                      string
		Cols, Rows, Width, Height uint32
		Modes                     string
	}
	const maxTerm, maxModes = 256, 1 << 10
	if s.started || ssh.Unmarshal(payload, &m) != nil || len(m.Term) > maxTerm || strings.Contains(m.Term, "\x00") || len(m.Modes) > maxModes {
		return false
	}
	s.pty = &guest.Pty{Term: m.Term, Size: guest.Size{Rows: int(m.Rows), Cols: int(m.Cols)}, Modes: []byte(m.Modes)}
	return true
}

// resize queues a size for the command's terminal. A newer size replaces one that still waits.
func (s *session) resize(size guest.Size) {
	if !s.started {
		s.pty.Size = size
		return
	}
	for {
		select {
		case s.sizes <- size:
			return
		default:
		}
		select {
		case <-s.sizes:
		default:
		}
	}
}

// start starts a command. It returns true if the command has started or finish will report its end, or if s.failed
// says why it has not started.
func (s *session) start(cmd guest.Cmd) bool {
	if s.started {
		return false
	}
	s.started = true
	cmd.User, cmd.Env, cmd.Pty = s.user, slices.Concat(s.Env, s.env), s.pty
	cmd.IO = guest.IO{Stdin: s.ch, Stdout: s.ch, Stderr: s.ch.Stderr(), Resize: s.sizes}
	var g *guest.Session
	// The session outlives its start, and only the start has a time limit.
	ctx, cancel := context.WithCancel(s.ctx)
	late := time.AfterFunc(startTime, cancel)
	var lost error
	err := s.Use(ctx, func(c *guest.Client) error {
		var err error
		g, err = c.Start(ctx, cmd)
		if errors.Is(err, guest.ErrConnectionLost) {
			// The command may have started: do not start it again.
			lost = err
			return nil
		}
		return err
	})
	if err == nil {
		err = lost
	}
	if !late.Stop() && err == nil {
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
		s.failed = err
		return true
	}
	s.wg.Go(func() {
		defer cancel()
		s.passSignals(ctx, g)
	})
	s.wg.Go(func() {
		s.finish(g.Wait())
		cancel()
	})
	return true
}

// passSignals sends signals until the command has ended.
func (s *session) passSignals(ctx context.Context, g *guest.Session) {
	for {
		select {
		case n := <-s.signals:
			_ = g.Signal(n) // failing because the command has just ended is not an error
		case <-g.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// finish reports to the client how the command ended, and closes the channel.
func (s *session) finish(st *guest.ExitStatus, err error) {
	defer s.ch.Close()
	var exit *guest.ExitError
	switch {
	case err == nil || errors.As(err, &exit):
	case s.ctx.Err() != nil:
		return
	case errors.Is(err, guest.ErrConnectionLost):
		// The client takes a session without a status for a lost one.
		_, _ = io.WriteString(s.ch.Stderr(), "drowse: the connection to the VM was lost: it sleeps, or has ended\r\n")
		return
	default:
		_, _ = io.WriteString(s.ch.Stderr(), "drowse: "+err.Error()+"\r\n")
		return
	}
	if st.NotStarted != "" {
		_, _ = io.WriteString(s.ch.Stderr(), "drowse: "+st.NotStarted+"\r\n")
	}
	_ = s.ch.CloseWrite()
	if name, ok := signalNames[st.Signal]; ok {
		_, _ = s.ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Name       string
			CoreDumped bool
			Message    string
			Language   string
		}{name, st.CoreDumped, fmt.Sprintf("signal %d", st.Signal), ""}))
		return
	}
	_, _ = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{uint32(st.Code)}))
}

// signalNames are the protocol's names of signals (RFC 4254, section 6.10), by their numbers in Linux: signal(7).
var signalNames = map[int]string{
	1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 8: "FPE", 9: "KILL", 10: "USR1", 11: "SEGV", 12: "USR2",
	13: "PIPE", 14: "ALRM", 15: "TERM",
}
