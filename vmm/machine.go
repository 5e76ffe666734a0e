package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/devices/reset"
	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/devices/serial"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// Interrupt lines of virtio devices.
const (
	firstDeviceGSI = 5
	lastDeviceGSI  = boot.IOAPICPins - 1
)

// MaxDevices is the most virtio devices of one machine.
const MaxDevices = lastDeviceGSI - firstDeviceGSI + 1

// Pages that VMX hosts want below 4 GiB and that no guest sees (api.rst 4.20, 4.45).
const (
	identityMapAddr = 0xfffbc000
	tssAddr         = 0xfffbd000
)

// Device is a virtio device with the name under which its state is saved.
type Device struct {
	Name   string
	Device devices.Device
}

// Config is the configuration of a machine besides its prebuilt VM.
type Config struct {
	// Devices are at most MaxDevices, in the order in which the guest finds them. Close resets them but does not
	// close their backends.
	Devices []Device
	// Console gets what the guest writes to its serial port. The machine drops output that a slow writer does not
	// take, rather than stop the guest. Nil discards everything.
	Console io.Writer
	// Symbolize, if not nil, names kernel functions in crash reports.
	Symbolize Symbolizer
	// Log gets the events of the machine; nil discards them.
	Log *slog.Logger
}

// ErrConfig says that a machine or a call is impossible. CheckHostMemory returns ErrHostMemory.
var (
	ErrConfig     = errors.New("impossible machine")
	ErrHostMemory = errors.New("the host does not have that much memory")
)

// ErrEnded says that the machine has ended and cannot do what was asked.
var ErrEnded = errors.New("the machine has ended")

// ErrNotPaused says that the machine is running and the operation needs a paused one.
var ErrNotPaused = errors.New("the machine is not paused")

// transport is a device in its place.
type transport struct {
	*mmio.Transport
	name string
	gsi  uint32
	base guestmem.GPA
	irq  *devices.Event
}

// Machine is one VM. Its methods may be called from any goroutine.
type Machine struct {
	cfg      Config
	log      *slog.Logger
	prebuilt *Prebuilt
	vm       *kvm.VM
	mem      *guestmem.Memory
	cpus     []*cpu

	mmioBus   devices.Bus
	pioBus    devices.Bus
	serial    *serial.UART
	serialIRQ *devices.Event
	handover  *handover.Device
	secrets   *secrets.Device
	quiet     quiet
	virtio    []*transport
	// generation reports that the guest has a VM generation ID.
	generation bool

	gate   gate
	ending atomic.Bool
	ended  chan struct{}
	exit   Exit
	wg     sync.WaitGroup
	stages Stages
	health health
	// watchInterval is about how often watch looks at the vCPUs.
	watchInterval time.Duration

	// life serialises Boot, Import, Start, Pause, Resume, Export, Close and the other methods that depend on state.
	life     sync.Mutex
	state    lifeState
	taken    bool // TakeDirty was called
	imported bool
}

type lifeState int

const (
	empty   lifeState = iota // nothing to run yet
	loaded                   // it has a kernel or a saved state
	running                  // vCPUs and devices run
	paused                   // they are stopped
	closed
)

// New makes a machine from a prebuilt VM, once that is complete, and devices, with nothing to run. The machine then
// owns the prebuilt VM; New closes it on failure. The host commits memory only on use.
func New(prebuilt *Prebuilt, cfg Config) (*Machine, error) {
	m := &Machine{cfg: cfg, log: cfg.Log, prebuilt: prebuilt, mem: prebuilt.cfg.Memory, ended: make(chan struct{}), watchInterval: defaultWatchInterval}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.gate.cond = sync.NewCond(&m.gate.mu)
	m.stages.begin()
	if err := m.build(); err != nil {
		return nil, errors.Join(err, m.release())
	}
	// The threads wait for Start: making a thread takes longer than waking one.
	for _, c := range m.cpus {
		m.wg.Go(c.loop)
	}
	return m, nil
}

// HostMemory returns the host's total memory in bytes.
func HostMemory() (uint64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, fmt.Errorf("asking for the host's memory: %w", err)
	}
	return si.Totalram * uint64(si.Unit), nil
}

// CheckHostMemory fails with ErrHostMemory when a guest's RAM of size bytes exceeds the host's total memory.
// Several guests together may exceed it, as long as they do not use it all.
func CheckHostMemory(size uint64) error {
	total, err := HostMemory()
	if err != nil {
		return err
	}
	if size > total {
		return fmt.Errorf("a guest of %d MiB: %w: it has %d MiB: give the guest less", size>>20, ErrHostMemory, total>>20)
	}
	return nil
}

