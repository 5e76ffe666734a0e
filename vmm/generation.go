package vmm

import (
	"crypto/rand"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/boot"
)

// The VM generation ID is 16 random bytes of the guest's RAM. Its kernel renews its random numbers when they have
// changed, and finds them by ACPI (Microsoft, "Virtual Machine Generation ID", 2012; drivers/virt/vmgenid.c of Linux
// 5.18 and later). Nothing in the guest's user space has to run for that.
const (
	generationName = "generation"
	kindGeneration = "generation-id"
	generationSize = 16
	// generationGSI is that of a second serial port, which no machine has.
	generationGSI = 3
)

// NewGeneration has the guest of a saved machine that is yet to be started find itself a clone, or gone back in time:
// it has another VM generation ID, and an interrupt about that is pending, before its first instruction. It does
// nothing to a guest that has no such ID, since it was booted without ACPI or by a version of drowse without it.
func (m *Machine) NewGeneration() error {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != loaded || !m.imported {
		return fmt.Errorf("renewing the VM generation ID: %w: the machine is not a saved one that waits for its start", ErrConfig)
	}
	if !m.generation {
		return nil
	}
	if err := m.newGeneration(); err != nil {
		return err
	}
	for _, level := range []bool{true, false} { // an edge
		if err := m.vm.IRQLine(generationGSI, level); err != nil {
			return fmt.Errorf("telling the guest of its new VM generation ID: %w", err)
		}
	}
	return nil
}

func (m *Machine) newGeneration() error {
	id := make([]byte, generationSize)
	rand.Read(id) // which never fails
	if err := m.mem.Write(boot.GenerationIDAddr, id); err != nil {
		return fmt.Errorf("writing the VM generation ID: %w", err)
	}
	return nil
}

// exportGeneration is what is saved of a guest that has an ID: that it has one, and where. The ID itself is in RAM.
func (m *Machine) exportGeneration() State {
	var e devices.Encoder
	e.Uint64(uint64(boot.GenerationIDAddr))
	return State{Name: generationName, Payload: e.Payload(kindGeneration, stateVersion)}
}

func (m *Machine) importGeneration(p devices.Payload) error {
	d := p.Decode(kindGeneration, stateVersion)
	at := d.Uint64()
	if err := d.Finish(); err != nil {
		return fmt.Errorf("the VM generation ID: %w", err)
	}
	if at != uint64(boot.GenerationIDAddr) {
		return fmt.Errorf("the VM generation ID: %w: it is at %#x, not at %#x", devices.ErrPayload, at, boot.GenerationIDAddr)
	}
	m.generation = true
	return nil
}
