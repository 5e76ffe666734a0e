package hostileguest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

const guestFile = "guest/guest.elf"

var (
	hostileFor   = flag.Duration("hostile-for", 10*time.Second, "how long the hostile guest attacks; on a busy machine longer, until it has reached everything")
	hostileSeed  = flag.Uint64("hostile-seed", 0, "seed of its random numbers; 0 takes one from the time")
	hostilePause = flag.Duration("hostile-pause", 0, "processor time that 99 of 100 pauses may take, on a calm machine; 0 is what a busy one keeps to whose processors are emulated")
)

// As in guest/layout.h and guest/guest.c.
const (
	ramSize      = 64 << 20
	controlAt    = 0x12e3000
	controlMagic = 0x656c6974736f68
	kinds        = 32
	maxDevices   = 16
)

// kindNames name the fault of each kind of chain.
var kindNames = []string{
	"plain", "follows itself", "next beyond the table", "zero length", "address wraps", "beyond RAM", "across the end of RAM", "in the hole",
	"readable after writable", "empty table", "table of odd length", "table too long", "nested table", "table with a next", "loop in a table",
	"next beyond an indirect table", "table nowhere", "plain table", "longest descriptor", "4 GiB to read", "4 GiB to write", "loop through all",
	"random", "unknown flags", "into the rings", "too short", "in 1,024 pieces",
}

// control is struct control of guest.c.
type control struct {
	Magic, Seed, Deadly, Storm, Faults uint64
	Turns                              [2]uint64
	Kinds                              [kinds]uint64
	Refused, Strings                   uint64
	Device                             [maxDevices]struct {
		ID, Queues, Starts, Resets, Chains, Kicks, Mutations, Registers uint64
	}
	Ports uint64
}

func readControl(mem *guestmem.Memory) (c control, err error) {
	p := make([]byte, binary.Size(c))
	if err = mem.Read(controlAt, p); err == nil {
		_, err = binary.Decode(p, binary.LittleEndian, &c)
	}
	return c, err
}

// counts are the guest's own counts over all its lives. The guest may have overwritten them by mistake. So they are
// only reported, and the host's figures must prove what needs proof.
type counts struct {
	kinds                                [kinds]uint64
	faults, refused, strings, ports      uint64
	chains, kicks, mutations, regs, init uint64
}

// add adds the differences between two looks, and ignores those that are impossible.
func (n *counts) add(before, now *control) {
	const most = 1 << 32
	take := func(sum *uint64, before, now uint64) {
		if now >= before && now-before < most {
			*sum += now - before
		}
	}
	for i := range n.kinds {
		take(&n.kinds[i], before.Kinds[i], now.Kinds[i])
	}
	take(&n.faults, before.Faults, now.Faults)
	take(&n.refused, before.Refused, now.Refused)
	take(&n.strings, before.Strings, now.Strings)
	take(&n.ports, before.Ports, now.Ports)
	for i := range now.Device {
		a, b := &before.Device[i], &now.Device[i]
		take(&n.chains, a.Chains, b.Chains)
		take(&n.kicks, a.Kicks, b.Kicks)
		take(&n.mutations, a.Mutations, b.Mutations)
		take(&n.regs, a.Registers, b.Registers)
		take(&n.init, a.Starts, b.Starts)
	}
}

// Bounds on what a guest may cost the host, beyond its RAM.
const (
	// moreMemory is what devices may hold for a guest (vsock alone 64 MiB), plus this test's garbage, in bytes.
	moreMemory = 128 << 20
	// moreFiles are for the guest's open connections and files: vsock and a share bound theirs. A connection has two
	// ends here.
	moreFiles = 2600
	// moreGoroutines are those of a machine and its devices. Connections and requests have none.
	moreGoroutines = 100
	// logPerMachine is for the few lines that a machine logs. The guest adds none.
	logPerMachine = 4 << 10
)

// attack is one run.
type attack struct {
	t    *testing.T
	w    *world
	r    *rand.Rand
	mem  *guestmem.Memory
	m    *machine
	seed uint64

	began time.Time
	last  control   // the last look at the guest's counts
	moved time.Time // when it last made progress
	till  time.Time // the end of this guest's life

	counts   counts
	pauses   []time.Duration // from the request until the guest stands still
	work     []time.Duration // this process's processor time in them, to which a busy machine does not add
	boots    int
	restores int
	lost     int // guests that stopped making progress
	endings  map[vmm.ExitReason]int
	arrived  int // times that the guest reached the handover ports
	read     int // times that the guest had read a secret
	most     usage
}

// usage is what this process uses.
type usage struct {
	memory            uint64 // resident bytes, without the guest's RAM
	files, goroutines int
}