func (m *Machine) build() error {
	if len(m.cfg.Devices) > MaxDevices {
		return fmt.Errorf("%w: %d devices, at most %d", ErrConfig, len(m.cfg.Devices), MaxDevices)
	}
	if err := m.prebuilt.Wait(); err != nil {
		return err
	}
	for stage, d := range m.prebuilt.took {
		m.stages.set(stage, d)
	}
	m.stages.mark(StagePrebuilt)
	m.vm = m.prebuilt.vm
	for _, v := range m.prebuilt.vcpus {
		begin, err := devices.NewEvent()
		if err != nil {
			return err
		}
		m.cpus = append(m.cpus, &cpu{m: m, kvm: v, begin: begin})
	}
	if err := m.buildDevices(); err != nil {
		return err
	}
	m.stages.mark(StageDevices)
	return nil
}

func (m *Machine) buildDevices() (err error) {
	if m.serialIRQ, err = devices.NewEvent(); err != nil {
		return err
	}
	if err := m.vm.IRQFD(m.serialIRQ.FD(), serial.IRQ); err != nil {
		return err
	}
	m.serial = serial.New(m.cfg.Console, m.serialIRQ.Signal)
	m.handover = handover.New(m.handoverEvent)
	m.secrets = secrets.New()
	if err := errors.Join(
		m.pioBus.Add(serial.Port, serial.Ports, m.serial),
		m.handover.AddTo(&m.pioBus),
		m.secrets.AddTo(&m.pioBus),
		reset.AddTo(&m.pioBus, m.powerEvent),
	); err != nil {
		return err
	}
	for i, d := range m.cfg.Devices {
		w, err := m.prebuilt.takeWires(i, min(len(d.Device.QueueSizes()), mmio.MaxQueues))
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
		t := &transport{name: d.Name, gsi: gsiOf(i), base: baseOf(i), irq: w.irq}
		if t.Transport, err = mmio.New(d.Device, m.mem, w.irq, mmio.Options{OnError: m.deviceError(d.Name), Kicks: w.kicks}); err != nil {
			return errors.Join(fmt.Errorf("device %s: %w", d.Name, err), w.close())
		}
		m.virtio = append(m.virtio, t)
		if err := m.mmioBus.Add(uint64(t.base), boot.MMIOStride, t.Transport); err != nil {
			return err
		}
	}
	return nil
}

// Memory returns the guest's RAM, for the pager that fills it and for the caller that saves it.
func (m *Machine) Memory() *guestmem.Memory { return m.mem }

// Handover returns the device at which the VMM meets the guest's agent at the instant of a capture and of a resume.
func (m *Machine) Handover() *handover.Device { return m.handover }

// Secrets returns the device that gives the guest's agent secrets for its programs. No snapshot contains them.
// Close wipes them.
func (m *Machine) Secrets() *secrets.Device { return m.secrets }

// KVMStats returns KVM's counters, summed over the vCPUs: see kvm.VCPU.Stats. The first call may wait while the
// guest runs.
func (m *Machine) KVMStats() (map[string]uint64, error) {
	sum := map[string]uint64{}
	for _, c := range m.cpus {
		stats, err := c.kvm.Stats()
		if err != nil {
			return nil, err
		}
		for name, n := range stats {
			sum[name] += n
		}
	}
	return sum, nil
}

// Stages returns the durations of the steps so far.
func (m *Machine) Stages() *Stages { return &m.stages }

// BootOptions are the kernel and its parameters for Boot.
type BootOptions struct {
	// Kernel is the path of an ELF vmlinux or a bzImage.
	Kernel string
	// Initramfs is the path of an initramfs, or empty.
	Initramfs string
	// Open opens both; nil means os.Open.
	Open func(name string) (*os.File, error)
	// Cmdline is the kernel's command line.
	Cmdline string
	// NoACPI is for kernels without ACPI: Boot names the virtio devices on the command line instead.
	NoACPI bool
	// Seed goes into the guest's random number generator; see boot.Config.
	Seed []byte
}

