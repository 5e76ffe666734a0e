package traces

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// observe has an operation observed that gives what do returns.
func observe(ctx context.Context, tr *Traces, kind control.OperationKind, do func(ctx context.Context) control.Operation) {
	begun := time.Now()
	ctx, ended := tr.Observe(ctx, kind, "a")
	op := do(ctx)
	op.Kind, op.Sandbox, op.Begun, op.Took = kind, cmp.Or(op.Report.Name, "a"), begun, time.Since(begun)
	ended(&op)
}

// wake has a wake observed that reports what rep returns.
func wake(ctx context.Context, tr *Traces, rep func() control.Report) {
	observe(ctx, tr, control.OpWake, func(context.Context) control.Operation { return control.Operation{Report: rep()} })
}

func recorder() (*Traces, *tracetest.InMemoryExporter) {
	e := tracetest.NewInMemoryExporter()
	return New(sdktrace.NewTracerProvider(sdktrace.WithSyncer(e))), e
}

// tree writes spans as "parent>name" in the order in which they ended, the operation's last.
func tree(spans tracetest.SpanStubs) string {
	names := map[trace.SpanID]string{}
	for _, s := range spans {
		names[s.SpanContext.SpanID()] = s.Name
	}
	var out []string
	for _, s := range spans {
		out = append(out, names[s.Parent.SpanID()]+">"+s.Name)
	}
	return strings.Join(out, " ")
}

func attributes(s tracetest.SpanStub) map[attribute.Key]any {
	out := map[attribute.Key]any{}
	for _, a := range s.Attributes {
		out[a.Key] = a.Value.AsInterface()
	}
	return out
}

func named(t *testing.T, spans tracetest.SpanStubs, name string) tracetest.SpanStub {
	t.Helper()
	for _, s := range spans {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("there is no span %s in %s", name, tree(spans))
	return tracetest.SpanStub{}
}

// woken is what a wake reports that has begun now.
func woken() control.Report {
	return control.Report{
		Name: "a", Begun: time.Now().UTC().Round(0), Faults: 12, MiBTouched: 1.5, FramesRead: 3, FramesCached: 4, Pooled: true,
		Stages: map[string]float64{
			"create_vm": 0.3, "prebuilt": 0.5, "devices": 1, "import": 2, "entry": 0.5, "resume_entry": 5, "agent_reached": 6, "agent_answer": 1, "resume_ready": 13, "network": 9,
		},
	}
}

// slow waits for so long that the stages of what it reports are over.
func slow[T any](v T) func() T {
	return func() T {
		time.Sleep(20 * time.Millisecond)
		return v
	}
}

func TestWake_has_a_span_with_the_stages_that_it_reports(t *testing.T) {
	tr, spans := recorder()
	var rep control.Report
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled, Remote: true})
	ctx := events.WithCause(trace.ContextWithSpanContext(t.Context(), parent), events.API)
	wake(ctx, tr, func() control.Report {
		rep = woken()
		return slow(rep)()
	})
	got := spans.GetSpans()
	if is, want := tree(got), "drowse.wake>process drowse.wake>entry drowse.wake>import drowse.wake>devices drowse.wake>prebuilt drowse.wake>agent_reached drowse.wake>agent_answer drowse.wake>report >drowse.wake"; is != want {
		t.Fatalf("spans %s, want %s", is, want)
	}
	op := got[len(got)-1]
	if op.SpanContext.TraceID() != parent.TraceID() || op.Parent.SpanID() != parent.SpanID() {
		t.Error("it is no child of the span of its context")
	}
	is := attributes(op)
	for key, want := range map[attribute.Key]any{
		"drowse.sandbox": "a", "drowse.cause": "api", "drowse.pool": true, "drowse.faults": int64(12), "drowse.touched_bytes": int64(3 << 19),
		"drowse.frames_read": int64(3), "drowse.frames_cached": int64(4), "drowse.create_vm_ms": 0.3, "drowse.network_ms": 9.0,
	} {
		if is[key] != want {
			t.Errorf("%s is %v, want %v", key, is[key], want)
		}
	}
	for name, want := range map[string][2]float64{
		"prebuilt": {1, 1.5}, "devices": {1.5, 2.5}, "import": {2.5, 4.5}, "entry": {4.5, 5}, "agent_reached": {5, 11}, "agent_answer": {11, 12},
	} {
		s := named(t, got, name)
		if from, to := s.StartTime.Sub(rep.Begun), s.EndTime.Sub(rep.Begun); from != millis(want[0]) || to != millis(want[1]) {
			t.Errorf("%s is from %v to %v, want %v ms", name, from, to, want)
		}
	}
	if end := named(t, got, "report"); end.StartTime.Sub(rep.Begun) != 13*time.Millisecond || !end.EndTime.Equal(op.EndTime) {
		t.Errorf("report is from %v to %v", end.StartTime.Sub(rep.Begun), end.EndTime.Sub(op.EndTime))
	}
}

