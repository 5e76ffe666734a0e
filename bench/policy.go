package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/process"
)

// MaxRules bounds the rules of a policy that is measured.
const MaxRules = netpolicy.MaxRules

// policyAgent is the agent whose packets are judged.
var policyAgent = netpolicy.Identity{Address4: netip.AddrFrom4([4]byte{10, 200, 3, 7})}

// rulesOf is a policy of n rules of which the last one allows what is measured.
func rulesOf(n int) (*netpolicy.Spec, error) {
	return netpolicy.Compile(policyOf(n, netpolicy.Public), policyAgent, netpolicy.Environment{})
}

// policyOf is a policy of n rules of which the last one allows all that goes to a group: each of the others
// denies a network and three ports of its own.
func policyOf(n int, to netpolicy.Group) *netpolicy.Policy {
	// The limits that all have, at rates which what is measured does not reach.
	p := &netpolicy.Policy{Limits: netpolicy.Limits{Egress: netpolicy.Rates{
		Packets: &netpolicy.Rate{PerSecond: 1e9}, Connections: &netpolicy.Rate{PerSecond: 1e6, Burst: 1e12},
	}}}
	for i := range n - 1 {
		network := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 24)
		port := uint16(2000 + 3*i)
		p.Rules = append(p.Rules, netpolicy.Rule{
			Direction: netpolicy.Egress, Verdict: netpolicy.Deny, CIDRs: []netpolicy.CIDR{{Prefix: network}},
			Protocols: []netpolicy.Protocol{netpolicy.TCP, netpolicy.UDP},
			Ports:     []netpolicy.PortRange{{First: uint16(1 + i), Last: uint16(1 + i)}, {First: port, Last: port + 1}},
		})
	}
	p.Rules = append(p.Rules, netpolicy.Rule{
		Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Groups: []netpolicy.Group{to},
		Protocols: []netpolicy.Protocol{netpolicy.AnyProtocol}, Ports: []netpolicy.PortRange{netpolicy.AnyPort},
	})
	return p
}

// The frame that is judged: to an address in the last rules' networks, of which the ports do
// not match, so that all of the policy counts.
var policyPeer = []byte{20, 1, 77, 9}

const (
	frameTCP, frameUDP = 6, 17
	frameSYN           = 2
	framePayload       = 1000
)

