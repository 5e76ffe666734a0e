// The two programs of the hostile guest: vCPU 0 runs feed, which drives the queues of every device with malformed chains and
// lying requests, and vCPU 1 runs mutate, which meanwhile changes rings, descriptors, registers and ports under the devices.
// Neither waits for anything or believes anything. Numbers of registers, offsets and operations are those of virtio 1.2.

#include "layout.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define MAX_DEVICES	16
#define MAX_QUEUES	4
#define MAX_SIZE	1024
#define KINDS		32

#define offsetof(t, f)	__builtin_offsetof(t, f)

// What the host reads, and sets before it starts the guest.
struct control {
	u64 magic;		// set by the guest when it has found its devices
	u64 seed;		// set by the host, not zero
	u64 deadly;		// set by the host: one of so many actions may end the guest; 0: none
	u64 storm;		// set by the host: of so many turns all but one publish nothing but malformed chains; 0: none
	u64 faults;		// exceptions, and 2 for the start
	u64 turns[2];		// of each vCPU
	u64 kinds[KINDS];	// chains by the kind of what is wrong with them
	u64 refused;		// features that a device did not accept
	u64 strings;		// string instructions on ports and registers
	struct {
		u64 id;
		u64 queues;
		u64 starts;	// DRIVER_OK
		u64 resets;
		u64 chains;	// published
		u64 kicks;
		u64 mutations;	// of rings, descriptors and tables
		u64 registers;	// accesses
	} device[MAX_DEVICES];
	u64 ports;
};

_Static_assert(offsetof(struct control, faults) == CONTROL_FAULTS, "start.S counts faults");

#define control ((volatile struct control *)CONTROL)
#define MAGIC	0x656c6974736f68	// "hostile"

// struct virtq_desc.
struct desc {
	u64 addr;
	u32 len;
	u16 flags;
	u16 next;
};
enum { NEXT = 1, WRITE = 2, INDIRECT = 4 };

// Offsets in the ring area of a queue.
enum { DESC = 0, AVAIL = 0x4000, USED = 0x5000, TABLE = 0x8000 };
#define TABLE_ENTRIES	(0x8000 / 16)

enum {
	R_MAGIC = 0x000, R_DEVICE_ID = 0x008, R_DEVICE_FEATURES = 0x010, R_DEVICE_FEATURES_SEL = 0x014, R_DRIVER_FEATURES = 0x020,
	R_DRIVER_FEATURES_SEL = 0x024, R_QUEUE_SEL = 0x030, R_QUEUE_NUM_MAX = 0x034, R_QUEUE_NUM = 0x038, R_QUEUE_READY = 0x044,
	R_QUEUE_NOTIFY = 0x050, R_INTERRUPT_ACK = 0x064, R_STATUS = 0x070, R_QUEUE_DESC = 0x080, R_QUEUE_DRIVER = 0x090,
	R_QUEUE_DEVICE = 0x0a0, R_CONFIG = 0x100, R_END = 0x200,
};
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4, FEATURES_OK = 8, NEEDS_RESET = 64 };

enum { NET = 1, BLOCK = 2, ENTROPY = 4, BALLOON = 5, VSOCK = 19, FS = 26 };

struct queue {
	u16 max, size;
	u16 avail;	// the next index
	u16 seen;	// used index, as of the last look
	u16 stalled;	// looks that have seen no change
	u8 ready;
};
static struct device {
	u32 id;
	u32 queues;
	u8 live;
	struct queue queue[MAX_QUEUES];
} device[MAX_DEVICES];
static u32 devices;

// Each vCPU has random numbers of its own (xorshift64*).
struct rand { u64 s; };
static struct rand rand0, rand1;

static u64 next(struct rand *r)
{
	r->s ^= r->s >> 12;
	r->s ^= r->s << 25;
	r->s ^= r->s >> 27;
	return r->s * 0x2545f4914f6cdd1dul;
}

static u32 below(struct rand *r, u32 n) { return (next(r) >> 32) * n >> 32; }
static int one_in(struct rand *r, u32 n) { return below(r, n) == 0; }
static int deadly(struct rand *r) { return control->deadly && one_in(r, control->deadly); }

// Registers. The compiler must not choose the instructions: not every KVM knows all.
static u32 in32(u64 a) { u32 v; asm volatile("movl (%1), %0" : "=r"(v) : "r"(a) : "memory"); return v; }
static void out32(u64 a, u32 v) { asm volatile("movl %0, (%1)" : : "r"(v), "r"(a) : "memory"); }
static u64 window(u32 d) { return WINDOWS + (u64)d * WINDOW_SIZE; }

