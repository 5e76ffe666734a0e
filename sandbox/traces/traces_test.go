package traces

import (
	"context"
	"errors"
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
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// said are VMs in memory that report what real ones would.
type said struct {
	fleet.VMs
	rep   func() control.Report
	slept func() control.SleepResult
	fork  func() sandbox.ForkResult
	err   error
}

func (s said) Wake(context.Context, string) (control.Report, error) { return s.rep(), s.err }

func (s said) Run(context.Context, sandbox.Spec, state.Metadata) (control.Report, error) {
	return s.rep(), s.err
}

func (s said) SleepWith(context.Context, string, sandbox.SleepOptions) (control.SleepResult, error) {
	return s.slept(), s.err
}

func (s said) SnapshotWith(context.Context, string, sandbox.SnapshotOptions) (control.SleepResult, error) {
	return s.slept(), s.err
}

func (s said) Fork(context.Context, string, sandbox.ForkOptions) (sandbox.ForkResult, error) {
	return s.fork(), s.err
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
	vms := tr.Watch(said{VMs: fleettest.New(), rep: func() control.Report {
		rep = woken()
		return slow(rep)()
	}})
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled, Remote: true})
	ctx := events.WithCause(trace.ContextWithSpanContext(t.Context(), parent), events.API)
	if _, err := vms.Wake(ctx, "a"); err != nil {
		t.Fatal(err)
	}
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
	vms := tr.Watch(said{VMs: fleettest.New(), rep: func() control.Report { return rep }})
	if _, err := vms.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	op := named(t, got, Wake)
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
	vms := tr.Watch(said{VMs: fleettest.New(), rep: func() control.Report { return rep }})
	if _, err := vms.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if len(got) != 1 || attributes(got[0])["drowse.joined"] != true {
		t.Errorf("spans %s, %v", tree(got), got[0].Attributes)
	}
}

func TestBoot_has_one_stage_until_the_agent_answers(t *testing.T) {
	tr, spans := recorder()
	vms := tr.Watch(said{VMs: fleettest.New(), rep: func() control.Report {
		return slow(control.Report{Name: "vm-1", Begun: time.Now(), Stages: map[string]float64{"boot": 10, "prebuilt": 1, "entry": 2}})()
	}})
	if _, err := vms.Run(t.Context(), sandbox.Spec{}, state.Metadata{}); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if is, want := tree(got), "drowse.create>process drowse.create>boot drowse.create>report >drowse.create"; is != want {
		t.Errorf("spans %s, want %s", is, want)
	}
	if is := attributes(named(t, got, Create))["drowse.sandbox"]; is != "vm-1" {
		t.Errorf("it is of sandbox %v, and the name was random", is)
	}
}

