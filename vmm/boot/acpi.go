package boot

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ACPI tables, after the ACPI specification 6.5, chapters 5 (tables), 6.4 (resource descriptors) and 20 (AML). The
// machine is hardware-reduced: no PM timer, no SCI, no FACS. The FADT names the registers for reset and power-off.

func writeACPI(mem *guestmem.Memory, c Config) (guestmem.GPA, error) {
	const xsdtAddr = acpiAddr + 64 // after the RSDP
	at := xsdtAddr + 36 + 8*2
	at = (at + 15) &^ 15
	var tables []byte
	place := func(t []byte) guestmem.GPA {
		start := at + guestmem.GPA(len(tables))
		tables = append(tables, t...)
		for len(tables)%16 != 0 {
			tables = append(tables, 0)
		}
		return start
	}
	dsdtAddr := place(dsdt(c))
	fadtAddr := place(fadt(dsdtAddr, c.Hardware))
	madtAddr := place(madt(c.VCPUs))

	le := binary.LittleEndian
	var entries []byte
	entries = le.AppendUint64(entries, uint64(fadtAddr))
	entries = le.AppendUint64(entries, uint64(madtAddr))
	xsdt := table("XSDT", 1, entries)

	rsdp := make([]byte, 36)
	copy(rsdp, "RSD PTR ")
	copy(rsdp[9:], oemID)
	rsdp[15] = 2
	le.PutUint32(rsdp[20:], 36)
	le.PutUint64(rsdp[24:], uint64(xsdtAddr))
	rsdp[8] = checksum(rsdp[:20])
	rsdp[32] = checksum(rsdp)

	if end := at + guestmem.GPA(len(tables)); end > acpiEnd || end > generationIDFloor && c.Hardware.GenerationID != 0 {
		return 0, fmt.Errorf("ACPI tables of %d bytes are too large: use fewer devices", len(tables))
	}
	for _, w := range []struct {
		at guestmem.GPA
		p  []byte
	}{{acpiAddr, rsdp}, {xsdtAddr, xsdt}, {at, tables}} {
		if err := mem.Write(w.at, w.p); err != nil {
			return 0, fmt.Errorf("writing ACPI tables: %w", err)
		}
	}
	return acpiAddr, nil
}

// GenerationIDAddr is an address for the VM generation ID: a page of its own in reserved memory.
const GenerationIDAddr guestmem.GPA = 0xff000

const generationIDFloor = GenerationIDAddr

const oemID = "DROWSE"

// table puts the common header before a table's body (ACPI 5.2.6).
func table(signature string, revision byte, body []byte) []byte {
	t := make([]byte, 36, 36+len(body))
	copy(t, signature)
	t = append(t, body...)
	binary.LittleEndian.PutUint32(t[4:], uint32(len(t)))
	t[8] = revision
	copy(t[10:], oemID)
	copy(t[16:], "MICROVM ")
	binary.LittleEndian.PutUint32(t[24:], 1)
	copy(t[28:], "DRWS")
	binary.LittleEndian.PutUint32(t[32:], 1)
	t[9] = checksum(t)
	return t
}

// gas returns a Generic Address Structure for an I/O port of one byte (ACPI 5.2.3.2).
func gas(port uint16) []byte {
	if port == 0 {
		return make([]byte, 12)
	}
	return binary.LittleEndian.AppendUint64([]byte{1, 8, 0, 1}, uint64(port))
}

