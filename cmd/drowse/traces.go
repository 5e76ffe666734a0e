//go:build linux

package main

import (
	"context"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/traces"
	"github.com/drowse-vm/drowse/sandbox/traces/otlp"
)

// flushTime bounds how long the process waits at its end for a collector to take the remaining spans.
const flushTime = 2 * time.Second

// sayLostEvery is the least time between logs of spans that a collector did not take.
const sayLostEvery = time.Minute

// traces returns the traces that the environment asks for, or nil. It makes them once.
func (a *app) traces(ctx context.Context) (*traces.Traces, error) {
	if a.spans != nil {
		return a.spans, nil
	}
	p, err := otlp.Provider(ctx, version())
	if err != nil {
		return nil, usageError{err}
	}
	if p == nil {
		return nil, nil
	}
	otel.SetErrorHandler(&lostSpans{warn: a.log.Warn, now: time.Now})
	a.provider, a.spans = p, traces.New(p)
	return a.spans, nil
}

// endTraces sends the remaining spans.
func (a *app) endTraces(ctx context.Context) {
	if a.provider == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
	defer cancel()
	if err := a.provider.Shutdown(ctx); err != nil {
		a.log.Warn("not all spans could be sent to the collector", "error", err)
	}
}

// traced returns the host with traced operations, if the environment asks for traces. A command's operations
// belong to the trace that the environment names.
func (a *app) traced(ctx context.Context, h *sandbox.Host) (*sandbox.Host, error) {
	t, err := a.traces(ctx)
	if err != nil || t == nil {
		return h, err
	}
	return h.WithObservers(func(ctx context.Context, kind control.OperationKind, name string) (context.Context, func(*control.Operation)) {
		return t.Observe(otlp.FromEnvironment(ctx), kind, name)
	}), nil
}

// traceContext returns a function that puts the trace of an API request into its context.
func traceContext(t *traces.Traces) func(context.Context, http.Header) context.Context {
	if t == nil {
		return nil
	}
	return otlp.FromHeader
}

// lostSpans logs failures to send spans: the first one, and then one a minute at most.
type lostSpans struct {
	warn func(msg string, args ...any)
	now  func() time.Time

	mu   sync.Mutex // guards said
	said time.Time
}

// Handle implements otel.ErrorHandler.
func (l *lostSpans) Handle(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := l.now(); l.said.IsZero() || now.Sub(l.said) >= sayLostEvery {
		l.said = now
		l.warn("spans are not sent to the collector; sandboxes do not depend on it", "error", err)
	}
}