static u32 get(u32 d, u32 r) { control->device[d].registers++; return in32(window(d) + r); }
static void set(u32 d, u32 r, u32 v) { control->device[d].registers++; out32(window(d) + r, v); }

static u64 rings(u32 d, u32 q) { return RINGS + (u64)(d * MAX_QUEUES + q) * RING_SIZE; }
static volatile struct desc *descs(u32 d, u32 q) { return (volatile struct desc *)(rings(d, q) + DESC); }
static volatile struct desc *table(u32 d, u32 q) { return (volatile struct desc *)(rings(d, q) + TABLE); }
static volatile u16 *avail(u32 d, u32 q) { return (volatile u16 *)(rings(d, q) + AVAIL); }
static volatile u16 *used(u32 d, u32 q) { return (volatile u16 *)(rings(d, q) + USED); }

static void set_desc(volatile struct desc *e, u64 addr, u32 len, u16 flags, u16 next)
{
	e->addr = addr;
	e->len = len;
	e->flags = flags;
	e->next = next;
}

// Values at which something may break.
static u64 odd(struct rand *r)
{
	static const u64 odd[] = {
		0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 40, 44, 63, 64, 255, 256, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537,
		1 << 20, RAM_END - 1, RAM_END, RAM_END + 1, 0x7fffffff, 0x80000000, 0xfffff000, 0xffffffff, 0x100000000, ~0ul >> 1,
		1ul << 63, ~0ul - 4095, ~0ul - 15, ~0ul - 1, ~0ul,
	};
	u64 v = odd[below(r, sizeof odd / sizeof *odd)];
	switch (below(r, 8)) {
	case 0: return next(r);
	case 1: return v + below(r, 32) - 16;
	case 2: return next(r) & 0xffff;
	default: return v;
	}
}

// An address of n bytes that a device may write to: not the guest's own code, unless it is to die.
static u64 buffer(struct rand *r, u64 n)
{
	if (deadly(r))
		return next(r) % RAM_END;
	// Mostly few pages: the first touch of each costs more than a request.
	u64 room = one_in(r, 256) ? RAM_END - ARENA : 2 << 20;

	if (n >= room)
		return ARENA;
	return ARENA + (next(r) % (room - n) & (one_in(r, 4) ? ~0ul : ~15ul));
}

static u32 length(struct rand *r)
{
	switch (below(r, 8)) {
	case 0: return 1 + below(r, 16);
	case 1: return 512 * (1 + below(r, 64));
	case 2: return 4096;
	case 3: return 1 + below(r, 65536);
	case 4: return one_in(r, 64) ? 1 << 20 : 2048;
	default: return 1 + below(r, 4096);
	}
}

static void scribble(struct rand *r, u64 at, u32 n)
{
	for (u32 i = 0; i + 8 <= n; i += 8)
		*(volatile u64 *)(at + i) = one_in(r, 4) ? odd(r) : next(r);
}

// Fields of a request.
static void put16(u64 at, u16 v) { *(volatile u16 *)at = v; }
static void put32(u64 at, u32 v) { *(volatile u32 *)at = v; }
static void put64(u64 at, u64 v) { *(volatile u64 *)at = v; }

