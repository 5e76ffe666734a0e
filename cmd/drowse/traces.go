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

// flushTime bounds how long the end of the process waits for a collector to take what is left.
const flushTime = 2 * time.Second

// sayLostEvery is how often it is logged that a collector does not take spans.
const sayLostEvery = time.Minute

// traces are what the environment asks for; nil if it asks for none. They are made once.
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

// endTraces sends what is left.
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

// traced is the host with its operations traced, if the environment asks for that: what a command does is a part of the
// trace that the environment names.
func (a *app) traced(ctx context.Context, h *sandbox.Host) (*sandbox.Host, error) {
	t, err := a.traces(ctx)
	if err != nil || t == nil {
		return h, err
	}
	return h.WithObservers(func(ctx context.Context, kind control.OperationKind, name string) (context.Context, func(*control.Operation)) {
		return t.Observe(otlp.FromEnvironment(ctx), kind, name)
	}), nil
}

// traceContext is where a request of the API has the context of its trace.
func traceContext(t *traces.Traces) func(context.Context, http.Header) context.Context {
	if t == nil {
		return nil
	}
	return otlp.FromHeader
}

// lostSpans says what goes wrong with the sending of spans: once, and then once a minute.
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
