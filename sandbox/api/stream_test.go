package api_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// stream is a client of a WebSocket.
type stream struct {
	t *testing.T
	*websocket.Conn
}

// dial opens a WebSocket of the server at its Unix socket.
func (s *served) dial(t *testing.T, path string) *stream {
	t.Helper()
	c, resp, err := s.tryDial(t, path, nil)
	if err != nil {
		text := ""
		if resp != nil && resp.Body != nil {
			b, _ := io.ReadAll(resp.Body)
			text = string(b)
		}
		t.Fatalf("%s: %v: %s", path, err, text)
	}
	return c
}

func (s *served) tryDial(t *testing.T, path string, o *websocket.DialOptions) (*stream, *http.Response, error) {
	t.Helper()
	if o == nil {
		o = &websocket.DialOptions{}
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", s.path)
	}}
	o.HTTPClient = &http.Client{Transport: transport}
	if o.Subprotocols == nil {
		o.Subprotocols = []string{wire.StreamProtocol}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, resp, err := websocket.Dial(ctx, "ws://drowse"+path, o)
	if err != nil {
		return nil, resp, err
	}
	c.SetReadLimit(1 << 20)
	t.Cleanup(func() { _ = c.CloseNow(); transport.CloseIdleConnections() })
	return &stream{t, c}, resp, nil
}

func (c *stream) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	c.t.Cleanup(cancel)
	return ctx
}

func (c *stream) say(m any) {
	c.t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := c.Write(c.ctx(), websocket.MessageText, text); err != nil {
		c.t.Fatal(err)
	}
}

func (c *stream) stdin(p []byte) {
	c.t.Helper()
	if err := c.Write(c.ctx(), websocket.MessageBinary, append([]byte{wire.StreamStdin}, p...)); err != nil {
		c.t.Fatal(err)
	}
}

// next returns the next message: a control, or data of a stream.
func (c *stream) next() (m *wire.Control, number byte, data []byte) {
	c.t.Helper()
	kind, p, err := c.Read(c.ctx())
	if err != nil {
		c.t.Fatal(err)
	}
	if kind == websocket.MessageBinary {
		return nil, p[0], p[1:]
	}
	m = &wire.Control{}
	if err := json.Unmarshal(p, m); err != nil {
		c.t.Fatalf("%s: %v", p, err)
	}
	return m, 0, nil
}

// control returns the next control that is not an ack, and what came before it.
func (c *stream) control() (m *wire.Control, stdout, stderr string) {
	c.t.Helper()
	for {
		m, n, data := c.next()
		switch {
		case m != nil && m.Type == wire.ControlAck:
		case m != nil:
			return m, stdout, stderr
		case n == wire.StreamStdout:
			stdout += string(data)
		case n == wire.StreamStderr:
			stderr += string(data)
		default:
			c.t.Fatalf("stream %d", n)
		}
	}
}

func (c *stream) started() *wire.Control {
	c.t.Helper()
	m, out, _ := c.control()
	if m.Type != wire.ControlStarted || out != "" {
		c.t.Fatalf("got %s %+v after %q, want started", m.Type, m.Error, out)
	}
	return m
}

func (c *stream) exited(code int) (stdout, stderr string) {
	c.t.Helper()
	m, stdout, stderr := c.control()
	if m.Type != wire.ControlExit || m.Exit == nil || m.Exit.ExitCode != code {
		c.t.Errorf("got %s %+v %+v, want an exit with %d", m.Type, m.Exit, m.Error, code)
	}
	return stdout, stderr
}

// closed reads until the end of the stream, and returns the code of its close frame.
func (c *stream) closed() websocket.StatusCode {
	c.t.Helper()
	for {
		if _, _, err := c.Read(c.ctx()); err != nil {
			return websocket.CloseStatus(err)
		}
	}
}

type start struct {
	Type string `json:"type"`
	wire.ExecStart
}

func startOf(e wire.ExecStart) start { return start{wire.ControlStart, e} }