func TestStages_lie_within_their_operation_whatever_the_clocks_say(t *testing.T) {
	tr, spans := recorder()
	rep := woken()
	rep.Begun = time.Now().Add(time.Hour) // another clock
	rep.Stages["import"] = 1e7
	wake(t.Context(), tr, func() control.Report { return rep })
	got := spans.GetSpans()
	op := named(t, got, "drowse.wake")
	for _, s := range got {
		if s.StartTime.Before(op.StartTime) || s.EndTime.After(op.EndTime) || s.EndTime.Before(s.StartTime) {
			t.Errorf("%s is from %v to %v, its operation from %v to %v", s.Name, s.StartTime, s.EndTime, op.StartTime, op.EndTime)
		}
	}
}

func TestWake_that_finds_the_VM_awake_has_no_stages_of_an_earlier_one(t *testing.T) {
	tr, spans := recorder()
	rep := woken()
	rep.Begun = time.Now().Add(-time.Minute)
	wake(t.Context(), tr, func() control.Report { return rep })
	got := spans.GetSpans()
	if len(got) != 1 || attributes(got[0])["drowse.joined"] != true {
		t.Errorf("spans %s, %v", tree(got), got[0].Attributes)
	}
}

func TestBoot_has_one_stage_until_the_agent_answers(t *testing.T) {
	tr, spans := recorder()
	observe(t.Context(), tr, control.OpCreate, func(context.Context) control.Operation {
		return control.Operation{Report: slow(control.Report{Name: "vm-1", Begun: time.Now(), Stages: map[string]float64{"boot": 10, "prebuilt": 1, "entry": 2}})()}
	})
	got := spans.GetSpans()
	if is, want := tree(got), "drowse.create>process drowse.create>boot drowse.create>report >drowse.create"; is != want {
		t.Errorf("spans %s, want %s", is, want)
	}
	if is := attributes(named(t, got, "drowse.create"))["drowse.sandbox"]; is != "vm-1" {
		t.Errorf("it is of sandbox %v, and the name was random", is)
	}
}

func TestSleep_and_snapshot_have_spans_with_bytes_and_pages(t *testing.T) {
	tr, spans := recorder()
	save := func(context.Context) control.Operation {
		time.Sleep(20 * time.Millisecond)
		return control.Operation{Saved: spec.SleepResult{
			Name: "a", Snapshot: "s", BytesRaw: 100, BytesStored: 10, BytesShared: 5, PagesChanged: 7, PagesFree: 2, Asleep: time.Now().Add(-5 * time.Millisecond),
			Stages: map[string]float64{"hooks": 1, "pause": 2, "save": 3, "sleep": 7, "gone": 18},
		}}
	}
	observe(t.Context(), tr, control.OpSleep, save)
	got := spans.GetSpans()
	if is, want := tree(got), "drowse.sleep>hooks drowse.sleep>pause drowse.sleep>save drowse.sleep>gone >drowse.sleep"; is != want {
		t.Errorf("spans %s, want %s", is, want)
	}
	is := attributes(named(t, got, "drowse.sleep"))
	for key, want := range map[attribute.Key]any{
		"drowse.snapshot": "s", "drowse.pages": int64(7), "drowse.pages_free": int64(2), "drowse.bytes_raw": int64(100), "drowse.bytes_stored": int64(10), "drowse.bytes_shared": int64(5),
	} {
		if is[key] != want {
			t.Errorf("%s is %v, want %v", key, is[key], want)
		}
	}
	spans.Reset()
	observe(t.Context(), tr, control.OpSnapshot, save)
	if got := spans.GetSpans(); got[len(got)-1].Name != "drowse.snapshot" {
		t.Errorf("spans %v", got)
	}
}