func TestAttack_hostile_guest_drives_every_device_and_the_host_stays_calm(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a guest: not in short mode")
	}
	sys, err := kvm.Open()
	if err != nil {
		if !errors.Is(err, kvm.ErrNoKVM) {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	_ = sys.Close()
	if os.Geteuid() != 0 {
		t.Skip("the network device and the shared file system need root")
	}
	a := &attack{t: t, seed: *hostileSeed, endings: map[vmm.ExitReason]int{}}
	if a.seed == 0 {
		a.seed = uint64(time.Now().UnixNano())
	}
	a.r = rand.New(rand.NewPCG(a.seed, 0))
	t.Logf("seed %d", a.seed)
	a.w = newWorld(t)
	before := a.usage()
	if a.mem, err = guestmem.New(ramSize); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.mem.Close(); err != nil {
			t.Error(err)
		}
	})
	defer func() {
		if a.m != nil {
			if err := a.m.close(); err != nil {
				t.Error(err)
			}
		}
	}()
	a.run()
	a.judge(before)
}

// patience bounds how long the run continues for what the guest has not reached yet.
const patience = 10 * time.Minute

// run has guests attack until the time is over and they have reached everything.
func (a *attack) run() {
	look, tell := time.Now(), time.Now()
	a.began = time.Now()
	going := func() bool {
		since := time.Since(a.began)
		return since < *hostileFor || since < patience && len(a.missed()) > 0
	}
	for going() && !a.t.Failed() {
		if a.m == nil {
			a.boot()
		}
		select {
		case <-a.m.Done():
			a.ended()
			continue
		case <-time.After(time.Duration(50+a.r.IntN(200)) * time.Millisecond):
		}
		for range a.r.IntN(4) {
			a.m.use(a.w, a.r)
		}
		a.handover()
		a.pause()
		if time.Since(look) > 2*time.Second {
			look = time.Now()
			a.watch()
		}
		if time.Since(tell) > time.Minute {
			tell = time.Now()
			a.t.Log(a.figures())
		}
	}
}

// boot starts a guest in fresh RAM. Every second guest may end itself, and every third floods the queues with
// malformed chains.
func (a *attack) boot() {
	t := a.t
	if err := a.mem.Discard(0, ramSize); err != nil {
		t.Fatal(err)
	}
	m, err := a.w.newMachine(a.mem)
	if err != nil {
		t.Fatal(err)
	}
	a.m = m
	if err := m.Boot(vmm.BootOptions{Kernel: guestFile}); err != nil {
		t.Fatal(err)
	}
	a.last = control{Seed: a.r.Uint64() | 1}
	if a.boots%2 == 1 {
		a.last.Deadly = 20_000
	}
	if a.boots%3 == 2 {
		a.last.Storm = 16
	}
	var p []byte
	for _, v := range []uint64{a.last.Seed, a.last.Deadly, a.last.Storm} {
		p = binary.LittleEndian.AppendUint64(p, v)
	}
	if err := errors.Join(a.mem.Write(controlAt+8, p), m.Start()); err != nil {
		t.Fatal(err)
	}
	a.boots++
	a.moved, a.till = time.Now(), time.Now().Add(time.Duration(5+a.r.IntN(25))*time.Second)
}

// ended records the end of a guest. Even a guest that may not end itself still can, by a descriptor that the device
// itself overwrote.
func (a *attack) ended() {
	x, err := a.m.Wait(context.Background())
	if err != nil {
		a.t.Fatal(err)
	}
	a.endings[x.Reason]++
	if x.Reason == vmm.HostError {
		a.t.Errorf("the guest ended: %v", x)
	} else if a.last.Deadly == 0 {
		a.t.Logf("a guest that was not to end itself has: %v", x)
	}
	a.close()
}

func (a *attack) close() {
	if err := a.m.close(); err != nil {
		a.t.Error(err)
	}
	a.m = nil
}

// handover treats the guest as an agent, which it is not.
func (a *attack) handover() {
	if a.r.IntN(4) > 0 {
		return
	}
	h := a.m.Handover()
	if h.StandingBy() {
		a.arrived++
		if a.r.IntN(2) == 0 {
			h.Resume(func() []byte { return make([]byte, a.r.IntN(4096)) })
			return
		}
	}
	h.Release()
	h.Expect()
}

// pauseLimit bounds a pause before the run is given up.
const pauseLimit = 2 * time.Minute

