package otlp

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
)

func TestMain(m *testing.M) {
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(error) {})) // collectors are down in tests
	goleak.VerifyTestMain(m)
}

// receiver is a collector that takes spans by OTLP over HTTP.
type receiver struct {
	mu    sync.Mutex // guards what follows
	spans []string
	names map[string]string // of the resource
	key   string            // a header
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	var got collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(body, &got)
	}
	if err != nil || req.URL.Path != "/v1/traces" {
		http.Error(w, "no spans", http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.key = req.Header.Get("X-Key")
	for _, rs := range got.ResourceSpans {
		for _, a := range rs.Resource.Attributes {
			r.names[a.Key] = a.Value.GetStringValue()
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				r.spans = append(r.spans, s.Name)
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// environment has no OTEL_* variables but these.
func environment(t *testing.T, vars map[string]string) {
	t.Helper()
	for _, name := range []string{
		"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER",
	} {
		t.Setenv(name, vars[name])
	}
}

func TestProvider_sends_spans_to_the_collector_of_the_environment(t *testing.T) {
	r := &receiver{names: map[string]string{}}
	s := httptest.NewServer(r)
	defer s.Close()
	environment(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": s.URL, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=k", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"})
	p, err := Provider(t.Context(), "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	_, span := p.Tracer("test").Start(t.Context(), "one")
	span.End()
	if err := p.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.spans) != 1 || r.spans[0] != "one" || r.key != "k" {
		t.Errorf("the collector has spans %v, with the key %q", r.spans, r.key)
	}
	for key, want := range map[string]string{"service.name": "drowse", "service.version": "1.2.3", "deployment.environment.name": "test"} {
		if r.names[key] != want {
			t.Errorf("%s is %q, want %q", key, r.names[key], want)
		}
	}
}

func TestProvider_is_none_unless_the_environment_asks_for_one_that_there_is(t *testing.T) {
	const at = "http://127.0.0.1:1"
	for _, c := range []struct {
		name string
		vars map[string]string
		made bool
		err  error
	}{
		{"no variables", nil, false, nil},
		{"an endpoint", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": at}, true, nil},
		{"an endpoint for traces", map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": at}, true, nil},
		{"an exporter", map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, true, nil},
		{"an endpoint and no exporter", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": at, "OTEL_TRACES_EXPORTER": "none"}, false, nil},
		{"an endpoint and a disabled SDK", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": at, "OTEL_SDK_DISABLED": "True"}, false, nil},
		{"another exporter", map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, false, ErrEnvironment},
		{"another protocol", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": at, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, false, ErrEnvironment},
		{"the protocol for traces counts", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": at, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, true, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			environment(t, c.vars)
			p, err := Provider(t.Context(), "test")
			if !errors.Is(err, c.err) || (p != nil) != c.made {
				t.Errorf("got %v, %v", p != nil, err)
			}
			if p != nil {
				if err := p.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A collector that takes connections and never answers holds up neither spans nor, beyond its bound, the end.
func TestCollector_that_is_slow_or_down_holds_up_nobody(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted sync.WaitGroup
	accepted.Go(func() {
		var conns []net.Conn
		defer func() {
			for _, c := range conns {
				c.Close()
			}
		}()
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
		}
	})
	defer accepted.Wait()
	defer silent.Close()
	down, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	down.Close()
	for name, at := range map[string]string{"slow": silent.Addr().String(), "down": down.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			environment(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://" + at})
			p, err := Provider(t.Context(), "test")
			if err != nil {
				t.Fatal(err)
			}
			// More than wait in the queue: what has no room is dropped, and whoever makes it does not wait. If it did,
			// it would be for ever.
			for range 10_000 {
				_, span := p.Tracer("test").Start(t.Context(), "one")
				span.End()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			// Of a collector that is down it is said to the handler of errors, which is not this test's.
			if err := p.Shutdown(ctx); name == "slow" && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the end did not keep to its bound: %v", err)
			}
		})
	}
}

func TestContext_comes_from_traceparent_and_not_from_what_is_none(t *testing.T) {
	const id = "0af7651916cd43dd8448eb211c80319c"
	for _, c := range []struct {
		parent string
		valid  bool
	}{
		{"00-" + id + "-b7ad6b7169203331-01", true},
		{"", false},
		{"00-" + id, false},
		{"00-00000000000000000000000000000000-b7ad6b7169203331-01", false},
		{"ff-" + id + "-b7ad6b7169203331-01", false},
		{strings.Repeat("0", 1<<16), false},
	} {
		header := http.Header{"Traceparent": {c.parent}, "Baggage": {"a=b"}}
		s := trace.SpanContextFromContext(FromHeader(t.Context(), header))
		if s.IsValid() != c.valid || c.valid && (s.TraceID().String() != id || !s.IsRemote()) {
			t.Errorf("%.60q in a header is %v", c.parent, s)
		}
		t.Setenv("TRACEPARENT", c.parent)
		s = trace.SpanContextFromContext(FromEnvironment(t.Context()))
		if s.IsValid() != c.valid {
			t.Errorf("%.60q in the environment is %v", c.parent, s)
		}
	}
}
