// Package s3server starts a real S3 server, versitygw on a directory, for tests, and stands between it and its clients
// as a bad network does.
package s3server

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Keys of the server's only user.
const (
	AccessKey = "drowse-test"
	SecretKey = "drowse-test-secret"
	Region    = "us-east-1"
	Bucket    = "drowse"
)

// Start starts the program that DROWSE_TEST_VERSITYGW names, and returns its URL. The bucket is there.
func Start(t testing.TB) string {
	t.Helper()
	program := os.Getenv("DROWSE_TEST_VERSITYGW")
	if program == "" {
		t.Fatal("DROWSE_TEST_VERSITYGW does not name the program versitygw: make test-scale")
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, Bucket), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	cmd := exec.CommandContext(context.Background(), program, "--access", AccessKey, "--secret", SecretKey, "--region", Region, "--quiet", "--port", address, "posix", dir)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	for range 600 {
		if c, err := net.DialTimeout("tcp", address, time.Second); err == nil {
			c.Close()
			return "http://" + address
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("versitygw does not listen")
	return ""
}

// Network is a bad network before a server. The zero value is a good one. Its fields may change while it is in use.
type Network struct {
	RTT         atomic.Int64 // a time.Duration before each answer
	BytesPerSec atomic.Int64 // of bodies of answers; 0: no limit
	// PerMille of requests that each of these happens to.
	Refused  atomic.Int64 // answered with 503 SlowDown, not done
	LostAsk  atomic.Int64 // the connection is cut before the server sees them
	LostDone atomic.Int64 // done, and the connection is cut before the answer
	Cut      atomic.Int64 // the answer breaks off in its middle

	Requests, Gets, Puts, Sent atomic.Int64 // counts; Sent: bytes of bodies of answers
}

// Stand puts the network before the server at target, and returns the URL of its near end.
func (n *Network) Stand(t testing.TB, target string) string {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	proxy := &httputil.ReverseProxy{
		// The host is signed: it stays what the client has sent.
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(u); r.Out.Host = r.In.Host },
		Transport:    tr,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) },
		ErrorLog:     nil,
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.Requests.Add(1)
		switch r.Method {
		case http.MethodGet:
			n.Gets.Add(1)
		case http.MethodPut:
			n.Puts.Add(1)
		}
		if !sleep(r.Context(), time.Duration(n.RTT.Load())) || happens(&n.LostAsk) {
			panic(http.ErrAbortHandler)
		}
		if happens(&n.Refused) {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>`)
			return
		}
		if happens(&n.LostDone) {
			w = &lost{ResponseWriter: w}
		}
		proxy.ServeHTTP(&slow{ResponseWriter: w, n: n, ctx: r.Context(), cut: happens(&n.Cut)}, r)
	}))
	s.Config.ErrorLog = nil
	s.Start()
	t.Cleanup(func() {
		s.Close()
		tr.CloseIdleConnections()
	})
	return s.URL
}

func happens(perMille *atomic.Int64) bool {
	p := perMille.Load()
	return p > 0 && rand.Int64N(1000) < p
}

func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// lost cuts the connection when the answer is to begin.
type lost struct{ http.ResponseWriter }

func (*lost) WriteHeader(int)           { panic(http.ErrAbortHandler) }
func (*lost) Write([]byte) (int, error) { panic(http.ErrAbortHandler) }

// slow paces an answer, and may cut it.
type slow struct {
	http.ResponseWriter
	n   *Network
	ctx context.Context
	cut bool
}

func (s *slow) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s *slow) Write(p []byte) (int, error) {
	if s.cut && len(p) > 1 {
		_, _ = s.ResponseWriter.Write(p[:len(p)/2])
		if f, ok := s.ResponseWriter.(http.Flusher); ok {
			f.Flush()
		}
		panic(http.ErrAbortHandler)
	}
	if rate := s.n.BytesPerSec.Load(); rate > 0 && !sleep(s.ctx, time.Duration(len(p))*time.Second/time.Duration(rate)) {
		return 0, fmt.Errorf("writing an answer: %w", context.Cause(s.ctx))
	}
	s.n.Sent.Add(int64(len(p)))
	return s.ResponseWriter.Write(p)
}
