package vmm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// PrebuiltConfig is the configuration of a prebuilt VM.
type PrebuiltConfig struct {
	// VCPUs is 1 to boot.MaxVCPUs.
	VCPUs int
	// Memory is the guest's RAM. The caller makes it first, for devices and a pager, and continues to own it. The
	// caller closes it after the prebuilt VM or the machine.
	Memory *guestmem.Memory
	// TrackDirty keeps a log of changed pages, for Machine.TakeDirty. It slows the guest: after TakeDirty, the
	// first write to each page exits to KVM, and KVM maps RAM only in pages of 4 KiB.
	TrackDirty bool
	// Queues are the numbers of queues of the machine's devices, in device order, as far as the caller knows them.
	// The prebuilt VM makes their eventfds ahead. A device may turn out to have more or fewer queues, and there may
	// be more devices, up to MaxDevices.
	Queues []int
}

// Prebuilt is the KVM part of a machine: the VM with its RAM, interrupt controllers and vCPUs, without devices and
// with nothing to run. It is made in the background because that takes time in proportion to the size of RAM: on
// hosts that shadow the guest's page tables, KVM allocates its records of all pages at once. The caller can do
// other work meanwhile. One goroutine owns a Prebuilt and gives it to New or closes it. Load may run concurrently
// with that.
type Prebuilt struct {
	cfg      PrebuiltConfig
	sys      *kvm.System
	vm       *kvm.VM
	vcpus    []*kvm.VCPU
	cpuid    [][]kvm.CPUIDEntry // what each vCPU shows
	msrIndex []uint32
	// tscKHz is the frequency of the guest's time stamp counter, or 0 if the host cannot tell because its own
	// counter is unstable.
	tscKHz uint64
	wires  []wires // by place
	// took is the duration of each step.
	took  map[Stage]time.Duration
	done  sync.WaitGroup
	ready atomic.Bool
	err   error

	// Load and Close hold loading. It guards what follows.
	loading sync.Mutex
	closed  bool
	// begun reports that loading of a saved machine has begun. loaded is the part that is in the prebuilt VM; nil
	// if loading has failed.
	begun  bool
	loaded *loadedState
}

// NewPrebuilt begins to make a prebuilt VM and does not wait for it.
func NewPrebuilt(cfg PrebuiltConfig) (*Prebuilt, error) {
	if cfg.VCPUs < 1 || cfg.VCPUs > boot.MaxVCPUs {
		return nil, fmt.Errorf("%w: %d vCPUs, use 1 to %d", ErrConfig, cfg.VCPUs, boot.MaxVCPUs)
	}
	if cfg.Memory == nil {
		return nil, fmt.Errorf("%w: it has no memory", ErrConfig)
	}
	if err := checkQueues(cfg.Queues); err != nil {
		return nil, err
	}
	s := &Prebuilt{cfg: cfg, took: map[Stage]time.Duration{}}
	s.done.Go(func() {
		s.err = s.build()
		s.ready.Store(true)
	})
	return s, nil
}

// Wait waits until the prebuilt VM is complete, or returns why it cannot be made.
func (s *Prebuilt) Wait() error {
	s.done.Wait()
	return s.err
}

// Ready reports whether making the prebuilt VM has ended, so that Wait returns at once.
func (s *Prebuilt) Ready() bool { return s.ready.Load() }

// Close waits until making the prebuilt VM has ended, and closes it.
func (s *Prebuilt) Close() error {
	s.done.Wait()
	s.loading.Lock()
	defer s.loading.Unlock()
	s.closed = true
	var errs []error
	for i := range s.wires {
		errs = append(errs, s.wires[i].close())
	}
	for _, v := range s.vcpus {
		errs = append(errs, v.Close())
	}
	if s.vm != nil {
		errs = append(errs, s.vm.Close())
	}
	if s.sys != nil {
		errs = append(errs, s.sys.Close())
	}
	s.wires, s.vcpus, s.vm, s.sys = nil, nil, nil, nil
	return errors.Join(errs...)
}

func (s *Prebuilt) build() (err error) {
	last := time.Now()
	mark := func(stage Stage) {
		now := time.Now()
		s.took[stage], last = now.Sub(last), now
	}
	if s.sys, err = kvm.Open(); err != nil {
		return err
	}
	if s.vm, err = s.sys.CreateVM(); err != nil {
		return err
	}
	mark(StageCreateVM)
	// Set memory before making the interrupt controllers. KVM puts those on its buses by deferred work, and a
	// change of memory slots waits 4 to 10 ms for that (Linux 6.18).
	if err := s.setMemory(); err != nil {
		return err
	}
	mark(StageMemory)
	if err := errors.Join(s.vm.SetTSSAddr(tssAddr), s.vm.SetIdentityMapAddr(identityMapAddr)); err != nil {
		return err
	}
	if err := s.vm.CreateIRQChip(); err != nil {
		return err
	}
	if err := s.vm.CreatePIT2(); err != nil {
		return err
	}
	if err := s.layAhead(); err != nil {
		return err
	}
	mark(StageIRQChip)
	supported, err := supportedCPUID()
	if err != nil {
		return err
	}
	if s.msrIndex, err = s.sys.MSRIndexList(); err != nil {
		return err
	}
	deadline := s.vm.Check(kvm.CapTSCDeadlineTimer) > 0
	for id := range s.cfg.VCPUs {
		v, err := s.vm.CreateVCPU(id)
		if err != nil {
			return err
		}
		s.vcpus = append(s.vcpus, v)
		s.cpuid = append(s.cpuid, guestCPUID(supported, id, s.cfg.VCPUs, deadline))
		// A machine that was saved on this host has the same CPUID.
		if err := v.SetCPUID(s.cpuid[id]); err != nil {
			return err
		}
	}
	s.tscKHz, _ = s.vcpus[0].TSCKHz()
	noteTSC(s.tscKHz, s.sys.Check(kvm.CapTSCControl) > 0)
	mark(StageVCPUs)
	return nil
}

// setMemory gives RAM to the VM, with a dirty log if the configuration asks for one.
//
// With KVM_DIRTY_LOG_MANUAL_PROTECT2 (api.rst 7.18) reading the log does not change it, so that it can be read
// while the guest runs. setMemory does not ask for KVM_DIRTY_LOG_INITIALLY_SET: the slots have their log from the
// start, when nothing is mapped and nothing needs protection, so a log that begins empty is complete. After a boot
// the log has the pages of zeros that the guest has written to; after a restore, the pages that differ from the
// snapshot.
func (s *Prebuilt) setMemory() error {
	flags := uint32(0)
	if s.cfg.TrackDirty {
		if s.vm.Check(kvm.CapManualDirtyLog)&kvm.DirtyLogManualProtect == 0 {
			return fmt.Errorf("tracking which pages change: %w: KVM lacks KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: use Linux 5.2 or later", ErrConfig)
		}
		if err := s.vm.EnableCap(kvm.CapManualDirtyLog, kvm.DirtyLogManualProtect); err != nil {
			return err
		}
		flags = kvm.MemLogDirtyPages
	}
	for i, slot := range s.cfg.Memory.Slots() {
		if err := s.vm.SetMemory(uint32(i), uint64(slot.GPA), slot.Size, slot.HVA, flags); err != nil {
			return err
		}
	}
	return nil
}
