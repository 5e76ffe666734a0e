package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ThroughputLinks are the possible links of a policy: the TAP device of a guest, or one end of a pair of Ethernet
// devices (veth(4)) whose other end stands for a guest.
var ThroughputLinks = []string{linkTAP, linkVeth}

const linkTAP, linkVeth = "tap", "veth"

// MaxSend bounds how long a sender sends in a run: the benchmark waits 10 minutes for the guest's answer.
const MaxSend = time.Minute

// throughputProgram is a program in the guest that sends over a TCP connection for some milliseconds, or receives
// until its end. It reports the number of bytes, and the nanoseconds since the connection by its own clock.
const throughputProgram = `
import socket, time
BLOCK = bytearray(64 << 10)
def answer(how, host, port, ms):
    with socket.socket() as s:
        s.connect((host, int(port)))
        begin = time.monotonic_ns()
        end = begin + int(ms) * 1000000
        n = 0
        if how == 'egress':
            while time.monotonic_ns() < end:
                n += s.send(BLOCK)
            s.shutdown(socket.SHUT_WR)
            # The other end closes when it has read all.
            s.recv(1)
        else:
            while True:
                got = s.recv_into(BLOCK, len(BLOCK), socket.MSG_WAITALL)
                if not got:
                    break
                n += got
        return '%d %d' % (n, time.monotonic_ns() - begin)
` + answering

// throughputBlock is the most that one end writes or reads at once, in bytes, like the program in the guest.
const throughputBlock = 64 << 10

// noPolicy stands for a device without programs among the numbers of rules.
const noPolicy = 0

// Values of the parameter policy.
const policyNone, policyRules = "none", "rules"

// PolicyThroughput measures how many bytes per second pass between a guest and its host over one TCP connection:
// policy_throughput in MiB/s, out of the guest (direction is egress) and into it (ingress). It measures policies
// with different numbers of rules, of which the last one allows the connection, and a device without programs
// (policy is none). The figure is what the receiver read, over the time on its own clock from the beginning of the
// connection to its end. The sender sends for a given time, and all of it must arrive. policy_throughput_ratio is
// the rate with a policy / the one without programs in the same round. A round measures each once, every other
// round in reverse order.
//
// With link tap it is a guest behind its TAP device, whose own speed is in the figure. With link veth both ends
// are threads of this process, with only the host's kernel and the programs between them.
//
// The devices and the server are in a network namespace of their own, without a way out: while the programs are
// off the device, the guest can reach only the server.
//
// faults are medians of what the policy's programs counted in a run: packets and bytes by direction, and denied
// packets.
func PolicyThroughput(ctx context.Context, e Env, o Options) ([]Row, error) {
	// The VM's process, which this thread starts, shares the namespace.
	return inNamespace(func() (rows []Row, err error) {
		for _, link := range o.Links {
			measure := e.tapThroughput
			if link == linkVeth {
				measure = e.vethThroughput
			}
			some, err := measure(ctx, o)
			if err != nil {
				return nil, err
			}
			rows = append(rows, some...)
		}
		return rows, nil
	})
}

// flowWay is a measured case: a direction, and the number of rules or noPolicy.
type flowWay struct {
	direction netpolicy.Direction
	rules     int
}

// waysOf returns all cases, in the order of the rows.
func waysOf(rules []int) (all []flowWay) {
	for _, d := range []netpolicy.Direction{netpolicy.Egress, netpolicy.Ingress} {
		for _, n := range append([]int{noPolicy}, rules...) {
			all = append(all, flowWay{d, n})
		}
	}
	return all
}

// farEnd is the guest's side of a link with a policy.
type farEnd interface {
	// setPolicy puts a policy with this many rules into force.
	setPolicy(ctx context.Context, rules int) error
	// counters returns the counters of the policy's programs.
	counters(context.Context) ([]netpolicy.Counter, error)
	// transfer connects to the server, and receives, or sends for the given time.
	transfer(ctx context.Context, d netpolicy.Direction, server netip.AddrPort, send time.Duration) (transfer, error)
}

