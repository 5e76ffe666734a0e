package otlp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// ErrEnvironment says that the environment asks for what there is not.
var ErrEnvironment = errors.New("the OTEL_* variables cannot be followed")

// Wanted says whether the environment asks for traces: by OTEL_EXPORTER_OTLP_ENDPOINT,
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER=otlp, unless that is "none" or OTEL_SDK_DISABLED is
// "true".
func Wanted() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false
	}
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" {
		return e != "none"
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Provider makes the provider that the environment asks for, and nil if it asks for none. Shut it down, with a context
// that ends: what has not been sent is sent then. It speaks to nobody before there is a span. The error is
// ErrEnvironment where it asks for another exporter or protocol.
//
// Spans wait in a queue of OTEL_BSP_MAX_QUEUE_SIZE (2,048), and are dropped when that is full: a collector that does
// not answer holds up nobody.
func Provider(ctx context.Context, version string) (*sdktrace.TracerProvider, error) {
	if !Wanted() {
		return nil, nil
	}
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		return nil, fmt.Errorf("%w: OTEL_TRACES_EXPORTER is %q: use otlp, or none", ErrEnvironment, e)
	}
	protocol := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
	if protocol == "" {
		protocol = os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL")
	}
	if protocol != "" && protocol != "http/protobuf" {
		return nil, fmt.Errorf("%w: the protocol is %q: use http/protobuf, which collectors take at port 4318", ErrEnvironment, protocol)
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEnvironment, err)
	}
	// What the environment says of the resource comes last, and counts.
	r, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "drowse"), attribute.String("service.version", version)), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) && !errors.Is(err, resource.ErrSchemaURLConflict) {
		return nil, fmt.Errorf("%w: %w", ErrEnvironment, err)
	}
	return sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(r)), nil
}

// propagator takes the W3C Trace Context (https://www.w3.org/TR/trace-context/) alone: baggage of callers goes nowhere.
var propagator = propagation.TraceContext{}

// FromHeader is a context whose spans are children of the one that the header traceparent names, if it names one.
func FromHeader(ctx context.Context, h http.Header) context.Context {
	return propagator.Extract(ctx, propagation.HeaderCarrier(h))
}

// FromEnvironment is FromHeader for the variables TRACEPARENT and TRACESTATE, by which a program tells one that it
// starts.
func FromEnvironment(ctx context.Context) context.Context {
	return propagator.Extract(ctx, propagation.MapCarrier{"traceparent": os.Getenv("TRACEPARENT"), "tracestate": os.Getenv("TRACESTATE")})
}
