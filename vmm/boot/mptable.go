package boot

import (
	"encoding/binary"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// writeMPTable describes CPUs and interrupts to kernels without ACPI (Intel
// MultiProcessor Specification 1.4, chapter 4).
func writeMPTable(mem *guestmem.Memory, vcpus int) error {
	const (
		processor = 0
		bus       = 1
		ioapic    = 2
		interrupt = 3
		local     = 4

		lapicVersion = 0x14
		ioapicVer    = 0x11
		enabled      = 1
		bootCPU      = 2
	)
	le := binary.LittleEndian
	ioapicID := byte(vcpus)
	var t []byte
	entries := uint16(0)
	add := func(b ...byte) { t, entries = append(t, b...), entries+1 }

	for i := range vcpus {
		flags := byte(enabled)
		if i == 0 {
			flags |= bootCPU
		}
		// Kernels ignore signature and features when CPUID exists.
		add(processor, byte(i), lapicVersion, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	add(append([]byte{bus, 0}, "ISA   "...)...)
	add(le.AppendUint32([]byte{ioapic, ioapicID, ioapicVer, enabled}, ioapicAddr)...)
	for pin := range byte(IOAPICPins) {
		// Edge triggered, active high, as irqfd raises them.
		add(interrupt, 0, 0x5, 0, 0, pin, ioapicID, pin)
	}
	add(local, 3, 0, 0, 0, 0, 0xff, 0) // ExtINT on LINT0
	add(local, 1, 0, 0, 0, 0, 0xff, 1) // NMI on LINT1

	h := make([]byte, 44)
	copy(h, "PCMP")
	le.PutUint16(h[4:], uint16(44+len(t)))
	h[6] = 4 // revision 1.4
	copy(h[8:], "DROWSE  ")
	copy(h[16:], "MICROVM     ")
	le.PutUint16(h[34:], entries)
	le.PutUint32(h[36:], lapicAddr)
	table := append(h, t...)
	table[7] = checksum(table)

	fp := make([]byte, 16)
	copy(fp, "_MP_")
	le.PutUint32(fp[4:], uint32(mpTableAddr)+16)
	fp[8] = 1 // 16 bytes long
	fp[9] = 4
	fp[10] = checksum(fp)
	return mem.Write(mpTableAddr, append(fp, table...))
}

// checksum returns the byte that makes the sum of all bytes zero.
func checksum(p []byte) byte {
	var sum byte
	for _, b := range p {
		sum += b
	}
	return -sum
}
