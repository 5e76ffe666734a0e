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

// PrebuiltConfig says what KVM is to have ready of a machine.
type PrebuiltConfig struct {
	// VCPUs is 1 to boot.MaxVCPUs.
	VCPUs int
	// Memory is the guest's RAM. It stays the caller's, who closes it after the
	// prebuilt VM or the machine: devices and a pager are made with it before.
	Memory *guestmem.Memory
	// TrackDirty keeps a log of changed pages, for Machine.TakeDirty. The guest pays
	// for it: the first write to each page after TakeDirty leaves it for KVM, and
	// KVM maps RAM in pages of 4 KiB only.
	TrackDirty bool
	// Queues are how many queues the machine's devices will have, in their order, as far as that is known: their
	// eventfds are made ahead. A device may turn out to have more, or fewer, and there may be more devices, up to
	// MaxDevices.
	Queues []int
}

// Prebuilt is what KVM has of a machine: the VM with its RAM, interrupt controllers and
// vCPUs, without devices and with nothing to run. It is made in the background, since the
// time for it follows the size of RAM (KVM allocates its records of all pages at once, on
// hosts that shadow the guest's page tables), and who wants a machine has other things to
// do meanwhile. It belongs to one goroutine, which gives it to New or closes it; Load may go on beside that.
type Prebuilt struct {
	cfg      PrebuiltConfig
	sys      *kvm.System
	vm       *kvm.VM
	vcpus    []*kvm.VCPU
	cpuid    [][]kvm.CPUIDEntry // what each vCPU shows
	msrIndex []uint32
	// tscKHz is the frequency of the guest's time stamp counter; 0 if the host cannot tell, as with one whose own is
	// unstable.
	tscKHz uint64
	wires  []wires // by place
	// took is what each step took.
	took  map[Stage]time.Duration
	done  sync.WaitGroup
	ready atomic.Bool
	err   error

	// loading is held by Load and Close, and guards what follows.
	loading sync.Mutex
	closed  bool
	// begun says that a saved machine has begun to be loaded, and loaded what of it is in the prebuilt VM, nil if that has
	// failed.
	begun  bool
	loaded *loadedState
}

// NewPrebuilt begins to make one and does not wait for it.
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

// Wait returns when the prebuilt VM is complete, or why it cannot be had.
func (s *Prebuilt) Wait() error {
	s.done.Wait()
	return s.err
}

// Ready says whether the prebuilt VM is complete, so that Wait returns at once.
func (s *Prebuilt) Ready() bool { return s.ready.Load() }

// Close gives the prebuilt VM back.
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
	// Memory before the interrupt controllers: they are put on KVM's buses by deferred
	// work, which a change of memory slots waits for, 4 to 10 ms (Linux 6.18).
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
		// What a saved machine of this host has, too.
		if err := v.SetCPUID(s.cpuid[id]); err != nil {
			return err
		}
	}
	s.tscKHz, _ = s.vcpus[0].TSCKHz()
	noteTSC(s.tscKHz, s.sys.Check(kvm.CapTSCControl) > 0)
	mark(StageVCPUs)
	return nil
}

// setMemory gives RAM to the VM, with a dirty log if that is wanted.
//
// With KVM_DIRTY_LOG_MANUAL_PROTECT2 (api.rst 7.18) reading the log does not change
// it, so that it can be looked at while the guest runs. KVM_DIRTY_LOG_INITIALLY_SET
// is not asked for: the slots have their log from the first moment, when nothing is
// mapped and nothing has to be protected, so a log that begins empty is complete.
// After a boot it has what the guest has written to RAM that was zeros, after a
// restore what differs from the snapshot.
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
