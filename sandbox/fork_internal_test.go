package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// parentSays is a VM's process that answers POST /fork with what says.
func parentSays(t *testing.T, says func(c *net.UnixConn)) *Store {
	t.Helper()
	dir, err := os.MkdirTemp("", "df")
	if err != nil {
		t.Fatal(err)
	}
	s, err := OpenStore(dir)
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
		if _, err := conn.Read(buf); err != nil || !strings.HasPrefix(string(buf), "POST /fork?id=") {
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

func send(t *testing.T, c *net.UnixConn, l forkLine, f *os.File) {
	t.Helper()
	if err := sendLine(c, l, f); err != nil {
		t.Error(err)
	}
}

func TestAForkGetsTheImageAndThenTheOutcome(t *testing.T) {
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
		{"committed", func(c *net.UnixConn) { send(t, c, forkLine{Result: &SleepResult{Snapshot: id}}, nil) }, nil},
		{"failed", func(c *net.UnixConn) {
			send(t, c, forkLine{Error: reportError(snapshot.ErrNoSpace)}, nil)
		}, snapshot.ErrNoSpace},
		{"ended without a word", func(*net.UnixConn) {}, errForkEnded},
		{"ended in the midst of a word", func(c *net.UnixConn) { _, _ = io.WriteString(c, `{"result":{`) }, errForkEnded},
		{"said nothing that makes sense", func(c *net.UnixConn) { send(t, c, forkLine{}, nil) }, errForkEnded},
		{"talked for ever", func(c *net.UnixConn) {
			for {
				if _, err := io.WriteString(c, strings.Repeat(" ", 64<<10)); err != nil {
					return
				}
			}
		}, errForkEnded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := parentSays(t, func(c *net.UnixConn) {
				send(t, c, forkLine{Layers: []string{"a-1"}, Pages: 7}, f)
				tc.then(c)
			})
			c, err := s.dialFork(t.Context(), "p", id, "a note")
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			got := make([]byte, 3)
			if _, err := c.image.ReadAt(got, 0); err != nil || string(got) != "RAM" || c.first.Pages != 7 {
				t.Errorf("the image has %q (%v), the line %+v", got, err, c.first)
			}
			res, err := c.wait(t.Context())
			if !errors.Is(err, tc.want) || tc.want == nil && res.Snapshot != id {
				t.Errorf("got %+v, %v, want %v", res, err, tc.want)
			}
		})
	}
}

func TestAForkThatCannotBeBegunSaysWhy(t *testing.T) {
	s := parentSays(t, func(c *net.UnixConn) { send(t, c, forkLine{Error: reportError(ErrNotRunning)}, nil) })
	if _, err := s.dialFork(t.Context(), "p", spec.NewID(), ""); !errors.Is(err, ErrNotRunning) {
		t.Errorf("refused: got %v, want ErrNotRunning", err)
	}
	s = parentSays(t, func(c *net.UnixConn) { send(t, c, forkLine{Pages: 1}, nil) })
	if _, err := s.dialFork(t.Context(), "p", spec.NewID(), ""); err == nil {
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
	if _, err := s.dialFork(ctx, "p", spec.NewID(), ""); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: got %v, want Canceled", err)
	}
}

func TestABadRequestForAForkIsRefused(t *testing.T) {
	for _, id := range []string{"", "../../x", strings.Repeat("G", 32)} {
		p := &process{}
		mux := http.NewServeMux()
		mux.HandleFunc("POST /fork", p.serveFork)
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: mux}
		go func() { _ = srv.Serve(l) }()
		client := &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", path)
			},
			DisableKeepAlives: true,
		}}
		resp, err := client.Post("http://vm/fork?id="+id, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("id %q: %s", id, resp.Status)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Whether a child has a snapshot is what the disk says at this moment.
func TestAForksRecordClaimsASnapshotThatIsThereOnly(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	r := &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "child"}, Phase: state.Stopped, Parent: id,
		Fork: &state.Origin{Parent: "p", ParentID: spec.NewID(), Generation: 1},
	}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	claims := func(want string) {
		t.Helper()
		if got, err := s.Get("child"); err != nil || got.Snapshot != want {
			t.Errorf("it claims %q (%v), want %q", got.Snapshot, err, want)
		}
	}
	claims("")
	if err := os.Mkdir(s.SnapshotDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	claims("")
	if err := os.WriteFile(filepath.Join(s.SnapshotDir(id), snapshot.ManifestName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	claims(id)
	r.Snapshot = spec.NewID() // it has slept since
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	claims(r.Snapshot)
}
