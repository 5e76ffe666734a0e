package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// clientFrame returns a frame of a client (RFC 6455, section 5.2), with a key of zeros.
func clientFrame(opcode byte, payload string) []byte {
	out := []byte{0x80 | opcode}
	switch n := len(payload); {
	case n < 126:
		out = append(out, 0x80|byte(n))
	default:
		out = binary.BigEndian.AppendUint16(append(out, 0x80|126), uint16(n))
	}
	return append(append(out, 0, 0, 0, 0), payload...)
}

// serverFrames calls f with each frame of a server, which are whole, unmasked and short.
func serverFrames(data []byte, f func(opcode byte, payload []byte) error) error {
	for len(data) > 0 {
		if len(data) < 2 || data[1]&0x80 != 0 || data[0]&0x70 != 0 {
			return fmt.Errorf("a bad frame: %.20x", data)
		}
		n, head := uint64(data[1]), 2
		switch {
		case n == 126 && len(data) >= 4:
			n, head = uint64(binary.BigEndian.Uint16(data[2:])), 4
		case n == 127 && len(data) >= 10:
			n, head = binary.BigEndian.Uint64(data[2:]), 10
		case n >= 126:
			return fmt.Errorf("a bad frame: %.20x", data)
		}
		if n > uint64(len(data)-head) {
			return fmt.Errorf("a frame of %d bytes has %d", n, len(data)-head)
		}
		if err := f(data[0]&0xf, data[head:head+int(n)]); err != nil {
			return err
		}
		data = data[head+int(n):]
	}
	return nil
}

// panics collects what the server of net/http says of handlers that panic.
type panics struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (p *panics) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes.Contains(b, []byte("panic")) {
		p.text.Write(b)
	}
	return len(b), nil
}

func (p *panics) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// FuzzStream sends any bytes to the WebSockets of commands, processes and ports. The stream ends when they do, the
// answer is frames of bounded length, and an error says what was wrong, and is not the server's.
func FuzzStream(f *testing.F) {
	m := newMachines(f)
	m.Dial = func(context.Context, string, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			defer theirs.Close()
			_, _ = io.Copy(theirs, theirs)
		}()
		return ours, nil
	}
	if _, err := m.host.Create(f.Context(), sandbox.Spec{Name: "a", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
		f.Fatal(err)
	}
	known := tokens.Open(filepath.Join(f.TempDir(), tokens.File))
	token, err := known.Create(tokens.Token{Name: "all", Scopes: tokens.All()})
	if err != nil {
		f.Fatal(err)
	}
	var said panics
	server := httptest.NewUnstartedServer(api.New(api.Options{Host: m.host, Tokens: known}))
	server.Config.ErrorLog = log.New(&said, "", 0)
	server.Start()
	f.Cleanup(server.Close)

	text := func(s string) []byte { return clientFrame(1, s) }
	data := func(s string) []byte { return clientFrame(2, s) }
	start := text(`{"type":"start","command":["run"],"stdin":true,"window":65536}`)
	for route, seeds := range [][][]byte{
		{
			bytes.Join([][]byte{start, data("\x00hello"), text(`{"type":"eof"}`), text(`{"type":"ack","bytes":11}`)}, nil),
			bytes.Join([][]byte{text(`{"type":"start","command":["run"],"tty":{"rows":24,"cols":80}}`), text(`{"type":"resize","rows":1,"cols":65535}`), text(`{"type":"signal","signal":9}`)}, nil),
			bytes.Join([][]byte{text(`{"type":"start","command":["run"],"detach":true}`), text(`{"type":"detach"}`)}, nil),
			text(`{"type":"start","command":[]}`), text(`{"type":"exit"}`), text(`{`), data("\x01x"), clientFrame(8, "\x03\xe8"), clientFrame(9, "ping"),
			{0x01, 0x80, 0, 0, 0, 0, 0x80, 0x80, 0, 0, 0, 0}, // a text in two frames
			{0x82, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0},
		},
		{bytes.Join([][]byte{data("\x00x"), text(`{"type":"ack","bytes":1}`), text(`{"type":"detach"}`)}, nil), text(`{"type":"ack","bytes":18446744073709551615}`)},
		{bytes.Join([][]byte{data("GET / HTTP/1.0\r\n\r\n"), text(`{"type":"eof"}`)}, nil), text(`{"type":"start","command":["x"]}`), {0x00}},
	} {
		for _, seed := range seeds {
			f.Add(uint8(route), seed)
		}
	}
	paths := []string{"/v1/sandboxes/a/exec", "/v1/sandboxes/a/processes/job/attach?window=65536", "/v1/sandboxes/a/ports/80"}
	f.Fuzz(func(t *testing.T, route uint8, input []byte) {
		if len(input) > 256<<10 {
			return
		}
		path := paths[int(route)%len(paths)]
		if strings.Contains(path, "attach") {
			g, err := m.host.Sandbox("a").Agent(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			p, err := g.Start(t.Context(), guest.Cmd{Argv: []string{"run"}, Detach: true, ID: "job"})
			if err != nil {
				t.Fatal(err)
			}
			_ = p.Close()
			defer func() { _ = g.Forget(context.WithoutCancel(t.Context()), "job") }()
		}
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		go func() {
			fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
				"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: drowse.v1\r\nAuthorization: Bearer %s\r\n\r\n", path, token)
			_, _ = conn.Write(input)
			_ = conn.(*net.TCPConn).CloseWrite()
		}()
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatal(resp, err)
		}
		const most = 2 << 20
		got, err := io.ReadAll(io.LimitReader(in, most+1))
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			t.Fatalf("%s: the stream has not ended with its client", path)
		}
		if len(got) > most {
			t.Fatalf("%s: more than %d bytes of answer to %d", path, most, len(input))
		}
		if err != nil { // it was reset, because the server has not read all: what has come may be cut
			got = nil
		}
		if err := serverFrames(got, func(opcode byte, payload []byte) error {
			switch opcode {
			case 1:
				var c wire.Control
				if err := json.Unmarshal(payload, &c); err != nil || c.Type == "" {
					return fmt.Errorf("control %s: %w", payload, err)
				}
				if c.Error != nil && (c.Error.Message == "" || c.Error.Code == "" || c.Error.Code == records.CodeOther) {
					return fmt.Errorf("an error that does not say what: %s", payload)
				}
			case 8:
				if len(payload) > 125 || len(payload) == 1 {
					return fmt.Errorf("a close of %d bytes", len(payload))
				}
			}
			return nil
		}); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if text := said.String(); text != "" {
			t.Fatalf("%s: %s", path, text)
		}
	})
}
