package hwkvm

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls and struct offsets of a guest that only exits (Documentation/virt/kvm/api.rst, 4.3 to 4.35, and struct
// kvm_run, kvm_regs, kvm_sregs).
const (
	kvmGetVCPUMmapSize     = 0xae04
	kvmRun                 = 0xae80
	kvmSetUserMemoryRegion = 0x4020ae46
	kvmSetRegs             = 0x4090ae82
	kvmGetSregs            = 0x8138ae83
	kvmSetSregs            = 0x4138ae84

	regsSize, regsRIP, regsRFLAGS = 144, 128, 136
	sregsSize                     = 312
	runExitReason                 = 8
	exitIO, exitMMIO              = 2, 6
	guestPage                     = 0x1000
)

func ioctlBytes(fd, request int, p []byte) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(&p[0]))); errno != 0 {
		return errno
	}
	return nil
}

// benchmarkExits runs real-mode code that exits from the guest in each round of a loop.
func benchmarkExits(b *testing.B, code []byte, wantExit uint32) {
	dev, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		b.Skip("no usable /dev/kvm: ", err)
	}
	defer unix.Close(dev)
	vm, err := unix.IoctlRetInt(dev, kvmCreateVM)
	if err != nil {
		b.Fatal("KVM_CREATE_VM: ", err)
	}
	defer unix.Close(vm)
	mem, err := unix.Mmap(-1, 0, guestPage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Munmap(mem)
	copy(mem, code)
	le := binary.LittleEndian
	region := make([]byte, 32)
	le.PutUint64(region[8:], guestPage)
	le.PutUint64(region[16:], guestPage)
	le.PutUint64(region[24:], uint64(uintptr(unsafe.Pointer(&mem[0]))))
	if err := ioctlBytes(vm, kvmSetUserMemoryRegion, region); err != nil {
		b.Fatal("KVM_SET_USER_MEMORY_REGION: ", err)
	}
	vcpu, err := unix.IoctlRetInt(vm, kvmCreateVCPU)
	if err != nil {
		b.Fatal("KVM_CREATE_VCPU: ", err)
	}
	defer unix.Close(vcpu)
	size, err := unix.IoctlRetInt(dev, kvmGetVCPUMmapSize)
	if err != nil {
		b.Fatal("KVM_GET_VCPU_MMAP_SIZE: ", err)
	}
	run, err := unix.Mmap(vcpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Munmap(run)
	sregs := make([]byte, sregsSize)
	if err := ioctlBytes(vcpu, kvmGetSregs, sregs); err != nil {
		b.Fatal("KVM_GET_SREGS: ", err)
	}
	le.PutUint64(sregs[0:], 0)  // base of CS, the first segment
	le.PutUint16(sregs[12:], 0) // its selector
	if err := ioctlBytes(vcpu, kvmSetSregs, sregs); err != nil {
		b.Fatal("KVM_SET_SREGS: ", err)
	}
	regs := make([]byte, regsSize)
	le.PutUint64(regs[regsRIP:], guestPage)
	le.PutUint64(regs[regsRFLAGS:], 2) // bit 1 is always set
	if err := ioctlBytes(vcpu, kvmSetRegs, regs); err != nil {
		b.Fatal("KVM_SET_REGS: ", err)
	}
	for b.Loop() {
		for {
			_, err := unix.IoctlRetInt(vcpu, kvmRun)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EINTR) {
				b.Fatal("KVM_RUN: ", err)
			}
		}
		if got := le.Uint32(run[runExitReason:]); got != wantExit {
			b.Fatalf("exit reason %d, want %d", got, wantExit)
		}
	}
}

func BenchmarkPIOExit(b *testing.B) {
	benchmarkExits(b, []byte{
		0xe6, 0x10, // out 0x10, al
		0xeb, 0xfc, // jmp to it
	}, exitIO)
}

func BenchmarkMMIOExit(b *testing.B) {
	benchmarkExits(b, []byte{
		0xa2, 0x00, 0x80, // mov [0x8000], al
		0xeb, 0xfb, // jmp to it
	}, exitMMIO)
}

// BenchmarkCPU measures arithmetic that the compiler cannot shorten: 1,000 rounds of xorshift64.
func BenchmarkCPU(b *testing.B) {
	x := uint64(88172645463325252)
	for b.Loop() {
		for range 1000 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
	}
	if x == 0 {
		b.Fatal("xorshift reached 0")
	}
}

func BenchmarkSystemCall(b *testing.B) {
	for b.Loop() {
		unix.Getppid()
	}
}

func BenchmarkForkExec(b *testing.B) {
	for b.Loop() {
		p, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReadFile reads a file with a cold cache in the reader. In the machine its file system is 9p.
func BenchmarkReadFile(b *testing.B) {
	path := os.Getenv("DROWSE_HWKVM_BENCH_FILE")
	if path == "" {
		b.Skip("DROWSE_HWKVM_BENCH_FILE names no file to read")
	}
	buf := make([]byte, 1<<20)
	for b.Loop() {
		f, err := os.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			b.Fatal(err)
		}
		var total int64
		for {
			n, err := f.Read(buf)
			total += int64(n)
			if n == 0 || err != nil {
				break
			}
		}
		f.Close()
		b.SetBytes(total)
	}
}