// tapThroughput measures a guest.
func (e Env) tapThroughput(ctx context.Context, o Options) (rows []Row, err error) {
	name := vmName()
	report, err := e.bootSpec(ctx, sandbox.Spec{Name: name, MemoryMiB: o.mib(), Network: spec.NetworkTAP, Policy: policyOf(1, netpolicy.Host)})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	if report.Network == nil {
		return nil, errors.New("the VM's process does not name its TAP device")
	}
	if err := e.startProgram(ctx, name, "throughput.py", throughputProgram); err != nil {
		return nil, err
	}
	all, err := e.throughputsOf(ctx, guestEnd{e, name}, report.Network.TAP, o)
	if err != nil {
		return nil, err
	}
	return all.rows(map[string]any{"link": linkTAP, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "seconds": o.Send.Seconds()}), nil
}

// throughputsOf measures all rounds of a link whose programs are on a device.
func (e Env) throughputsOf(ctx context.Context, far farEnd, device string, o Options) (all *throughputs, err error) {
	programs, err := programsOn(device)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, programs.close()) }()
	all = newThroughputs(o.Rules)
	for i := range o.Warmup + o.N {
		ways := waysOf(o.Rules)
		if i%2 == 1 {
			slices.Reverse(ways)
		}
		e.say("policy_throughput: round %d of %d", i, o.Warmup+o.N)
		round := map[flowWay]passed{}
		for _, w := range ways {
			if round[w], err = throughputOf(ctx, far, w, programs, o.Send); err != nil {
				return nil, fmt.Errorf("%s, %d rules: %w", w.direction, w.rules, err)
			}
		}
		if i >= o.Warmup {
			all.record(round)
		}
	}
	return all, nil
}

// guestEnd is a guest in which throughputProgram runs.
type guestEnd struct {
	env  Env
	name string
}

func (g guestEnd) setPolicy(ctx context.Context, rules int) error {
	_, err := g.env.Store.Sandbox(g.name).SetPolicy(ctx, policyOf(rules, netpolicy.Host))
	return err
}

func (g guestEnd) counters(ctx context.Context) ([]netpolicy.Counter, error) {
	st, err := g.env.Store.Sandbox(g.name).NetworkStats(ctx)
	return st.Counters, err
}

func (g guestEnd) transfer(ctx context.Context, d netpolicy.Direction, server netip.AddrPort, send time.Duration) (transfer, error) {
	answer, err := g.env.ask(ctx, g.name, fmt.Sprintf("%s %v %d %d", d, server.Addr(), server.Port(), send.Milliseconds()))
	if err != nil {
		return transfer{}, err
	}
	return readTransfer(answer)
}

// passed is the traffic of a run.
type passed struct {
	bytes  int64
	took   time.Duration
	counts map[string]int64 // by the policy's programs
}

// rate returns the rate in MiB/s.
func (p passed) rate() float64 { return float64(p.bytes) / mibBytes / p.took.Seconds() }

// throughputOf does one run. It first puts the policy into force, or takes its programs off.
func throughputOf(ctx context.Context, far farEnd, w flowWay, programs *linkPrograms, send time.Duration) (p passed, err error) {
	if w.rules == noPolicy {
		if err := programs.off(); err != nil {
			return p, err
		}
		defer func() { err = errors.Join(err, programs.on()) }()
	} else if err := far.setPolicy(ctx, w.rules); err != nil {
		return p, err
	}
	before, err := far.counters(ctx)
	if err != nil {
		return p, err
	}
	if p.bytes, p.took, err = pass(ctx, far, w.direction, send); err != nil {
		return p, err
	}
	after, err := far.counters(ctx)
	if err != nil {
		return p, err
	}
	p.counts = countsBetween(before, after)
	return p, p.check(w)
}