// request writes what the device may take for a request, with lies in it, to at. It returns the length of that part which the
// device reads, with *in for what it may write.
static u32 request(struct rand *r, u32 d, u32 q, u64 at, u32 *in)
{
	static const u8 types[] = {0, 0, 0, 1, 1, 1, 4, 8, 11, 13};
	static const u8 ops[] = {1, 1, 1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 14, 15, 15, 16, 16, 17, 18, 20, 25, 26, 26, 27, 28, 29, 30, 35, 35, 36, 42, 43, 45, 46};

	*in = 0;
	switch (device[d].id) {
	case BLOCK:
		put32(at, one_in(r, 16) ? odd(r) : types[below(r, sizeof types)]);
		put32(at + 4, 0);
		put64(at + 8, one_in(r, 4) ? odd(r) : below(r, 65536));
		put64(at + 16, one_in(r, 4) ? odd(r) : below(r, 65536));	// of a discard
		put32(at + 24, one_in(r, 4) ? odd(r) : below(r, 2048));
		put32(at + 28, below(r, 4));
		*in = 1 + (one_in(r, 8) ? odd(r) & 0xfffff : 512 * below(r, 64));
		return one_in(r, 8) ? below(r, 64) : 16 + 16 * below(r, 2) + 512 * below(r, 8);
	case NET:
		if (q == 0) {
			*in = length(r);
			return 0;
		}
		put16(at, one_in(r, 2) ? next(r) : 0);	// flags, gso_type
		for (u32 i = 2; i < 12; i += 2)
			put16(at + i, one_in(r, 2) ? odd(r) : 0);
		return one_in(r, 4) ? below(r, 64) : 12 + below(r, one_in(r, 64) ? 70000 : 2000);
	case VSOCK:
		if (q != 1) {
			*in = 44 + length(r);
			return 0;
		}
		put64(at, one_in(r, 16) ? odd(r) : 3);
		put64(at + 8, one_in(r, 16) ? odd(r) : 2);
		put32(at + 16, one_in(r, 16) ? odd(r) : 1000 + below(r, 64));
		put32(at + 20, one_in(r, 16) ? odd(r) : 1 + below(r, 4));
		{
			u32 n = one_in(r, 2) ? 0 : below(r, 8192);
			put32(at + 24, one_in(r, 8) ? odd(r) : n);
			put16(at + 28, one_in(r, 32) ? odd(r) : 1);
			put16(at + 30, one_in(r, 32) ? odd(r) : 1 + below(r, 7));
			put32(at + 32, one_in(r, 4) ? odd(r) : below(r, 4));
			put32(at + 36, one_in(r, 4) ? odd(r) : 65536);
			put32(at + 40, one_in(r, 2) ? odd(r) : 0);
			return one_in(r, 16) ? below(r, 64) : 44 + n;
		}
	case BALLOON: {
		u32 pages = below(r, one_in(r, 64) ? 4096 : 64);
		for (u32 i = 0; i < pages; i++)
			put32(at + 4 * i, deadly(r) ? next(r) % (RAM_END >> 12) : one_in(r, 8) ? RAM_END >> 12 | odd(r)
				: ARENA / 4096 + below(r, (RAM_END - ARENA) / 4096));
		*in = q >= 2 ? length(r) : 0;	// pages that it reports
		return q >= 2 && one_in(r, 2) ? 0 : 4 * pages;
	}
	case FS: {
		u32 op = one_in(r, 32) ? odd(r) : ops[below(r, sizeof ops)], n = 40 + 8 * below(r, 12);
		put32(at + 4, op);
		put64(at + 8, next(r));
		put64(at + 16, one_in(r, 8) ? odd(r) : 1 + below(r, 8));
		for (u32 i = 24; i < n; i += 8)
			put64(at + i, one_in(r, 4) ? odd(r) : below(r, 16));
		if (one_in(r, 2)) {
			// Names, some behind a struct of 8 bytes or 16.
			u64 name = at + 40 + 8 * below(r, 3);
			for (u32 i = 0; i < 3; i++)
				put64(name + 8 * i, one_in(r, 16) ? next(r) : 'a' + below(r, 8));
			n = one_in(r, 4) ? name - at + 2 : name - at + 24;
		}
		if (op == 26) {
			put32(at + 40, 7);
			put32(at + 44, 31);
			n = 104;
		} else if (op == 16) {
			u32 data = below(r, one_in(r, 16) ? 65536 : 4096);
			put32(at + 56, one_in(r, 8) ? odd(r) : data);
			n = 80 + data;
		}
		put32(at, one_in(r, 16) ? odd(r) : n);
		*in = one_in(r, 8) ? below(r, 64) : 16 + length(r);
		return n;
	}
	default:
		*in = length(r);
		return 0;
	}
}

enum {
	K_PLAIN, K_SELF, K_NEXT_BEYOND, K_ZERO, K_WRAP, K_BEYOND, K_ACROSS, K_HOLE, K_DIRECTION, K_TABLE_EMPTY, K_TABLE_ODD,
	K_TABLE_LONG, K_TABLE_NESTED, K_TABLE_NEXT, K_TABLE_LOOP, K_TABLE_BEYOND, K_TABLE_NOWHERE, K_TABLE_PLAIN, K_LONGEST, K_HUGE_READ,
	K_HUGE_WRITE, K_LOOP_ALL, K_RANDOM, K_FLAGS, K_RINGS, K_SHORT, K_MANY, K_COUNT,
};
_Static_assert(K_COUNT <= KINDS, "each kind is counted");

