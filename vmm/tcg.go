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

// emulatedByTCG says whether this host's CPU is emulated by QEMU, as where tests run on a
// KVM of the hardware kind without such hardware.
//
// A guest gets no XSAVE there, and nothing that needs it: before QEMU 9.0 an XSETBV of a guest's is executed where SVM
// wants it intercepted (APM volume 2, 15.9). It changes the XCR0 of KVM's own CPU and KVM never learns of it: the size
// of the area in CPUID stays that of x87 and SSE, at which Linux in the guest gives XSAVE up, with AVX still in CPUID,
// and the registers would be in no snapshot. The kernel of a guest without XSAVE has nothing to execute XSETBV for.
var emulatedByTCG = sync.OnceValue(func() bool {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return false
	}
	defer f.Close()
	// The first CPU is enough: on a large host the rest takes long.
	p := make([]byte, 1024)
	n, _ := f.Read(p)
	return bytes.Contains(p[:n], []byte(tcgName))
})

// makeTSSAvailable works around an error of QEMU's TCG: when a program uses an I/O port it
// looks into the task-state segment only if that is marked available, and refuses the
// port otherwise. A segment that is in use is marked busy, and so it is saved (SDM volume
// 3, 8.2.2; volume 1, 19.5.2). To KVM and SVM the mark means nothing.
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
