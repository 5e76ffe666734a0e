package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// echo answers each line of a connection, and each datagram, with the same bytes.
const echo = `
import select, socket
s = socket.create_server(('', 8000), backlog=64)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.bind(('', 8001))
open('` + busyFile + `', 'w').close()
while True:
    if u in select.select([s, u], [], [])[0]:
        d, a = u.recvfrom(2000)
        u.sendto(d, a)
        continue
    c, _ = s.accept()
    try:
        while d := c.recv(2000):
            c.sendall(d)
    except OSError:
        pass
    c.close()
`

const echoTCP, echoUDP = 8000, 8001

// touchTime bounds the wait for an answer.
const touchTime = time.Minute

// WakeTouch measures the time from a touch of a supervised, sleeping VM to the answer of a python3 program in it.
// A touch is a connection to a published port, until the first byte comes back, or a datagram to the VM's own
// address, until it comes back. A touch that the VM does not answer at the first try ends the benchmark with an error.
//
// Each run touches the VM once when it sleeps and once more when it is awake. The rows are:
//
//   - wake_touch: the touch of the sleeping VM. Its stages in turn: come, until the supervisor has the connection or
//     packet; resume_ready, as the VM's process measured it in this wake; around, the rest of the wake, until the
//     supervisor knows that the VM is awake and holds it; deliver, until the guest has accepted the connection, or
//     its device has the packet; answer.
//   - wake_touch_awake: the same exchange with the VM awake.
//   - wake_touch_added: what the host adds to resume_ready: come, around, and for a packet deliver. A connection's
//     deliver is the handshake of the guest's kernel, and is part of wake_touch_awake as well.
//   - wake_touch_whole: wake_touch less resume_ready and wake_touch_awake of the same run: the host's part, and pages
//     that the guest faults in to answer.
func WakeTouch(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	c := counting()
	defer c.close()
	at, err := freePort()
	if err != nil {
		return nil, err
	}
	policy, err := netpolicy.Parse([]byte(fmt.Sprintf("publish: [{listen: %[1]q, port: %[2]d, protocol: tcp}, {listen: %[1]q, port: %[3]d, protocol: udp}]\n", at, echoTCP, echoUDP)))
	if err != nil {
		return nil, err
	}
	if _, err := e.bootSpec(ctx, sandbox.Spec{Name: name, MemoryMiB: o.mib(), Network: spec.NetworkTAP, Policy: policy}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	if err := e.startLive(ctx, name, "echo.py", echo); err != nil {
		return nil, err
	}
	for range o.Depth {
		if _, err := e.sleepAndWake(ctx, name); err != nil {
			return nil, err
		}
	}
	touched := make(chan supervisor.Activation, 16)
	serving, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- supervisor.Run(serving, e.Store, e.Launcher, supervisor.Options{Pool: o.Processes, PruneEvery: -1, Activated: func(t supervisor.Activation) {
			select {
			case touched <- t:
			case <-serving.Done():
			}
		}})
	}()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()
	w := wakeTouch{Env: e, o: o, name: name, at: at, touched: touched, counter: c}
	if err := w.ready(ctx); err != nil {
		return nil, err
	}
	all := map[string]*touches{}
	for _, by := range touchKinds {
		all[by] = newTouches()
	}
	for i := range o.Warmup + o.N {
		if i%10 == 0 {
			e.say("wake_touch: run %d of %d", i, o.Warmup+o.N)
		}
		for _, by := range touchKinds {
			if err := w.once(ctx, by, i >= o.Warmup, all[by]); err != nil {
				return nil, fmt.Errorf("touch %d by %s: %w", i+1, by, err)
			}
		}
	}
	for _, by := range touchKinds {
		params := map[string]any{"touch": by, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "depth": o.Depth, "pool": o.Processes > 0}
		rows = append(rows, all[by].touch.row("wake_touch", params), all[by].awake.row("wake_touch_awake", params),
			all[by].added.row("wake_touch_added", params), all[by].whole.row("wake_touch_whole", params))
	}
	return rows, nil
}

var touchKinds = []string{supervisor.ByConnection, supervisor.ByPacket}

// touches are the measurements of one kind of touch.
type touches struct{ touch, awake, added, whole *series }

func newTouches() *touches {
	return &touches{newSeries(inMs), newSeries(inMs), newSeries(inMs), newSeries(inMs)}
}

// wakeTouch is a sleeping VM to touch.
type wakeTouch struct {
	Env
	o       Options
	name    string
	at      netip.AddrPort
	own     netip.Addr
	touched chan supervisor.Activation
	counter *counter
}

