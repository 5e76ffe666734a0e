package vmm

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// State is one named part of a saved machine.
type State struct {
	Name    string
	Payload devices.Payload
}

// Kinds of state of the machine itself; devices have their own kinds.
const (
	kindVCPU    = "kvm-vcpu"
	kindIRQChip = "kvm-irqchip"
	kindPIT     = "kvm-pit"
	kindClock   = "kvm-clock"

	stateVersion = 1
)

func vcpuName(id int) string         { return fmt.Sprintf("vcpu/%d", id) }
func deviceName(name string) string  { return "device/" + name }
func irqchipName(chip uint32) string { return fmt.Sprintf("irqchip/%d", chip) }

// Export returns the state of a paused machine, without its RAM and disks.
func (m *Machine) Export() ([]State, error) {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != paused {
		return nil, fmt.Errorf("saving the machine: %w", ErrNotPaused)
	}
	var out []State
	add := func(name, kind string, data []byte) {
		out = append(out, State{Name: name, Payload: devices.Payload{Kind: kind, Version: stateVersion, Data: data}})
	}
	for _, c := range m.cpus {
		data, err := c.kvm.Export(nil, m.prebuilt.cpuid[c.kvm.ID()], m.prebuilt.msrIndex)
		if err != nil {
			return nil, fmt.Errorf("saving vCPU %d: %w", c.kvm.ID(), err)
		}
		add(vcpuName(c.kvm.ID()), kindVCPU, data)
	}
	for _, chip := range []uint32{kvm.ChipPICMaster, kvm.ChipPICSlave, kvm.ChipIOAPIC} {
		data, err := m.vm.IRQChip(chip, nil)
		if err != nil {
			return nil, err
		}
		add(irqchipName(chip), kindIRQChip, data)
	}
	pit, err := m.vm.PIT(nil)
	if err != nil {
		return nil, err
	}
	add("pit", kindPIT, pit)
	clock, err := m.vm.Clock()
	if err != nil {
		return nil, err
	}
	add("clock", kindClock, binary.LittleEndian.AppendUint64(nil, clock))
	p, err := m.serial.Export()
	if err != nil {
		return nil, fmt.Errorf("saving the serial port: %w", err)
	}
	out = append(out, State{Name: "serial", Payload: p})
	if p, err = m.handover.Export(); err != nil {
		return nil, fmt.Errorf("saving the handover ports: %w", err)
	}
	out = append(out, State{Name: "handover", Payload: p})
	if m.generation {
		out = append(out, m.exportGeneration())
	}
	for _, t := range m.virtio {
		p, err := t.Export()
		if err != nil {
			return nil, fmt.Errorf("saving %s: %w", t.name, err)
		}
		out = append(out, State{Name: deviceName(t.name), Payload: p})
	}
	return out, nil
}

// Facts returns what the guest depends on of this host. It does not ask KVM, because that would have to wait until
// a vCPU leaves the guest: forever, if the vCPU is idle.
func (m *Machine) Facts() HostFacts {
	return hostFacts(m.prebuilt.cpuid[0], m.prebuilt.tscKHz)
}

// savedParts are the parts of a saved machine that have not been used yet.
type savedParts map[string]devices.Payload

func partsOf(states []State) (savedParts, error) {
	parts := make(savedParts, len(states))
	for _, s := range states {
		if _, twice := parts[s.Name]; twice {
			return nil, fmt.Errorf("%w: %s is there twice", devices.ErrPayload, s.Name)
		}
		parts[s.Name] = s.Payload
	}
	return parts, nil
}

func (parts savedParts) take(name string) (devices.Payload, error) {
	p, ok := parts[name]
	if !ok {
		return p, fmt.Errorf("%w: %s is missing: the snapshot is of a machine with other devices or vCPUs", devices.ErrPayload, name)
	}
	delete(parts, name)
	return p, nil
}

func (parts savedParts) data(name, kind string) ([]byte, error) {
	p, err := parts.take(name)
	if err != nil {
		return nil, err
	}
	return p.Data, p.Check(kind, stateVersion)
}

