package boot

import "github.com/drowse-vm/drowse/vmm/guestmem"

// The layout of the first megabyte. The kernel starts with these areas in use, and copies what it needs before it
// reuses the space.
const (
	gdtAddr      guestmem.GPA = 0x500
	zeroPageAddr guestmem.GPA = 0x7000
	stackAddr    guestmem.GPA = 0x8ff0
	pageTables   guestmem.GPA = 0x9000 // PML4, PDPT and four page directories
	cmdlineAddr  guestmem.GPA = 0x20000
	setupAddr    guestmem.GPA = 0x21000
	mpTableAddr  guestmem.GPA = 0x9fc00 // the EBDA, one of the places kernels search
	ebdaEnd      guestmem.GPA = 0xa0000
	acpiAddr     guestmem.GPA = 0xe0000 // the BIOS area, where kernels search for the RSDP
	acpiEnd      guestmem.GPA = 0x100000
	highMemory   guestmem.GPA = 0x100000
)

// MaxCmdline is the longest kernel command line in bytes, without the final zero:
// COMMAND_LINE_SIZE of x86 is 2048.
const MaxCmdline = 2047

// MMIOBase is the address of the first virtio-mmio window: above RAM, in the hole below 4 GiB.
const MMIOBase guestmem.GPA = 0xd0000000

// MMIOStride is the distance between virtio-mmio windows, in bytes.
const MMIOStride = 0x1000

// The interrupt controllers' usual addresses, in the same hole.
const (
	ioapicAddr = 0xfec00000
	lapicAddr  = 0xfee00000
)

// IOAPICPins is the number of interrupt lines for devices.
const IOAPICPins = 24