func TestSleep_and_snapshot_have_spans_with_bytes_and_pages(t *testing.T) {
	tr, spans := recorder()
	vms := tr.Watch(said{VMs: fleettest.New(), slept: func() control.SleepResult {
		time.Sleep(20 * time.Millisecond)
		return control.SleepResult{
			Name: "a", Snapshot: "s", BytesRaw: 100, BytesStored: 10, BytesShared: 5, PagesChanged: 7, PagesFree: 2, Asleep: time.Now().Add(-5 * time.Millisecond),
			Stages: map[string]float64{"hooks": 1, "pause": 2, "save": 3, "sleep": 7, "gone": 18},
		}
	}})
	if _, err := vms.SleepWith(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if is, want := tree(got), "drowse.sleep>hooks drowse.sleep>pause drowse.sleep>save drowse.sleep>gone >drowse.sleep"; is != want {
		t.Errorf("spans %s, want %s", is, want)
	}
	is := attributes(named(t, got, Sleep))
	for key, want := range map[attribute.Key]any{
		"drowse.snapshot": "s", "drowse.pages": int64(7), "drowse.pages_free": int64(2), "drowse.bytes_raw": int64(100), "drowse.bytes_stored": int64(10), "drowse.bytes_shared": int64(5),
	} {
		if is[key] != want {
			t.Errorf("%s is %v, want %v", key, is[key], want)
		}
	}
	spans.Reset()
	if _, err := vms.SnapshotWith(t.Context(), "a", sandbox.SnapshotOptions{Note: "a note of the user's"}); err != nil {
		t.Fatal(err)
	}
	if got := spans.GetSpans(); got[len(got)-1].Name != Snapshot || strings.Contains(fmt.Sprint(got), "a note of the user's") {
		t.Errorf("spans %v", got)
	}
}

func TestFork_has_a_span_for_each_child_with_its_stages(t *testing.T) {
	tr, spans := recorder()
	vms := tr.Watch(said{VMs: fleettest.New(), fork: func() sandbox.ForkResult {
		a, b := woken(), woken()
		b.Name = "b"
		time.Sleep(20 * time.Millisecond)
		return sandbox.ForkResult{
			Parent: "p", Snapshot: "s", Durable: true, Pages: 9, Children: []control.Report{a, b},
			Stages: map[string]float64{"ahead": 1, "pause": 1, "fill": 1, "ready": 15, "durable": 18, "save": 4},
		}
	}})
	if _, err := vms.Fork(t.Context(), "p", sandbox.ForkOptions{}); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	is := tree(got)
	if !strings.HasPrefix(is, "drowse.fork>ahead drowse.fork>pause drowse.fork>fill drowse.fork>save drowse.fork>child child>process") || strings.Count(is, "drowse.fork>child") != 2 {
		t.Errorf("spans %s", is)
	}
	if at := attributes(named(t, got, Fork)); at["drowse.children"] != int64(2) || at["drowse.pages"] != int64(9) {
		t.Errorf("attributes %v", at)
	}
}

func TestExec_has_a_span_that_does_not_say_what_was_run(t *testing.T) {
	tr, spans := recorder()
	const secret = "hunter2"
	c := guest.Cmd{Argv: []string{"login", secret}, Env: []string{"TOKEN=" + secret}, Dir: "/" + secret, User: secret}
	vms := tr.Watch(said{VMs: fleettest.New(), rep: woken})
	exec := tr.Exec(func(ctx context.Context, name string, _ guest.Cmd) (*guest.ExitStatus, error) {
		if _, err := vms.Wake(ctx, name); err != nil {
			return nil, err
		}
		return &guest.ExitStatus{Code: 3}, nil
	})
	if _, err := exec(t.Context(), "a", c); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if is := tree(got); !strings.Contains(is, "drowse.exec>drowse.wake") {
		t.Errorf("the wake for a command is no child of it: %s", is)
	}
	if at := attributes(named(t, got, Exec)); at["drowse.exit_code"] != int64(3) || at["drowse.sandbox"] != "a" {
		t.Errorf("attributes %v", at)
	}
	failing := tr.Exec(func(context.Context, string, guest.Cmd) (*guest.ExitStatus, error) {
		return nil, fmt.Errorf("starting login %s: %w", secret, sandbox.ErrNotRunning)
	})
	if _, err := failing(t.Context(), "a", c); err == nil {
		t.Fatal("no error")
	}
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
	vms := tr.Watch(said{VMs: fleettest.New(), rep: woken, err: fmt.Errorf("reading /a/path: %w", state.ErrExpired)})
	if _, err := vms.Wake(t.Context(), "a"); !errors.Is(err, state.ErrExpired) {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if len(got) != 1 || got[0].Status.Description != "expired" || attributes(got[0])["error.type"] != "expired" {
		t.Errorf("spans %s, %v", tree(got), got[0].Status)
	}
}

func TestTraces_without_a_provider_leave_VMs_and_commands_as_they_are(t *testing.T) {
	tr := New(nil)
	vms := fleettest.New()
	if got := tr.Watch(vms); got != fleet.VMs(vms) {
		t.Errorf("VMs became %T", got)
	}
	tr.Up(t.Context(), Wake, "a", time.Now(), woken(), nil)
}

// BenchmarkWake is a wake that takes no time: what is left is what traces add. "off" is VMs that are not wrapped.
func BenchmarkWake(b *testing.B) {
	rep := woken()
	bare := said{VMs: fleettest.New(), rep: func() control.Report { rep.Begun = time.Now(); return rep }}
	on := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(discard{}))
	for _, c := range []struct {
		name string
		p    trace.TracerProvider
	}{{"off", nil}, {"noop", noop.NewTracerProvider()}, {"unsampled", sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))}, {"on", on}} {
		b.Run(c.name, func(b *testing.B) {
			vms := New(c.p).Watch(bare)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := vms.Wake(b.Context(), "a"); err != nil {
					b.Fatal(err)
				}
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
