package traces

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
)

// Scope is the name of the instrumentation.
const Scope = "github.com/drowse-vm/drowse/sandbox/traces"

// Keys of attributes. No attribute contains a command, its environment or a secret. The errors of operations may
// contain them, so a span has only an error's code.
const (
	keySandbox      = attribute.Key("drowse.sandbox")
	keyCause        = attribute.Key("drowse.cause")
	keyJoined       = attribute.Key("drowse.joined")
	keyPool         = attribute.Key("drowse.pool")
	keyFaults       = attribute.Key("drowse.faults")
	keyTouched      = attribute.Key("drowse.touched_bytes")
	keyFramesRead   = attribute.Key("drowse.frames_read")
	keyFramesCached = attribute.Key("drowse.frames_cached")
	keySnapshot     = attribute.Key("drowse.snapshot")
	keyPages        = attribute.Key("drowse.pages")
	keyFree         = attribute.Key("drowse.pages_free")
	keyRaw          = attribute.Key("drowse.bytes_raw")
	keyStored       = attribute.Key("drowse.bytes_stored")
	keyShared       = attribute.Key("drowse.bytes_shared")
	keyChildren     = attribute.Key("drowse.children")
	keyDurable      = attribute.Key("drowse.durable")
	keyExit         = attribute.Key("drowse.exit_code")
	keySignal       = attribute.Key("drowse.signal")
	keyTimedOut     = attribute.Key("drowse.timed_out")
	keyErrorType    = attribute.Key("error.type")
)

// Traces makes spans. Its methods may be called from any goroutine.
type Traces struct{ tracer trace.Tracer }

// New returns a Traces that makes spans with a provider. The caller shuts the provider down.
func New(p trace.TracerProvider) *Traces { return &Traces{p.Tracer(Scope)} }

// Observe makes a span for an operation, with its name: a sandbox.Host's observer (control.Observer). The parent
// comes from the context. A wake of a VM that was awake, or that another caller was waking, has the attribute
// drowse.joined and no stages. So has a sleep of a sleeping VM. The span of a command has its sandbox and how it
// ended, but not the command; a wake for it is a child span.
func (t *Traces) Observe(ctx context.Context, kind control.OperationKind, _ string) (context.Context, func(*control.Operation)) {
	begin := time.Now()
	ctx, s := t.tracer.Start(ctx, prefix+string(kind), trace.WithTimestamp(begin))
	return ctx, func(op *control.Operation) {
		o := &operation{t, ctx, s, begin, time.Now()}
		defer s.End(trace.WithTimestamp(o.end))
		if !s.IsRecording() {
			return
		}
		s.SetAttributes(keySandbox.String(op.Sandbox), keyCause.String(string(events.CauseOf(ctx))))
		switch {
		case op.Err != nil:
			code := string(fleet.CodeOf(op.Err)) // from a fixed set
			s.SetAttributes(keyErrorType.String(code))
			s.SetStatus(codes.Error, code)
		case op.Kind == control.OpSleep, op.Kind == control.OpSnapshot:
			o.saved(op)
		case op.Kind == control.OpFork:
			o.forked(op.Fork)
		case op.Kind == control.OpExec:
			o.executed(op.Exit)
		case op.Joined():
			s.SetAttributes(keyJoined.Bool(true))
		default:
			s.SetAttributes(upAttributes(op.Report)...)
			o.up(ctx, op.Report, o.begin, o.end)
		}
	}
}

// prefix begins the names of operations' spans.
const prefix = "drowse."

// operation is an unfinished span, with the times that its children must lie within.
type operation struct {
	t          *Traces
	ctx        context.Context
	span       trace.Span
	begin, end time.Time
}

// stage makes a child span. It keeps the child within the operation, even if the clocks of two processes differ or
// a clock was set.
func (o *operation) stage(ctx context.Context, name string, begin, end time.Time, attrs ...attribute.KeyValue) context.Context {
	begin, end = o.within(begin), o.within(end)
	ctx, s := o.t.tracer.Start(ctx, name, trace.WithTimestamp(begin), trace.WithAttributes(attrs...))
	s.End(trace.WithTimestamp(end))
	return ctx
}

func (o *operation) within(t time.Time) time.Time {
	switch {
	case t.Before(o.begin):
		return o.begin
	case t.After(o.end):
		return o.end
	}
	return t
}

func upAttributes(rep control.Report) []attribute.KeyValue {
	return append([]attribute.KeyValue{
		keyPool.Bool(rep.Pooled), keyFaults.Int64(int64(rep.Faults)), keyTouched.Int64(int64(rep.MiBTouched * (1 << 20))),
		keyFramesRead.Int64(int64(rep.FramesRead)), keyFramesCached.Int64(int64(rep.FramesCached)),
	}, beside(rep)...)
}

