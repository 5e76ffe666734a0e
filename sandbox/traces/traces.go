package traces

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Scope is the name of the instrumentation.
const Scope = "github.com/drowse-vm/drowse/sandbox/traces"

// Names of the spans of operations.
const (
	Create   = "drowse.create"
	Start    = "drowse.start"
	Wake     = "drowse.wake"
	Restore  = "drowse.restore"
	Sleep    = "drowse.sleep"
	Snapshot = "drowse.snapshot"
	Fork     = "drowse.fork"
	Exec     = "drowse.exec"
)

// Keys of attributes. None of them has what a command, its environment or a secret says: operations have them in their
// errors too, so of an error there is the code alone.
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

// Traces makes spans. The nil *Traces makes none. Its methods may be called from any goroutine.
type Traces struct{ tracer trace.Tracer }

// New makes spans with a provider, which the caller shuts down; nil makes none.
func New(p trace.TracerProvider) *Traces {
	if p == nil {
		return nil
	}
	return &Traces{p.Tracer(Scope)}
}

// Watch are the VMs with a span made of each operation that brings one up, saves or forks it. The parent is that of the
// context. Without a provider they are the VMs themselves.
func (t *Traces) Watch(vms fleet.VMs) fleet.VMs {
	if t == nil {
		return vms
	}
	return watched{vms, t}
}

type watched struct {
	fleet.VMs
	t *Traces
}

func (w watched) Run(ctx context.Context, spec sandbox.Spec, label state.Metadata) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.Run(ctx, spec, label)
	w.t.Up(ctx, Create, spec.Name, begin, rep, err)
	return rep, err
}

func (w watched) Start(ctx context.Context, name string) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.Start(ctx, name)
	w.t.Up(ctx, Start, name, begin, rep, err)
	return rep, err
}

func (w watched) Wake(ctx context.Context, name string) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.Wake(ctx, name)
	w.t.Up(ctx, Wake, name, begin, rep, err)
	return rep, err
}

func (w watched) BringUp(ctx context.Context, name string) (control.Report, error) {
	begin := time.Now()
	rep, err := w.VMs.BringUp(ctx, name)
	w.t.Up(ctx, Wake, name, begin, rep, err)
	return rep, err
}

func (w watched) SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error) {
	begin := time.Now()
	res, err := w.VMs.SleepWith(ctx, name, o)
	w.t.saved(ctx, Sleep, name, begin, res, err)
	return res, err
}

func (w watched) SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error) {
	begin := time.Now()
	res, err := w.VMs.SnapshotWith(ctx, name, o)
	w.t.saved(ctx, Snapshot, name, begin, res, err)
	return res, err
}

func (w watched) Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error) {
	begin := time.Now()
	res, err := w.VMs.Fork(ctx, name, o)
	w.t.forked(ctx, name, begin, res, err)
	return res, err
}

// operation is a span under way, with what its children have to lie in.
type operation struct {
	t          *Traces
	ctx        context.Context
	span       trace.Span
	begin, end time.Time
}

// operation makes the span of one that has ended now. It is nil for one that is not recorded.
func (t *Traces) operation(ctx context.Context, span, name string, begin time.Time, err error) *operation {
	end := time.Now()
	ctx, s := t.tracer.Start(ctx, span, trace.WithTimestamp(begin))
	if !s.IsRecording() {
		s.End(trace.WithTimestamp(end))
		return nil
	}
	s.SetAttributes(keySandbox.String(name), keyCause.String(string(events.CauseOf(ctx))))
	failed(s, err)
	return &operation{t, ctx, s, begin, end}
}

// failed says why a span's operation has failed: by the code of the error, which is of a fixed set.
func failed(s trace.Span, err error) {
	if err != nil {
		code := string(fleet.CodeOf(err))
		s.SetAttributes(keyErrorType.String(code))
		s.SetStatus(codes.Error, code)
	}
}

func (o *operation) close() { o.span.End(trace.WithTimestamp(o.end)) }

// stage makes a child. What the clocks of two processes or a clock that was set make of its times, it lies within the
// operation.
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

