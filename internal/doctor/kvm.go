package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

const (
	// createTries is how many VMs to make to measure the time.
	createTries = 5
	// slowCreate is a time to make a VM that shows a problem: 0.1 to 1 ms is usual, and a whole resume should take
	// 25 ms.
	slowCreate = 5 * time.Millisecond
	// memslots is how many a machine needs: RAM below and above the hole for devices.
	memslots = 2
)

func (h host) kvm(g *group) KVM {
	h.architecture(g)
	sys, err := kvm.OpenPath(h.path("dev/kvm"))
	if err != nil {
		k := KVM{Kind: NoKVM}
		if errors.Is(err, kvm.ErrNoPermission) {
			k.Kind = NoPermission
		} else if !errors.Is(err, kvm.ErrNoKVM) {
			k.Kind = Broken
		}
		k.VendorModule = h.vendorModule()
		g.require("kvm", Missing, oneLine(err.Error()), "no VM can run")
		return k
	}
	defer sys.Close()
	k := KVM{VendorModule: h.vendorModule()}
	vm := h.create(sys, &k, g)
	if vm == nil {
		k.Kind = Broken
		return k
	}
	defer vm.Close()
	h.kind(&k, g)
	capabilities(vm, g)
	h.largePages(k, g)
	return k
}

// create makes a few VMs, keeps the last one and records their times.
func (h host) create(sys *kvm.System, k *KVM, g *group) *kvm.VM {
	var (
		vm    *kvm.VM
		times []time.Duration
	)
	for range createTries {
		begin := time.Now()
		next, err := sys.CreateVM()
		if err != nil {
			if vm != nil {
				vm.Close()
			}
			g.require("create_vm", Missing, oneLine(err.Error()), "no VM can run: see the kernel's log (dmesg) for the cause")
			return nil
		}
		times = append(times, time.Since(begin))
		if vm != nil {
			vm.Close()
		}
		vm = next
	}
	slices.Sort(times)
	middle, worst := times[len(times)/2], times[len(times)-1]
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	k.CreateVMMs, k.CreateVMMaxMs = ms(middle), ms(worst)
	g.require("create_vm", unless(middle > slowCreate, Degraded), fmt.Sprintf("%.2f ms, at worst %.2f ms, of %d", ms(middle), ms(worst), len(times)),
		"each start and wake takes that much longer: see nx_huge_pages, and whether a cgroup with a CPU limit holds up the start of kernel threads")
	return vm
}

// kind finds out what is below KVM.
func (h host) kind(k *KVM, g *group) {
	flags := h.cpuFlags()
	switch {
	case vmm.SoftKVM():
		k.Kind = Soft
	case k.VendorModule == "kvm_intel" || k.VendorModule == "" && flags["vmx"]:
		k.Kind = HardwareVMX
	case k.VendorModule == "kvm_amd" || k.VendorModule == "" && flags["svm"]:
		k.Kind = HardwareSVM
	default:
		k.Kind = Hardware
	}
	detail := string(k.Kind)
	if k.VendorModule != "" {
		detail += ", module " + k.VendorModule
	}
	if k.Kind == Soft {
		g.require("kvm", Degraded, detail+": no hardware virtualisation under it",
			"guest programs run at full speed and guest kernel code about a thousand times slower; only kernels of `drowse kernel build` boot; "+
				"AVX registers are not kept for guest programs, which Go, glibc and OpenSSL are told and others (V8, the JVM) cannot be")
		return
	}
	nested := flags["hypervisor"]
	if flags != nil {
		k.Nested = &nested
	}
	if nested {
		g.require("kvm", OK, detail+", nested: this host is a virtual machine", "")
		g.add("nested", Degraded, "the CPU says that a hypervisor is under this host", "exits and page faults of guests cost several times what they do on bare metal")
		return
	}
	g.require("kvm", OK, detail, "")
}

// vendorModule returns the module that registered with KVM.
func (h host) vendorModule() string {
	found, _ := filepath.Glob(h.path("sys/module/kvm/holders/*")) // the pattern is well-formed
	if len(found) == 0 {
		// Built in, or without that folder: the vendors' modules still appear if they have parameters.
		found, _ = filepath.Glob(h.path("sys/module/kvm_*"))
	}
	names := make([]string, 0, len(found))
	for _, f := range found {
		names = append(names, filepath.Base(f))
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, "kvm_") })
	if len(names) == 2 && slices.Contains(names, "kvm_intel") && slices.Contains(names, "kvm_amd") {
		// A kernel with both built in.
		if h.cpuFlags()["svm"] {
			return "kvm_amd"
		}
		return "kvm_intel"
	}
	if len(names) == 1 {
		return names[0]
	}
	return ""
}

// cpuFlags returns the flags of the first CPU, or nil if they cannot be read.
func (h host) cpuFlags() map[string]bool {
	for line := range strings.Lines(h.read("proc/cpuinfo")) {
		key, value, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(key) != "flags" {
			continue
		}
		flags := map[string]bool{}
		for f := range strings.FieldsSeq(value) {
			flags[f] = true
		}
		return flags
	}
	return nil
}

// capability is a capability of KVM that drowse uses.
type capability struct {
	name     string
	cap      kvm.Capability
	required bool
	lack     string // the consequence of its absence
	want     int    // the least sufficient value, or the necessary bits; 0 means 1
	bits     bool
}