// loadedState is the part of a saved machine that a prebuilt VM has loaded.
type loadedState struct {
	// rest are the parts for the devices.
	rest savedParts
	// quiet reports that the machine must begin quiet. putOff is what Import has put off of each vCPU's timer.
	quiet  bool
	putOff []kvm.PutOff
	took   time.Duration
}

// Load loads the KVM part of a saved machine into an empty prebuilt VM: the interrupt controllers, timers, clock
// and vCPUs. Machine.Import loads the rest. Load waits for the prebuilt VM. It may run while New makes a machine
// from it and the caller makes devices, but the machine must do nothing before Load has returned. RAM must already
// have its content, or a pager that provides it. After an error the prebuilt VM can only be closed.
func (s *Prebuilt) Load(states []State) error {
	if err := s.Wait(); err != nil {
		return err
	}
	s.loading.Lock()
	defer s.loading.Unlock()
	return s.load(states)
}

// saved returns what Load has loaded of a saved machine. It loads it if Load has not been called.
func (s *Prebuilt) saved(states []State) (*loadedState, error) {
	s.loading.Lock()
	defer s.loading.Unlock()
	if s.loaded != nil {
		return s.loaded, nil
	}
	err := s.load(states)
	return s.loaded, err
}

// empty reports that no loading has begun.
func (s *Prebuilt) empty() bool {
	s.loading.Lock()
	defer s.loading.Unlock()
	return !s.begun
}

// load is Load for a caller that holds the lock.
func (s *Prebuilt) load(states []State) error {
	if s.closed || s.begun {
		return fmt.Errorf("restoring: %w: what KVM has of it is closed, or has had a state loaded", ErrConfig)
	}
	s.begun = true
	begin := time.Now()
	l, err := s.loadState(states)
	if err != nil {
		return fmt.Errorf("restoring: %w", err)
	}
	l.took = time.Since(begin)
	s.loaded = l
	return nil
}

// kvmState is the part of a saved machine that belongs to KVM.
type kvmState struct {
	chips [chips][]byte
	pit   []byte
	clock uint64
	vcpus [][]byte
	// standing reports that the guest's agent stands by.
	standing bool
}

// chips is the number of interrupt controllers that have a state, numbered from 0.
const chips = kvm.ChipIOAPIC + 1

// kvmStateOf takes the KVM state from parts, for a machine with this number of vCPUs. On success everything is
// present, with the right kinds and sizes.
func kvmStateOf(parts savedParts, vcpus int) (k kvmState, err error) {
	for chip := range k.chips {
		if k.chips[chip], err = parts.data(irqchipName(uint32(chip)), kindIRQChip); err != nil {
			return k, err
		}
		if len(k.chips[chip]) != kvm.ChipSize {
			return k, fmt.Errorf("interrupt controller %d: %w", chip, devices.ErrPayload)
		}
	}
	if k.pit, err = parts.data("pit", kindPIT); err != nil {
		return k, err
	}
	if len(k.pit) != kvm.PITSize {
		return k, fmt.Errorf("the PIT: %w", devices.ErrPayload)
	}
	clock, err := parts.data("clock", kindClock)
	if err != nil {
		return k, err
	}
	if len(clock) != 8 {
		return k, fmt.Errorf("the clock: %w", devices.ErrPayload)
	}
	k.clock = binary.LittleEndian.Uint64(clock)
	// Older versions did not save it.
	if p, ok := parts["handover"]; ok {
		if k.standing, err = handover.Standing(p); err != nil {
			return k, err
		}
	}
	for id := range vcpus {
		b, err := parts.data(vcpuName(id), kindVCPU)
		if err == nil {
			err = kvm.CheckSaved(b)
		}
		if err == nil {
			err = checkGuestCPUID(b)
		}
		if err != nil {
			return k, err
		}
		k.vcpus = append(k.vcpus, b)
	}
	return k, nil
}