func TestStream_of_a_command_has_its_input_output_and_end(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	if _, err := s.client.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	s.vms.set(func() {
		s.vms.exec = func(_ context.Context, p *fakeguest.Process) int {
			fmt.Fprint(p.Stderr, "oops")
			if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
				return 1
			}
			return 3
		}
	})
	c := s.dial(t, "/v1/sandboxes/a/exec")
	c.say(startOf(wire.ExecStart{Command: []string{"run", "x"}, User: "dev", Cwd: "/srv", Env: []string{"A=b"}, Stdin: true}))
	if m := c.started(); m.Process == "" || m.PID == 0 {
		t.Errorf("started %+v", m)
	}
	c.stdin([]byte("one "))
	c.stdin(nil)
	c.stdin([]byte("two"))
	c.say(wire.Control{Type: wire.ControlEOF})
	if out, errs := c.exited(3); out != "one two" || errs != "oops" {
		t.Errorf("output %q, %q", out, errs)
	}
	if code := c.closed(); code != websocket.StatusNormalClosure {
		t.Errorf("closed with %d", code)
	}
	p := s.vms.ran[0]
	if p.User != "dev" || p.Dir != "/srv" || p.Args[1] != "x" {
		t.Errorf("it ran %+v", p)
	}
	missing := s.dial(t, "/v1/sandboxes/a/exec")
	missing.say(startOf(wire.ExecStart{Command: []string{"nothing"}}))
	m, _, _ := missing.control()
	if m.Type != wire.ControlExit || m.Exit.ExitCode != 127 || m.Exit.NotStarted == "" {
		t.Errorf("a missing program: %+v", m)
	}
}

func TestStream_terminal_signal_and_resize_reach_the_command(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	sizes := make(chan string, 4)
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, p *fakeguest.Process) int {
			sizes <- fmt.Sprint(p.TTY.GetRows(), p.TTY.GetCols())
			for {
				select {
				case n := <-p.Resized:
					sizes <- fmt.Sprint(n.Rows, n.Cols)
				case <-ctx.Done():
					return 1
				}
			}
		}
	})
	c := s.dial(t, "/v1/sandboxes/a/exec")
	c.say(startOf(wire.ExecStart{Command: []string{"run"}, TTY: &wire.TTY{Rows: 24, Cols: 80}}))
	c.started()
	if got := <-sizes; got != "24 80" {
		t.Errorf("it begins with %s", got)
	}
	c.say(wire.Control{Type: wire.ControlResize, Rows: 50, Cols: 132})
	if got := <-sizes; got != "50 132" {
		t.Errorf("it is resized to %s", got)
	}
	c.say(wire.Control{Type: wire.ControlSignal, Signal: 15})
	m, _, _ := c.control()
	if m.Type != wire.ControlExit || m.Exit.Signal != 15 {
		t.Errorf("after a signal: %+v", m)
	}
}