// pass connects the far end to a server at the gateway's address, and one of them sends.
func pass(ctx context.Context, far farEnd, d netpolicy.Direction, send time.Duration) (bytes int64, took time.Duration, err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp4", netip.AddrPortFrom(netpolicy.TheWire.Gateway4, 0).String())
	if err != nil {
		return 0, 0, fmt.Errorf("listening for the guest: %w", err)
	}
	defer l.Close()
	at, err := netip.ParseAddrPort(l.Addr().String())
	if err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var here transfer
	var hereErr error
	served := make(chan struct{})
	go func() {
		defer close(served)
		here, hereErr = serveTransfer(ctx, l, d, send)
	}()
	there, err := far.transfer(ctx, d, at, send)
	if err != nil {
		cancel()
	}
	<-served
	if err := errors.Join(err, hereErr); err != nil {
		return 0, 0, err
	}
	return received(d, here, there)
}

// transfer is what one end of a connection sent or received.
type transfer struct {
	bytes int64
	took  time.Duration
}

// readTransfer parses the answer of the program in the guest.
func readTransfer(answer string) (t transfer, err error) {
	if _, err := fmt.Sscanf(answer, "%d %d", &t.bytes, &t.took); err != nil || t.bytes <= 0 || t.took <= 0 {
		return transfer{}, fmt.Errorf("the program in the guest says %q", answer)
	}
	return t, nil
}

// received returns the receiver's figures, if it received everything that was sent.
func received(d netpolicy.Direction, host, guest transfer) (bytes int64, took time.Duration, err error) {
	sender, receiver := guest, host
	if d == netpolicy.Ingress {
		sender, receiver = host, guest
	}
	if sender.bytes != receiver.bytes || receiver.took <= 0 {
		return 0, 0, fmt.Errorf("%d bytes were sent, and %d have come in %v", sender.bytes, receiver.bytes, receiver.took)
	}
	return receiver.bytes, receiver.took, nil
}

// serveTransfer accepts one connection of the guest and receives, or sends for the given time. It ends with the
// context.
func serveTransfer(ctx context.Context, l net.Listener, d netpolicy.Direction, send time.Duration) (transfer, error) {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	c, err := l.Accept()
	if err != nil {
		return transfer{}, fmt.Errorf("waiting for the guest's connection: %w", err)
	}
	return transferOver(ctx, c, d == netpolicy.Ingress, send)
}

// transferOver is one end of a connection, which it closes. It sends for the given time and waits until the other
// end has read everything, or receives until the end. It ends with the context.
func transferOver(ctx context.Context, c net.Conn, sends bool, send time.Duration) (t transfer, err error) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	begin := time.Now()
	block := make([]byte, throughputBlock)
	if sends {
		for time.Since(begin) < send {
			n, err := c.Write(block)
			t.bytes += int64(n)
			if err != nil {
				return transfer{}, fmt.Errorf("sending: %w", err)
			}
		}
		if half, ok := c.(interface{ CloseWrite() error }); ok {
			if err := half.CloseWrite(); err != nil {
				return transfer{}, fmt.Errorf("sending: %w", err)
			}
		}
	}
	for {
		n, err := c.Read(block)
		if !sends {
			t.bytes += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF):
			t.took = time.Since(begin)
			return t, nil
		case err != nil:
			return transfer{}, fmt.Errorf("receiving: %w", err)
		}
	}
}

// Names of the counts of a direction.
func packetsOf(d netpolicy.Direction) string { return string(d) + "_packets" }
func bytesOf(d netpolicy.Direction) string   { return string(d) + "_bytes" }

const packetsDenied = "denied_packets"

// countsBetween returns what a policy's programs counted between two looks.
func countsBetween(before, after []netpolicy.Counter) map[string]int64 {
	counts := map[string]int64{packetsDenied: 0}
	for _, d := range []netpolicy.Direction{netpolicy.Egress, netpolicy.Ingress} {
		counts[packetsOf(d)], counts[bytesOf(d)] = 0, 0
	}
	add := func(all []netpolicy.Counter, sign int64) {
		for _, c := range all {
			if c.Verdict != netpolicy.Allow {
				counts[packetsDenied] += sign * int64(c.Packets)
				continue
			}
			counts[packetsOf(c.Direction)] += sign * int64(c.Packets)
			counts[bytesOf(c.Direction)] += sign * int64(c.Bytes)
		}
	}
	add(before, -1)
	add(after, 1)
	return counts
}

