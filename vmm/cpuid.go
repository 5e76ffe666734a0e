package vmm

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// CPUID leaves and bits (SDM volume 2, CPUID; AMD APM volume 3, appendix E).
const (
	leafFeatures    = 0x1
	leafCache       = 0x4
	leafTopology    = 0xb
	leafTopologyV2  = 0x1f
	leafExtFeatures = 0x80000001
	leafAddressSize = 0x80000008
	leafAMDCache    = 0x8000001d
	leafAMDTopology = 0x8000001e

	ecxVMX         = 1 << 5
	ecxTSCDeadline = 1 << 24
	ecxHypervisor  = 1 << 31
	edxHTT         = 1 << 28
	ecxSVM         = 1 << 2
	ecxCmpLegacy   = 1 << 1
)

// guestCPUID returns the CPUID of vCPU id of n, made from what KVM supports on this host: a single package of n
// cores without hyperthreads, no nested virtualisation.
func guestCPUID(supported []kvm.CPUIDEntry, id, n int, tscDeadline bool) []kvm.CPUIDEntry {
	out := make([]kvm.CPUIDEntry, 0, len(supported)+2)
	idBits := uint32(bits.Len(uint(n - 1)))
	topology := false
	for _, e := range supported {
		switch e.Function {
		case leafFeatures:
			e.EBX = e.EBX&0xffff | uint32(n)<<16 | uint32(id)<<24
			e.ECX = e.ECX&^(ecxVMX|ecxTSCDeadline) | ecxHypervisor
			if tscDeadline {
				e.ECX |= ecxTSCDeadline
			}
			e.EDX &^= edxHTT
			if n > 1 {
				e.EDX |= edxHTT
			}
		case leafCache, leafAMDCache:
			// Cores share only the last-level cache.
			if level := e.EAX >> 5 & 7; level > 0 {
				shared := uint32(0)
				if level == 3 {
					shared = uint32(n - 1)
				}
				e.EAX = e.EAX&0x3fff | shared<<14
				if e.Function == leafCache {
					e.EAX |= uint32(n-1) << 26
				}
			}
		case leafTopology, leafTopologyV2:
			// Replaced below.
			if e.Function == leafTopology {
				topology = true
			}
			continue
		case leafExtFeatures:
			e.ECX &^= ecxSVM | ecxCmpLegacy
			if n > 1 {
				e.ECX |= ecxCmpLegacy
			}
		case leafAddressSize:
			e.ECX = e.ECX&^0xf0ff | idBits<<12 | uint32(n-1)
		case leafAMDTopology:
			e.EAX, e.EBX, e.ECX = uint32(id), uint32(id), 0
		}
		out = append(out, e)
	}
	if topology {
		const (
			significantIndex = 1
			typeSMT          = 1 << 8
			typeCore         = 2 << 8
		)
		out = append(out,
			kvm.CPUIDEntry{Function: leafTopology, Index: 0, Flags: significantIndex, EAX: 0, EBX: 1, ECX: 0 | typeSMT, EDX: uint32(id)},
			kvm.CPUIDEntry{Function: leafTopology, Index: 1, Flags: significantIndex, EAX: idBits, EBX: uint32(n), ECX: 1 | typeCore, EDX: uint32(id)})
	}
	return out
}

// What a CPUID of KVM's emulation of Hyper-V begins with (Hypervisor Top Level Functional Specification, 2.4).
const (
	leafHyperV      = 0x40000001
	hyperVInterface = 0x31237648 // "Hv#1"
)

// checkGuestCPUID refuses a saved vCPU with parts of KVM that no guest is given: nested virtualisation and Hyper-V. The
// facts of a snapshot are elsewhere, and another hand may have written either.
func checkGuestCPUID(vcpu []byte) error {
	list, err := kvm.SavedCPUID(vcpu)
	if err != nil {
		return err
	}
	return checkCPUID(list)
}

func checkCPUID(list []kvm.CPUIDEntry) error {
	for _, e := range list {
		if e.Function == leafFeatures && e.ECX&ecxVMX != 0 || e.Function == leafExtFeatures && e.ECX&ecxSVM != 0 ||
			e.Function == leafHyperV && e.EAX == hyperVInterface {
			return fmt.Errorf("%w: its vCPU has what no guest is given: CPUID leaf %#x", devices.ErrPayload, e.Function)
		}
	}
	return nil
}

// HostFacts are the properties of the host's CPU that a guest depends on. A snapshot keeps them.
type HostFacts struct {
	Arch   string           `json:"arch"`
	TSCKHz uint64           `json:"tsc_khz"`
	CPUID  []kvm.CPUIDEntry `json:"cpuid"`
}

