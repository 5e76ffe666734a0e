//go:build linux

package main

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

func TestCommand_sends_its_spans_before_it_ends_and_only_if_the_environment_asks(t *testing.T) {
	var got atomic.Pointer[[]byte]
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got.Store(&body)
	}))
	defer s.Close()
	for _, at := range []string{"", s.URL} {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", at)
		a := &app{log: slog.New(slog.DiscardHandler)}
		h, err := a.traced(t.Context(), (&sandboxtest.VMs{}).Host(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: "name-of-the-sandbox", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		a.endTraces(t.Context())
		if sent := got.Load(); (sent != nil) != (at != "") || sent != nil && !bytes.Contains(*sent, []byte("name-of-the-sandbox")) {
			t.Errorf("with the endpoint %q %v was sent", at, sent != nil)
		}
	}
}

func TestCommand_refuses_an_exporter_that_there_is_not(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "zipkin")
	a := &app{log: slog.New(slog.DiscardHandler)}
	var usage usageError
	if _, err := a.traced(t.Context(), &sandbox.Host{}); !errors.As(err, &usage) || !strings.Contains(err.Error(), "zipkin") {
		t.Errorf("got %v", err)
	}
}

func TestLostSpans_are_said_once_a_minute(t *testing.T) {
	now, said := time.Unix(1000, 0), 0
	l := &lostSpans{warn: func(string, ...any) { said++ }, now: func() time.Time { return now }}
	for range 130 {
		l.Handle(errors.New("nobody answers"))
		now = now.Add(time.Second)
	}
	if said != 3 {
		t.Errorf("in 130 s it was said %d times, want 3", said)
	}
}
