package vmm

import (
	"fmt"
	"strings"

	"golang.org/x/arch/x86/x86asm"

	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// ExitReason is the way in which a machine has ended.
type ExitReason string

// The ways in which a machine ends.
const (
	// PoweredOff: the guest switched itself off.
	PoweredOff ExitReason = "powered-off"
	// Rebooted: the guest asked for a reset, by the keyboard controller or the
	// ACPI reset register.
	Rebooted ExitReason = "rebooted"
	// TripleFault: a vCPU could not deliver an exception. A guest kernel that is
	// told to reboot that way looks the same.
	TripleFault ExitReason = "triple-fault"
	// Panicked: the guest kernel reported a panic through pvpanic.
	Panicked ExitReason = "panicked"
	// InternalError: KVM could not continue, for instance because it does not know an instruction.
	InternalError ExitReason = "internal-error"
	// HostError: something on the host failed under the machine.
	HostError ExitReason = "host-error"
	// Stopped: the owner has closed the machine.
	Stopped ExitReason = "stopped"
)

// Known reports whether it is one of the above.
func (r ExitReason) Known() bool {
	switch r {
	case PoweredOff, Rebooted, TripleFault, Panicked, InternalError, HostError, Stopped:
		return true
	}
	return false
}

// Exit is the end of a machine.
type Exit struct {
	Reason ExitReason
	// VCPU is the vCPU that caused the end, or -1.
	VCPU int
	// RIP is that vCPU's instruction pointer, or 0 when it is unknown or meaningless.
	RIP uint64
	// Detail is one line for users: what happened and what to do.
	Detail string
	// Err is the cause of a HostError.
	Err error
}

func (e Exit) String() string {
	if e.Detail == "" {
		return string(e.Reason)
	}
	return string(e.Reason) + ": " + e.Detail
}

// Clean reports whether the guest ended by its own decision.
func (e Exit) Clean() bool { return e.Reason == PoweredOff || e.Reason == Rebooted }

// Symbolizer names the function of the guest kernel at an address.
type Symbolizer func(addr uint64) (name string, offset uint64, ok bool)

func (m *Machine) location(rip uint64) string {
	if m.cfg.Symbolize != nil {
		if name, off, ok := m.cfg.Symbolize(rip); ok {
			return fmt.Sprintf("RIP %#x (%s+%#x)", rip, name, off)
		}
	}
	return fmt.Sprintf("RIP %#x", rip)
}

// describeInternalError reports which instruction KVM gave up on.
func (m *Machine) describeInternalError(c *cpu) Exit {
	e := c.kvm.InternalError()
	x := Exit{Reason: InternalError, VCPU: c.kvm.ID()}
	regs, err := c.kvm.Regs()
	if err == nil {
		x.RIP = regs.RIP
	}
	switch e.Suberror {
	case kvm.InternalErrorEmulation:
		code := e.Instruction
		if len(code) == 0 {
			code = m.code(c, x.RIP)
		}
		x.Detail = fmt.Sprintf("KVM cannot emulate the instruction `%s` (% x) at %s: on a host without hardware virtualisation use the kernel of kernel.Build, or switch the feature off on the guest's command line (clearcpuid=)",
			disassemble(code, x.RIP), code, m.location(x.RIP))
	case kvm.InternalErrorSimulEx:
		x.Detail = fmt.Sprintf("an exception came while another was being delivered, at %s", m.location(x.RIP))
	case kvm.InternalErrorDeliveryEv:
		x.Detail = fmt.Sprintf("an event could not be delivered, at %s: the guest's descriptor tables are not in RAM", m.location(x.RIP))
	default:
		x.Detail = fmt.Sprintf("KVM met a condition that it does not handle (suberror %d) at %s: see the host's kernel log", e.Suberror, m.location(x.RIP))
	}
	return x
}

// code reads the bytes of the instruction at a guest virtual address.
func (m *Machine) code(c *cpu, va uint64) []byte {
	const longest = 15
	gpa, ok := c.kvm.Translate(va)
	if !ok {
		return nil
	}
	n := min(longest, guestmem.PageSize-gpa%guestmem.PageSize)
	p := make([]byte, n)
	if m.mem.Read(guestmem.GPA(gpa), p) != nil {
		return nil
	}
	if inst, err := x86asm.Decode(p, 64); err == nil {
		return p[:inst.Len]
	}
	return p
}

func disassemble(code []byte, rip uint64) string {
	inst, err := x86asm.Decode(code, 64)
	if err != nil || inst.Op == 0 {
		return "unknown"
	}
	return strings.ToLower(x86asm.IntelSyntax(inst, rip, nil))
}
