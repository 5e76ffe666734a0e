package boot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Config is what Load loads.
type Config struct {
	// Kernel is the path of an ELF vmlinux or of a bzImage.
	Kernel string
	// Initramfs is the path of an archive for the kernel, or empty.
	Initramfs string
	// Open opens both; nil means os.Open.
	Open func(name string) (*os.File, error)
	// Cmdline is the kernel's command line, at most MaxCmdline bytes of ASCII.
	Cmdline string
	// Seed goes into the kernel's random number generator, at most 64 bytes; the kernel wipes it from memory. It
	// saves a guest without RDRAND most of the cost of waiting for entropy early in the boot.
	Seed []byte
	// VCPUs is the number of CPUs that the tables describe, 1 to MaxVCPUs.
	VCPUs int
	// Devices are the virtio devices that the ACPI tables describe.
	Devices []VirtioMMIO
	// Hardware is the other hardware that the tables describe.
	Hardware Hardware
}

// MaxVCPUs is the largest number of vCPUs of one VM.
const MaxVCPUs = 8

// VirtioMMIO is one virtio-mmio window with its interrupt line.
type VirtioMMIO struct {
	Base guestmem.GPA
	Size uint32
	GSI  uint32
}

// CmdlineParam returns the parameter that names the device on the command line of a kernel without ACPI
// (virtio_mmio.device=, Documentation/admin-guide/kernel-parameters.txt).
func (d VirtioMMIO) CmdlineParam() string {
	return fmt.Sprintf("virtio_mmio.device=%d@%#x:%d", d.Size, uint64(d.Base), d.GSI)
}

// Hardware is the hardware besides virtio devices that the ACPI tables describe. A zero port leaves the item out.
type Hardware struct {
	SerialPort   uint16 // 16550A, 8 ports
	SerialGSI    uint32
	ResetPort    uint16 // a write of ResetValue resets
	ResetValue   uint8
	SleepPort    uint16 // sleep control register; status is the next port
	PvpanicPort  uint16
	GenerationID guestmem.GPA // 16 bytes, the VM generation ID
	EventGSI     uint32       // raised when the generation ID has changed
}

// Entry is the state in which the first vCPU starts. All other general registers
// are zero.
type Entry struct {
	RIP, RSP, RSI uint64
	CR3           uint64
	GDT           uint64
	GDTLimit      uint16
}

// Load writes the kernel and its boot data into RAM and returns the state of the first vCPU.
func Load(mem *guestmem.Memory, c Config) (Entry, error) {
	if len(c.Cmdline) > MaxCmdline {
		return Entry{}, fmt.Errorf("kernel command line of %d bytes: the kernel takes %d: shorten it", len(c.Cmdline), MaxCmdline)
	}
	for i := 0; i < len(c.Cmdline); i++ {
		if c.Cmdline[i] < ' ' || c.Cmdline[i] > '~' {
			return Entry{}, fmt.Errorf("kernel command line has byte %#x at %d: use printable ASCII", c.Cmdline[i], i)
		}
	}
	if c.VCPUs < 1 || c.VCPUs > MaxVCPUs {
		return Entry{}, fmt.Errorf("%d vCPUs: use 1 to %d", c.VCPUs, MaxVCPUs)
	}
	open := c.Open
	if open == nil {
		open = os.Open
	}
	k, err := loadKernel(mem, c.Kernel, open)
	if err != nil {
		return Entry{}, err
	}
	initrd, initrdSize, err := loadInitramfs(mem, c.Initramfs, k.end, open)
	if err != nil {
		return Entry{}, err
	}
	rsdp, err := writeACPI(mem, c)
	if err != nil {
		return Entry{}, err
	}
	if err := errors.Join(
		writeMPTable(mem, c.VCPUs),
		mem.Write(cmdlineAddr, append([]byte(c.Cmdline), 0)),
		writeSeed(mem, c.Seed),
		writeZeroPage(mem, c, k, initrd, initrdSize, rsdp),
		writePageTables(mem),
		writeGDT(mem),
	); err != nil {
		return Entry{}, fmt.Errorf("writing boot tables: %w", err)
	}
	return Entry{
		RIP:      uint64(k.entry),
		RSP:      uint64(stackAddr),
		RSI:      uint64(zeroPageAddr),
		CR3:      uint64(pageTables),
		GDT:      uint64(gdtAddr),
		GDTLimit: uint16(len(gdt)*8 - 1),
	}, nil
}