// Stages that a VM's process passes one after the other until the guest runs, and then stages of the guest. The
// stages in background and network run beside them. Only their duration is known, not their beginning, so they are
// attributes.
var (
	inline     = []string{"prebuilt", "devices", "load", "import", "entry"}
	inGuest    = []string{"agent_reached", "agent_answer"}
	background = []string{"create_vm", "memory", "irqchip", "vcpus", "kvm_state", "network"}
)

func beside(rep control.Report) (out []attribute.KeyValue) {
	for _, name := range background {
		if ms, ok := rep.Stages[name]; ok {
			out = append(out, attribute.Float64("drowse."+name+"_ms", ms))
		}
	}
	return out
}

func millis(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// up makes the stages of a VM that came up between begin and end.
func (o *operation) up(ctx context.Context, rep control.Report, begin, end time.Time) {
	if rep.Begun.IsZero() {
		return
	}
	o.stage(ctx, "process", begin, rep.Begun)
	ready := rep.Begun.Add(millis(rep.Stages["boot"]))
	if ms, ok := rep.Stages["resume_entry"]; ok {
		entry := rep.Begun.Add(millis(ms))
		ready = rep.Begun.Add(millis(rep.Stages["resume_ready"]))
		at := entry
		for _, name := range slices.Backward(inline) {
			if ms, ok := rep.Stages[name]; ok {
				from := at.Add(-millis(ms))
				o.stage(ctx, name, from, at)
				at = from
			}
		}
		at = entry
		for _, name := range inGuest {
			if ms, ok := rep.Stages[name]; ok {
				to := at.Add(millis(ms))
				o.stage(ctx, name, at, to)
				at = to
			}
		}
	} else {
		o.stage(ctx, "boot", rep.Begun, ready)
	}
	o.stage(ctx, "report", ready, end)
}

// saved completes the span of a sleep or a snapshot.
func (o *operation) saved(op *control.Operation) {
	res, begin := op.Saved, o.begin
	o.span.SetAttributes(keySnapshot.String(res.Snapshot), keyPages.Int64(int64(res.PagesChanged)), keyFree.Int64(int64(res.PagesFree)),
		keyRaw.Int64(int64(res.BytesRaw)), keyStored.Int64(res.BytesStored), keyShared.Int64(res.BytesShared))
	if op.Joined() {
		o.span.SetAttributes(keyJoined.Bool(true))
		return
	}
	at := begin
	stage := func(name string, ms float64) {
		if ms > 0 {
			to := at.Add(millis(ms))
			o.stage(o.ctx, name, at, to)
			at = to
		}
	}
	stage("hooks", res.Stages["hooks"])
	// That of a disk snapshot is how long the file system was frozen.
	for _, name := range []string{"pause", "frozen", "save"} {
		stage(name, res.Stages[name])
	}
	if gone := res.Stages["gone"]; gone > 0 && !res.Asleep.IsZero() {
		o.stage(o.ctx, "gone", res.Asleep, begin.Add(millis(gone)))
	}
}

// forked completes the span of a fork, and makes one for each child.
func (o *operation) forked(res control.ForkResult) {
	begin := o.begin
	o.span.SetAttributes(keySnapshot.String(res.Snapshot), keyPages.Int64(int64(res.Pages)), keyChildren.Int(len(res.Children)), keyDurable.Bool(res.Durable))
	at := begin
	for _, name := range []string{"ahead", "pause", "fill"} {
		if ms := res.Stages[name]; ms > 0 {
			to := at.Add(millis(ms))
			o.stage(o.ctx, name, at, to)
			at = to
		}
	}
	if durable, save := res.Stages["durable"], res.Stages["save"]; durable > 0 && save > 0 {
		to := begin.Add(millis(durable))
		o.stage(o.ctx, "save", to.Add(-millis(save)), to)
	}
	for _, rep := range res.Children {
		if rep.Begun.IsZero() {
			continue
		}
		ready := rep.Begun.Add(millis(rep.Stages["resume_ready"]))
		ctx := o.stage(o.ctx, "child", rep.Begun, ready, append(upAttributes(rep), keySandbox.String(rep.Name))...)
		o.up(ctx, rep, rep.Begun, ready)
	}
}

// executed completes the span of a command.
func (o *operation) executed(st *guest.ExitStatus) {
	if st == nil {
		return
	}
	o.span.SetAttributes(keyExit.Int(st.Code))
	if st.Signal != 0 {
		o.span.SetAttributes(keySignal.Int(st.Signal))
	}
	if st.TimedOut {
		o.span.SetAttributes(keyTimedOut.Bool(true))
	}
}
