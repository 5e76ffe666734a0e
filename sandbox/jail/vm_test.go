package jail

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/vmm"
)

// hostile is a confined process that does what a test wants, in this process.
type hostile struct {
	conn *rpc.Conn
	once sync.Once
	done chan struct{}

	mu      sync.Mutex
	kills   int
	frozen  int // above zero if it is
	answers map[string]func(ctx context.Context, body []byte) (any, []*os.File, error)
}

// A process that is killed loses its end of the connection.
func (h *hostile) Kill() error {
	h.mu.Lock()
	h.kills++
	h.mu.Unlock()
	h.once.Do(func() {
		go func() {
			h.conn.Close()
			close(h.done)
		}()
	})
	return nil
}

// freeze counts what freezes it.
func (h *hostile) freeze(n int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.frozen += n
	return nil
}

func (h *hostile) killed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.kills > 0
}

func (h *hostile) Freeze(context.Context) error   { return h.freeze(1) }
func (h *hostile) Thaw() error                    { return h.freeze(-1) }
func (h *hostile) PID() int                       { return 1 << 22 }
func (h *hostile) Done() <-chan struct{}          { return h.done }
func (h *hostile) CPU() time.Duration             { return 0 }
func (h *hostile) Urgent(bool)                    {}
func (h *hostile) Wait() error                    { <-h.done; return errors.New("killed") }
func (h *hostile) Stats() (confine.Stats, error)  { return confine.Stats{}, nil }
func (h *hostile) SetLimits(confine.Limits) error { return nil }
func (h *hostile) Close() error                   { return nil }

func (h *hostile) serve(ctx context.Context, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	defer closeAll(files)
	h.mu.Lock()
	f := h.answers[method]
	h.mu.Unlock()
	if f == nil {
		return nil, nil, nil
	}
	return f(ctx, body)
}

type answer = func(context.Context, []byte) (any, []*os.File, error)

// on sets the answer to a call.
func (h *hostile) on(method string, f answer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answers[method] = f
}

// says answers with a text of JSON.
func says(text string) answer {
	return func(context.Context, []byte) (any, []*os.File, error) { return json.RawMessage(text), nil, nil }
}

// silent does not answer, also when the keeper gives up.
func silent(ctx context.Context, _ []byte) (any, []*os.File, error) {
	<-rpc.Peer(ctx).Done()
	return nil, nil, io.EOF
}

// cell returns a jail with a hostile process.
func cell(t testing.TB) (*Jail, *hostile) {
	t.Helper()
	mine, its, err := rpc.Pair()
	if err != nil {
		t.Fatal(err)
	}
	h := &hostile{done: make(chan struct{}), answers: map[string]answer{}}
	j := &Jail{proc: h}
	j.vm = newVM(j)
	j.vm.times = times{soon: 50 * time.Millisecond, silent: time.Second, fail: 50 * time.Millisecond, flush: 200 * time.Millisecond, patience: time.Minute}
	if j.conn, err = rpc.New(mine, options(j.vm.serve)); err != nil {
		t.Fatal(err)
	}
	if h.conn, err = rpc.New(its, options(h.serve)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j, h
}

// running returns a VM that a hostile process has started.
func running(t testing.TB, change func(*instance.Parts)) (*VM, *hostile, *store) {
	t.Helper()
	s := newStore(t)
	j, h := cell(t)
	p := s.parts()
	if change != nil {
		change(&p)
	}
	v, err := j.Start(t.Context(), p, "", instance.RestoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.v = v
	t.Cleanup(func() { _ = v.Close() })
	return v, h, s
}

// patient has a keeper wait long: for tests in which nothing may be too slow.
func patient(v *VM) { v.times = usualTimes }

func awaitEnd(t testing.TB, v *VM) vmm.Exit {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	x, err := v.Wait(ctx)
	if err != nil {
		t.Fatal("the VM has not ended: ", err)
	}
	return x
}

func TestA_process_that_does_not_answer_is_killed_when_its_VM_fails(t *testing.T) {
	sameFDs(t)
	v, h, _ := running(t, nil)
	h.on(callFail, silent)
	h.on(callClose, silent)
	cause := errors.New("the disk is gone")
	for range 100 {
		v.Fail(cause)
	}
	if x := awaitEnd(t, v); x.Reason != vmm.HostError || !errors.Is(x.Err, cause) || x.Detail != cause.Error() {
		t.Errorf("it ended with %+v", x)
	}
	if !h.killed() {
		t.Error("the process was not killed")
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

func TestA_process_that_only_claims_to_have_failed_is_killed(t *testing.T) {
	v, h, _ := running(t, nil)
	cause := errors.New("the disk is gone")
	v.Fail(cause) // answered, and nothing comes
	if x := awaitEnd(t, v); !errors.Is(x.Err, cause) || !h.killed() {
		t.Errorf("it ended with %+v", x)
	}
}

func TestClose_returns_though_the_process_does_not_answer(t *testing.T) {
	sameFDs(t)
	v, h, _ := running(t, nil)
	h.on(callClose, silent)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := v.Close(); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("it ended with %v", err)
			}
			select {
			case <-h.done:
			default:
				t.Error("the process is still there")
			}
		})
	}
	wg.Wait()
	v.Fail(errors.New("too late"))
}

