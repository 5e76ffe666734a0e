package doctor

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// noInterface is an index that no network interface has.
const noInterface = 1<<31 - 1

// programAttr is the beginning of union bpf_attr for BPF_PROG_LOAD.
type programAttr struct {
	kind, count    uint32
	insns, license uint64
	_              [2]uint32 // log level and size
	_              uint64    // log buffer
	_              [2]uint32 // kernel version, flags
}

// linkAttr is the beginning of union bpf_attr for BPF_LINK_CREATE.
type linkAttr struct {
	program, ifindex, attachType, flags uint32
	_                                   [4]uint64
}

// loadNothing loads a program for tc that lets everything pass, and returns its
// descriptor; it is attached to nothing.
func loadNothing() (int, error) {
	// r0 = 0; exit. See Documentation/bpf/standardization/instruction-set.rst.
	insns := []uint64{0xb7, 0x95}
	license := []byte("GPL\x00")
	attr := programAttr{
		kind: unix.BPF_PROG_TYPE_SCHED_CLS, count: uint32(len(insns)),
		insns:   uint64(uintptr(unsafe.Pointer(unsafe.SliceData(insns)))),
		license: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(license)))),
	}
	fd, err := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(insns)
	runtime.KeepAlive(license)
	return fd, err
}

// attachTCX tries to attach a program to the incoming packets of an interface, and
// detaches it at once if that was possible.
func attachTCX(program int, ifindex uint32) error {
	attr := linkAttr{program: uint32(program), ifindex: ifindex, attachType: unix.BPF_TCX_INGRESS}
	fd, err := bpf(unix.BPF_LINK_CREATE, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err == nil {
		return os.NewSyscallError("close", unix.Close(fd))
	}
	return err
}

// bpf is bpf(2). The error is a plain errno.
func bpf(cmd int, attr unsafe.Pointer, size uintptr) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(attr), size)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}