// Boot loads a kernel into an empty machine.
func (m *Machine) Boot(o BootOptions) error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != empty || !m.prebuilt.empty() {
		return fmt.Errorf("booting: %w: the machine already has something to run", ErrConfig)
	}
	c := boot.Config{
		Kernel: o.Kernel, Initramfs: o.Initramfs, Open: o.Open, Cmdline: o.Cmdline, Seed: o.Seed, VCPUs: len(m.cpus),
		Hardware: boot.Hardware{
			SerialPort: serial.Port, SerialGSI: serial.IRQ,
			ResetPort: reset.ResetPort, ResetValue: reset.ResetValue,
			SleepPort: reset.SleepControlPort, PvpanicPort: reset.PVPanicPort,
		},
	}
	if m.generation = !o.NoACPI; m.generation {
		c.Hardware.GenerationID, c.Hardware.EventGSI = boot.GenerationIDAddr, generationGSI
	}
	for _, t := range m.virtio {
		d := boot.VirtioMMIO{Base: t.base, Size: mmio.WindowSize, GSI: t.gsi}
		c.Devices = append(c.Devices, d)
		if o.NoACPI {
			c.Cmdline += " " + d.CmdlineParam()
		}
	}
	entry, err := boot.Load(m.mem, c)
	if err == nil && m.generation {
		err = m.newGeneration()
	}
	if err != nil {
		return err
	}
	for i, c := range m.cpus {
		if err := c.kvm.SetCPUID(m.prebuilt.cpuid[i]); err != nil {
			return err
		}
		if err := c.resetState(); err != nil {
			return err
		}
		if i == 0 {
			if err := c.bootRegisters(entry); err != nil {
				return err
			}
		}
	}
	m.stages.mark(StageLoad)
	m.state = loaded
	return nil
}

// Start lets the vCPUs run. It comes after Boot or Import.
func (m *Machine) Start() error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != loaded {
		return fmt.Errorf("starting: %w: there is nothing to run, or it runs already", ErrConfig)
	}
	if m.imported {
		m.beQuiet()
	}
	m.state = running
	m.limitQuiet()
	m.openGate()
	for _, c := range m.cpus {
		c.begin.Signal()
	}
	m.wg.Go(m.watch)
	if m.imported {
		// The devices of a saved machine resume while its vCPUs are on their way into the guest, except for those
		// that may wait. A request that a guest makes before that waits in the device's event or at its register.
		for _, t := range m.virtio {
			if m.mayWait(t) {
				continue
			}
			if err := t.restart(); err != nil {
				return err
			}
		}
		if !m.quiet.on { // else EndQuiet does it
			return m.serial.Resume()
		}
	}
	return nil
}

// restart lets the device of a saved machine resume.
func (t *transport) restart() error {
	if err := t.Restore(); err != nil {
		return fmt.Errorf("restarting %s: %w", t.name, err)
	}
	if err := t.Resume(); err != nil {
		return fmt.Errorf("resuming %s: %w", t.name, err)
	}
	return nil
}

func (m *Machine) openGate() {
	m.gate.mu.Lock()
	defer m.gate.mu.Unlock()
	m.gate.run = true
	m.gate.cond.Broadcast()
}

// Pause stops the vCPUs, then the devices, with no request in flight. Pausing a paused machine does nothing. If ctx
// ends first, the machine continues to run.
func (m *Machine) Pause(ctx context.Context) error {
	m.life.Lock()
	defer m.life.Unlock()
	switch m.state {
	case paused:
		return nil
	case running:
	default:
		return fmt.Errorf("pausing: %w: the machine is not running", ErrConfig)
	}
	m.EndQuiet()
	begin := time.Now()
	if err := m.pauseVCPUs(ctx); err != nil {
		m.openGate()
		return err
	}
	if err := m.pauseDevices(ctx); err != nil {
		if err := m.resumeDevices(); err != nil {
			m.finish(Exit{Reason: HostError, VCPU: -1, Detail: err.Error(), Err: err})
		}
		m.openGate()
		return err
	}
	m.stages.set(StagePause, time.Since(begin))
	m.state = paused
	return nil
}

func (m *Machine) pauseVCPUs(ctx context.Context) error {
	g := &m.gate
	stop := context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.cond.Broadcast()
	})
	defer stop()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.run = false
	for _, c := range m.cpus {
		if err := c.callOut(); err != nil {
			return err
		}
	}
	for _, c := range m.cpus {
		for !c.parked {
			if g.stopped {
				return fmt.Errorf("pausing: %w", ErrEnded)
			}
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("pausing vCPU %d: %w", c.kvm.ID(), err)
			}
			g.cond.Wait()
		}
	}
	return nil
}

// Resume undoes Pause.
func (m *Machine) Resume() error {
	m.life.Lock()
	defer m.life.Unlock()
	switch m.state {
	case running:
		return nil
	case paused:
	default:
		return fmt.Errorf("resuming: %w: the machine is not paused", ErrConfig)
	}
	for _, c := range m.cpus {
		// The guest must not take the pause for a lockup. A guest without kvmclock refuses the call and does not
		// need it.
		_ = c.kvm.KVMClockCtrl()
	}
	if err := m.resumeDevices(); err != nil {
		return err
	}
	m.state = running
	m.openGate()
	return nil
}

