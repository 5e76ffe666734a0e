package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
)

// patience bounds the waits of a test.
const patience = time.Minute

// pair returns two connected sockets.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	// t.TempDir may be too long for a socket's path.
	dir, err := os.MkdirTemp("", "db")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	addr := &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialUnix("unix", nil, addr); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

const greeting = `{"QMP": {"version": {"qemu": {"micro": 3, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}`

// answers starts a QEMU that sends hello, and then one of lines (which may be several) to each command.
func answers(t *testing.T, hello string, lines ...string) *net.UnixConn {
	t.Helper()
	a, b := pair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer b.Close()
		fmt.Fprintln(b, hello)
		in := bufio.NewScanner(b)
		for _, line := range lines {
			if !in.Scan() {
				return
			}
			fmt.Fprintln(b, line)
		}
		for in.Scan() {
		}
	}()
	t.Cleanup(func() { a.Close(); <-done })
	return a
}

func TestQMP_commands_give_answers_errors_and_events(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := answers(t, greeting, `{"return": {}}`,
		`{"event": "RESUME", "timestamp": {}}`+"\n"+`{"return": {"status": "completed"}}`,
		`{"error": {"class": "GenericError", "desc": "no such thing"}}`,
		`{"return": 7}`)
	q, err := newQMP(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if q.version != "7.2.3" {
		t.Errorf("version %s", q.version)
	}
	var m struct{ Status string }
	if err := q.execute(ctx, "query-migrate", nil, &m); err != nil || m.Status != "completed" {
		t.Errorf("%+v, %v", m, err)
	}
	if q.event("RESUME").IsZero() || !q.event("STOP").IsZero() {
		t.Error("the event that came is not there, or another is")
	}
	if err := q.execute(ctx, "x", nil, nil); !errors.Is(err, errQMP) || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("error %v", err)
	}
	if err := q.execute(ctx, "x", nil, &m); !errors.Is(err, errQMP) {
		t.Errorf("an answer of another form: %v", err)
	}
}

