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

// MaxRules bounds the rules of a measured policy.
const MaxRules = netpolicy.MaxRules

// policyAgent is the agent whose packets the programs judge.
var policyAgent = netpolicy.Identity{Address4: netip.AddrFrom4([4]byte{10, 200, 3, 7})}

// rulesOf returns a policy of n rules, of which the last one allows the measured packets.
func rulesOf(n int) (*netpolicy.Spec, error) {
	return netpolicy.Compile(policyOf(n, netpolicy.Public), policyAgent, netpolicy.Environment{})
}

// policyOf returns a policy of n rules. The last one allows all packets to a group. Each of the others denies a
// network and three ports of its own.
func policyOf(n int, to netpolicy.Group) *netpolicy.Policy {
	// The limits that all policies have, at rates that no benchmark reaches.
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

// The judged frame goes to an address in the last rules' networks, but to a port that does not match, so that the
// whole policy counts.
var policyPeer = []byte{20, 1, 77, 9}

const (
	frameTCP, frameUDP = 6, 17
	frameSYN           = 2
	framePayload       = 1000
)

// policyFrame returns a TCP SYN, which the rules judge and which opens a flow, or a UDP packet of a flow, or the
// answer to it. Checksums do not matter: programs adjust them without checking them.
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

// PolicyPacket measures the time in which the programs judge and translate a packet that the guest sends or gets,
// in the kernel and without a device (BPF_PROG_RUN). The packets are: one of a known flow, an answer of that flow,
// one that the rules judge and whose flow exists already (a repeated SYN), and one that opens a new flow in a full
// flow table. Stage "empty" is the time of an empty program, measured in turn. The figures include it.
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

// policyRun runs packets of one kind through the programs, and as many through an empty program.
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

// othersRules is the number of rules of the other agents.
const othersRules = 10

// swapBatch is how many packets to judge between two looks at whether to go on.
const swapBatch = 1000

// probePort is a port of the peer's that only every second policy allows.
const probePort = 10000

// swapSpecs returns two policies of n rules. Only the first allows packets to probePort.
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

// PolicySwap measures a swap of a policy while another thread has packets judged without a pause. The time goes
// from the call with a compiled policy until the old policy judges no packet. It fails if the new policy does not
// judge the first packet after a swap. Param agents is the number of other agents, in a network namespace that the
// measured one shares. Stage "compile" comes before the time. "table" is the time until the new table is filled,
// and "wait" the rest. "cpu" is the processor time of the swapping thread in it, with the 99th percentile as param
// cpu_p99_ms. Param packets is how many packets were judged meanwhile.
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

// policySwaps measures with the given number of other agents.
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

// threadTime returns the processor time of the calling thread.
func threadTime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0, fmt.Errorf("reading the clock of a thread: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

// policySwap measures one row. The calling goroutine has a thread of its own.
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
	beat := make(chan struct{}, 1) // a batch was judged; closed after the last one
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
	// A SYN, so that no flow remembers the verdict of a policy.
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
		// Wait until packets are really being judged.
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

// attachRoot is where a benchmark's agents have their pins.
func attachRoot() string { return attachRootPrefix + strconv.Itoa(os.Getpid()) }

const attachRootPrefix = link.DefaultRoot + "-bench-"

// sweepAttachRoots removes the pins of killed benchmarks: 600 MiB of the kernel's memory for 1,000 agents. Their
// devices went with their namespaces.
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

// PolicyAttach measures the time to put a policy on a TAP device that is down and to raise the device, for one agent
// after another. The agents stay, in a network namespace of their own. The policy is compiled before. Param process
// tells the rows of policy_attach apart: the first agent, which loads the programs, the others, with their sum as
// param total_ms, and those in processes of their own. policy_attach_memory is what the kernel reports for an agent's
// maps and programs, in KiB. Param measured_kib is how much memory the host lost for each agent, device included.
func PolicyAttach(ctx context.Context, e Env, o Options) ([]Row, error) {
	return inNamespace(func() ([]Row, error) { return policyAttach(ctx, e, o) })
}

// inNamespace runs f on a thread and in a network namespace of its own.
func inNamespace(f func() ([]Row, error)) (rows []Row, err error) {
	done := make(chan struct{})
	// The namespace belongs to the thread, which ends with its goroutine.
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

// attached is a set of agents with their devices.
type attached struct {
	root    string
	spec    *netpolicy.Spec
	links   []*link.Link
	devices []*tap.Device
}

// newAttached returns an empty set, after removing what killed benchmarks have left.
func newAttached(spec *netpolicy.Spec) (*attached, error) {
	if err := sweepAttachRoots(); err != nil {
		return nil, fmt.Errorf("removing what a killed benchmark has left: %w", err)
	}
	return &attached{root: attachRoot(), spec: spec}, nil
}

// device makes the device of the next agent.
func (a *attached) device() (string, error) {
	name := "b" + strconv.Itoa(len(a.devices))
	d, err := tap.Create(name)
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

// available returns the host's free memory and what it could free at once, in KiB, or 0 if that is unknown.
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

// attachElsewhere attaches an agent in a new process. The agent stays when the process has ended.
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

// PolicyAttachHelper does the work of that process. It returns the times of Attach and of Up.
func PolicyAttachHelper(root, name string, rules int) ([]time.Duration, error) {
	process.PrepareProcess() // like a VM's process
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