// check fails unless the policy's programs judged all traffic or, without a policy, none.
func (p passed) check(w flowWay) error {
	switch judged := p.counts[bytesOf(w.direction)]; {
	case w.rules != noPolicy && judged < p.bytes:
		return fmt.Errorf("%d bytes have passed, and the policy has counted %d", p.bytes, judged)
	case w.rules == noPolicy:
		for name, n := range p.counts {
			if n != 0 {
				return fmt.Errorf("the programs are off the device, and have counted %s: %d", name, n)
			}
		}
	}
	return nil
}

// throughputs are the series of each case.
type throughputs struct {
	ways         []flowWay
	rate, ratios map[flowWay]*series
}

func newThroughputs(rules []int) *throughputs {
	t := &throughputs{ways: waysOf(rules), rate: map[flowWay]*series{}, ratios: map[flowWay]*series{}}
	for _, w := range t.ways {
		t.rate[w], t.ratios[w] = newSeries(inRate), newSeries(inRatio)
	}
	return t
}

// record adds a round.
func (t *throughputs) record(round map[flowWay]passed) {
	for _, w := range t.ways {
		p := round[w]
		t.rate[w].add(max(1, int64(math.Round(p.rate()*thousandths))))
		for name, n := range p.counts {
			t.rate[w].fault(name, max(0, n))
		}
		if w.rules != noPolicy {
			t.ratios[w].portion(p.rate(), round[flowWay{w.direction, noPolicy}].rate())
		}
	}
}

// rows returns the rows of all cases. common has the parameters that all rows share.
func (t *throughputs) rows(common map[string]any) (rows []Row) {
	params := func(w flowWay) map[string]any {
		p := map[string]any{"direction": string(w.direction), "policy": policyRules, "rules": w.rules}
		if w.rules == noPolicy {
			p["policy"] = policyNone
		}
		maps.Copy(p, common)
		return p
	}
	for _, w := range t.ways {
		rows = append(rows, t.rate[w].row("policy_throughput", params(w)))
	}
	for _, w := range t.ways {
		if w.rules != noPolicy {
			rows = append(rows, t.ratios[w].row("policy_throughput_ratio", params(w)))
		}
	}
	return rows
}

// linkPrograms are the programs of a policy on a device, which it can take off and put back. One goroutine at a
// time may use it, in the device's network namespace.
type linkPrograms struct {
	filters  []*netlink.BpfFilter
	programs []*ebpf.Program
}

// programsOn returns the programs of a device. They stay on it.
func programsOn(device string) (_ *linkPrograms, err error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("finding %q: %w", device, err)
	}
	t := &linkPrograms{}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	for _, side := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		all, err := netlink.FilterList(link, side)
		if err != nil {
			return nil, fmt.Errorf("listing the filters of %q: %w", device, err)
		}
		if len(all) != 1 {
			return nil, fmt.Errorf("%q has %d filters in a direction, and a policy has 1", device, len(all))
		}
		b, ok := all[0].(*netlink.BpfFilter)
		if !ok {
			return nil, fmt.Errorf("%q has a filter %q that is not a policy's", device, all[0].Type())
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(b.Id))
		if err != nil {
			return nil, fmt.Errorf("opening a program on %q: %w", device, err)
		}
		t.filters, t.programs = append(t.filters, b), append(t.programs, p)
	}
	return t, nil
}

// off takes the programs off the device.
func (t *linkPrograms) off() error {
	for _, f := range t.filters {
		if err := netlink.FilterDel(f); err != nil {
			return fmt.Errorf("taking a program off a device: %w", err)
		}
	}
	return nil
}

// on puts the programs back on the device.
func (t *linkPrograms) on() error {
	var errs []error
	for i, f := range t.filters {
		again := &netlink.BpfFilter{FilterAttrs: f.FilterAttrs, Fd: t.programs[i].FD(), Name: f.Name, DirectAction: true}
		if err := netlink.FilterReplace(again); err != nil {
			errs = append(errs, fmt.Errorf("putting a program on a device again: %w", err))
		}
	}
	return errors.Join(errs...)
}

// close closes the descriptors. The programs stay where they are.
func (t *linkPrograms) close() error {
	var errs []error
	for _, p := range t.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