func TestQMP_what_is_no_QEMU_gives_error(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, hello := range map[string]string{
		"no JSON": "SSH-2.0", "no greeting": `{"return": {}}`, "null": "null", "endless line": strings.Repeat("x", maxQMPLine+1),
	} {
		if _, err := newQMP(ctx, answers(t, hello)); !errors.Is(err, errQMP) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a, b := pair(t)
	b.Close()
	if _, err := newQMP(ctx, a); !errors.Is(err, errQMP) {
		t.Errorf("an end: %v", err)
	}
}

func TestQMP_silence_ends_with_the_context(t *testing.T) {
	a, _ := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newQMP(ctx, a); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func testEnv(t *testing.T) Env {
	t.Helper()
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return Env{Store: s}
}

func TestPreparePeer_that_is_not_there_gives_row_that_says_why(t *testing.T) {
	t.Setenv("PATH", "")
	for _, name := range append([]string{"bogus"}, Peers...) {
		b, err := testEnv(t).preparePeer(t.Context(), name, 256, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.resume(t.Context(), true, time.Second); err != nil {
			t.Error(err)
		}
		rows := b.rows("resume_ready")
		if len(rows) != 1 || rows[0].Params["peer"] != name || rows[0].N != 0 || rows[0].Skipped == "" {
			t.Errorf("%s: %+v", name, rows)
		}
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}
}

// fakeQEMU puts a script in place of QEMU. It returns the path of a kernel, which does not exist.
func fakeQEMU(t *testing.T, script string) (e Env, kernel string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, qemuProgram), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return testEnv(t), filepath.Join(dir, "vmlinux")
}

func TestQEMU_that_ends_at_once_gives_its_words(t *testing.T) {
	_, kernel := fakeQEMU(t, "echo cannot do that >&2; exit 3")
	q := &qemu{peerGuest: peerGuest{monitor: "QEMU", dir: t.TempDir(), path: qemuProgram, mib: 256, kernel: kernel}, cpu: "host"}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := q.save(ctx)
	if err == nil || !strings.Contains(err.Error(), "cannot do that") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("%v", err)
	}
	if left, _ := os.ReadDir(q.dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestQEMU_has_its_RAM_in_a_file_that_only_the_first_writes(t *testing.T) {
	_, kernel := fakeQEMU(t, `echo "$@" >&2; exit 3`)
	state, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	for name, tt := range map[string]struct {
		shared bool
		state  *os.File
		has    []string
		not    []string
	}{
		"boot":             {false, nil, []string{"-kernel"}, []string{"memory-backend", "-incoming"}},
		"resume":           {false, state, []string{"-incoming fd:3"}, []string{"memory-backend", "-kernel"}},
		"boot, shared":     {true, nil, []string{"-kernel", "id=ram,size=256M", "share=on", ",memory-backend=ram -cpu"}, []string{"-incoming"}},
		"resume of shared": {true, state, []string{"-incoming defer", "id=ram,size=256M", "share=off", ",memory-backend=ram -cpu"}, []string{"-kernel", "share=on"}},
	} {
		q := &qemu{peerGuest: peerGuest{monitor: "QEMU", dir: t.TempDir(), path: qemuProgram, mib: 256, kernel: kernel}, cpu: "host", shared: tt.shared}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := q.start(ctx, tt.state)
		cancel()
		if err == nil {
			t.Fatalf("%s: it has started", name)
		}
		for _, word := range tt.has {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: no %q in %v", name, word, err)
			}
		}
		for _, word := range tt.not {
			if strings.Contains(err.Error(), word) {
				t.Errorf("%s: %q in %v", name, word, err)
			}
		}
	}
}

func TestQEMU_that_never_talks_is_ended_with_the_context(t *testing.T) {
	_, kernel := fakeQEMU(t, "exec sleep 1000")
	q := &qemu{peerGuest: peerGuest{monitor: "QEMU", dir: t.TempDir(), path: qemuProgram, mib: 256, kernel: kernel}, cpu: "host"}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := q.save(ctx); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// A fakePeer resumes in the given times, and then fails.
type fakePeer struct {
	times []time.Duration
	err   error
}

func (f *fakePeer) params() map[string]any { return map[string]any{"peer_version": "1"} }
func (f *fakePeer) stateMiB() float64      { return 7 }
func (f *fakePeer) close() error           { return nil }
func (f *fakePeer) resume(context.Context) (time.Duration, map[string]time.Duration, error) {
	if len(f.times) == 0 {
		return 0, nil, f.err
	}
	d := f.times[0]
	f.times = f.times[1:]
	return d, map[string]time.Duration{"process": d / 2, "load": d / 2}, nil
}

func TestBeside_runs_give_ratios_of_pairs(t *testing.T) {
	b := &beside{name: "qemu", mib: 256, runs: newSeries(inMs), whole: newSeries(inRatio), bare: newSeries(inRatio)}
	b.peer = &fakePeer{times: []time.Duration{time.Hour, 20 * time.Millisecond, 40 * time.Millisecond, 90 * time.Millisecond}}
	for i, drowse := range []time.Duration{1, 10 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond} {
		if err := b.resume(t.Context(), i > 0, drowse); err != nil {
			t.Fatal(err)
		}
	}
	rows := b.rows("resume_ready")
	if len(rows) != 3 {
		t.Fatalf("%+v", rows)
	}
	near := func(what string, got, want float64) {
		t.Helper()
		if got < want*0.998 || got > want*1.002 {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	near("the median", rows[0].P50, 40)
	near("the process", rows[0].Stages["process"], 20)
	near("the ratio", rows[1].P50, 3)
	near("the highest ratio", rows[1].P99, 4)
	near("the ratio without the process", rows[2].P50, 1.5)
	if rows[0].Params["peer_version"] != "1" || rows[0].StateMiB != 7 || rows[1].Unit != "x" || rows[1].N != 3 {
		t.Errorf("%+v", rows)
	}
}

func TestBeside_peer_that_fails_gives_row_that_says_why(t *testing.T) {
	b := &beside{name: "qemu", mib: 256, runs: newSeries(inMs), whole: newSeries(inRatio), bare: newSeries(inRatio)}
	b.peer = &fakePeer{times: []time.Duration{time.Second}, err: errors.New("it broke")}
	for range 3 {
		if err := b.resume(t.Context(), true, time.Second); err != nil {
			t.Fatal(err)
		}
	}
	rows := b.rows("resume_ready")
	if len(rows) != 1 || !strings.Contains(rows[0].Skipped, "resumed 1 times") || !strings.Contains(rows[0].Skipped, "it broke") {
		t.Errorf("%+v", rows)
	}
}

func TestNewQEMU_without_the_program_for_its_guest_gives_error(t *testing.T) {
	e := Env{PeerGuest: filepath.Join(t.TempDir(), "none")}
	if _, err := e.peerInitramfs(t.Context(), t.TempDir()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
}

func TestWatcher_output_in_any_pieces_is_found(t *testing.T) {
	text := "echo drowse-$((6*7))\r\ndrowse-" + "drowse-42\r\n# "
	for size := 1; size <= len(text); size++ {
		w := &watcher{want: []byte(printed), seen: make(chan struct{})}
		for at := 0; at < len(text); at += size {
			if _, err := w.Write([]byte(text[at:min(at+size, len(text))])); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case <-w.seen:
		default:
			t.Errorf("in pieces of %d: not found", size)
		}
	}
	w := &watcher{want: []byte(printed), seen: make(chan struct{})}
	_, _ = w.Write([]byte(typed))
	select {
	case <-w.seen:
		t.Error("what was typed is taken for what was printed")
	default:
	}
}

func TestCPUTime_own_process_gives_what_it_has_used(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for i := range 50_000_000 {
		sum += i ^ sum
	}
	after, err := cpuTime(os.Getpid())
	if err != nil || after <= before || before <= 0 || sum == 1 {
		t.Errorf("%v, then %v: %v", before, after, err)
	}
	if _, err := cpuTime(1 << 22); err == nil {
		t.Error("a process that cannot be has used time")
	}
}

func TestConcurrent_round_gives_first_last_and_ratio(t *testing.T) {
	c := &concurrent{wakes: newSeries(inMs), ratio: newSeries(inRatio)}
	ms := time.Millisecond
	c.record([]oneWake{{took: 10 * ms, cpu: 4 * ms}, {took: 20 * ms, cpu: 4 * ms}, {took: 30 * ms, cpu: 4 * ms}})
	r := c.wakes.row("concurrent_resume", nil)
	for stage, want := range map[string]float64{"first": 10, "median": 20, "last": 30, "cpu": 4} {
		if got := r.Stages[stage]; got < want*0.998 || got > want*1.002 {
			t.Errorf("%s is %v, want %v", stage, got, want)
		}
	}
	if r.N != 3 || c.ratio.total.TotalCount() != 1 {
		t.Errorf("%d wakes, %d ratios", r.N, c.ratio.total.TotalCount())
	}
}

func TestOptions_rounds(t *testing.T) {
	for _, c := range []struct{ wakes, atOnce, want int }{
		{100, 1, 100}, {100, 4, 25}, {100, 20, 5}, {101, 20, 6}, {100, 256, 5}, {2, 1, 2}, {2, 20, 2}, {1, 1, 1},
	} {
		if got := (Options{N: c.wakes}).rounds(c.atOnce); got != c.want {
			t.Errorf("%d wakes, %d at once: %d rounds, want %d", c.wakes, c.atOnce, got, c.want)
		}
	}
}