func fadt(dsdt guestmem.GPA, h Hardware) []byte {
	const (
		size = 276
		head = 36

		flagWBINVD          = 1 << 0
		flagPowerButton     = 1 << 4 // no fixed power button
		flagSleepButton     = 1 << 5
		flagResetSupported  = 1 << 10
		flagHardwareReduced = 1 << 20

		bootNoVGA = 1 << 2
		bootNoRTC = 1 << 5
	)
	b := make([]byte, size)
	le := binary.LittleEndian
	le.PutUint16(b[109:], bootNoVGA|bootNoRTC)
	flags := uint32(flagWBINVD | flagPowerButton | flagSleepButton | flagHardwareReduced)
	if h.ResetPort != 0 {
		flags |= flagResetSupported
	}
	le.PutUint32(b[112:], flags)
	copy(b[116:], gas(h.ResetPort))
	b[128] = h.ResetValue
	b[131] = 5 // minor version: 6.5
	le.PutUint64(b[140:], uint64(dsdt))
	if h.SleepPort != 0 {
		copy(b[244:], gas(h.SleepPort))
		copy(b[256:], gas(h.SleepPort+1))
	}
	return table("FACP", 6, b[head:])
}

func madt(vcpus int) []byte {
	le := binary.LittleEndian
	var b []byte
	b = le.AppendUint32(b, lapicAddr)
	b = le.AppendUint32(b, 1) // PCAT_COMPAT: there are also PICs
	for i := range vcpus {
		const enabled = 1
		b = append(b, 0, 8, byte(i), byte(i))
		b = le.AppendUint32(b, enabled)
	}
	b = append(b, 1, 12, byte(vcpus), 0)
	b = le.AppendUint32(b, ioapicAddr)
	b = le.AppendUint32(b, 0) // its first GSI
	// NMI on LINT1 of all CPUs.
	b = append(b, 4, 6, 0xff, 0, 0, 1)
	return table("APIC", 5, b)
}

func dsdt(c Config) []byte {
	h := c.Hardware
	var devs []byte
	for i, d := range c.Devices {
		devs = append(devs, amlDevice(fmt.Sprintf("VR%02X", i),
			amlName("_HID", amlString("LNRO0005")),
			amlName("_UID", amlInt(uint64(i))),
			amlName("_CCA", amlInt(1)),
			amlName("_CRS", amlResources(memory32(uint32(d.Base), d.Size), edge(d.GSI))),
		)...)
	}
	if h.SerialPort != 0 {
		devs = append(devs, amlDevice("COM1",
			amlName("_HID", amlInt(uint64(eisaID("PNP0501")))),
			amlName("_UID", amlInt(0)),
			amlName("_CRS", amlResources(ioPorts(h.SerialPort, 8), edge(h.SerialGSI))),
		)...)
	}
	if h.PvpanicPort != 0 {
		devs = append(devs, amlDevice("PVPN",
			amlName("_HID", amlString("QEMU0001")),
			amlName("_STA", amlInt(0xb)),
			amlName("_CRS", amlResources(ioPorts(h.PvpanicPort, 1))),
		)...)
	}
	if h.GenerationID != 0 {
		// A Generic Event Device notifies the guest (ACPI 5.6.9), since a hardware-reduced machine has no GPEs.
		devs = append(devs, amlDevice("VGEN",
			amlName("_HID", amlString("DRWSVGEN")),
			amlName("_CID", amlString("VM_Gen_Counter")),
			amlName("_DDN", amlString("VM_Gen_Counter")),
			amlName("ADDR", amlPackage(amlInt(uint64(h.GenerationID)&0xffffffff), amlInt(uint64(h.GenerationID)>>32))),
		)...)
		devs = append(devs, amlDevice("GED_",
			amlName("_HID", amlString("ACPI0013")),
			amlName("_UID", amlInt(0)),
			amlName("_CRS", amlResources(edge(h.EventGSI))),
			amlMethod("_EVT", 1, true, amlNotify(`\_SB_VGEN`, 0x80)),
		)...)
	}
	body := amlScope(`\_SB_`, devs)
	// S5: soft off. SLP_TYP 5.
	if h.SleepPort != 0 {
		body = append(body, amlName("_S5_", amlPackage(amlInt(5), amlInt(0), amlInt(0), amlInt(0)))...)
	}
	return table("DSDT", 6, body)
}