func TestStream_a_process_outlives_its_stream_and_is_attached_to_from_an_offset(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, p *fakeguest.Process) int {
			b := make([]byte, 1)
			for {
				if _, err := p.Stdin.Read(b); err != nil {
					return 4
				}
				if _, err := p.Stdout.Write(b); err != nil {
					return 1
				}
			}
		}
	})
	c := s.dial(t, "/v1/sandboxes/a/exec")
	c.say(startOf(wire.ExecStart{Command: []string{"run"}, Detach: true, Process: "job"}))
	c.started()
	c.stdin([]byte("abc"))
	for got := ""; got != "abc"; {
		if m, _, data := c.next(); m == nil {
			got += string(data)
		}
	}
	c.say(wire.Control{Type: wire.ControlDetach})
	c.closed()
	is, err := s.client.Sandbox("a").Processes(t.Context())
	if err != nil || len(is) != 1 || is[0].Process != "job" || !is[0].Detached || is[0].OutputEnd != 3 || is[0].Exit != nil {
		t.Fatalf("listed %+v, %v", is, err)
	}
	c = s.dial(t, "/v1/sandboxes/a/processes/job/attach?offset=1")
	if m := c.started(); m.Offset != 1 {
		t.Errorf("attached at %d", m.Offset)
	}
	second := s.dial(t, "/v1/sandboxes/a/processes/job/attach?offset=0")
	second.started()
	if m, _, _ := c.control(); m.Type != wire.ControlError || m.Error.Code != "guest-refused" {
		t.Errorf("one whose place was taken is told %+v %+v", m, m.Error)
	}
	second.say(wire.Control{Type: wire.ControlEOF})
	if out, _ := second.exited(4); out != "abc" {
		t.Errorf("the whole output is %q", out)
	}
	if err := s.client.Sandbox("a").Signal(t.Context(), "job", 9); err == nil {
		t.Error("a signal to one that has ended succeeds")
	}
	if err := s.client.Sandbox("a").RemoveProcess(t.Context(), "job"); err != nil {
		t.Error(err)
	}
	if is, err := s.client.Sandbox("a").Processes(t.Context()); err != nil || len(is) != 0 {
		t.Errorf("listed %+v, %v", is, err)
	}
	p, err := s.client.Sandbox("a").StartProcess(t.Context(), wire.ExecStart{Command: []string{"run"}})
	if err != nil || p.Process == "" {
		t.Fatalf("%+v, %v", p, err)
	}
	if err := s.client.Sandbox("a").Signal(t.Context(), p.Process, 15); err != nil {
		t.Error(err)
	}
}

func TestStream_breaking_its_rules_ends_it_alone(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, _ *fakeguest.Process) int { <-ctx.Done(); return 1 }
	})
	running := startOf(wire.ExecStart{Command: []string{"run"}})
	text := func(s string) func(*stream) {
		return func(c *stream) { _ = c.Write(c.ctx(), websocket.MessageText, []byte(s)) }
	}
	binary := func(p ...byte) func(*stream) {
		return func(c *stream) { _ = c.Write(c.ctx(), websocket.MessageBinary, p) }
	}
	for name, tc := range map[string]struct {
		before bool
		send   func(*stream)
		want   websocket.StatusCode
	}{
		"no JSON":                   {true, text("{"), websocket.StatusPolicyViolation},
		"another first message":     {true, text(`{"type":"eof"}`), websocket.StatusPolicyViolation},
		"data first":                {true, binary(0, 1), websocket.StatusPolicyViolation},
		"no command":                {true, text(`{"type":"start"}`), websocket.StatusPolicyViolation},
		"an empty command":          {true, text(`{"type":"start","command":[""]}`), websocket.StatusPolicyViolation},
		"an unknown field":          {true, text(`{"type":"start","command":["run"],"x":1}`), websocket.StatusPolicyViolation},
		"two documents":             {true, text(`{"type":"start","command":["run"]} {}`), websocket.StatusPolicyViolation},
		"a small window":            {true, text(`{"type":"start","command":["run"],"window":1}`), websocket.StatusPolicyViolation},
		"a process without detach":  {true, text(`{"type":"start","command":["run"],"process":"x"}`), websocket.StatusPolicyViolation},
		"no stdin, and attached":    {true, text(`{"type":"start","command":["run"],"no_stdin":true}`), websocket.StatusPolicyViolation},
		"a large terminal":          {true, text(`{"type":"start","command":["run"],"tty":{"rows":65536}}`), websocket.StatusPolicyViolation},
		"a second start":            {false, text(`{"type":"start","command":["run"]}`), websocket.StatusPolicyViolation},
		"an unknown control":        {false, text(`{"type":"dance"}`), websocket.StatusPolicyViolation},
		"stdin without stdin":       {false, binary(0, 1), websocket.StatusPolicyViolation},
		"an unknown stream":         {false, binary(9, 1), websocket.StatusPolicyViolation},
		"an empty binary message":   {false, binary(), websocket.StatusPolicyViolation},
		"signal 0":                  {false, text(`{"type":"signal"}`), websocket.StatusPolicyViolation},
		"signal 65":                 {false, text(`{"type":"signal","signal":65}`), websocket.StatusPolicyViolation},
		"an ack of what never was":  {false, text(`{"type":"ack","bytes":1}`), websocket.StatusPolicyViolation},
		"detach of an attached one": {false, text(`{"type":"detach"}`), websocket.StatusPolicyViolation},
		"a message over the limit":  {false, binary(make([]byte, wire.MaxMessage+1)...), websocket.StatusMessageTooBig},
	} {
		c := s.dial(t, "/v1/sandboxes/a/exec")
		if !tc.before {
			c.say(running)
			c.started()
		}
		tc.send(c)
		if code := c.closed(); code != tc.want {
			t.Errorf("%s: closed with %d, want %d", name, code, tc.want)
		}
	}
	if _, err := s.client.Exec(t.Context(), "a", wire.Exec{Command: []string{"true"}}); err != nil {
		t.Errorf("others: %v", err)
	}
}