// pauseDevices pauses all devices concurrently, since each may have work to finish first. If it fails, devices that
// have already paused remain paused.
func (m *Machine) pauseDevices(ctx context.Context) error {
	errs := make([]error, len(m.virtio))
	var all sync.WaitGroup
	for i, t := range m.virtio {
		all.Go(func() {
			if err := t.Pause(ctx); err != nil {
				errs[i] = fmt.Errorf("pausing %s: %w", t.name, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (m *Machine) resumeDevices() error {
	for _, t := range m.virtio {
		if err := t.Resume(); err != nil {
			return fmt.Errorf("resuming %s: %w", t.name, err)
		}
	}
	return nil
}

// deviceError returns the error handler of a device. The device calls it when it cannot continue because the guest
// broke it or the host failed. The guest sees that the device needs a reset.
func (m *Machine) deviceError(name string) func(error) {
	return func(err error) { m.log.Warn("device needs a reset", "device", name, "cause", err) }
}

// handoverEvent runs on a vCPU thread.
func (m *Machine) handoverEvent(e handover.Event) {
	switch e {
	case handover.Reached:
		m.stages.since(StageAgentReached)
	case handover.Answered:
		m.stages.since(StageAgentAnswer)
		// EndQuiet runs on another goroutine, so that it does not delay the vCPU.
		m.wg.Go(m.EndQuiet)
	}
}

// powerEvent runs on a vCPU thread.
func (m *Machine) powerEvent(e reset.Event) {
	switch e.Kind {
	case reset.PowerOff:
		m.finish(Exit{Reason: PoweredOff, VCPU: -1, Detail: "the guest switched itself off by " + e.Via})
	case reset.Reset:
		m.finish(Exit{Reason: Rebooted, VCPU: -1, Detail: "the guest asked for a reset by " + e.Via})
	case reset.Panicked:
		m.finish(Exit{Reason: Panicked, VCPU: -1, Detail: "the guest kernel panicked: its console says why"})
	}
}

// finish ends the machine. The first reason counts. finish does not wait.
func (m *Machine) finish(x Exit) {
	if m.ending.Swap(true) {
		return
	}
	m.exit = x
	m.log.Info("machine ended", "reason", string(x.Reason), "detail", x.Detail)
	g := &m.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped = true
	for _, c := range m.cpus {
		_ = c.callOut()
		c.begin.Signal()
	}
	g.cond.Broadcast()
	close(m.ended)
}

// Fail ends the machine because something it depends on has failed, such as the storage behind its memory.
func (m *Machine) Fail(err error) {
	m.finish(Exit{Reason: HostError, VCPU: -1, Detail: err.Error(), Err: err})
}

// Done returns a channel that is closed when the machine has ended.
func (m *Machine) Done() <-chan struct{} { return m.ended }

// Wait returns how the machine has ended, or the error of ctx.
func (m *Machine) Wait(ctx context.Context) (Exit, error) {
	select {
	case <-m.ended:
		return m.exit, nil
	default:
	}
	select {
	case <-m.ended:
		return m.exit, nil
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
}

// WaitEntry returns when the first vCPU is about to enter the guest for the first time. It fails with ErrEnded, or
// with the error of ctx.
func (m *Machine) WaitEntry(ctx context.Context) error {
	select {
	case <-m.stages.inside:
		return nil
	case <-m.ended:
		return ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close stops the machine and releases its resources. A pager must keep working until Close has returned, since a
// vCPU may be waiting for it.
func (m *Machine) Close() error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state == closed {
		return nil
	}
	m.finish(Exit{Reason: Stopped, VCPU: -1})
	m.dropQuiet()
	m.state = closed
	return m.release()
}

func (m *Machine) release() error {
	m.wg.Wait()
	var errs []error
	for _, c := range m.cpus {
		errs = append(errs, c.begin.Close())
	}
	for _, t := range m.virtio {
		errs = append(errs, t.Close(), t.irq.Close())
	}
	if m.secrets != nil {
		errs = append(errs, m.secrets.Close())
	}
	if m.serial != nil {
		errs = append(errs, m.serial.Close())
	}
	if m.serialIRQ != nil {
		errs = append(errs, m.serialIRQ.Close())
	}
	errs = append(errs, m.prebuilt.Close())
	return errors.Join(errs...)
}