// chain writes one chain with its head at descriptor h and at most k descriptors, and returns what is wrong with it.
static u32 chain(struct rand *r, u32 d, u32 q, u32 h, u32 k, int storm)
{
	volatile struct desc *e = descs(d, q), *t = table(d, q);
	u32 size = device[d].queue[q].size, mask = size - 1;
	u32 kind = storm ? K_SELF + below(r, K_TABLE_PLAIN - K_SELF) : one_in(r, 3) ? K_PLAIN : below(r, K_COUNT), in = 0, out = 0;
	u64 at = buffer(r, 1 << 17);
	u32 slot = below(r, TABLE_ENTRIES - 32), h1 = (h + 1) & mask;
	u64 slot_at = (u64)&t[slot];

	if ((kind == K_HUGE_READ || kind == K_HUGE_WRITE || kind == K_LOOP_ALL || kind == K_MANY) && !one_in(r, 64))
		kind = K_PLAIN;
	if (kind == K_PLAIN || kind == K_TABLE_PLAIN || kind == K_HUGE_READ || kind == K_HUGE_WRITE || kind == K_MANY)
		out = request(r, d, q, at, &in);
	switch (kind) {
	case K_SELF: set_desc(&e[h], at, 16, NEXT, h); break;
	case K_NEXT_BEYOND: set_desc(&e[h], at, 16, NEXT, one_in(r, 2) ? size : odd(r) | size); break;
	case K_ZERO: set_desc(&e[h], at, 0, one_in(r, 2) ? WRITE : 0, 0); break;
	case K_WRAP: set_desc(&e[h], -(u64)(1 + below(r, 64)), 64 + below(r, 64), one_in(r, 2) ? WRITE : 0, 0); break;
	case K_BEYOND: set_desc(&e[h], RAM_END + (odd(r) & 0xffffffffff), 1 + below(r, 4096), one_in(r, 2) ? WRITE : 0, 0); break;
	case K_ACROSS: set_desc(&e[h], RAM_END - 8, 9 + below(r, 4096), one_in(r, 2) ? WRITE : 0, 0); break;
	case K_HOLE: set_desc(&e[h], WINDOWS + below(r, 16 * WINDOW_SIZE), 1 + below(r, 4096), one_in(r, 2) ? WRITE : 0, 0); break;
	case K_DIRECTION:
		set_desc(&e[h], at, 16, NEXT | WRITE, h1);
		set_desc(&e[h1], at, 16, 0, 0);
		break;
	case K_TABLE_EMPTY: set_desc(&e[h], slot_at, 0, INDIRECT, 0); break;
	case K_TABLE_ODD: set_desc(&e[h], slot_at, 1 + below(r, 15) + 16 * below(r, 4), INDIRECT, 0); break;
	case K_TABLE_LONG: set_desc(&e[h], slot_at, one_in(r, 2) ? 16 * (size + 1) : odd(r) | 16 * size << 1, INDIRECT, 0); break;
	case K_TABLE_NESTED:
		set_desc(&e[h], slot_at, 16, INDIRECT, 0);
		set_desc(&t[slot], slot_at, 16, INDIRECT, 0);
		break;
	case K_TABLE_NEXT:
		set_desc(&e[h], slot_at, 16, INDIRECT | NEXT, h1);
		set_desc(&t[slot], at, 16, 0, 0);
		break;
	case K_TABLE_LOOP:
		set_desc(&e[h], slot_at, 32, INDIRECT, 0);
		set_desc(&t[slot], at, 16, NEXT, 1);
		set_desc(&t[slot + 1], at, 16, NEXT, 0);
		break;
	case K_TABLE_BEYOND:
		set_desc(&e[h], slot_at, 16, INDIRECT, 0);
		set_desc(&t[slot], at, 16, NEXT, 1 + below(r, 65535));
		break;
	case K_TABLE_NOWHERE: set_desc(&e[h], one_in(r, 2) ? odd(r) | RAM_END : WINDOWS, 16, INDIRECT, 0); break;
	case K_TABLE_PLAIN:
		set_desc(&e[h], slot_at, 32, INDIRECT, 0);
		set_desc(&t[slot], at, out ? out : 1, NEXT, 1);
		set_desc(&t[slot + 1], buffer(r, in), in ? in : 1, WRITE, 0);
		break;
	case K_LONGEST: set_desc(&e[h], at, 0xffffffff, one_in(r, 2) ? WRITE : 0, 0); break;
	case K_HUGE_READ:
	case K_HUGE_WRITE: {
		// As many bytes as a chain may have, of the same few pages again and again. Readable ones begin with the request.
		u32 n = 0xffffffffu / (RAM_END - ARENA), i = 0;
		if (n > size - 2)
			n = size - 2;
		if (out)
			set_desc(&e[h], at, out, NEXT, (h + ++i) & mask);
		for (; i < n; i++)
			set_desc(&e[(h + i) & mask], ARENA, RAM_END - ARENA, NEXT | (kind == K_HUGE_WRITE ? WRITE : 0), (h + i + 1) & mask);
		set_desc(&e[(h + i) & mask], at, 1, WRITE, 0);
		break;
	}
	case K_LOOP_ALL:
		for (u32 i = 0; i < size; i++)
			set_desc(&e[i], at, 16, NEXT, (i + 1) & mask);
		break;
	case K_MANY:
		// As many pieces as a chain may have, of a byte each.
		for (u32 i = 0; i < size; i++)
			set_desc(&e[(h + i) & mask], at + i, 1, (i + 1 < size ? NEXT : 0) | (i >= out || i + 1 == size ? WRITE : 0), (h + i + 1) & mask);
		break;
	case K_RANDOM: {
		u64 a = one_in(r, 2) ? odd(r) : buffer(r, 1 << 20);
		// Never the guest's own code by chance.
		if (a < ARENA && !deadly(r))
			a += ARENA;
		set_desc(&e[h], a, odd(r), next(r), next(r));
		set_desc(&e[h1], buffer(r, 1 << 20), odd(r), next(r), next(r));
		break;
	}
	case K_FLAGS: set_desc(&e[h], at, 1 + below(r, 4096), next(r) & ~INDIRECT, h1); break;
	case K_RINGS: set_desc(&e[h], rings(d, one_in(r, 2) ? q : below(r, MAX_QUEUES)) + below(r, RING_SIZE), 1 + below(r, 64), one_in(r, 2) ? WRITE : 0, 0); break;
	case K_SHORT: set_desc(&e[h], at, 1 + below(r, 16), one_in(r, 2) ? WRITE : 0, 0); break;
	default:
		if (k < 2 || !in || !out) {
			set_desc(&e[h], out ? at : buffer(r, in), out ? out : in ? in : 1, out ? 0 : WRITE, 0);
			break;
		}
		if (k >= 3 && out > 16 && one_in(r, 2)) {
			u32 h2 = (h + 2) & mask, cut = 1 + below(r, out - 1);
			set_desc(&e[h], at, cut, NEXT, h1);
			set_desc(&e[h1], at + cut, out - cut, NEXT, h2);
			set_desc(&e[h2], buffer(r, in), in, WRITE, 0);
			break;
		}
		set_desc(&e[h], at, out, NEXT, h1);
		set_desc(&e[h1], buffer(r, in), in, WRITE, 0);
	}
	return kind;
}