func TestStream_is_refused_before_it_is_one(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	for name, tc := range map[string]struct {
		path   string
		header http.Header
		want   int
	}{
		"no such sandbox": {"/v1/sandboxes/none/exec", nil, http.StatusNotFound},
		"another origin":  {"/v1/sandboxes/a/exec", http.Header{"Origin": {"https://evil.example"}}, http.StatusForbidden},
		"a rebound page":  {"/v1/sandboxes/a/exec", http.Header{"Origin": {"null"}}, http.StatusForbidden},
		"a foreign fetch": {"/v1/sandboxes/a/exec", http.Header{"Sec-Fetch-Site": {"cross-site"}}, http.StatusForbidden},
	} {
		_, resp, err := s.tryDial(t, tc.path, &websocket.DialOptions{HTTPHeader: tc.header})
		if err == nil || resp == nil || resp.StatusCode != tc.want {
			t.Errorf("%s: %v, %v, want %d", name, resp, err, tc.want)
		}
	}
	resp, err := s.client.Do(t.Context(), http.MethodGet, "/v1/sandboxes/a/exec", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("without an upgrade: %s", resp.Status)
	}
}

func TestStream_carries_more_than_any_buffer_both_ways_and_a_slow_reader_stalls_itself(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	const size = 24 << 20
	sent := make([]byte, size)
	_, _ = rand.Read(sent)
	s.vms.set(func() {
		s.vms.exec = func(_ context.Context, p *fakeguest.Process) int {
			if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
				return 1
			}
			return 0
		}
	})
	slow := s.dial(t, "/v1/sandboxes/a/exec")
	slow.say(startOf(wire.ExecStart{Command: []string{"run"}, Stdin: true, Window: wire.MinWindow}))
	slow.started()
	go func() {
		for range 64 { // more than the window of output
			if slow.Write(context.Background(), websocket.MessageBinary, append([]byte{wire.StreamStdin}, make([]byte, 32<<10)...)) != nil {
				return
			}
		}
	}()
	c := s.dial(t, "/v1/sandboxes/a/exec")
	c.say(startOf(wire.ExecStart{Command: []string{"run"}, Stdin: true, Window: 256 << 10}))
	c.started()
	var wg sync.WaitGroup
	acked := make(chan uint64, 1<<16)
	wg.Go(func() {
		told := uint64(0)
		for at := 0; at < size; {
			n := min(size-at, 60<<10)
			for uint64(at+n) > told+wire.StdinWindow {
				told = <-acked
			}
			c.stdin(sent[at : at+n])
			at += n
		}
		c.say(wire.Control{Type: wire.ControlEOF})
	})
	var got bytes.Buffer
	for {
		m, _, data := c.next()
		if m == nil {
			got.Write(data)
			c.say(wire.Control{Type: wire.ControlAck, Bytes: uint64(got.Len())})
			continue
		}
		if m.Type == wire.ControlAck {
			acked <- m.Bytes
			continue
		}
		if m.Type != wire.ControlExit || m.Exit.ExitCode != 0 || m.Offset != size {
			t.Errorf("it ends with %+v %+v", m, m.Error)
		}
		break
	}
	wg.Wait()
	if !bytes.Equal(got.Bytes(), sent) {
		t.Errorf("%d bytes came back, want %d, the same", got.Len(), size)
	}
	// The slow one still hears signals: it keeps within the window of stdin no longer, so end it by closing.
	_ = slow.CloseNow()
}

