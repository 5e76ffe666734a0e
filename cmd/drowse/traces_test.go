package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/traces"
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
		rep, err := a.bringUp(t.Context(), traces.Wake, "name-of-the-sandbox", func() (control.Report, error) { return control.Report{Faults: 3}, nil })
		if err != nil || rep.Faults != 3 {
			t.Fatalf("%+v, %v", rep, err)
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
	up := func() (control.Report, error) {
		t.Error("the sandbox was brought up")
		return control.Report{}, nil
	}
	var usage usageError
	if _, err := a.bringUp(t.Context(), traces.Wake, "a", up); !errors.As(err, &usage) || !strings.Contains(err.Error(), "zipkin") {
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

// execs are VMs that run commands and do nothing else.
type execs struct{ api.VMs }

func (execs) Exec(context.Context, string, guest.Cmd) (*guest.ExitStatus, error) {
	return &guest.ExitStatus{}, nil
}

func TestVMs_without_traces_are_what_they_were(t *testing.T) {
	vms := execs{}
	if got := withSpans(nil, vms); got != api.VMs(vms) {
		t.Errorf("VMs became %T", got)
	}
	if traceContext(nil) != nil {
		t.Error("requests get contexts of traces")
	}
}