func hostFacts(cpuid []kvm.CPUIDEntry, khz uint64) HostFacts {
	return HostFacts{Arch: runtime.GOARCH, TSCKHz: khz, CPUID: cpuid}
}

// ErrForeign says that this host lacks something of the CPU on which the machine was saved.
var ErrForeign = errors.New("the snapshot needs another host")

// CheckFacts compares what a saved machine depends on with this host. The error
// wraps ErrForeign and names the first thing that is missing.
func CheckFacts(saved HostFacts) error {
	if saved.Arch != runtime.GOARCH {
		return fmt.Errorf("%w: it is of a %s machine, this is %s", ErrForeign, saved.Arch, runtime.GOARCH)
	}
	have, err := supportedCPUID()
	if err != nil {
		return err
	}
	// An older version may have shown the guest AVX or an XSAVE area without XSAVE, which the guest could not use.
	if err := compareCPUID(savedFeatures(saved.CPUID, true), have); err != nil {
		return err
	}
	host, scales, err := hostTSC()
	if err != nil {
		return err
	}
	return compareTSC(saved.TSCKHz, host, scales)
}

// compareTSC refuses a guest whose time stamp counter would run at another rate than the guest was told at its
// boot. A rate of 0 means unknown.
func compareTSC(saved, host uint64, scales bool) error {
	if scales || kvm.SameTSCRate(saved, host) || saved == 0 || host == 0 {
		return nil
	}
	return fmt.Errorf("%w: its time stamp counter runs at %d kHz, that of this host at %d kHz, and this host cannot scale it: restore on a CPU like the first", ErrForeign, saved, host)
}

// kvmTSC caches what KVM reports of this host's time stamp counter.
var kvmTSC struct {
	mu     sync.Mutex
	known  bool
	khz    uint64
	scales bool
}

// noteTSC saves hostTSC the making of a VM in a process that has one, such as one that restores a machine.
func noteTSC(khz uint64, scales bool) {
	kvmTSC.mu.Lock()
	defer kvmTSC.mu.Unlock()
	kvmTSC.known, kvmTSC.khz, kvmTSC.scales = true, khz, scales
}

// hostTSC returns the rate of this host's time stamp counter in kHz, 0 if KVM cannot tell. scales reports whether
// guests may have other rates.
func hostTSC() (khz uint64, scales bool, err error) {
	kvmTSC.mu.Lock()
	khz, scales = kvmTSC.khz, kvmTSC.scales
	known := kvmTSC.known
	kvmTSC.mu.Unlock()
	if known {
		return khz, scales, nil
	}
	err = withVCPU(func(sys *kvm.System, c *kvm.VCPU) error {
		khz, _ = c.TSCKHz() // 0 on a host whose counter is unstable
		scales = sys.Check(kvm.CapTSCControl) > 0
		noteTSC(khz, scales)
		return nil
	})
	return khz, scales, err
}

// withVCPU calls ask with a temporary VM's vCPU, to find out what this host's KVM can do.
func withVCPU(ask func(*kvm.System, *kvm.VCPU) error) error {
	sys, err := kvm.Open()
	if err != nil {
		return err
	}
	defer sys.Close()
	vm, err := sys.CreateVM()
	if err != nil {
		return err
	}
	defer vm.Close()
	// vCPUs need their LAPIC.
	if err := vm.CreateIRQChip(); err != nil {
		return err
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		return err
	}
	defer c.Close()
	return ask(sys, c)
}

// kvmCPUID caches what this host's KVM supports, without the features whose registers it would not save. It does
// not change, and asking takes 0.4 ms.
var kvmCPUID struct {
	mu    sync.Mutex
	cpuid []kvm.CPUIDEntry
}

// supportedCPUID returns kvmCPUID. The caller must not change it.
func supportedCPUID() ([]kvm.CPUIDEntry, error) {
	kvmCPUID.mu.Lock()
	defer kvmCPUID.mu.Unlock()
	if kvmCPUID.cpuid != nil {
		return kvmCPUID.cpuid, nil
	}
	sys, err := kvm.Open()
	if err != nil {
		return nil, err
	}
	defer sys.Close()
	offered, err := sys.SupportedCPUID()
	if err != nil {
		return nil, err
	}
	kvmCPUID.cpuid = savedFeatures(offered, !emulatedByTCG())
	return kvmCPUID.cpuid, nil
}