// start resets a device and makes it a driver's again, mostly by the rules.
static void start_device(struct rand *r, u32 d)
{
	struct device *v = &device[d];

	v->live = 0;
	set(d, R_STATUS, 0);
	control->device[d].resets++;
	set(d, R_STATUS, ACKNOWLEDGE | DRIVER);
	for (u32 word = 0; word < 2; word++) {
		u32 f;
		set(d, R_DEVICE_FEATURES_SEL, word);
		f = get(d, R_DEVICE_FEATURES);
		if (one_in(r, 4))
			f &= next(r);
		if (one_in(r, 64))
			f |= next(r);	// not offered
		if (word == 1 && !one_in(r, 64))
			f |= 1;		// VIRTIO_F_VERSION_1
		set(d, R_DRIVER_FEATURES_SEL, one_in(r, 256) ? odd(r) : word);
		set(d, R_DRIVER_FEATURES, f);
	}
	set(d, R_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
	if (!(get(d, R_STATUS) & FEATURES_OK)) {
		control->refused++;
		if (!one_in(r, 4))
			return;
	}
	for (u32 q = 0; q < v->queues; q++) {
		struct queue *u = &v->queue[q];
		u64 at = rings(d, q);

		u->ready = !one_in(r, 32);
		if (!u->ready)
			continue;
		u->size = u->max >> (one_in(r, 4) ? below(r, 6) : 0);
		if (u->size < 4)
			u->size = 4;
		u->avail = u->seen = u->stalled = 0;
		avail(d, q)[0] = 0;
		avail(d, q)[1] = 0;
		used(d, q)[0] = 0;
		used(d, q)[1] = 0;
		// What has not been written yet must not name the guest's own code when it is changed.
		for (u32 i = 0; i < u->size; i++)
			set_desc(&descs(d, q)[i], ARENA, 16, 0, 0);
		for (u32 i = 0; i < TABLE_ENTRIES; i++)
			if (!table(d, q)[i].addr)
				set_desc(&table(d, q)[i], ARENA, 16, 0, 0);
		set(d, R_QUEUE_SEL, q);
		set(d, R_QUEUE_NUM, one_in(r, 128) ? odd(r) : u->size);
		// Some queues lie where they must not, or on top of each other.
		if (one_in(r, 128))
			at = odd(r) | RAM_END;
		else if (one_in(r, 128))
			at = rings(d, 0) + below(r, 64);
		set(d, R_QUEUE_DESC, at + DESC);
		set(d, R_QUEUE_DESC + 4, at >> 32);
		set(d, R_QUEUE_DRIVER, at + AVAIL);
		set(d, R_QUEUE_DRIVER + 4, at >> 32);
		set(d, R_QUEUE_DEVICE, at + USED);
		set(d, R_QUEUE_DEVICE + 4, at >> 32);
		set(d, R_QUEUE_READY, 1);
	}
	if (one_in(r, 64))
		for (u32 q = 0; q < v->queues; q++) {
			v->queue[q].ready = 0;
			set(d, R_QUEUE_SEL, q);
			set(d, R_QUEUE_READY, 0);
		}
	set(d, R_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
	control->device[d].starts++;
	v->live = 1;
}

// fill publishes chains in a queue, as many as it has room for, and kicks it.
static void fill(struct rand *r, u32 d, u32 q)
{
	struct device *v = &device[d];
	struct queue *u = &v->queue[q];
	int storm = control->storm && !one_in(r, control->storm);
	u32 size = u->size, k = storm ? 1 : 1u << below(r, 3), n, room;
	u16 done;

	if (!u->ready || !size)
		return;
	done = used(d, q)[1];
	u->stalled = done == u->seen ? u->stalled + 1 : 0;
	u->seen = done;
	room = (u16)(size - (u16)(u->avail - done));
	if (room > size)
		room = size;	// Somebody has written to the used index.
	n = room / k;
	if (n > 64 && !storm && one_in(r, 2))
		n = 64;
	for (u32 i = 0; i < n; i++) {
		u32 h = u->avail * k & (size - 1);
		u32 kind = chain(r, d, q, h, k, storm);

		control->kinds[kind]++;
		control->device[d].chains++;
		avail(d, q)[2 + (u->avail & (size - 1))] = one_in(r, 65536) ? odd(r) : h;
		u->avail++;
	}
	if (one_in(r, 512))
		u->avail += odd(r);
	avail(d, q)[0] = one_in(r, 16) ? next(r) : 0;
	avail(d, q)[2 + size] = one_in(r, 4) ? next(r) : done;	// used_event
	asm volatile("" : : : "memory");
	avail(d, q)[1] = u->avail;
	set(d, R_QUEUE_NOTIFY, q);
	control->device[d].kicks++;
	if (u->stalled > 8 && (one_in(r, 64) || get(d, R_STATUS) & NEEDS_RESET))
		v->live = 0;
}

static void find_devices(void)
{
	for (u32 d = 0; d < MAX_DEVICES; d++) {
		if (in32(window(d) + R_MAGIC) != 0x74726976)
			break;
		device[d].id = in32(window(d) + R_DEVICE_ID);
		for (u32 q = 0; q < MAX_QUEUES; q++) {
			out32(window(d) + R_QUEUE_SEL, q);
			device[d].queue[q].max = in32(window(d) + R_QUEUE_NUM_MAX);
			if (!device[d].queue[q].max)
				break;
			device[d].queues = q + 1;
		}
		control->device[d].id = device[d].id;
		control->device[d].queues = device[d].queues;
		devices = d + 1;
	}
	control->magic = MAGIC;
}

void feed(void)
{
	struct rand *r = &rand0;

	if (!r->s)
		r->s = control->seed;
	if (!devices) {
		find_devices();
		for (u32 d = 0; d < devices; d++)
			start_device(r, d);
	}
	for (;;) {
		u32 d = below(r, devices);

		control->turns[0]++;
		if (!device[d].live || one_in(r, 512))
			start_device(r, d);
		if (!device[d].live)
			continue;
		for (u32 i = 1 + below(r, 8); i > 0; i--)
			fill(r, d, below(r, device[d].queues));
	}
}

// Ports of the devices that are not virtio ones; the last three end the machine.
static u16 port(struct rand *r)
{
	static const u16 bases[] = {0x3f8, 0x3f8, 0x620, 0x640, 0x640, 0x60, 0x604, 0x505, 0x70};
	u16 p;

	if (deadly(r))
		p = one_in(r, 2) ? next(r) : 0x600;
	else
		p = bases[below(r, sizeof bases / sizeof *bases)] + below(r, 16);
	return p;
}

// May the guest write to it and live?
static int harmless(u16 p) { return p != 0x64 && p != 0x600 && p != 0x604 && p != 0x505; }

static void use_port(struct rand *r)
{
	u16 p = port(r);
	u32 v = one_in(r, 2) ? next(r) : odd(r), n = 1 + below(r, 256);
	u64 at = buffer(r, 4096);

	control->ports++;
	if (control->deadly && one_in(r, 500)) {
		// Reset by the keyboard controller and by ACPI, power off, panic.
		static const struct { u16 port; u8 value; } ends[] = {{0x64, 0xfe}, {0x600, 1}, {0x604, 5 << 2 | 1 << 5}, {0x505, 1}};
		u32 i = below(r, sizeof ends / sizeof *ends);
		asm volatile("outb %b0, %w1" : : "a"((u32)ends[i].value), "d"((u32)ends[i].port));
	}
	if (one_in(r, 4)) {
		// As the agent does, more or less: read a secret, stand by at a capture, read a message, print.
		u32 secret = below(r, 8), command = 1 + below(r, 4);
		asm volatile("outl %0, %w1" : : "a"(secret), "d"(0x640));
		asm volatile("rep insb" : "+D"(at), "+c"(n) : "d"(0x648) : "memory");
		asm volatile("outb %b0, %w1" : : "a"(command), "d"(0x622));
		asm volatile("inb %w1, %b0" : "=a"(v) : "d"(0x620));
		asm volatile("inb %w1, %b0" : "=a"(v) : "d"(0x621));
		asm volatile("outb %b0, %w1" : : "a"(one_in(r, 2) ? 1 : v), "d"(0x64c));
		asm volatile("outb %b0, %w1" : : "a"(v), "d"(0x3f8));
		return;
	}
	if (!harmless(p) && !deadly(r)) {
		asm volatile("inb %1, %b0" : "=a"(v) : "Nd"(p));
		return;
	}
	switch (below(r, 8)) {
	case 0: asm volatile("outb %b0, %1" : : "a"(v), "Nd"(p)); break;
	case 1: asm volatile("outw %w0, %1" : : "a"(v), "Nd"(p)); break;
	case 2: asm volatile("outl %0, %1" : : "a"(v), "Nd"(p)); break;
	case 3: asm volatile("inb %1, %b0" : "=a"(v) : "Nd"(p)); break;
	case 4: asm volatile("inw %1, %w0" : "=a"(v) : "Nd"(p)); break;
	case 5: asm volatile("inl %1, %0" : "=a"(v) : "Nd"(p)); break;
	case 6:
		control->strings++;
		asm volatile("rep outsb" : "+S"(at), "+c"(n) : "d"(p) : "memory");
		break;
	case 7:
		control->strings++;
		asm volatile("rep insb" : "+D"(at), "+c"(n) : "d"(p) : "memory");
		break;
	}
}

// Any register, or what lies between and behind them, in any width; now and then across the end of the window.
static void use_register(struct rand *r, u32 d)
{
	static const u16 known[] = {
		R_DEVICE_FEATURES_SEL, R_DRIVER_FEATURES, R_DRIVER_FEATURES_SEL, R_QUEUE_SEL, R_QUEUE_NUM, R_QUEUE_READY, R_QUEUE_NOTIFY,
		R_INTERRUPT_ACK, R_STATUS, R_QUEUE_DESC, R_QUEUE_DESC + 4, R_QUEUE_DRIVER, R_QUEUE_DRIVER + 4, R_QUEUE_DEVICE, R_QUEUE_DEVICE + 4,
		R_CONFIG, R_CONFIG + 4, R_CONFIG + 8,
	};
	u32 off = one_in(r, 4) ? below(r, WINDOW_SIZE) : one_in(r, 2) ? below(r, R_END) : known[below(r, sizeof known / sizeof *known)];
	u64 at = window(d) + off, v = one_in(r, 2) ? odd(r) : next(r) & 0xff, to = buffer(r, 64), n = 1 + below(r, 16);

	control->device[d].registers++;
	// Most of what it writes to the status would stop the device.
	if (off == R_STATUS && !one_in(r, 16))
		v |= ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
	// A ring where the guest's own code is would be its end.
	if (off >= R_QUEUE_DESC && off < R_QUEUE_DEVICE + 8 && !deadly(r))
		v = one_in(r, 2) ? buffer(r, RING_SIZE) : v | RAM_END;
	switch (below(r, 10)) {
	case 0: asm volatile("movb %b0, (%1)" : : "q"(v), "r"(at) : "memory"); break;
	case 1: asm volatile("movw %w0, (%1)" : : "r"(v), "r"(at) : "memory"); break;
	case 2: case 3: case 4: asm volatile("movl %k0, (%1)" : : "r"(v), "r"(at) : "memory"); break;
	case 5: asm volatile("movq %0, (%1)" : : "r"(v), "r"(at) : "memory"); break;
	case 6: asm volatile("movb (%1), %b0" : "=q"(v) : "r"(at) : "memory"); break;
	case 7: asm volatile("movl (%1), %k0" : "=r"(v) : "r"(at) : "memory"); break;
	case 8: asm volatile("movq (%1), %0" : "=r"(v) : "r"(at) : "memory"); break;
	case 9:
		control->strings++;
		if (off > R_END || one_in(r, 4))
			asm volatile("rep movsb" : "+S"(at), "+D"(to), "+c"(n) : : "memory");
		else
			asm volatile("rep movsb" : "+S"(to), "+D"(at), "+c"(n) : : "memory");
		break;
	}
}

// A descriptor that is good often enough to get somewhere.
static void mutate_desc(struct rand *r, volatile struct desc *e, u32 size)
{
	switch (below(r, 8)) {
	case 0: e->addr = buffer(r, 1 << 20); break;
	case 1: e->addr = odd(r) | ARENA; break;
	case 2: e->len = odd(r); break;
	case 3: e->len = length(r); break;
	case 4: e->flags = below(r, 4); break;
	case 5: e->flags = next(r); break;
	case 6: e->next = below(r, size); break;
	case 7: e->next = odd(r); break;
	}
}

static void mutate_ring(struct rand *r, u32 d, u32 q)
{
	struct queue *u = &device[d].queue[q];
	u32 size = u->size ? u->size : u->max;
	// Some changes break the ring for good, so they are rare enough for the rest to get somewhere.
	u32 wild = one_in(r, 256);

	control->device[d].mutations++;
	switch (below(r, 8)) {
	case 0: case 1: case 2:
		mutate_desc(r, &descs(d, q)[below(r, size)], size);
		break;
	case 3:
		mutate_desc(r, &table(d, q)[below(r, TABLE_ENTRIES)], 32);
		break;
	case 4:
		avail(d, q)[2 + below(r, size)] = wild ? odd(r) : below(r, size);
		break;
	case 5:
		if (wild && one_in(r, 16))
			avail(d, q)[1] = odd(r);
		else
			avail(d, q)[0] = next(r);
		break;
	case 6:
		avail(d, q)[2 + size] = odd(r);
		break;
	case 7:
		if (wild)
			used(d, q)[below(r, 2 + 4 * size)] = odd(r);
		else
			used(d, q)[2 + 4 * size] = odd(r);	// avail_event
		break;
	}
}

void mutate(void)
{
	struct rand *r = &rand1;

	if (!r->s)
		r->s = ~control->seed;
	while (control->magic != MAGIC)
		asm volatile("pause");
	for (;;) {
		u32 d = below(r, devices), q = below(r, device[d].queues);

		control->turns[1]++;
		switch (below(r, 8)) {
		case 0: case 1: case 2: case 3:
			for (u32 i = below(r, 256); i > 0; i--)
				mutate_ring(r, d, q);
			out32(window(d) + R_QUEUE_NOTIFY, q);
			break;
		case 4:
			scribble(r, buffer(r, 4096), 4096);
			break;
		case 5:
			for (u32 i = below(r, 8); i > 0; i--)
				use_register(r, d);
			break;
		case 6:
			for (u32 i = below(r, 8); i > 0; i--)
				use_port(r);
			break;
		case 7:
			if (one_in(r, 64))
				start_device(r, d);	// beside the other vCPU
			else if (one_in(r, 256))
				asm volatile("ud2");
			break;
		}
	}
}