func TestA_closed_VM_has_stopped(t *testing.T) {
	for range 20 {
		v, _, _ := running(t, nil)
		patient(v)
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
		if x := awaitEnd(t, v); x.Reason != vmm.Stopped {
			t.Fatalf("it ended with %+v", x)
		}
	}
}

func TestA_process_that_does_not_answer_is_waited_for_once(t *testing.T) {
	sameFDs(t)
	v, h, _ := running(t, nil)
	for _, m := range []string{callInfo, callSecrets, callData, callFail, callMissed} {
		h.on(m, silent)
	}
	v.Health()
	if v.stopped.Load() != nil {
		t.Fatal("the VM has failed at once")
	}
	// Nobody waits again: with these times a wait would take years.
	v.mu.Lock()
	v.times.soon = 1 << 60
	v.mu.Unlock()
	for range 100 {
		v.Health()
		v.Connections()
		v.List()
		v.Data()
		v.MissedPages()
		v.KeepRunning()()
	}
	// It ends when it has been silent for long.
	if x := awaitEnd(t, v); x.Reason != vmm.HostError || !strings.Contains(x.Detail, "has not answered") {
		t.Errorf("it ended with %+v", x)
	}
}

func TestConnections_that_the_guest_does_not_accept_hold_up_nothing_else(t *testing.T) {
	v, h, _ := running(t, nil)
	patient(v)
	h.on(callDial, silent)
	h.on(callInfo, says(`{"open":7}`))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 * maxCalls {
		wg.Go(func() {
			if c, err := v.Dial(ctx, 1); err == nil {
				c.Close()
				t.Error("a connection to nobody")
			}
		})
	}
	until(t, "all are waiting", func() bool { return len(v.dials) == maxDials })
	if open, _ := v.Connections(); open != 7 {
		t.Errorf("%d connections", open)
	}
	cancel()
	wg.Wait()
}

func TestOnly_one_Unix_connection_is_taken_for_one_to_the_guest(t *testing.T) {
	v, h, _ := running(t, nil)
	patient(v)
	sameFDs(t)
	pipes := func(n int) answer {
		return func(context.Context, []byte) (any, []*os.File, error) {
			var out []*os.File
			for range n {
				r, w, err := os.Pipe()
				if err != nil {
					return nil, nil, err
				}
				out = append(out, r, w)
			}
			return nil, out, nil
		}
	}
	socket := func(domain, kind int) answer {
		return func(context.Context, []byte) (any, []*os.File, error) {
			fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
			return nil, []*os.File{os.NewFile(uintptr(fd), "socket")}, err
		}
	}
	one := func(context.Context, []byte) (any, []*os.File, error) {
		f, err := os.Open(os.DevNull)
		return nil, []*os.File{f}, err
	}
	for name, a := range map[string]answer{"nothing": pipes(0), "two files": pipes(1), "sixty": pipes(30), "a device": one,
		"a socket of the network": socket(unix.AF_INET, unix.SOCK_STREAM),
		"datagrams":               socket(unix.AF_UNIX, unix.SOCK_DGRAM)} {
		h.on(callDial, a)
		c, err := v.Dial(t.Context(), 1)
		if err != nil {
			t.Fatal(name, err)
		}
		// The connection is the keeper's own, whose other end the process has closed.
		if n, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%s: a read gives %d, %v", name, n, err)
		}
		c.Close()
	}
}