// freePort returns a port of the host that is free now.
func freePort() (netip.AddrPort, error) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return netip.AddrPort{}, err
	}
	return l.Addr().(*net.TCPAddr).AddrPort(), l.Close()
}

// ready waits until the supervisor listens, and notes the VM's address.
func (w *wakeTouch) ready(ctx context.Context) error {
	info, err := w.Store.Sandbox(w.name).Info(ctx)
	if err != nil {
		return err
	}
	if info.Network == nil {
		return errors.New("the VM has no network")
	}
	w.own = info.Network.Address
	for until := time.Now().Add(touchTime); ; {
		_, _, err := w.exchange(ctx, supervisor.ByConnection)
		if err == nil || !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(until) {
			w.drain()
			return err
		}
		if err := wait.For(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// drain drops earlier reports of the supervisor.
func (w *wakeTouch) drain() {
	for {
		select {
		case <-w.touched:
		default:
			return
		}
	}
}

// exchange touches the VM once, and waits for its answer.
func (w *wakeTouch) exchange(ctx context.Context, by string) (begin, end time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, touchTime)
	defer cancel()
	network, to, line := "tcp4", w.at, "touch\n"
	if by == supervisor.ByPacket {
		network, to = "udp4", netip.AddrPortFrom(w.own, echoUDP)
	}
	begin = time.Now()
	c, err := (&net.Dialer{}).DialContext(ctx, network, to.String())
	if err != nil {
		return begin, end, err
	}
	defer c.Close()
	until, _ := ctx.Deadline()
	if err := c.SetDeadline(until); err != nil {
		return begin, end, err
	}
	if _, err := io.WriteString(c, line); err != nil {
		return begin, end, err
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	end = time.Now()
	if err == nil && got != line {
		err = fmt.Errorf("it answers %q, want %q", got, line)
	}
	if t, ok := c.(*net.TCPConn); ok && err == nil {
		err = finish(t)
	}
	return begin, end, err
}

// finish ends a connection on both sides. A VM that sleeps before its program sees the end never sees it:
// connections do not survive a wake. The program, which serves one at a time, would wait for more input.
func finish(c *net.TCPConn) error {
	if err := c.CloseWrite(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, c)
	return err
}

// once puts the VM to sleep, touches it, and touches it again.
func (w *wakeTouch) once(ctx context.Context, by string, timed bool, t *touches) error {
	if _, err := w.Store.Sandbox(w.name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		return err
	}
	if err := wait.For(ctx, w.o.Settle); err != nil {
		return err
	}
	w.drain()
	counts := w.counter.begin(timed)
	begin, end, err := w.exchange(ctx, by)
	if err != nil {
		return err
	}
	t.touch.counted(w.counter, w.counter.since(counts), true)
	var touch supervisor.Activation
	select {
	case touch = <-w.touched:
	case <-time.After(touchTime):
		return errors.New("the VM was woken by something else")
	}
	if touch.By != by {
		return fmt.Errorf("the VM was woken by a %s", touch.By)
	}
	info, err := w.Store.Sandbox(w.name).Info(ctx)
	if err != nil {
		return err
	}
	ready, ok := info.Report.Stages["resume_ready"]
	if !ok {
		return errors.New("the VM's process does not say how long it took to wake")
	}
	resume := time.Duration(ready * perMs)
	counts = w.counter.begin(timed)
	again, answered, err := w.exchange(ctx, by)
	if err != nil {
		return err
	}
	t.awake.counted(w.counter, w.counter.since(counts), true)
	if !timed {
		return nil
	}
	total, awake := end.Sub(begin), answered.Sub(again)
	come, around, deliver := touch.Came.Sub(begin), touch.Awake.Sub(touch.Came)-resume, touch.Delivered.Sub(touch.Awake)
	added := come + around
	if by == supervisor.ByPacket {
		added += deliver
	}
	for s, d := range map[*series]time.Duration{t.touch: total, t.awake: awake, t.added: added, t.whole: total - awake - resume} {
		s.add(int64(max(d, 1)))
	}
	for stage, d := range map[string]time.Duration{"come": come, "resume_ready": resume, "around": around, "deliver": deliver, "answer": end.Sub(touch.Delivered)} {
		t.touch.stage(stage, int64(max(d, 0)))
	}
	if ms, ok := info.Report.Stages["network"]; ok {
		t.added.stage("network", ns(ms))
	}
	return nil
}
