// Where things lie in the guest's RAM. hostileguest_test.go has the same figures.

#define BOOT_TABLES	0x9000		// of package vmm/boot: one PML4, one PDPT, four page directories
#define TABLES_SIZE	0x6000
#define TRAMPOLINE	0x10000		// below 1 MiB, page aligned

// Addresses and page numbers that are round are what a request names by chance.
#define CODE		0x12a7000		// as in guest.ld
#define CONTROL		0x12e3000	// struct control
#define CONTROL_FAULTS	32
#define RINGS		0x1313000	// RING_SIZE for each queue of each device
#define RING_SIZE	0x10000
#define ARENA		0x1800000	// buffers, to the end of RAM
#define RAM_END		0x4000000

#define WINDOWS		0xd0000000u	// of the devices' registers
#define WINDOW_SIZE	0x1000
