package vmm

import (
	"bytes"
	"fmt"
	"os"
	"sync"

	"github.com/drowse-vm/drowse/vmm/kvm"
)

// tcgName is the model name of a CPU that QEMU emulates. KVM does not pass it on.
const tcgName = "QEMU TCG CPU"

// emulatedByTCG reports whether QEMU emulates this host's CPU, as where tests need a KVM with hardware
// virtualisation on a machine without it.
//
// A guest gets no XSAVE there, and nothing that needs it. Before QEMU 9.0, TCG executes an XSETBV of the guest
// although SVM wants it intercepted (APM volume 2, 15.9). It changes the XCR0 of KVM's own CPU, and KVM never
// learns of it. The size of the area in CPUID stays that of x87 and SSE. Linux in the guest then gives XSAVE up,
// with AVX still in CPUID, and no snapshot would have the registers. The kernel of a guest without XSAVE has no
// reason to execute XSETBV.
var emulatedByTCG = sync.OnceValue(func() bool {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return false
	}
	defer f.Close()
	// The first CPU is enough: reading all takes long on a large host.
	p := make([]byte, 1024)
	n, _ := f.Read(p)
	return bytes.Contains(p[:n], []byte(tcgName))
})

// OpenAhead opens or reads what machines need of the host by path, for a process that can open no path later.
func OpenAhead() error {
	emulatedByTCG()
	return kvm.OpenAhead()
}

// makeTSSAvailable works around an error of QEMU's TCG. When a program uses an I/O port, TCG looks into the
// task-state segment only if the segment is marked available, and otherwise refuses the port. A segment in use is
// marked busy and is saved like that (SDM volume 3, 8.2.2; volume 1, 19.5.2). KVM and SVM ignore the mark.
func makeTSSAvailable(v *kvm.VCPU) error {
	const busy = 2
	sregs, err := v.Sregs()
	if err != nil {
		return fmt.Errorf("marking the TSS: %w", err)
	}
	sregs.TR.Typ &^= busy
	if err := v.SetSregs(sregs); err != nil {
		return fmt.Errorf("marking the TSS: %w", err)
	}
	return nil
}
