package vmm

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// cpu is a vCPU and the thread that runs it.
type cpu struct {
	m   *Machine
	kvm *kvm.VCPU
	tid atomic.Int32
	// The thread waits for begin, a read that wakes the thread itself, before it looks at the gate for the first
	// time. A sync.Cond would go through Go's scheduler and take two or three times as long.
	begin *devices.Event
	// exits counts returns from KVM_RUN.
	exits atomic.Uint64

	// m.gate.mu guards these once the machine runs.
	parked bool
	sample *sample
	putOff kvm.PutOff // its timer; see quiet
	due    bool       // the timer must get its own deadline again
}

// sample is a look at a running vCPU.
type sample struct {
	rip    uint64
	rflags uint64
	// taken counts the interrupts that KVM has injected, as far as KVM reports them: only since Linux 5.14, and
	// without those that the CPU delivers by itself.
	taken uint64
	deep  bool     // fill in stack
	stack []uint64 // see Sample
	done  chan struct{}
}

// gate is where vCPU threads wait while they must not run the guest.
type gate struct {
	mu      sync.Mutex
	cond    *sync.Cond
	run     bool
	stopped bool
}

// checkpoint serves the requests to a vCPU thread that has left the guest, and holds the thread while the gate is
// closed. It returns false when the machine has stopped.
func (c *cpu) checkpoint() bool {
	g := &c.m.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	c.timerDue()
	if c.sample != nil {
		if regs, err := c.kvm.Regs(); err == nil {
			c.sample.rip, c.sample.rflags = regs.RIP, regs.RFLAGS
			if c.sample.deep {
				c.sample.stack = c.m.kernelStack(c.kvm, regs.RIP, regs.RSP)
			}
		}
		c.sample.taken, _ = c.kvm.Counter("irq_injections")
		close(c.sample.done)
		c.sample = nil
	}
	for !g.run && !g.stopped {
		if !c.parked {
			c.parked = true
			g.cond.Broadcast()
		}
		g.cond.Wait()
	}
	c.parked = false
	// Under the lock, so that a request that comes now is not lost.
	c.kvm.SetImmediateExit(false)
	return !g.stopped
}

// callOut makes the vCPU thread come to its checkpoint soon. The caller holds g.mu.
func (c *cpu) callOut() error {
	c.kvm.SetImmediateExit(true)
	if tid := c.tid.Load(); tid != 0 {
		return kvm.Kick(int(tid))
	}
	return nil
}

// loop runs the guest until the machine stops.
func (c *cpu) loop() {
	// KVM binds a vCPU to a thread. The thread ends with this goroutine.
	runtime.LockOSThread()
	c.tid.Store(int32(unix.Gettid()))
	// Wait cannot fail while the machine is not closed; the gate decides.
	_ = c.begin.Wait()
	for ok := c.checkpoint(); ok; {
		c.m.stages.entered()
		err := c.kvm.Run()
		c.exits.Add(1)
		switch {
		case err == nil:
			if x := c.handle(); x != nil {
				c.m.finish(*x)
			}
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			ok = c.checkpoint()
		default:
			c.m.finish(c.m.runFailed(c, err))
		}
		if c.m.ending.Load() {
			ok = c.checkpoint()
		}
	}
}

// handle serves one exit. A result other than nil ends the machine.
func (c *cpu) handle() *Exit {
	switch reason := c.kvm.ExitReason(); reason {
	case kvm.ExitIO:
		return c.handleIO()
	case kvm.ExitMMIO:
		addr, p, write := c.kvm.MMIO()
		if c.m.mem.Contains(guestmem.GPA(addr), uint64(len(p))) {
			// KVM's instruction emulator takes a page that the host cannot provide for a device. The guest must not
			// see an answer that no device gave.
			return &Exit{Reason: HostError, VCPU: c.kvm.ID(),
				Detail: fmt.Sprintf("the guest touched its memory at %#x, which the host could not provide", addr)}
		}
		if write {
			c.m.mmioBus.Write(addr, p)
		} else {
			c.m.mmioBus.Read(addr, p)
		}
		return nil
	case kvm.ExitIntr, kvm.ExitIRQWindow, kvm.ExitHLT:
		return nil
	case kvm.ExitShutdown:
		x := Exit{Reason: TripleFault, VCPU: c.kvm.ID()}
		x.Detail = fmt.Sprintf("vCPU %d could not deliver an exception: the guest kernel has crashed, or rebooted by a triple fault (reboot=t)", c.kvm.ID())
		// On some hosts KVM has already reset the vCPU's registers; RIP is best effort.
		if regs, err := c.kvm.Regs(); err == nil && regs.RIP != 0xfff0 {
			x.RIP = regs.RIP
			x.Detail += ", at " + c.m.location(regs.RIP)
		}
		return &x
	case kvm.ExitSystemEvent:
		switch c.kvm.SystemEvent() {
		case kvm.SystemEventShutdown:
			return &Exit{Reason: PoweredOff, VCPU: c.kvm.ID()}
		case kvm.SystemEventReset:
			return &Exit{Reason: Rebooted, VCPU: c.kvm.ID()}
		}
		return &Exit{Reason: Panicked, VCPU: c.kvm.ID(), Detail: "KVM reports that the guest has crashed"}
	case kvm.ExitInternalError:
		x := c.m.describeInternalError(c)
		return &x
	case kvm.ExitFailEntry:
		return &Exit{Reason: InternalError, VCPU: c.kvm.ID(),
			Detail: fmt.Sprintf("the CPU refused to enter the guest (hardware reason %#x): the vCPU state is not valid on this host", c.kvm.FailEntryReason())}
	case kvm.ExitMemoryFault:
		return &Exit{Reason: HostError, VCPU: c.kvm.ID(),
			Detail: fmt.Sprintf("the guest touched %#x, which the host could not provide", c.kvm.MemoryFault())}
	default:
		return &Exit{Reason: InternalError, VCPU: c.kvm.ID(), Detail: fmt.Sprintf("KVM_RUN returned with reason %d, which drowse does not know", reason)}
	}
}