func TestStream_with_pings_without_end_is_closed(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, _ *fakeguest.Process) int { <-ctx.Done(); return 1 }
	})
	c := s.dial(t, "/v1/sandboxes/a/exec")
	c.say(startOf(wire.ExecStart{Command: []string{"run"}}))
	c.started()
	// Without waiting for the pongs. A ping whose context ends closes the client's own end.
	var pings sync.WaitGroup
	for range 100 {
		pings.Go(func() { _ = c.Ping(t.Context()) })
	}
	if code := c.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("closed with %d", code)
	}
	pings.Wait()
}

func TestStream_ends_with_its_token_and_with_the_server(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, _ *fakeguest.Process) int { <-ctx.Done(); return 1 }
	})
	known := tokens.Open(filepath.Join(filepath.Dir(s.path), tokens.File))
	address, _ := overTCP(t, s, api.Options{})
	secret, err := known.Create(tokens.Token{Name: "brief", Scopes: tokens.Scopes{tokens.ScopeExec}})
	if err != nil {
		t.Fatal(err)
	}
	// As a page offers its token.
	c, _, err := websocket.Dial(t.Context(), "ws://"+address+"/v1/sandboxes/a/exec", &websocket.DialOptions{Subprotocols: []string{wire.StreamProtocol, wire.BearerProtocol + secret}})
	if err != nil {
		t.Fatal(err)
	}
	if c.Subprotocol() != wire.StreamProtocol {
		t.Errorf("subprotocol %q", c.Subprotocol())
	}
	with := &stream{t, c}
	with.say(startOf(wire.ExecStart{Command: []string{"run"}}))
	with.started()
	local := s.dial(t, "/v1/sandboxes/a/exec")
	local.say(startOf(wire.ExecStart{Command: []string{"run"}}))
	local.started()
	if err := known.Remove("brief"); err != nil {
		t.Fatal(err)
	}
	if code := with.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("without its token it is closed with %d", code)
	}
	ended := make(chan websocket.StatusCode, 1)
	go func() { ended <- local.closed() }()
	s.end()
	if code := <-ended; code != websocket.StatusGoingAway {
		t.Errorf("when the server ends it is closed with %d", code)
	}
}

func TestPort_is_a_connection_whose_directions_end_by_themselves(t *testing.T) {
	s := serve(t)
	s.vms.Dial = func(_ context.Context, _, _, address string) (net.Conn, error) {
		if address != "127.0.0.1:80" {
			return nil, syscall.ECONNREFUSED
		}
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			b := make([]byte, 4)
			if _, err := io.ReadFull(far, b); err == nil {
				_, _ = far.Write(bytes.ToUpper(b))
			}
		}()
		return near, nil
	}
	s.made(t, "a")
	c := s.dial(t, "/v1/sandboxes/a/ports/80")
	if m, _, _ := c.control(); m.Type != wire.ControlStarted {
		t.Fatalf("%+v", m)
	}
	if err := c.Write(c.ctx(), websocket.MessageBinary, []byte("ping")); err != nil {
		t.Fatal(err)
	}
	_, got, err := c.Read(c.ctx())
	if err != nil || string(got) != "PING" {
		t.Errorf("got %q, %v", got, err)
	}
	if m, _, _ := c.control(); m.Type != wire.ControlEOF {
		t.Errorf("%+v", m)
	}
	c.say(wire.Control{Type: wire.ControlEOF})
	if code := c.closed(); code != websocket.StatusNormalClosure {
		t.Errorf("closed with %d", code)
	}
	for _, port := range []string{"81", "0", "65536", "x"} {
		c := s.dial(t, "/v1/sandboxes/a/ports/"+port)
		if m, _, _ := c.control(); m.Type != wire.ControlError {
			t.Errorf("port %s: %+v", port, m)
		}
	}
}
