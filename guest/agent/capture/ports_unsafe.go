package capture

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// IOPorts are the machine's own ports. The zero value is ready.
type IOPorts struct{ signals uint64 }

// asynchronous is every signal except those that an instruction causes: they end a process that blocks them.
const asynchronous = ^uint64(1<<(unix.SIGILL-1) | 1<<(unix.SIGTRAP-1) | 1<<(unix.SIGBUS-1) | 1<<(unix.SIGFPE-1) | 1<<(unix.SIGSEGV-1))

// schedParam is struct sched_param of linux/sched.h.
type schedParam struct{ priority int32 }

// Open implements Ports. It gives the thread real-time priority, so that neither the tick nor a thread that it
// wakes takes the CPU. It blocks signals, such as the one by which the Go runtime preempts.
func (p *IOPorts) Open() error {
	if errno := iopl(3); errno != 0 {
		return errno
	}
	mask := asynchronous
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&mask)), uintptr(unsafe.Pointer(&p.signals)), unsafe.Sizeof(mask), 0, 0)
	if errno != 0 {
		_ = iopl(0)
		return errno
	}
	// The handover works without real-time priority as well.
	schedule(unix.SCHED_FIFO, 1)
	return nil
}

// Close implements Ports.
func (p *IOPorts) Close() {
	schedule(unix.SCHED_NORMAL, 0)
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&p.signals)), 0, unsafe.Sizeof(p.signals), 0, 0)
	_ = iopl(0)
}

// iopl grants the thread access to all ports, or revokes it: iopl(2). ioperm(2) would grant it these alone, but goes
// through a bitmap of 65,536 bits in each call, which takes a guest whose kernel is interpreted 3.5 ms of its wake.
func iopl(level uintptr) syscall.Errno {
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOPL, level, 0, 0)
	return errno
}

func schedule(policy uintptr, priority int32) {
	param := schedParam{priority}
	_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_SETSCHEDULER, 0, policy, uintptr(unsafe.Pointer(&param)))
}

// Command implements Ports.
func (*IOPorts) Command(v byte) { outb(agentpb.HandoverPort+agentpb.HandoverCommand, v) }

// Wait implements Ports.
func (*IOPorts) Wait() byte {
	return inbWhile(agentpb.HandoverPort+agentpb.HandoverStatus, agentpb.StatusWait)
}

// Message implements Ports.
func (*IOPorts) Message(p *[agentpb.HandoverSize]byte) {
	insb(agentpb.HandoverPort+agentpb.HandoverData, &p[0], len(p))
}

// outb writes a byte to a port.
//
//go:noescape
func outb(port uint16, v byte)

// inbWhile reads a port until it returns something other than v.
//
//go:noescape
func inbWhile(port uint16, v byte) byte

// insb reads n bytes from a port, in one exit to the VMM.
//
//go:noescape
func insb(port uint16, p *byte, n int)
