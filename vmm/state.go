package vmm

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// State is one named part of a saved machine.
type State struct {
	Name    string
	Payload devices.Payload
}

// Kinds of state that the machine itself has; devices have their own.
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
		data, err := c.kvm.Export(nil, c.cpuid, m.shell.msrIndex)
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
	for _, t := range m.virtio {
		p, err := t.Export()
		if err != nil {
			return nil, fmt.Errorf("saving %s: %w", t.name, err)
		}
		out = append(out, State{Name: deviceName(t.name), Payload: p})
	}
	return out, nil
}

// Facts says what the guest depends on of this host. It asks KVM nothing, which would
// have to wait for a vCPU that is in the guest to leave it: for ever, if that is idle.
func (m *Machine) Facts() HostFacts {
	return hostFacts(m.cpus[0].cpuid, m.tscKHz)
}

// readTSC notes the frequency of the guest's time stamp counter; 0 if the host cannot
// tell, as with one whose own is unstable.
func (m *Machine) readTSC() { m.tscKHz, _ = m.cpus[0].kvm.TSCKHz() }

// Import loads a saved machine into an empty one. RAM must have been given its content,
// or a pager that has it. Every part must be known, used and there exactly once;
// otherwise Import fails with devices.ErrPayload or kvm.ErrState, and the machine
// can only be closed.
func (m *Machine) Import(states []State) error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != empty {
		return fmt.Errorf("restoring: %w: the machine already has something to run", ErrConfig)
	}
	parts := make(map[string]devices.Payload, len(states))
	for _, s := range states {
		if _, twice := parts[s.Name]; twice {
			return fmt.Errorf("restoring: %w: %s is there twice", devices.ErrPayload, s.Name)
		}
		parts[s.Name] = s.Payload
	}
	take := func(name string) (devices.Payload, error) {
		p, ok := parts[name]
		if !ok {
			return p, fmt.Errorf("restoring: %w: %s is missing: the snapshot is of a machine with other devices or vCPUs", devices.ErrPayload, name)
		}
		delete(parts, name)
		return p, nil
	}
	data := func(name, kind string) ([]byte, error) {
		p, err := take(name)
		if err != nil {
			return nil, err
		}
		return p.Data, p.Check(kind, stateVersion)
	}
	for _, chip := range []uint32{kvm.ChipPICMaster, kvm.ChipPICSlave, kvm.ChipIOAPIC} {
		b, err := data(irqchipName(chip), kindIRQChip)
		if err != nil {
			return err
		}
		if err := m.vm.SetIRQChip(chip, b); err != nil {
			return err
		}
	}
	b, err := data("pit", kindPIT)
	if err != nil {
		return err
	}
	if err := m.vm.SetPIT(b); err != nil {
		return err
	}
	// Before the vCPUs: their TSCs are matched with each other as they are set.
	if b, err = data("clock", kindClock); err != nil {
		return err
	}
	if len(b) != 8 {
		return fmt.Errorf("restoring the clock: %w", devices.ErrPayload)
	}
	if err := m.vm.SetClock(binary.LittleEndian.Uint64(b)); err != nil {
		return err
	}
	// Older versions have saved none.
	if _, ok := parts["handover"]; ok {
		p, err := take("handover")
		if err != nil {
			return err
		}
		if err := m.handover.Import(p); err != nil {
			return fmt.Errorf("restoring: %w", err)
		}
	}
	m.quiet.on = m.handover.StandingBy()
	for _, c := range m.cpus {
		b, err := data(vcpuName(c.kvm.ID()), kindVCPU)
		if err != nil {
			return err
		}
		if err := c.restore(b); err != nil {
			return fmt.Errorf("restoring: %w", err)
		}
	}
	p, err := take("serial")
	if err != nil {
		return err
	}
	if err := m.serial.Import(p); err != nil {
		return fmt.Errorf("restoring the serial port: %w", err)
	}
	for _, t := range m.virtio {
		p, err := take(deviceName(t.name))
		if err != nil {
			return err
		}
		if err := t.Import(p); err != nil {
			return fmt.Errorf("restoring %s: %w", t.name, err)
		}
	}
	for name := range parts {
		return fmt.Errorf("restoring: %w: nothing takes %s: the snapshot is of a machine with other devices or vCPUs", devices.ErrPayload, name)
	}
	m.readTSC()
	m.stages.mark(StageImport)
	m.imported = true
	m.state = loaded
	return nil
}

func (c *cpu) restore(b []byte) error {
	cpuid, err := kvm.SavedCPUID(b)
	if err != nil {
		return err
	}
	c.cpuid = cpuid
	if c.putOff, err = c.kvm.Import(b, c.quietCycles()); err != nil {
		return err
	}
	if emulatedByTCG() {
		if err := makeTSSAvailable(c.kvm); err != nil {
			return err
		}
	}
	// So that the guest's soft-lockup watchdog does not take the sleep for a
	// lockup (api.rst 4.69). A guest without kvmclock refuses, and does not need it.
	_ = c.kvm.KVMClockCtrl()
	return nil
}