func (c *cpu) handleIO() *Exit {
	io, err := c.kvm.IO()
	if err != nil {
		return &Exit{Reason: HostError, VCPU: c.kvm.ID(), Detail: err.Error(), Err: err}
	}
	for p := io.Data; len(p) >= io.Size && io.Size > 0; p = p[io.Size:] {
		if io.Out {
			c.m.pioBus.Write(uint64(io.Port), p[:io.Size])
		} else {
			c.m.pioBus.Read(uint64(io.Port), p[:io.Size])
		}
	}
	return nil
}

// runFailed explains an error of KVM_RUN.
func (m *Machine) runFailed(c *cpu, err error) Exit {
	x := Exit{Reason: HostError, VCPU: c.kvm.ID(), Err: err}
	x.Detail = fmt.Sprintf("KVM_RUN on vCPU %d: %v", c.kvm.ID(), err)
	if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
		x.Detail += ": a page of the guest could not be provided"
	}
	return x
}

// Model-specific registers that a boot needs (SDM volume 4).
const (
	miscEnableFastStrings = 1
	mtrrEnable            = 1 << 11
	mtrrWriteBack         = 6
)

// bootRegisters puts the vCPU into 64-bit mode at the kernel's entry (boot.rst, 64-bit
// boot protocol).
func (c *cpu) bootRegisters(e boot.Entry) error {
	sregs, err := c.kvm.Sregs()
	if err != nil {
		return err
	}
	const (
		cr0 = 1<<0 | 1<<4 | 1<<5 | 1<<31 // PE, ET, NE, PG
		pae = 1 << 5
		lme = 1 << 8
		lma = 1 << 10
	)
	flat := kvm.Segment{Limit: 0xffffffff, Present: 1, S: 1, G: 1}
	code, data := flat, flat
	code.Selector, code.Typ, code.L = boot.SelectorCode, 0xb, 1
	data.Selector, data.Typ, data.DB = boot.SelectorData, 0x3, 1
	sregs.CS = code
	sregs.DS, sregs.ES, sregs.FS, sregs.GS, sregs.SS = data, data, data, data, data
	sregs.TR = kvm.Segment{Limit: 0xffff, Selector: boot.SelectorTSS, Typ: 0xb, Present: 1}
	sregs.GDT.Base, sregs.GDT.Limit = e.GDT, e.GDTLimit
	sregs.IDT.Base, sregs.IDT.Limit = 0, 0
	sregs.CR0, sregs.CR3, sregs.CR4, sregs.EFER = cr0, e.CR3, pae, lme|lma
	if err := c.kvm.SetSregs(sregs); err != nil {
		return err
	}
	const reserved = 2 // bit 1 of RFLAGS is always set
	return c.kvm.SetRegs(&kvm.Regs{RIP: e.RIP, RSP: e.RSP, RBP: e.RSP, RSI: e.RSI, RFLAGS: reserved})
}

// resetState does what firmware does on every vCPU.
func (c *cpu) resetState() error {
	msrs := []kvm.MSR{
		{Index: kvm.MSRMiscEnable, Value: miscEnableFastStrings},
		{Index: kvm.MSRMTRRDefType, Value: mtrrEnable | mtrrWriteBack},
	}
	for len(msrs) > 0 {
		// Not every host has all of these MSRs, and no guest needs them.
		n, err := c.kvm.SetMSRs(msrs)
		if err != nil {
			return err
		}
		msrs = msrs[min(n+1, len(msrs)):]
	}
	// LINT0 delivers the PIC's interrupts, LINT1 NMIs (SDM volume 3, 11.5.1).
	const (
		lvtLINT0   = 0x350
		lvtLINT1   = 0x360
		modeNMI    = 4 << 8
		modeExtINT = 7 << 8
	)
	lapic, err := c.kvm.LAPIC(nil)
	if err != nil {
		return err
	}
	setMode := func(reg int, mode uint32) {
		v := uint32(lapic[reg+1])<<8&^0x700 | mode
		lapic[reg+1] = byte(v >> 8)
		// Clear the mask bit.
		lapic[reg+2] &^= 1
	}
	setMode(lvtLINT0, modeExtINT)
	setMode(lvtLINT1, modeNMI)
	return c.kvm.SetLAPIC(lapic)
}