// policyFrame is a TCP SYN, which the rules judge and which opens a flow, or a
// UDP packet of a flow, or an answer of it to the guest. Checksums do not count: programs
// adjust them without a look at them.
func policyFrame(proto byte, d netpolicy.Direction) []byte {
	header, payload := 8, framePayload
	if proto == frameTCP {
		header, payload = 20, 0
	}
	f := make([]byte, 14+20+header+payload)
	w := netpolicy.TheWire
	copy(f, w.GatewayMAC[:])
	copy(f[6:], w.GuestMAC[:])
	be := binary.BigEndian
	be.PutUint16(f[12:], unix.ETH_P_IP)
	ip := f[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, proto
	be.PutUint16(ip[2:], uint16(len(ip)))
	copy(ip[12:], w.Guest4.AsSlice())
	copy(ip[16:], policyPeer)
	l4 := ip[20:]
	guest, peer := l4, l4[2:]
	if d == netpolicy.Ingress {
		copy(f, w.GuestMAC[:])
		copy(f[6:], w.GatewayMAC[:])
		copy(ip[16:], policyAgent.Address4.AsSlice())
		copy(ip[12:], policyPeer)
		guest, peer = peer, guest
	}
	be.PutUint16(guest, 40000)
	be.PutUint16(peer, 443)
	if proto == frameTCP {
		l4[12], l4[13] = 5<<4, frameSYN
	} else {
		be.PutUint16(l4[4:], uint16(len(l4)))
	}
	return f
}

// PolicyPacket measures the time in which the programs judge and translate a packet that the guest sends, or gets, in
// the kernel and without a device (BPF_PROG_RUN): one of a flow that is known, an answer of that flow, one that the
// rules judge and that opens a flow which is there already (a SYN that is sent again), and one that opens a flow that
// was not there, in a flow table that is full. Stage "empty" is the same of an empty program, in turn with it; it is in
// the figures.
func PolicyPacket(ctx context.Context, e Env, o Options) ([]Row, error) {
	var rows []Row
	for _, rules := range o.Rules {
		spec, err := rulesOf(rules)
		if err != nil {
			return nil, err
		}
		for _, flow := range []string{"known", "answer", "new", "first"} {
			params := map[string]any{"rules": rules, "flow": flow, "table_bytes": spec.Bytes()}
			row, err := policyPacket(ctx, spec, o, flow, params)
			if err != nil {
				return nil, err
			}
			e.say("policy_packet: %d rules, %s flow: %.0f ns, an empty program %.0f ns", rules, flow, row.P50, row.Stages["empty"])
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func policyPacket(ctx context.Context, spec *netpolicy.Spec, o Options, flow string, params map[string]any) (_ Row, err error) {
	t, err := link.NewTrial(spec)
	if err != nil {
		return Row{}, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	direction := netpolicy.Egress
	frame := policyFrame(frameTCP, direction)
	if flow == "known" || flow == "answer" {
		frame = policyFrame(frameUDP, direction)
		if _, _, err := t.Judge(direction, frame, 1); err != nil {
			return Row{}, err
		}
	}
	if flow == "answer" {
		direction = netpolicy.Ingress
		frame = policyFrame(frameUDP, direction)
	}
	s := newSeries(inNs)
	for i := range o.Warmup + o.N {
		if err := ctx.Err(); err != nil {
			return Row{}, err
		}
		empty, each, err := policyRun(t, flow, direction, frame, o.Packets)
		if err != nil {
			return Row{}, err
		}
		if i < o.Warmup {
			continue
		}
		s.add(int64(each))
		s.stage("empty", int64(empty))
		s.stage("judged", int64(max(0, each-empty)))
	}
	return s.row("policy_packet", params), nil
}

// policyRun has packets of one kind judged, and as many by an empty program.
func policyRun(t *link.Trial, flow string, direction netpolicy.Direction, frame []byte, packets int) (empty, each time.Duration, err error) {
	if flow == "first" {
		if empty, err = t.EmptyFirst(frame, packets); err != nil {
			return 0, 0, err
		}
		var opened uint64
		if each, opened, err = t.JudgeFirst(frame, packets); err == nil && opened != uint64(packets) {
			err = fmt.Errorf("%d packets have opened %d flows", packets, opened)
		}
		return empty, each, err
	}
	if empty, err = t.Empty(direction, frame, packets); err != nil {
		return 0, 0, err
	}
	each, passed, err := t.Judge(direction, frame, packets)
	if err == nil && !passed {
		err = errors.New("the programs have denied a packet that the policy allows")
	}
	return empty, each, err
}

// othersRules are the rules of agents beside the one that is measured.
const othersRules = 10

// swapBatch is how many packets are judged between two looks at whether to go on.
const swapBatch = 1000

// probePort is a port of the peer's that every other policy does not allow.
const probePort = 10000

// swapSpecs are two policies of n rules, of which only the first allows what is sent to probePort.
func swapSpecs(n int) (specs [2]*netpolicy.Spec, err error) {
	for i := range specs {
		p := policyOf(n, netpolicy.Public)
		if i == 1 {
			p.Rules[n-1].Ports = []netpolicy.PortRange{{First: 1, Last: probePort - 1}, {First: probePort + 1, Last: 65535}}
		}
		if specs[i], err = netpolicy.Compile(p, policyAgent, netpolicy.Environment{}); err != nil {
			return specs, err
		}
	}
	return specs, nil
}

// PolicySwap measures a swap of a policy while packets are judged without a pause on another thread: from the call with
// a policy that is compiled until no packet is judged by the old one. The first packet after each swap has to be judged
// by the new one, or it ends with an error. With other agents, of which param agents says how many, the one that is
// measured is one of them, in a network namespace of their own. Stages: "compile" comes before it; "table" is what goes
// by until the new table is filled, "wait" the rest; "cpu" is how long the thread that swaps had a processor meanwhile,
// of which param cpu_p99_ms is the 99th percentile. Param packets is how many were judged meanwhile.
func PolicySwap(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	for _, agents := range o.Agents {
		some, err := inNamespace(func() ([]Row, error) { return policySwaps(ctx, e, agents, o) })
		if err != nil {
			return nil, err
		}
		rows = append(rows, some...)
	}
	return rows, nil
}

// policySwaps measures beside so many other agents.
func policySwaps(ctx context.Context, e Env, agents int, o Options) (rows []Row, err error) {
	spec, err := rulesOf(othersRules)
	if err != nil {
		return nil, err
	}
	trial := func() (*link.Trial, error) { return link.NewTrial(spec) }
	if agents > 0 {
		a, err := newAttached(spec)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, a.close()) }()
		for i := range agents + 1 {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if i%100 == 0 {
				e.say("policy_swap: agent %d of %d", i, agents)
			}
			name, err := a.device()
			if err != nil {
				return nil, err
			}
			if _, _, err := a.attach(name); err != nil {
				return nil, err
			}
		}
		trial = a.links[agents/2].Trial
	}
	for _, rules := range o.Rules {
		row, err := policySwap(ctx, trial, rules, o)
		if err != nil {
			return nil, err
		}
		row.Params["agents"] = agents
		e.say("policy_swap: %d rules, %d other agents: %.3f ms", rules, agents, row.P50)
		rows = append(rows, row)
	}
	return rows, nil
}

// threadTime is how long the calling thread has had a processor.
func threadTime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0, fmt.Errorf("reading the clock of a thread: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

// policySwap is one row. The calling goroutine has a thread of its own.
func policySwap(ctx context.Context, trial func() (*link.Trial, error), rules int, o Options) (_ Row, err error) {
	specs, err := swapSpecs(rules)
	if err != nil {
		return Row{}, err
	}
	t, err := trial()
	if err != nil {
		return Row{}, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if _, err := t.Swap(specs[0]); err != nil {
		return Row{}, err
	}
	load, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var judged int64
	var loadErr error
	beat := make(chan struct{}, 1) // a batch was judged; closed when no more are
	wg.Go(func() {
		defer close(beat)
		for frame := policyFrame(frameUDP, netpolicy.Egress); load.Err() == nil; judged += swapBatch {
			_, passed, err := t.Judge(netpolicy.Egress, frame, swapBatch)
			if err == nil && !passed {
				err = errors.New("a packet that both policies allow was denied during a swap")
			}
			if err != nil {
				loadErr = err
				return
			}
			select {
			case beat <- struct{}{}:
			default:
			}
		}
	})
	// A SYN, so that no flow remembers what a policy has said before.
	probe := policyFrame(frameTCP, netpolicy.Egress)
	binary.BigEndian.PutUint16(probe[14+20+2:], probePort)
	s, running := newSeries(inMs), newSeries(inMs)
	once := func(i int) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		begin := time.Now()
		specs, err := swapSpecs(rules)
		if err != nil {
			return err
		}
		compiled := time.Since(begin) / time.Duration(len(specs))
		next := (i + 1) % len(specs)
		// Packets are being judged, and not about to be.
		select {
		case <-beat:
		default:
		}
		<-beat
		before, err := threadTime()
		if err != nil {
			return err
		}
		begin = time.Now()
		made, err := t.Swap(specs[next])
		if err != nil {
			return err
		}
		took := time.Since(begin)
		after, err := threadTime()
		if err != nil {
			return err
		}
		_, passed, err := t.Judge(netpolicy.Egress, probe, 1)
		if err == nil && passed != (next == 0) {
			err = errors.New("the first packet after a swap was judged by the policy before it")
		}
		if err != nil || i < o.Warmup {
			return err
		}
		s.add(int64(took))
		for stage, d := range map[string]time.Duration{"compile": compiled, "table": made, "wait": took - made, "cpu": after - before} {
			s.stage(stage, int64(d))
		}
		running.add(int64(after - before))
		return nil
	}
	for i := range o.Warmup + o.N {
		if err = once(i); err != nil {
			break
		}
	}
	stop()
	wg.Wait()
	if err := errors.Join(err, loadErr); err != nil {
		return Row{}, err
	}
	cpu := float64(running.total.ValueAtQuantile(99)) / perMs
	return s.row("policy_swap", map[string]any{"rules": rules, "packets": judged, "cpu_p99_ms": cpu}), nil
}

// attachRoot is where the agents of a benchmark have their pins.
func attachRoot() string { return attachRootPrefix + strconv.Itoa(os.Getpid()) }

const attachRootPrefix = link.DefaultRoot + "-bench-"

// sweepAttachRoots removes what benchmarks have left that were killed: 600 MiB of the kernel's
// memory for 1,000 agents. Their devices went with their namespaces.
func sweepAttachRoots() error {
	roots, err := filepath.Glob(attachRootPrefix + "*")
	if err != nil {
		return err
	}
	var errs []error
	for _, root := range roots {
		pid, err := strconv.Atoi(strings.TrimPrefix(root, attachRootPrefix))
		if err != nil || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		errs = append(errs, (&attached{root: root}).close())
	}
	return errors.Join(errs...)
}

// PolicyAttach measures how long it takes to put a policy on a TAP device that is down, and to raise it: one after
// another for so many agents, which stay, in a network namespace of its own. The policy is compiled before. Rows:
// policy_attach, of which param total_ms is how long all took, those of the first, which loads the programs, and of
// others in processes of their own, by param process; and policy_attach_memory, in KiB: what the kernel says that the
// agent's maps and programs take (param measured_kib is how much less memory the host had per agent, device included).
func PolicyAttach(ctx context.Context, e Env, o Options) ([]Row, error) {
	return inNamespace(func() ([]Row, error) { return policyAttach(ctx, e, o) })
}

// inNamespace runs f on a thread of its own, in a network namespace of its own.
func inNamespace(f func() ([]Row, error)) (rows []Row, err error) {
	done := make(chan struct{})
	// The namespace is the thread's, which ends with its goroutine.
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("making a network namespace: %w: run as root", err)
			return
		}
		rows, err = f()
	}()
	<-done
	return rows, err
}

// attached are agents with their devices.
type attached struct {
	root    string
	spec    *netpolicy.Spec
	links   []*link.Link
	devices []*tap.Device
}

// newAttached are none yet, after what a benchmark has left that was killed is gone.
func newAttached(spec *netpolicy.Spec) (*attached, error) {
	if err := sweepAttachRoots(); err != nil {
		return nil, fmt.Errorf("removing what a killed benchmark has left: %w", err)
	}
	return &attached{root: attachRoot(), spec: spec}, nil
}

// device makes the device of the next agent.
func (a *attached) device() (string, error) {
	name := "b" + strconv.Itoa(len(a.devices))
	d, err := tap.Create(tap.Config{Name: name, Down: true})
	if err != nil {
		return "", err
	}
	a.devices = append(a.devices, d)
	return name, nil
}

func (a *attached) attach(name string) (took, up time.Duration, err error) {
	begin := time.Now()
	l, err := link.Attach(link.Config{Endpoint: name, Interface: name, Root: a.root}, a.spec)
	took = time.Since(begin)
	if err != nil {
		return 0, 0, err
	}
	a.links = append(a.links, l)
	begin = time.Now()
	err = l.Up(a.spec.Identity())
	return took, time.Since(begin), err
}

func (a *attached) close() error {
	var errs []error
	for _, l := range a.links {
		errs = append(errs, l.Remove())
	}
	for _, d := range a.devices {
		errs = append(errs, d.Close())
	}
	names, err := link.Endpoints(a.root)
	for _, name := range names {
		errs = append(errs, link.Remove(link.Config{Endpoint: name, Interface: name, Root: a.root}))
	}
	return errors.Join(append(errs, err, link.Sweep(a.root), os.Remove(a.root))...)
}

func policyAttach(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	spec, err := rulesOf(o.Rules[0])
	if err != nil {
		return nil, err
	}
	a, err := newAttached(spec)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.close()) }()
	first, each, own := newSeries(inMs), newSeries(inMs), newSeries(inMs)
	memory := newSeries(inKiB)
	var before, after uint64
	var total time.Duration
	record := func(s *series, took, up time.Duration) {
		s.add(int64(took + up))
		s.stage("attach", int64(took))
		s.stage("up", int64(up))
	}
	for i := range o.Agents[0] + 1 {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if i%100 == 0 {
			e.say("policy_attach: agent %d of %d", i, o.Agents[0])
		}
		name, err := a.device()
		if err != nil {
			return nil, err
		}
		took, up, err := a.attach(name)
		if err != nil {
			return nil, err
		}
		s := each
		if i == 0 {
			s, before = first, available()
		} else {
			total += took + up
		}
		record(s, took, up)
		if err := recordMemory(memory, a.links[i]); err != nil {
			return nil, err
		}
	}
	after = available()
	for range o.Processes {
		took, up, err := attachElsewhere(ctx, a, o)
		if err != nil {
			return nil, err
		}
		record(own, took, up)
	}
	params := func(process string) map[string]any {
		return map[string]any{"rules": o.Rules[0], "process": process, "agents": o.Agents[0]}
	}
	rows = append(rows, first.row("policy_attach", params("first")))
	row := each.row("policy_attach", params("same"))
	row.Params["total_ms"] = total.Milliseconds()
	rows = append(rows, row)
	if o.Processes > 0 {
		rows = append(rows, own.row("policy_attach", params("own")))
	}
	row = memory.row("policy_attach_memory", params("same"))
	row.Params["measured_kib"] = (int64(before) - int64(after)) / int64(o.Agents[0])
	return append(rows, row), nil
}