func TestDescriptors_that_nobody_wants_are_closed(t *testing.T) {
	s := newStore(t)
	sameFDs(t)
	j, h := cell(t)
	many := func(context.Context, []byte) (any, []*os.File, error) {
		var out []*os.File
		for range maxFiles {
			f, err := os.Open(os.DevNull)
			if err != nil {
				return nil, nil, err
			}
			out = append(out, f)
		}
		return json.RawMessage("{}"), out, nil
	}
	for _, m := range []string{callPass, callStart, callInfo, callFail, callClose, callCapture, callSealFrozen,
		callHooksBefore} {
		h.on(m, many)
	}
	v, err := j.Start(t.Context(), s.parts(), "", instance.RestoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	patient(v)
	v.Health()
	_, _ = v.Capture(t.Context(), s.options())
	_, _ = v.RunHooksBefore(t.Context(), "", spec.HookPolicy(""))
	for _, m := range []string{callFile, callConnect, callForked, callSealed, callWritten, "nonsense"} {
		_, files, _ := many(t.Context(), nil)
		got, err := h.conn.Call(t.Context(), m, "x", nil, files...)
		if err == nil || len(got) > 0 {
			t.Errorf("%s: %v", m, err)
		}
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

func TestAnswers_that_are_nonsense_are_errors_or_nothing(t *testing.T) {
	v, h, s := running(t, func(p *instance.Parts) { p.Log = slog.New(slog.DiscardHandler) })
	patient(v)
	o := s.options()
	for _, text := range []string{`null`, `1`, `-1`, `1e999`, `"x"`, `[]`, `{}`, `true`, `[[[[]]]]`, `{"open":-1}`,
		`{"open":1e30}`,
		`{"health":[]}`, `{"failures":[null]}`, `{"stored":"much"}`, `[null]`, `[{"Name":7}]`,
		`{"a":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + "}"} {
		for _, m := range []string{callInfo, callHooksBefore, callHooksAfter, callCapture, callSealFrozen, callData,
			callSecrets, callMissed, callDropSecret, callDial, callKeep} {
			h.on(m, says(text))
		}
		v.Health()
		v.Connections()
		v.Faults()
		v.List()
		v.Remove("x")
		v.MissedPages()
		v.KeepRunning()()
		if n := v.Data(); n < 0 {
			t.Errorf("%s: %d bytes of data", text, n)
		}
		if c, err := v.Dial(t.Context(), 1); err == nil {
			c.Close()
		}
		if hooks, err := v.RunHooksBefore(t.Context(), "x", spec.HookPolicy("")); err == nil {
			hooks.After(t.Context())
		}
		if _, err := v.Capture(t.Context(), o); err == nil {
			t.Errorf("%s: a snapshot", text)
		}
		if _, _, _, err := v.SealFrozen(t.Context(), s.top, guest.HookLimits{}, o.Sealed); err == nil {
			t.Errorf("%s: a sealed disk", text)
		}
	}
	if v.stopped.Load() != nil {
		t.Error("the VM has failed")
	}
}

// checkText fails if a text by the child is long or unprintable.
func checkText(t testing.TB, what, s string) {
	t.Helper()
	if len(s) > maxText || !utf8.ValidString(s) || strings.ContainsAny(s, "\x1b\n\r\x00") {
		t.Errorf("%s: %d bytes: %.40q", what, len(s), s)
	}
}

func TestTexts_by_the_process_are_short_lines(t *testing.T) {
	huge := "\x1b[2J\n" + strings.Repeat("ü\x00", 4<<10)
	quoted, err := json.Marshal(huge)
	if err != nil {
		t.Fatal(err)
	}
	with := func(format string) answer { return says(strings.ReplaceAll(format, "HUGE", string(quoted))) }
	const failure = `{"name":HUGE,"event":HUGE,"problem":HUGE,"output":HUGE}`
	s := newStore(t)
	j, h := cell(t)
	patient(j.vm)
	h.on(callStart, with(`{"stages":{HUGE:-5},"failures":[`+failure+`],"entry":-1,"ready":9223372036854775807,
		"disk_size":-7,"info":{"full":HUGE},"facts":{"arch":HUGE}}`))
	p := s.parts()
	events := make(chan guest.ServiceEvent, 1)
	p.ServiceEvent = func(e guest.ServiceEvent) { events <- e }
	var log bytes.Buffer
	p.Log = slog.New(slog.NewTextHandler(&log, nil))
	v, err := j.Start(t.Context(), p, "", instance.RestoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	check := func(list []guest.HookFailure) {
		t.Helper()
		if len(list) == 0 || len(list) > maxFailures {
			t.Errorf("%d failures", len(list))
		}
		for _, f := range list {
			for _, s := range []string{f.Name, string(f.Event), f.Problem, f.Output} {
				checkText(t, "a failure", s)
			}
		}
	}
	check(v.WakeFailures())
	checkText(t, "facts", v.Facts().Arch)
	for name, d := range v.Stages() {
		checkText(t, "a stage", name)
		if d < 0 {
			t.Errorf("a stage took %v", d)
		}
	}
	if entry, ready := v.Timing(); entry < 0 || ready > maxTime || v.Size() < 0 {
		t.Errorf("it took %v and %v, and the disk has %d bytes", entry, ready, v.Size())
	}

	h.on(callInfo, with(`{"full":HUGE,"health":{"Hung":true,"Detail":HUGE},
		"open":18446744073709551615,"faults":{"Read":18446744073709551615}}`))
	checkText(t, "health", v.Health().Detail)
	checkText(t, "space", v.SpaceProblem())
	if open, _ := v.Connections(); open > maxBytes {
		t.Errorf("%d connections", open)
	}
	if f, _ := v.Faults(); f.ReadFaults.Load() > maxBytes {
		t.Errorf("%d faults", f.ReadFaults.Load())
	}
	h.on(callSecrets, says(`[`+strings.Repeat(`{"Name":"a","Size":-1},`, 999)+`{}]`))
	if list := v.List(); len(list) != secrets.MaxSecrets || list[0].Size != 0 {
		t.Errorf("%d secrets", len(list))
	}
	h.on(callSecrets, with(`[{"Name":HUGE}]`))
	checkText(t, "a secret", v.List()[0].Name)
	h.on(callMissed, says(`[`+strings.Repeat(`1,`, 400<<10)+`1]`))
	if n := len(v.MissedPages()); n != pagecache.MaxMissed {
		t.Errorf("%d missed pages", n)
	}

	h.on(callHooksBefore, with(`{"refused":true,"failures":[`+strings.Repeat(`{},`, 4000)+failure+`]}`))
	_, err = v.RunHooksBefore(t.Context(), "x", spec.HookPolicy(""))
	var refused *spec.HooksError
	if !errors.As(err, &refused) {
		t.Fatal(err)
	}
	check(refused.Failures)
	h.on(callHooksBefore, with(`{"due":true,"failures":[`+failure+`]}`))
	h.on(callHooksAfter, with(`{"failures":[`+failure+`]}`))
	hooks, err := v.RunHooksBefore(t.Context(), "x", spec.HookPolicy(""))
	if err != nil {
		t.Fatal(err)
	}
	check(hooks.Failed())
	hooks.After(t.Context())
	check(hooks.Failed())
	h.on(callSealFrozen, with(`{"problem":{"text":HUGE,"code":HUGE},"failures":[`+failure+`]}`))
	_, _, list, err := v.SealFrozen(t.Context(), s.top, guest.HookLimits{}, func(disk.Stack) error { return nil })
	var report *control.ErrorReport
	if !errors.As(err, &report) {
		t.Fatal(err)
	}
	check(list)
	checkText(t, "a problem", report.Message)
	checkText(t, "a code", report.Code)

	fails := func(context.Context, []byte) (any, []*os.File, error) { return nil, nil, errors.New(huge) }
	h.on(callFlush, fails)
	if err := v.Flush(); err == nil || len(err.Error()) > maxText+200 || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("an error of the process: %.80q", err)
	}
	h.on(callData, fails)
	v.Data()
	if log.Len() == 0 || log.Len() > 2*maxText || strings.Contains(log.String(), "\x1b") {
		t.Errorf("the log has %d bytes", log.Len())
	}
	e := guest.ServiceEvent{Name: huge, Event: huge, Problem: huge, Exit: math.MinInt}
	if _, err := h.conn.Call(t.Context(), postService, e, nil); err != nil {
		t.Fatal(err)
	}
	e = <-events
	checkText(t, "a service", e.Name)
	checkText(t, "an event", e.Event)
	checkText(t, "a problem of a service", e.Problem)

	end := ended{Reason: "nonsense", VCPU: math.MinInt, RIP: math.MaxUint64, Detail: huge, Error: huge}
	if err := h.conn.Post(postEnded, end); err != nil {
		t.Fatal(err)
	}
	x := awaitEnd(t, v)
	checkText(t, "the end", x.Detail)
	checkText(t, "the error", x.Err.Error())
	if x.Reason != vmm.HostError || x.VCPU != -1 {
		t.Errorf("it ended with %+v", x)
	}
}

func TestA_machine_ends_once(t *testing.T) {
	v, h, _ := running(t, nil)
	patient(v)
	for _, r := range []vmm.ExitReason{vmm.PoweredOff, vmm.Panicked} {
		if _, err := h.conn.Call(t.Context(), postEnded, ended{Reason: r, VCPU: 1}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if x := awaitEnd(t, v); x.Reason != vmm.PoweredOff || x.VCPU != 1 {
		t.Errorf("it ended with %+v", x)
	}
}

func TestFigures_of_a_capture_are_in_bounds(t *testing.T) {
	said := instance.CaptureCosts{Raw: math.MaxUint64, Stored: math.MinInt64, Shared: math.MaxInt64, Changed: math.MaxUint64,
		Free: math.MaxUint64, Shareable: math.MaxUint64, Ahead: -1, Fill: math.MaxInt64, Pause: math.MinInt64, Save: 7}
	c := boundCosts(said)
	if c.Raw != maxBytes || c.Stored != 0 || c.Shared != maxBytes || c.Changed != maxBytes || c.Free != maxBytes ||
		c.Shareable != maxBytes || c.Ahead != 0 || c.Fill != maxTime || c.Pause != 0 || c.Save != 7 {
		t.Errorf("%+v", c)
	}
}

func TestBefore_its_VM_starts_a_process_may_ask_for_nothing(t *testing.T) {
	sameFDs(t)
	s := newStore(t)
	j, h := cell(t)
	patient(j.vm)
	for _, m := range []string{callFile, callConnect, callWritten, callStill, callSealed, callForked, callPrioritize,
		callSymbolize, callLinkReady, callResumed, postCalm, postService, postEnded} {
		for _, arg := range []any{none{}, 0, "x", fileOrder{Op: fileSyncDir, Name: "/"}, ended{Reason: vmm.PoweredOff}} {
			if _, err := h.conn.Call(t.Context(), m, arg, nil); !errors.Is(err, unix.EACCES) {
				t.Errorf("%s: %v", m, err)
			}
		}
	}
	v, err := j.Start(t.Context(), s.parts(), "", instance.RestoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-v.Done():
		t.Errorf("the machine had ended before it began: %+v", v.exit)
	default:
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

func TestA_port_without_a_socket_leads_nowhere(t *testing.T) {
	v, h, s := running(t, nil)
	patient(v)
	sameFDs(t)
	l, err := net.Listen("unix", guest.HostPath(v.parts.Socket, 1023))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	other := s.in("vms/other/vm.json")
	err = errors.Join(os.Symlink("/dev/null", guest.HostPath(v.parts.Socket, 7)),
		os.Link(other, guest.HostPath(v.parts.Socket, 8)))
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range []any{0, 1, 7, 8, 1022, uint32(math.MaxUint32), int64(1 << 32), -1, "1023/../x", nil, 1.5} {
		files, err := h.conn.Call(t.Context(), callConnect, port, nil)
		if err == nil {
			t.Errorf("port %v", port)
		}
		_ = closeAll(files)
	}
	var own bool
	files, err := h.conn.Call(t.Context(), callConnect, 1023, &own)
	if err != nil || len(files) != 1 || !own {
		t.Errorf("port 1023: %v, %d descriptors, %v", err, len(files), own)
	}
	_ = closeAll(files)
}

func TestA_flood_of_calls_and_posts_does_no_harm(t *testing.T) {
	var n int
	v, h, s := running(t, func(p *instance.Parts) {
		p.ServiceEvent = func(guest.ServiceEvent) { n++ } // one at a time
		p.Symbolize = func(uint64) (string, uint64, bool) { return "f", 0, true }
	})
	patient(v)
	v.pace = rpc.NewPace(math.MaxInt32, 1)
	sameFDs(t)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for k := range 40 {
				_ = h.conn.Post(postService, guest.ServiceEvent{Name: "x"})
				_ = h.conn.Post(postCalm, none{})
				if _, err := h.conn.Call(t.Context(), postService, guest.ServiceEvent{Name: "x"}, nil); err != nil {
					t.Error(err)
				}
				for m, arg := range map[string]any{callSymbolize: uint64(k), callWritten: k - 20, callLinkReady: none{},
					callSealed: none{}, callFile: fileOrder{Op: fileOpen, Name: s.image}, "nonsense": i} {
					files, err := h.conn.Call(t.Context(), m, arg, nil)
					if ok := m == callSymbolize || m == callFile; ok != (err == nil) {
						t.Errorf("%s: %v", m, err)
					}
					_ = closeAll(files)
				}
			}
		})
	}
	wg.Wait()
	if v.Health(); n < 64*40 {
		t.Errorf("%d events", n)
	}
	if v.stopped.Load() != nil {
		t.Error("the VM has failed")
	}
}

func TestA_capture_ends_with_the_process(t *testing.T) {
	v, h, s := running(t, nil)
	patient(v)
	h.on(callCapture, func(ctx context.Context, _ []byte) (any, []*os.File, error) {
		if _, err := rpc.Peer(ctx).Call(ctx, callFile, fileOrder{Op: fileMkdir, Name: s.temp}, nil); err != nil {
			t.Error(err)
		}
		err := h.Kill()
		<-ctx.Done()
		return nil, nil, err
	})
	_, err := v.Capture(t.Context(), s.options())
	var end *instance.EndedError
	if !errors.As(err, &end) {
		t.Errorf("it ended with %v", err)
	}
	if _, err := os.Lstat(s.temp); err == nil {
		t.Error("an unfinished snapshot is left")
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

func TestA_capture_that_is_given_up_is_waited_for(t *testing.T) {
	v, h, s := running(t, nil)
	patient(v)
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan uint64, 1)
	h.on(callGiveUp, func(_ context.Context, body []byte) (any, []*os.File, error) {
		var n uint64
		err := json.Unmarshal(body, &n)
		gaveUp <- n
		return nil, nil, err
	})
	h.on(callCapture, func(context.Context, []byte) (any, []*os.File, error) {
		cancel()
		<-gaveUp
		// It was too late: the disk has the layer.
		return nil, nil, errors.Join(s.sealBy(), errors.New("too late"))
	})
	if _, err := v.Capture(ctx, s.options()); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if got := v.Stack().Top(); got != s.top {
		t.Errorf("the keeper believes that the disk's top is %s", got)
	}
	if v.stopped.Load() != nil {
		t.Error("the VM has failed")
	}
}

func TestA_process_that_does_not_give_up_a_capture_is_killed(t *testing.T) {
	v, h, s := running(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	h.on(callCapture, func(ctx context.Context, body []byte) (any, []*os.File, error) {
		cancel()
		return silent(ctx, body)
	})
	if _, err := v.Capture(ctx, s.options()); err == nil {
		t.Error("it has succeeded")
	}
	if x := awaitEnd(t, v); x.Reason != vmm.HostError || !h.killed() {
		t.Errorf("it ended with %+v", x)
	}
}

func TestA_capture_that_is_given_up_before_it_begins_does_not_begin(t *testing.T) {
	var c child
	c.abandon(2)
	ctx, cancel := c.begin(t.Context(), 1)
	defer cancel()
	if ctx.Err() != nil {
		t.Error("another capture was given up")
	}
	ctx, cancel = c.begin(t.Context(), 2)
	defer cancel()
	if ctx.Err() == nil {
		t.Error("it begins")
	}
	ctx, cancel = c.begin(t.Context(), 3)
	defer cancel()
	if c.abandon(3); ctx.Err() == nil {
		t.Error("it goes on")
	}
}

func TestA_capture_without_what_was_ordered_fails(t *testing.T) {
	for name, some := range map[string]func(s *store) error{
		"nothing":  func(*store) error { return nil },
		"the disk": func(s *store) error { return s.sealBy() },
		"no fork":  func(s *store) error { return errors.Join(s.sealBy(), s.write(context.Background(), nil)) },
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			v, h, s := running(t, nil)
			patient(v)
			v.started.DiskSize = 1 << 20
			h.on(callCapture, func(context.Context, []byte) (any, []*os.File, error) {
				return instance.CaptureCosts{Stored: 7}, nil, some(s)
			})
			o := s.options()
			o.Fork = func(*os.File, *instance.Capture) error { return nil }
			if c, err := v.Capture(t.Context(), o); err == nil || !strings.Contains(err.Error(), "does not exist") {
				t.Errorf("%+v, %v", c, err)
			}
		})
	}
}

// sealBy seals the disk as a child does.
func (s *store) sealBy() error {
	for _, o := range []fileOrder{
		{Op: fileOpen, Name: s.topTemp, Flags: layerFlags}, {Op: fileRename, Name: s.topTemp, To: s.top},
	} {
		_, files, err := s.ask(o)
		if err := errors.Join(err, closeAll(files)); err != nil {
			return err
		}
	}
	return s.v.sealed(s.v.capture)
}

func TestA_capture_gives_what_the_keeper_knows(t *testing.T) {
	v, h, s := running(t, nil)
	patient(v)
	v.started.DiskSize = 1 << 20
	h.on(callCapture, func(context.Context, []byte) (any, []*os.File, error) {
		return instance.CaptureCosts{Stored: 7}, nil, errors.Join(s.sealBy(), s.write(context.Background(), nil))
	})
	before := v.Stack()
	c, err := v.Capture(t.Context(), s.options())
	if err != nil {
		t.Fatal(err)
	}
	if c.ID != newID || c.Dir != s.final || c.Stored != 7 || c.Manifest == nil || c.Manifest.ID != newID ||
		fmt.Sprint(c.Disk) != fmt.Sprint(before) || fmt.Sprint(v.Stack()) != fmt.Sprint(before.With(s.top)) {
		t.Errorf("%+v", c)
	}
}

func TestMemory_that_is_on_its_way_is_asked_for_by_a_hostile_process(t *testing.T) {
	sameFDs(t)
	const size = 4 << 20
	asked, block := make(chan ensureOrder, 100), make(chan struct{})
	ensure := func(ctx context.Context, file string, off, n int64) error {
		asked <- ensureOrder{file, off, n}
		select {
		case <-block:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	// begin starts a VM, and returns what its process asks for.
	begin := func(a *instance.Arriving, patience time.Duration) (*VM, func(o any) error) {
		s := newStore(t)
		j, h := cell(t)
		j.vm.arriving, j.vm.times.arrival = map[string]int64{"memory": size}, patience
		p := s.parts()
		p.Arriving = a
		v, err := j.Start(t.Context(), p, "", instance.RestoreOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = v.Close() })
		return v, func(o any) error {
			files, err := h.conn.Call(t.Context(), callEnsure, o, nil)
			_ = closeAll(files)
			return err
		}
	}
	if _, call := begin(nil, time.Minute); !errors.Is(call(ensureOrder{"memory", 0, 1}), unix.EACCES) {
		t.Error("a VM whose memory is all there asks for some")
	}
	v, call := begin(&instance.Arriving{Ensure: ensure}, time.Minute)
	for _, o := range []any{
		ensureOrder{"", 0, 1}, ensureOrder{"manifest", 0, 1}, ensureOrder{"../memory", 0, 1}, ensureOrder{"memory-" + otherID, 0, 1},
		ensureOrder{"memory", -1, 1}, ensureOrder{"memory", 0, 0}, ensureOrder{"memory", 0, -1}, ensureOrder{"memory", size, 1},
		ensureOrder{"memory", size - 1, 2}, ensureOrder{"memory", 0, maxEnsure + 1}, ensureOrder{"memory", math.MaxInt64, maxEnsure},
		ensureOrder{"memory", math.MinInt64, math.MaxInt64}, json.RawMessage(`{"file":7}`), json.RawMessage(`[]`),
	} {
		if err := call(o); err == nil {
			t.Errorf("%+v was done", o)
		}
	}
	if len(asked) != 0 {
		t.Errorf("the node was asked for %+v", <-asked)
	}
	// Many at once hold up nothing else.
	var wg sync.WaitGroup
	for range ensuresAtOnce {
		wg.Go(func() {
			if err := call(ensureOrder{"memory", size - maxEnsure, maxEnsure}); err != nil {
				t.Error(err)
			}
		})
	}
	for range ensuresAtOnce {
		if o := <-asked; o != (ensureOrder{"memory", size - maxEnsure, maxEnsure}) {
			t.Errorf("the node was asked for %+v", o)
		}
	}
	if err := v.Arrived(); err != nil {
		t.Error(err)
	}
	// A guest does not wait for ever.
	if _, call := begin(&instance.Arriving{Ensure: ensure}, 10*time.Millisecond); call(ensureOrder{"memory", 0, 1}) == nil {
		t.Error("it has what is not there")
	}
	close(block)
	wg.Wait()
}

// A guest that waits for memory for long stands still, with all that its VM does, until it has that.
func TestVM_is_frozen_while_its_guest_waits_for_memory(t *testing.T) {
	sameFDs(t)
	block := make(chan struct{})
	ensure := func(ctx context.Context, _ string, off, _ int64) error {
		if off == 0 {
			return nil
		}
		select {
		case <-block:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s := newStore(t)
	j, h := cell(t)
	j.vm.arriving, j.vm.times.arrival, j.vm.times.patience = map[string]int64{"memory": 1 << 20}, time.Minute, time.Millisecond
	p := s.parts()
	p.Arriving = &instance.Arriving{Ensure: ensure}
	v, err := j.Start(t.Context(), p, "", instance.RestoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.Close() })
	call := func(off int64) error {
		files, err := h.conn.Call(t.Context(), callEnsure, ensureOrder{"memory", off, 1}, nil)
		_ = closeAll(files)
		return err
	}
	stopped := func(is bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			h.mu.Lock()
			now := h.frozen > 0
			h.mu.Unlock()
			if now == is && (v.Frozen() != "") == is {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("its process is stopped: %v; the VM says %q", now, v.Frozen())
			}
		}
	}
	if err := call(0); err != nil {
		t.Error(err)
	}
	stopped(false)
	var waits sync.WaitGroup
	for range 3 {
		waits.Go(func() {
			if err := call(4096); err != nil {
				t.Error(err)
			}
		})
	}
	stopped(true)
	// Nobody waits for its answers.
	if err := v.Arrived(); !errors.Is(err, errFrozen) || !strings.Contains(err.Error(), waitsForMemory) {
		t.Errorf("asking it: %v", err)
	}
	// It also has no lease. It goes on when it has both.
	if err := v.Freeze("no lease"); err != nil {
		t.Error(err)
	}
	close(block)
	waits.Wait()
	stopped(true)
	if why := v.Frozen(); why != "no lease" {
		t.Errorf("it is frozen because of %q", why)
	}
	v.Thaw("no lease")
	stopped(false)
	if err := v.Arrived(); err != nil {
		t.Error(err)
	}
	// One that must end ends without going on.
	if err := v.Freeze("no lease"); err != nil {
		t.Error(err)
	}
	h.on(callFail, func(context.Context, []byte) (any, []*os.File, error) {
		t.Error("it was asked to end")
		return nil, nil, nil
	})
	v.Fail(errors.New("the lease has ended"))
	<-v.Done()
	if !h.killed() {
		t.Error("it was not killed")
	}
}

// A process gets layers under their names, wherever they are, and may wait for those that are on their way.
func TestVM_gets_layers_from_their_snapshot_while_that_is_on_its_way(t *testing.T) {
	begin := func(t *testing.T, move func(s *store, dir string)) (startOrder, *VM, string) {
		s := newStore(t)
		dir := s.in("arriving/" + fromID)
		if err := errors.Join(os.MkdirAll(s.in("arriving"), 0o700), os.Rename(s.from, dir), os.Rename(s.lower, filepath.Join(dir, filepath.Base(s.lower)))); err != nil {
			t.Fatal(err)
		}
		move(s, dir)
		p := s.parts()
		p.Arriving = &instance.Arriving{Dir: dir}
		s.v.parts = p
		o, files, err := s.v.order(p, s.from, instance.RestoreOptions{})
		defer func() { _ = errors.Join(closeAll(files), s.v.release()) }()
		if err != nil {
			t.Fatal(err)
		}
		i := slices.Index(o.Passed, s.lower)
		if i < 0 {
			t.Fatalf("passed are %q", o.Passed)
		}
		body := make([]byte, 100)
		n, _ := files[i].ReadAt(body, 0)
		if string(body[:n]) != "this is "+filepath.Base(s.lower) {
			t.Errorf("the layer is %q", body[:n])
		}
		return o, s.v, filepath.Base(s.lower)
	}
	t.Run("on its way", func(t *testing.T) {
		o, v, name := begin(t, func(*store, string) {})
		want := map[string]int64{name: int64(len("this is " + name))}
		if !o.Arriving || !maps.Equal(o.Coming, want) || v.arriving[name] != want[name] || v.arriving["memory"] == 0 {
			t.Errorf("arriving %v, coming %v, known %v", o.Arriving, o.Coming, v.arriving)
		}
	})
	t.Run("only its snapshot is on its way", func(t *testing.T) {
		o, v, name := begin(t, func(s *store, dir string) {
			if err := os.Rename(filepath.Join(dir, filepath.Base(s.lower)), s.lower); err != nil {
				t.Fatal(err)
			}
		})
		if !o.Arriving || len(o.Coming) > 0 || v.arriving[name] != 0 {
			t.Errorf("arriving %v, coming %v, known %v", o.Arriving, o.Coming, v.arriving)
		}
	})
	t.Run("it has arrived", func(t *testing.T) {
		o, v, _ := begin(t, func(s *store, dir string) {
			if err := errors.Join(os.Rename(filepath.Join(dir, filepath.Base(s.lower)), s.lower), os.Rename(dir, s.from)); err != nil {
				t.Fatal(err)
			}
		})
		if o.Arriving || len(o.Coming) > 0 || v.parts.Arriving != nil {
			t.Errorf("arriving %v, coming %v", o.Arriving, o.Coming)
		}
	})
}
