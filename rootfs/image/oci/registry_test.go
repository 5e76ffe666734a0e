package oci

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// answers is a transport that a test defines.
type answers func(*http.Request) (*http.Response, error)

func (f answers) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestRegistry_is_not_asked_without_TLS(t *testing.T) {
	for url, want := range map[string]bool{
		"https://example.com/v2/": true, "https://10.0.0.1/v2/": true, "http://localhost:5000/v2/": true, "http://a.localhost/v2/": true,
		"http://127.0.0.1:5000/v2/": true, "http://127.9.9.9/v2/": true, "http://[::1]:5000/v2/": true,
		"http://example.com/v2/": false, "http://10.0.0.1/v2/": false, "http://192.168.1.1:5000/v2/": false, "http://172.16.0.1/v2/": false,
		"http://localhost.example.com/v2/": false, "http://127.0.0.1.example.com/v2/": false, "ftp://example.com/": false,
	} {
		for _, plain := range []bool{false, true} {
			asked := false
			p := &patient{plainHTTP: plain, stall: time.Hour, inner: answers(func(r *http.Request) (*http.Response, error) {
				asked = true
				return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
			})}
			resp, err := p.RoundTrip(imagetest.Must(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)))
			if err == nil {
				resp.Body.Close()
			}
			if want := want || plain; asked != want || (err == nil) != want || err != nil && !errors.Is(err, image.ErrRegistry) {
				t.Errorf("%s (plain %v): asked %v, %v", url, plain, asked, err)
			}
		}
	}
}

// stillBody blocks every Read until its request is cancelled.
type stillBody struct{ ctx context.Context }

func (s stillBody) Read([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

func (stillBody) Close() error { return nil }

func TestRegistry_answer_that_stands_still_is_given_up(t *testing.T) {
	for _, path := range []string{"/v2/a/manifests/v1", "/v2/a/blobs/sha256:x", "/token"} {
		p := &patient{stall: time.Millisecond, inner: answers(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: stillBody{r.Context()}, Request: r}, nil
		})}
		resp, err := p.RoundTrip(imagetest.Must(http.NewRequestWithContext(t.Context(), http.MethodGet, "https://example.com"+path, nil)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(resp.Body); !errors.Is(err, image.ErrRegistry) {
			t.Errorf("%s: got %v", path, err)
		}
		resp.Body.Close()
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Duration{"0": 0, "7": 7 * time.Second, "Thu, 01 Jan 2026 00:01:00 GMT": time.Minute, "Thu, 01 Jan 2025 00:01:00 GMT": 0} {
		if got, ok := retryAfter(s, now); !ok || got != want {
			t.Errorf("%q: %v %v", s, got, ok)
		}
	}
	for _, s := range []string{"", "-1", "soon", "99999999999999999999"} {
		if got, ok := retryAfter(s, now); ok {
			t.Errorf("%q: %v", s, got)
		}
	}
}