// Up makes the span of a VM that was brought up, Create, Start, Wake or Restore, and has ended now: for callers of
// sandbox.Store, and for supervisor.Options.Woken. A wake that has found the VM awake, or being woken for somebody
// else, has the attribute drowse.joined and no stages.
func (t *Traces) Up(ctx context.Context, span, name string, begin time.Time, rep control.Report, err error) {
	if t == nil {
		return
	}
	if rep.Name != "" {
		name = rep.Name // a random one
	}
	o := t.operation(ctx, span, name, begin, err)
	if o == nil {
		return
	}
	defer o.close()
	if err != nil {
		return
	}
	if !rep.Begun.IsZero() && rep.Begun.Before(begin.Round(0)) {
		o.span.SetAttributes(keyJoined.Bool(true))
		return
	}
	o.span.SetAttributes(upAttributes(rep)...)
	o.up(o.ctx, rep, o.begin, o.end)
}

func upAttributes(rep control.Report) []attribute.KeyValue {
	return append([]attribute.KeyValue{
		keyPool.Bool(rep.Pooled), keyFaults.Int64(int64(rep.Faults)), keyTouched.Int64(int64(rep.MiBTouched * (1 << 20))),
		keyFramesRead.Int64(int64(rep.FramesRead)), keyFramesCached.Int64(int64(rep.FramesCached)),
	}, beside(rep)...)
}

// Stages that a VM's process goes through one after the other until the guest runs, and what the guest does then. Those
// of background and network go on beside them: how long they have taken is known, and not when they began, so they are
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

// up makes the stages of a VM that was brought up between begin and end.
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

// saved makes the span of a sleep or a snapshot.
func (t *Traces) saved(ctx context.Context, span, name string, begin time.Time, res control.SleepResult, err error) {
	o := t.operation(ctx, span, name, begin, err)
	if o == nil {
		return
	}
	defer o.close()
	if err != nil {
		return
	}
	o.span.SetAttributes(keySnapshot.String(res.Snapshot), keyPages.Int64(int64(res.PagesChanged)), keyFree.Int64(int64(res.PagesFree)),
		keyRaw.Int64(int64(res.BytesRaw)), keyStored.Int64(res.BytesStored), keyShared.Int64(res.BytesShared))
	if !res.Asleep.IsZero() && res.Asleep.Before(begin.Round(0)) {
		o.span.SetAttributes(keyJoined.Bool(true)) // it slept already
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
	// That of a snapshot of the disk is the time for which its file system was frozen.
	for _, name := range []string{"pause", "frozen", "save"} {
		stage(name, res.Stages[name])
	}
	if gone := res.Stages["gone"]; gone > 0 && !res.Asleep.IsZero() {
		o.stage(o.ctx, "gone", res.Asleep, begin.Add(millis(gone)))
	}
}

// forked makes the span of a fork, and one for each child.
func (t *Traces) forked(ctx context.Context, name string, begin time.Time, res sandbox.ForkResult, err error) {
	o := t.operation(ctx, Fork, name, begin, err)
	if o == nil {
		return
	}
	defer o.close()
	if err != nil {
		return
	}
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

// ExecFunc runs a command in a VM: api.VMs.Exec.
type ExecFunc func(ctx context.Context, name string, c guest.Cmd) (*guest.ExitStatus, error)

// Exec is exec with a span made of each command: of its sandbox and how it has ended, and not of what it is. A wake for
// it is a child.
func (t *Traces) Exec(exec ExecFunc) ExecFunc {
	if t == nil {
		return exec
	}
	return func(ctx context.Context, name string, c guest.Cmd) (*guest.ExitStatus, error) {
		ctx, s := t.tracer.Start(ctx, Exec)
		defer s.End()
		st, err := exec(ctx, name, c)
		s.SetAttributes(keySandbox.String(name), keyCause.String(string(events.CauseOf(ctx))))
		failed(s, err)
		if st != nil {
			s.SetAttributes(keyExit.Int(st.Code))
			if st.Signal != 0 {
				s.SetAttributes(keySignal.Int(st.Signal))
			}
			if st.TimedOut {
				s.SetAttributes(keyTimedOut.Bool(true))
			}
		}
		return st, err
	}
}