// features are the CPUID registers whose bits are a CPU's features.
var features = []struct {
	function, index uint32
	name            string
	register        func(*kvm.CPUIDEntry) uint32
	ignore          uint32 // bits that the VMM sets itself, or that mirror guest state
}{
	{0x1, 0, "CPUID.1:ECX", func(e *kvm.CPUIDEntry) uint32 { return e.ECX }, ecxHypervisor | ecxTSCDeadline | 1<<27},
	{0x1, 0, "CPUID.1:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, edxHTT},
	{0x7, 0, "CPUID.7.0:EBX", func(e *kvm.CPUIDEntry) uint32 { return e.EBX }, 0},
	{0x7, 0, "CPUID.7.0:ECX", func(e *kvm.CPUIDEntry) uint32 { return e.ECX }, 1 << 4},
	{0x7, 0, "CPUID.7.0:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{0x7, 1, "CPUID.7.1:EAX", func(e *kvm.CPUIDEntry) uint32 { return e.EAX }, 0},
	{0x7, 1, "CPUID.7.1:EBX", func(e *kvm.CPUIDEntry) uint32 { return e.EBX }, 0},
	{0x7, 1, "CPUID.7.1:ECX", func(e *kvm.CPUIDEntry) uint32 { return e.ECX }, 0},
	{0x7, 1, "CPUID.7.1:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{0x7, 2, "CPUID.7.2:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{0xd, 0, "CPUID.D.0:EAX", func(e *kvm.CPUIDEntry) uint32 { return e.EAX }, 0},
	{0xd, 0, "CPUID.D.0:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{0xd, 1, "CPUID.D.1:EAX", func(e *kvm.CPUIDEntry) uint32 { return e.EAX }, 0},
	{0xd, 1, "CPUID.D.1:ECX", func(e *kvm.CPUIDEntry) uint32 { return e.ECX }, 0},
	{0x80000001, 0, "CPUID.80000001:ECX", func(e *kvm.CPUIDEntry) uint32 { return e.ECX }, ecxCmpLegacy},
	{0x80000001, 0, "CPUID.80000001:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{0x80000007, 0, "CPUID.80000007:EDX", func(e *kvm.CPUIDEntry) uint32 { return e.EDX }, 0},
	{leafAddressSize, 0, "CPUID.80000008:EBX", func(e *kvm.CPUIDEntry) uint32 { return e.EBX }, 0},
	{0x80000021, 0, "CPUID.80000021:EAX", func(e *kvm.CPUIDEntry) uint32 { return e.EAX }, 0},
	{0x40000001, 0, "CPUID.40000001:EAX", func(e *kvm.CPUIDEntry) uint32 { return e.EAX }, 0},
}

func compareCPUID(saved, have []kvm.CPUIDEntry) error {
	find := func(list []kvm.CPUIDEntry, function, index uint32) *kvm.CPUIDEntry {
		for i := range list {
			if list[i].Function == function && list[i].Index == index {
				return &list[i]
			}
		}
		return new(kvm.CPUIDEntry)
	}
	vendor := func(list []kvm.CPUIDEntry) [3]uint32 {
		e := find(list, 0, 0)
		return [3]uint32{e.EBX, e.EDX, e.ECX}
	}
	if vendor(saved) != vendor(have) {
		return fmt.Errorf("%w: its CPU is of another vendor", ErrForeign)
	}
	for _, f := range features {
		missing := f.register(find(saved, f.function, f.index)) &^ f.register(find(have, f.function, f.index)) &^ f.ignore
		if missing != 0 {
			return fmt.Errorf("%w: this CPU lacks features %#x of %s: restore on a CPU like the first", ErrForeign, missing, f.name)
		}
	}
	// Bits 7:0 of EAX are the width of physical addresses, 15:8 that of linear ones. A guest uses the widths it has
	// seen, even for page table bits beyond its RAM, which are reserved on a CPU with narrower addresses.
	sw, hw := find(saved, leafAddressSize, 0).EAX, find(have, leafAddressSize, 0).EAX
	for _, w := range []struct {
		what  string
		shift int
	}{{"physical", 0}, {"linear", 8}} {
		if s, h := sw>>w.shift&0xff, hw>>w.shift&0xff; s > h {
			return fmt.Errorf("%w: its CPU has %s addresses of %d bits, this one of %d: restore on a CPU like the first", ErrForeign, w.what, s, h)
		}
	}
	return nil
}

// softKVMSignature is the value of softKVMMSR, in KVM's paravirtual range, on a KVM without hardware
// virtualisation.
const (
	softKVMMSR       = 0x4b564d11
	softKVMSignature = 0x4d5650
)

// SoftKVM reports whether this host's KVM has no hardware virtualisation under it and interprets guest kernel code.
// It returns false if it cannot find out.
var SoftKVM = sync.OnceValue(func() bool {
	var msrs []kvm.MSR
	err := withVCPU(func(_ *kvm.System, c *kvm.VCPU) (err error) {
		msrs, err = c.MSRs([]uint32{softKVMMSR})
		return err
	})
	return err == nil && len(msrs) == 1 && msrs[0].Value == softKVMSignature
})
