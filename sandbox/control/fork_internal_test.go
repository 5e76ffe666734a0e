package control

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// parentSays is a VM's process that answers the order of a fork with what says.
func parentSays(t *testing.T, says func(c *net.UnixConn)) *state.Store {
	t.Helper()
	dir, err := os.MkdirTemp("", "df")
	if err != nil {
		t.Fatal(err)
	}
	s, err := state.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.VMDir("p"), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := osfile.ListenUnix(s.ControlSocket("p"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		buf := make([]byte, 4096)
		if _, err := conn.Read(buf); err != nil || !strings.HasPrefix(string(buf), "POST /orders/fork ") {
			t.Errorf("the request is %q (%v)", buf, err)
		}
		if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"); err != nil {
			t.Error(err)
		}
		says(conn.(*net.UnixConn))
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		os.RemoveAll(dir)
	})
	return s
}

func send(t *testing.T, c *net.UnixConn, l ForkLine, f *os.File) {
	t.Helper()
	if err := SendLine(c, l, f); err != nil {
		t.Error(err)
	}
}

func TestA_fork_gets_the_image_and_then_the_outcome(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "image")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("RAM"); err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	for _, tc := range []struct {
		name string
		then func(c *net.UnixConn)
		want error
	}{
		{"committed", func(c *net.UnixConn) { send(t, c, ForkLine{Result: &spec.SleepResult{Snapshot: id}}, nil) }, nil},
		{"failed", func(c *net.UnixConn) {
			send(t, c, ForkLine{Error: ReportError(snapshot.ErrNoSpace)}, nil)
		}, snapshot.ErrNoSpace},
		{"ended without a word", func(*net.UnixConn) {}, ErrForkEnded},
		{"ended in the midst of a word", func(c *net.UnixConn) { _, _ = io.WriteString(c, `{"result":{`) }, ErrForkEnded},
		{"said nothing that makes sense", func(c *net.UnixConn) { send(t, c, ForkLine{}, nil) }, ErrForkEnded},
		{"talked for ever", func(c *net.UnixConn) {
			for {
				if _, err := io.WriteString(c, strings.Repeat(" ", 64<<10)); err != nil {
					return
				}
			}
		}, ErrForkEnded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := parentSays(t, func(c *net.UnixConn) {
				send(t, c, ForkLine{Layers: []string{"a-1"}, Pages: 7}, f)
				tc.then(c)
			})
			c, err := DialFork(t.Context(), s, "p", id, "a note")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			got := make([]byte, 3)
			if _, err := c.Image.ReadAt(got, 0); err != nil || string(got) != "RAM" || c.First.Pages != 7 {
				t.Errorf("the image has %q (%v), the line %+v", got, err, c.First)
			}
			res, err := c.Wait(t.Context())
			if !errors.Is(err, tc.want) || tc.want == nil && res.Snapshot != id {
				t.Errorf("got %+v, %v, want %v", res, err, tc.want)
			}
		})
	}
}

func TestA_fork_that_cannot_be_begun_says_why(t *testing.T) {
	s := parentSays(t, func(c *net.UnixConn) { send(t, c, ForkLine{Error: ReportError(spec.ErrNotRunning)}, nil) })
	if _, err := DialFork(t.Context(), s, "p", spec.NewID(), ""); !errors.Is(err, spec.ErrNotRunning) {
		t.Errorf("refused: got %v, want ErrNotRunning", err)
	}
	s = parentSays(t, func(c *net.UnixConn) { send(t, c, ForkLine{Pages: 1}, nil) })
	if _, err := DialFork(t.Context(), s, "p", spec.NewID(), ""); err == nil {
		t.Error("without an image: no error")
	}
	asked := make(chan struct{})
	s = parentSays(t, func(c *net.UnixConn) {
		close(asked)
		_, _ = c.Read(make([]byte, 1)) // until the caller goes away
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := DialFork(ctx, s, "p", spec.NewID(), ""); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: got %v, want Canceled", err)
	}
}