func (s *Prebuilt) loadState(states []State) (*loadedState, error) {
	parts, err := partsOf(states)
	if err != nil {
		return nil, err
	}
	saved, err := kvmStateOf(parts, len(s.vcpus))
	if err != nil {
		return nil, err
	}
	l := &loadedState{rest: parts, quiet: saved.standing}
	for chip, b := range saved.chips {
		if err := s.vm.SetIRQChip(uint32(chip), b); err != nil {
			return nil, err
		}
	}
	if err := s.vm.SetPIT(saved.pit); err != nil {
		return nil, err
	}
	// Set the clock before the vCPUs: KVM matches their TSCs with each other as it sets them.
	if err := s.vm.SetClock(saved.clock); err != nil {
		return nil, err
	}
	var quiet uint64
	if l.quiet {
		quiet = s.tscKHz * uint64(quietMost/time.Millisecond)
	}
	for id, v := range s.vcpus {
		b := saved.vcpus[id]
		if s.cpuid[id], err = kvm.SavedCPUID(b); err != nil {
			return nil, err
		}
		off, err := restoreVCPU(v, b, quiet)
		if err != nil {
			return nil, err
		}
		l.putOff = append(l.putOff, off)
	}
	for _, v := range s.vcpus {
		for _, gpa := range v.SavedClockPages() {
			// ImportClock will need this page. A pager loads it here at once; there this thread would wait for
			// another thread of the pager. If the page cannot be loaded, KVM will report that.
			_ = s.cfg.Memory.Read(guestmem.GPA(gpa), make([]byte, 1))
		}
	}
	s.tscKHz, _ = s.vcpus[0].TSCKHz()
	return l, nil
}

func restoreVCPU(v *kvm.VCPU, b []byte, quiet uint64) (kvm.PutOff, error) {
	off, err := v.Import(b, quiet)
	if err == nil && emulatedByTCG() {
		err = makeTSSAvailable(v)
	}
	return off, err
}

// restoreClock is the last step of a restore: KVM needs pages of RAM for it, which a pager loads meanwhile.
func restoreClock(v *kvm.VCPU) error {
	if err := v.ImportClock(); err != nil {
		return err
	}
	// This keeps the guest's soft-lockup watchdog from taking the sleep for a lockup (api.rst 4.69). A guest
	// without kvmclock refuses the call and does not need it.
	_ = v.KVMClockCtrl()
	return nil
}

// Import loads a saved machine into an empty one: all of states but what the prebuilt VM has already loaded. RAM
// must already have its content, or a pager that provides it. Every part must be known, used and present exactly
// once. Otherwise Import fails with devices.ErrPayload or kvm.ErrState, and the machine can only be closed.
func (m *Machine) Import(states []State) error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != empty {
		return fmt.Errorf("restoring: %w: the machine already has something to run", ErrConfig)
	}
	saved, err := m.prebuilt.saved(states)
	if err != nil {
		return err
	}
	if err := m.importDevices(saved.rest); err != nil {
		return fmt.Errorf("restoring: %w", err)
	}
	m.quiet.on = saved.quiet
	for i, c := range m.cpus {
		c.putOff = saved.putOff[i]
		if err := restoreClock(c.kvm); err != nil {
			return fmt.Errorf("restoring: %w", err)
		}
	}
	m.stages.set(StageKVMState, saved.took)
	m.stages.mark(StageImport)
	m.imported = true
	m.state = loaded
	return nil
}

// importDevices loads the state of everything outside KVM.
func (m *Machine) importDevices(parts savedParts) error {
	// Older versions did not save it.
	if _, ok := parts["handover"]; ok {
		p, err := parts.take("handover")
		if err != nil {
			return err
		}
		if err := m.handover.Import(p); err != nil {
			return err
		}
	}
	if p, ok := parts[generationName]; ok {
		delete(parts, generationName)
		if err := m.importGeneration(p); err != nil {
			return err
		}
	}
	p, err := parts.take("serial")
	if err != nil {
		return err
	}
	if err := m.serial.Import(p); err != nil {
		return fmt.Errorf("the serial port: %w", err)
	}
	for _, t := range m.virtio {
		p, err := parts.take(deviceName(t.name))
		if err != nil {
			return err
		}
		if err := t.Import(p); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	for name := range parts {
		return fmt.Errorf("%w: nothing takes %s: the snapshot is of a machine with other devices or vCPUs", devices.ErrPayload, name)
	}
	return nil
}