func TestFork_has_a_span_for_each_child_with_its_stages(t *testing.T) {
	tr, spans := recorder()
	observe(t.Context(), tr, control.OpFork, func(context.Context) control.Operation {
		a, b := woken(), woken()
		b.Name = "b"
		time.Sleep(20 * time.Millisecond)
		return control.Operation{Fork: control.ForkResult{
			Parent: "p", Snapshot: "s", Durable: true, Pages: 9, Children: []control.Report{a, b},
			Stages: map[string]float64{"ahead": 1, "pause": 1, "fill": 1, "ready": 15, "durable": 18, "save": 4},
		}}
	})
	got := spans.GetSpans()
	is := tree(got)
	if !strings.HasPrefix(is, "drowse.fork>ahead drowse.fork>pause drowse.fork>fill drowse.fork>save drowse.fork>child child>process") || strings.Count(is, "drowse.fork>child") != 2 {
		t.Errorf("spans %s", is)
	}
	if at := attributes(named(t, got, "drowse.fork")); at["drowse.children"] != int64(2) || at["drowse.pages"] != int64(9) {
		t.Errorf("attributes %v", at)
	}
}

func TestExec_has_a_span_that_does_not_say_what_was_run(t *testing.T) {
	tr, spans := recorder()
	const secret = "hunter2"
	observe(t.Context(), tr, control.OpExec, func(ctx context.Context) control.Operation {
		wake(ctx, tr, woken)
		return control.Operation{Exit: &guest.ExitStatus{Code: 3}}
	})
	got := spans.GetSpans()
	if is := tree(got); !strings.Contains(is, "drowse.exec>drowse.wake") {
		t.Errorf("the wake for a command is no child of it: %s", is)
	}
	if at := attributes(named(t, got, "drowse.exec")); at["drowse.exit_code"] != int64(3) || at["drowse.sandbox"] != "a" {
		t.Errorf("attributes %v", at)
	}
	observe(t.Context(), tr, control.OpExec, func(context.Context) control.Operation {
		return control.Operation{Err: fmt.Errorf("starting login %s: %w", secret, spec.ErrNotRunning)}
	})
	got = spans.GetSpans()
	last := got[len(got)-1]
	if last.Status.Code != codes.Error || last.Status.Description != "not-running" {
		t.Errorf("status %v", last.Status)
	}
	for _, s := range got {
		if text := fmt.Sprintf("%+v %v %v %v", s.Attributes, s.Events, s.Status, s.Name); strings.Contains(text, secret) {
			t.Errorf("a span has the secret: %s", text)
		}
	}
}

func TestOperation_that_fails_has_the_code_of_its_error(t *testing.T) {
	tr, spans := recorder()
	observe(t.Context(), tr, control.OpWake, func(context.Context) control.Operation {
		return control.Operation{Err: fmt.Errorf("reading /a/path: %w", spec.ErrExpired)}
	})
	got := spans.GetSpans()
	if len(got) != 1 || got[0].Status.Description != "expired" || attributes(got[0])["error.type"] != "expired" {
		t.Errorf("spans %s, %v", tree(got), got[0].Status)
	}
}

// BenchmarkWake is a wake that takes no time: what is left is what traces add.
func BenchmarkWake(b *testing.B) {
	rep := woken()
	on := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(discard{}))
	for _, c := range []struct {
		name string
		p    trace.TracerProvider
	}{{"noop", noop.NewTracerProvider()}, {"unsampled", sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))}, {"on", on}} {
		b.Run(c.name, func(b *testing.B) {
			tr := New(c.p)
			b.ReportAllocs()
			for b.Loop() {
				wake(b.Context(), tr, func() control.Report { rep.Begun = time.Now(); return rep })
			}
		})
	}
}

// discard takes spans as a queue would, and drops them.
type discard struct{}

func (discard) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (discard) OnEnd(sdktrace.ReadOnlySpan)                     {}
func (discard) Shutdown(context.Context) error                  { return nil }
func (discard) ForceFlush(context.Context) error                { return nil }