// loadInitramfs loads the archive as high as low memory allows, page aligned.
func loadInitramfs(mem *guestmem.Memory, path string, kernelEnd guestmem.GPA,
	open func(string) (*os.File, error)) (guestmem.GPA, uint32, error) {
	if path == "" {
		return 0, 0, nil
	}
	f, err := open(path)
	if err != nil {
		return 0, 0, fmt.Errorf("opening the initramfs: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, 0, fmt.Errorf("opening the initramfs: %w", err)
	}
	size := uint64(st.Size())
	low := mem.Slots()[0].Size
	if !st.Mode().IsRegular() || size == 0 || size >= low {
		return 0, 0, fmt.Errorf("initramfs %s of %d bytes: %w", path, size, ErrNoRoom)
	}
	at := guestmem.GPA(low-size) &^ (guestmem.PageSize - 1)
	// Leave the kernel some room after its image, for its early allocations.
	if at < kernelEnd+(8<<20) {
		return 0, 0, fmt.Errorf("initramfs %s of %d MiB: %w: give it more memory", path, size>>20, ErrNoRoom)
	}
	if err := mem.FillFrom(at, int(size), f, 0); err != nil {
		return 0, 0, fmt.Errorf("reading the initramfs %s: %w", path, err)
	}
	return at, uint32(size), nil
}

// setup_data types (arch/x86/include/uapi/asm/setup_data.h).
const setupRNGSeed = 9

func writeSeed(mem *guestmem.Memory, seed []byte) error {
	if len(seed) == 0 {
		return nil
	}
	if len(seed) > 64 {
		return fmt.Errorf("random seed of %d bytes, at most 64", len(seed))
	}
	p := make([]byte, 16, 16+len(seed))
	binary.LittleEndian.PutUint32(p[8:], setupRNGSeed)
	binary.LittleEndian.PutUint32(p[12:], uint32(len(seed)))
	return mem.Write(setupAddr, append(p, seed...))
}

// E820 types.
const (
	e820RAM      = 1
	e820Reserved = 2
)

// Offsets in struct boot_params (Documentation/arch/x86/zero-page.rst).
const (
	bpACPIRSDP    = 0x070
	bpE820Entries = 0x1e8
	bpE820Table   = 0x2d0
	bpLoader      = 0x210
	bpLoadFlags   = 0x211
	bpRamdisk     = 0x218
	bpRamdiskSize = 0x21c
	bpCmdline     = 0x228
	bpAlignment   = 0x230
	bpCmdlineSize = 0x238
	bpSetupData   = 0x250
)

func writeZeroPage(mem *guestmem.Memory, c Config, k loaded, initrd guestmem.GPA, initrdSize uint32, rsdp guestmem.GPA) error {
	var p [4096]byte
	le := binary.LittleEndian
	if k.header != nil {
		copy(p[hdrSetupSects:], k.header)
	} else {
		le.PutUint16(p[hdrBootFlag:], 0xaa55)
		copy(p[hdrMagic:], "HdrS")
		le.PutUint16(p[hdrVersion:], 0x20f)
		le.PutUint32(p[bpAlignment:], 0x1000000)
	}
	p[bpLoader] = 0xff   // no assigned loader id
	p[bpLoadFlags] |= 1  // LOADED_HIGH
	p[bpLoadFlags] &^= 2 // no KASLR was done
	le.PutUint32(p[bpCmdline:], uint32(cmdlineAddr))
	le.PutUint32(p[bpCmdlineSize:], uint32(len(c.Cmdline)))
	le.PutUint32(p[bpRamdisk:], uint32(initrd))
	le.PutUint32(p[bpRamdiskSize:], initrdSize)
	if len(c.Seed) > 0 {
		le.PutUint64(p[bpSetupData:], uint64(setupAddr))
	} else {
		le.PutUint64(p[bpSetupData:], 0)
	}
	le.PutUint64(p[bpACPIRSDP:], uint64(rsdp))

	n := 0
	add := func(start, end guestmem.GPA, typ uint32) {
		e := p[bpE820Table+20*n:]
		le.PutUint64(e, uint64(start))
		le.PutUint64(e[8:], uint64(end-start))
		le.PutUint32(e[16:], typ)
		n++
	}
	add(0, mpTableAddr, e820RAM)
	add(mpTableAddr, ebdaEnd, e820Reserved)
	add(acpiAddr, acpiEnd, e820Reserved)
	for i, s := range mem.Slots() {
		start := s.GPA
		if i == 0 {
			start = highMemory
		}
		add(start, s.GPA+guestmem.GPA(s.Size), e820RAM)
	}
	p[bpE820Entries] = byte(n)
	return mem.Write(zeroPageAddr, p[:])
}

// writePageTables maps the first 4 GiB one to one with 2 MiB pages (SDM volume 3,
// 4.5).
func writePageTables(mem *guestmem.Memory) error {
	const (
		presentWritable = 0x3
		large           = 0x80
	)
	p := make([]byte, 6*4096)
	le := binary.LittleEndian
	le.PutUint64(p, uint64(pageTables)+4096|presentWritable)
	for i := range uint64(4) {
		le.PutUint64(p[4096+8*i:], uint64(pageTables)+(2+i)*4096|presentWritable)
		for j := range uint64(512) {
			le.PutUint64(p[(2+i)*4096+8*j:], (i*512+j)<<21|large|presentWritable)
		}
	}
	return mem.Write(pageTables, p)
}

// The descriptors that the boot protocol needs: flat code at selector 0x10, flat data at 0x18. VMX also needs a
// task state segment.
var gdt = [...]uint64{0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x008f8b000000ffff}

// Selectors of these descriptors.
const (
	SelectorCode = 0x10
	SelectorData = 0x18
	SelectorTSS  = 0x20
)

func writeGDT(mem *guestmem.Memory) error {
	var p []byte
	for _, d := range gdt {
		p = binary.LittleEndian.AppendUint64(p, d)
	}
	return mem.Write(gdtAddr, p)
}