const noVM = "no VM can run: a newer kernel is needed"

// capabilityList is what packages vmm and vmm/kvm use, in the order of use.
var capabilityList = []capability{
	{name: "user_memory", cap: kvm.CapUserMemory, required: true, lack: noVM},
	{name: "set_tss_addr", cap: kvm.CapSetTSSAddr, required: true, lack: noVM},
	{name: "set_identity_map_addr", cap: kvm.CapSetIdentityMapAddr, required: true, lack: noVM},
	{name: "irqchip", cap: kvm.CapIRQChip, required: true, lack: noVM},
	{name: "pit2", cap: kvm.CapPIT2, required: true, lack: noVM},
	{name: "irqfd", cap: kvm.CapIRQFD, required: true, lack: "no device can interrupt a guest: no VM can run"},
	{name: "ioeventfd", cap: kvm.CapIOEventFD, required: true, lack: "no device can be kicked by a guest: no VM can run"},
	{name: "ext_cpuid", cap: kvm.CapExtCPUID, required: true, lack: noVM},
	{name: "immediate_exit", cap: kvm.CapImmediateExit, required: true, lack: "a VM cannot be paused without a race: no VM can run (Linux 4.13 has it)"},
	{name: "nr_memslots", cap: kvm.CapNrMemslots, want: memslots, required: true, lack: noVM},
	{name: "max_vcpus", cap: kvm.CapMaxVCPUs, want: boot.MaxVCPUs, lack: fmt.Sprintf("VMs get fewer than %d vCPUs", boot.MaxVCPUs)},
	{name: "mp_state", cap: kvm.CapMPState, lack: noSleep},
	{name: "vcpu_events", cap: kvm.CapVCPUEvents, lack: noSleep},
	{name: "debugregs", cap: kvm.CapDebugRegs, lack: noSleep},
	{name: "xsave", cap: kvm.CapXSave, lack: noSleep},
	{name: "pit_state2", cap: kvm.CapPITState2, lack: noSleep},
	{name: "adjust_clock", cap: kvm.CapAdjustClock, lack: noSleep},
	{name: "xcrs", cap: kvm.CapXCRs, lack: "the XCR0 register is not in snapshots; a CPU without AVX needs none"},
	{name: "xsave2", cap: kvm.CapXSave2, lack: "vector state beyond 4 KiB (AMX) is not saved, and not offered to guests"},
	{name: "sregs2", cap: kvm.CapSregs2, lack: "page-directory pointers of 32-bit PAE guests are read anew from memory on wake; 64-bit guests do not notice"},
	{name: "kvmclock_ctrl", cap: kvm.CapKVMClockCtrl, lack: "guests that were paused for long may report a soft lockup when they go on"},
	{name: "tsc_deadline", cap: kvm.CapTSCDeadlineTimer, lack: "guest timers use the slower one-shot LAPIC timer"},
	{name: "get_tsc_khz", cap: kvm.CapGetTSCKHz, lack: "snapshots do not say how fast their TSC ran: woken on a CPU of another speed, the clock of the guest is wrong"},
	{name: "tsc_control", cap: kvm.CapTSCControl, lack: "snapshots from hosts whose TSC runs at another rate cannot be woken here; those of this host can"},
	{name: "manual_dirty_log", cap: kvm.CapManualDirtyLog, want: kvm.DirtyLogManualProtect | kvm.DirtyLogInitiallySet, bits: true,
		lack: "not needed by full snapshots; deltas would protect all of RAM at once, which lengthens the pause"},
}

const noSleep = "VMs run but cannot be put to sleep: a newer kernel is needed"

func capabilities(vm *kvm.VM, g *group) {
	for _, c := range capabilityList {
		have, want := vm.Check(c.cap), max(c.want, 1)
		s := OK
		switch {
		case c.bits && have&want == want, !c.bits && have >= want:
		case have == 0, c.required: // a required one that is too small counts as absent
			s = Missing
		default:
			s = Degraded
		}
		g.put(Check{Name: "cap_" + c.name, Status: s, Detail: fmt.Sprintf("KVM_CHECK_EXTENSION(%d) = %d", int(c.cap), have), Consequence: c.lack, Required: c.required})
	}
}

// largePages checks the mitigation for a bug of Intel CPUs (iTLB multihit). It takes a kernel thread for each VM,
// whose start can take long under cgroups.
func (h host) largePages(k KVM, g *group) {
	value := strings.TrimSpace(h.read("sys/module/kvm/parameters/nx_huge_pages"))
	detail := "nx_huge_pages=" + value
	switch {
	case value == "":
		if _, err := os.Stat(h.path("sys/module/kvm")); err != nil {
			g.add("nx_huge_pages", Unknown, "this kernel does not show the parameters of KVM", "")
			return
		}
		g.add("nx_huge_pages", OK, "KVM has no such parameter", "")
	case (value == "Y" || value == "1") && time.Duration(k.CreateVMMaxMs*float64(time.Millisecond)) > slowCreate:
		g.add("nx_huge_pages", Degraded, detail,
			"making a VM starts a kernel thread, which can take tens of milliseconds under cgroups: boot with kvm.nx_huge_pages=never on CPUs that do not need it, or favordynmods for the cgroup")
	default:
		g.add("nx_huge_pages", OK, detail, "")
	}
}