// pause stops the guest, looks at its counts, and lets it continue: as it is, or restored from its state.
func (a *attack) pause() {
	ctx, cancel := context.WithTimeout(context.Background(), pauseLimit)
	defer cancel()
	begin, used := time.Now(), processorTime()
	err := a.m.Pause(ctx)
	took, used := time.Since(begin), processorTime()-used
	if errors.Is(err, vmm.ErrEnded) {
		return
	}
	if err != nil {
		a.t.Fatalf("pausing: %v", err)
	}
	a.pauses, a.work = append(a.pauses, took), append(a.work, used)
	if took > pauseGoal {
		a.t.Logf("a pause took %v, and %v of processor time: %s", took, used, a.parts(took))
	}
	now, err := readControl(a.mem)
	if err != nil {
		a.t.Fatal(err)
	}
	a.counts.add(&a.last, &now)
	if now.Turns != a.last.Turns {
		a.moved = time.Now()
	}
	deadly := a.last.Deadly
	a.last = now
	a.last.Deadly = deadly
	if a.m.Secrets().Busy() {
		a.read++
	}
	switch {
	case time.Since(a.moved) > 20*time.Second:
		// It has broken itself, or something blocks it.
		a.lost++
		a.t.Logf("the guest has done nothing for 20 s: %+v, deadly %d", a.m.Health(), deadly)
		a.close()
	case time.Now().After(a.till):
		a.close()
	case a.r.IntN(16) == 0:
		a.restore()
	default:
		if err := a.m.Resume(); err != nil && !errors.Is(err, vmm.ErrEnded) {
			a.t.Fatalf("resuming: %v", err)
		}
	}
}

// parts returns what the last pause waited for, in milliseconds: first for the vCPUs, then for all devices at once.
func (a *attack) parts(took time.Duration) string {
	var list []string
	var devices time.Duration
	for _, name := range deviceNames {
		d := time.Duration(a.w.figures[name].last.Load())
		devices = max(devices, d)
		list = append(list, fmt.Sprintf("%s %.1f", name, d.Seconds()*1000))
	}
	return fmt.Sprintf("%s, vCPUs %.1f ms", strings.Join(list, ", "), (took-devices).Seconds()*1000)
}

// restore saves the paused guest and continues it in a new machine.
func (a *attack) restore() {
	states, err := a.m.Export()
	if err != nil {
		a.t.Fatalf("saving: %v", err)
	}
	a.close()
	m, err := a.w.newMachine(a.mem)
	if err != nil {
		a.t.Fatal(err)
	}
	a.m = m
	if err := errors.Join(m.Import(states), m.Start()); err != nil {
		a.t.Fatalf("a guest has made itself so that it cannot be restored: %v", err)
	}
	a.restores++
}

// watch records what the guest costs.
func (a *attack) watch() {
	u := a.usage()
	a.most.memory = max(a.most.memory, u.memory)
	a.most.files = max(a.most.files, u.files)
	a.most.goroutines = max(a.most.goroutines, u.goroutines)
}

func (a *attack) usage() usage {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		a.t.Fatal(err)
	}
	u := usage{files: len(files), goroutines: math.MaxInt}
	// The two numbers are not of one instant: when many connections end between them, one look counts their ends.
	for range 10 {
		u.goroutines = min(u.goroutines, runtime.NumGoroutine()-int(a.w.serving.Load()))
		time.Sleep(time.Millisecond)
	}
	if u.memory, err = a.resident(); err != nil {
		a.t.Fatal(err)
	}
	return u
}

// resident returns this process's resident memory in bytes, without the guest's RAM.
func (a *attack) resident() (sum uint64, err error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	ours := true
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) == 0 {
			continue
		}
		if from, to, ok := strings.Cut(fields[0], "-"); ok {
			start, err1 := strconv.ParseUint(from, 16, 64)
			end, err2 := strconv.ParseUint(to, 16, 64)
			if err1 == nil && err2 == nil {
				ours = !a.ofGuest(start, end)
				continue
			}
		}
		if fields[0] == "Rss:" && ours {
			kib, err := strconv.ParseUint(fields[1], 10, 64)
			if err != nil {
				return 0, err
			}
			sum += kib << 10
		}
	}
	return sum, nil
}

// ofGuest reports whether a mapping belongs to the guest's RAM.
func (a *attack) ofGuest(start, end uint64) bool {
	return a.mem != nil && slices.ContainsFunc(a.mem.Slots(), func(s guestmem.Slot) bool {
		return start < uint64(s.HVA)+s.Size && end > uint64(s.HVA)
	})
}

// malformed returns how many chains the queues and devices have refused.
func (a *attack) malformed() (n uint64) {
	for _, f := range a.w.figures {
		n += f.badChains()
	}
	return n
}

