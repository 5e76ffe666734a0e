package vmm

import (
	"crypto/rand"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/boot"
)

// The VM generation ID is 16 random bytes in the guest's RAM. The guest's kernel finds it by ACPI and reseeds its
// random number generator when it changes (Microsoft, "Virtual Machine Generation ID", 2012; drivers/virt/vmgenid.c
// of Linux 5.18 and later). That needs nothing in the guest's user space.
const (
	generationName = "generation"
	kindGeneration = "generation-id"
	generationSize = 16
	// generationGSI is the line of a second serial port, which no machine has.
	generationGSI = 3
)

// NewGeneration tells the guest of a saved machine, before its start, that it is a clone or has gone back in time:
// before its first instruction the VM generation ID has changed and an interrupt about that is pending. It does
// nothing to a guest without an ID, because it was booted without ACPI or by an older version of drowse.
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
	rand.Read(id) // never fails
	if err := m.mem.Write(boot.GenerationIDAddr, id); err != nil {
		return fmt.Errorf("writing the VM generation ID: %w", err)
	}
	return nil
}

// exportGeneration returns the state of a guest that has an ID: only the ID's address. The ID itself is in RAM.
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