func recordMemory(s *series, l *link.Link) error {
	parts, err := l.Memory()
	if err != nil {
		return err
	}
	var sum uint64
	for name, n := range parts {
		sum += n
		s.stage(name, int64(n))
	}
	s.add(int64(sum))
	return nil
}

// available is the host's free memory and what it could free at once, in KiB; 0 if it does not say.
func available() uint64 {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "MemAvailable:")
	var kib uint64
	_, _ = fmt.Sscan(rest, &kib)
	return kib
}

// attachElsewhere has a new process attach an agent, which stays when it has ended.
func attachElsewhere(ctx context.Context, a *attached, o Options) (took, up time.Duration, err error) {
	name, err := a.device()
	if err != nil {
		return 0, 0, err
	}
	argv := append(o.Helper[1:len(o.Helper):len(o.Helper)], a.root, name, strconv.Itoa(o.Rules[0]))
	cmd := exec.CommandContext(ctx, o.Helper[0], argv...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return 0, 0, fmt.Errorf("attaching a policy in a process of its own: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	var times [2]time.Duration
	if err := json.Unmarshal(stdout.Bytes(), &times); err != nil {
		return 0, 0, fmt.Errorf("attaching a policy in a process of its own: reading what it says: %w", err)
	}
	return times[0], times[1], nil
}

// PolicyAttachHelper is such a process: it prints two times in nanoseconds as JSON, of Attach and of Up.
func PolicyAttachHelper(root, name string, rules int) ([]time.Duration, error) {
	process.PrepareProcess() // as a VM's process is
	spec, err := rulesOf(rules)
	if err != nil {
		return nil, err
	}
	a := attached{root: root, spec: spec}
	took, up, err := a.attach(name)
	if err != nil {
		return nil, err
	}
	return []time.Duration{took, up}, a.links[0].Close()
}