// missed returns what the guest has not reached yet.
func (a *attack) missed() (list []string) {
	w := a.w
	add := func(missed bool, what string) {
		if missed {
			list = append(list, what)
		}
	}
	for _, name := range deviceNames {
		f := w.figures[name]
		add(f.starts.Load() == 0, "a start of "+name)
		add(f.badChains() == 0, "a malformed chain for "+name)
		add(f.interrupts.Load() == 0, "an interrupt of "+name)
	}
	for i, name := range kindNames {
		add(a.counts.kinds[i] == 0, "a chain of the kind "+strconv.Quote(name))
	}
	add(w.entropy.n.Load() == 0, "a byte of entropy")
	add(w.serial.n.Load() == 0, "a byte to the serial port")
	add(a.arrived == 0, "the handover")
	add(a.read == 0, "a secret")
	add(a.restores == 0, "a restore")
	add(len(a.endings) == 0, "its own end")
	return list
}

func percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// spread describes the distribution of durations.
func spread(all []time.Duration) string {
	p := slices.Clone(all)
	slices.Sort(p)
	at := func(q float64) time.Duration { return percentile(p, q).Round(100 * time.Microsecond) }
	below, _ := slices.BinarySearch(p, pauseGoal+1)
	return fmt.Sprintf("p50 %v, p99 %v, max %v, %d over %v", at(0.5), at(0.99), at(1), len(p)-below, pauseGoal)
}

// pauseGoal is the longest that a pause should take on an idle machine.
const pauseGoal = 50 * time.Millisecond

// processorTime returns the processor time of this process, guests included.
func processorTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// figures describes the run in one line.
func (a *attack) figures() string {
	lane := "hardware"
	if vmm.SoftKVM() {
		lane = "software"
	}
	n := &a.counts
	return fmt.Sprintf("hostile guest on %s KVM for %v, seed %d: %d chains, %d of them malformed, %d ring mutations, %d kicks, %d register accesses, "+
		"%d port accesses, %d starts of devices, %d feature sets refused, %d string instructions, %d exceptions; %d boots, %d restores, %d lost, endings %v; "+
		"%d pauses: %s; processor time in them: %s; most memory %d MiB, %d files, %d goroutines; log %d bytes",
		lane, time.Since(a.began).Round(time.Second), a.seed, n.chains, a.malformed(), n.mutations, n.kicks, n.regs,
		n.ports, n.init, n.refused, n.strings, n.faults, a.boots, a.restores, a.lost, a.endings,
		len(a.pauses), spread(a.pauses), spread(a.work), a.most.memory>>20, a.most.files, a.most.goroutines, a.w.log.n.Load())
}

// judge checks that the attack achieved nothing, and that it was an attack.
func (a *attack) judge(before usage) {
	t, w := a.t, a.w
	a.watch()
	t.Log(a.figures())
	for _, name := range deviceNames {
		f := w.figures[name]
		t.Logf("%s: started %d times, %d malformed chains, %d interrupts, given up %d times, pauses up to %v", name,
			f.starts.Load(), f.badChains(), f.interrupts.Load(), f.broken.Load(), time.Duration(f.longest.Load()).Round(100*time.Microsecond))
	}
	if missed := a.missed(); len(missed) > 0 {
		t.Errorf("the guest has not reached: %s", strings.Join(missed, ", "))
	}
	w.mu.Lock()
	for err, n := range w.errors {
		t.Errorf("what the guest did became the host's failure, %d times: %s", n, err)
	}
	w.mu.Unlock()
	// On emulated processors a process is charged for time that others on the machine take.
	half, most := time.Second, 20*time.Second
	if *hostilePause > 0 {
		half, most = *hostilePause, *hostilePause
	}
	slices.Sort(a.work)
	if h, m := percentile(a.work, 0.5), percentile(a.work, 0.99); h > half || m > most {
		t.Errorf("half of the pauses took up to %v of processor time, 99 of 100 up to %v: more than %v or %v", h, m, half, most)
	}
	if a.most.memory > before.memory+moreMemory {
		t.Errorf("%d MiB of memory besides the guest's RAM, %d MiB before", a.most.memory>>20, before.memory>>20)
	}
	if a.most.files > before.files+moreFiles || a.most.goroutines > before.goroutines+moreGoroutines {
		t.Errorf("up to %d files and %d goroutines, %d and %d before", a.most.files, a.most.goroutines, before.files, before.goroutines)
	}
	if most := uint64(a.boots+a.restores) * logPerMachine; w.log.n.Load() > most {
		t.Errorf("%d bytes of log of %d machines, more than %d", w.log.n.Load(), a.boots+a.restores, most)
	}
	if a.m != nil {
		a.close()
	}
	// What the guest held is released. Connections that were cut end in their own time.
	var after usage
	for range 100 {
		debug.FreeOSMemory()
		if after = a.usage(); after.files <= before.files && after.goroutines <= before.goroutines {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	// Threads and their stacks stay for reuse, and RAM is one file.
	if after.files > before.files+4 || after.goroutines > before.goroutines+4 || after.memory > before.memory+moreMemory/4 {
		t.Errorf("left when the guest is gone: %+v, before it came %+v", after, before)
	}
}
