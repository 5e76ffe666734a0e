//go:build ignore

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

// The programs on an endpoint's TAP device: from_guest sees what the guest sends, to_guest
// what it gets. What they do, in which order, is written in the comment of package
// netpolicy; what the rows of the table are, in table.go there. Every lookup that fails
// ends in a denial.
//
// The programs are loaded once for a host and serve all its endpoints. Each endpoint has a small
// program of its own on its device (netpolicy/entry.go), which writes the endpoint's slot and
// claim, and which of its two tables is in force, into skb->cb and calls one of these. All that
// belongs to an endpoint is in maps of its own, which are found by the slot; where there is none,
// nothing passes.
//
// Headers are copied, once, before they are looked at: out of the linear part of the skb
// where they lie in it, else with bpf_skb_load_bytes, which works on any layout.

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define TC_ACT_OK 0
#define TC_ACT_SHOT 2

#define ETH_HLEN 14
#define ETH_ZLEN 60 // frames up to here may be padded
#define ETH_P_ARP 0x0806
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd

#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ICMPV6 58

enum { EGRESS, INGRESS };
enum { DENY, ALLOW, REJECT };

// Reasons: the same numbers are in netpolicy/reason.go.
enum {
	R_RULE = 1, R_DEFAULT, R_FLOW, R_LINK, R_RELATED,
	R_NO_POLICY = 16, R_TRUNCATED, R_ETHERTYPE, R_VLAN, R_SRC_MAC, R_DST_MAC, R_ARP, R_IP_HEADER, R_IP_OPTIONS,
	R_FRAGMENT, R_SRC_IP, R_DST_IP, R_EXT_HEADER, R_PROTOCOL, R_L4_HEADER, R_ND, R_DHCP, R_FLOOR, R_ICMP_TYPE,
	R_NO_FLOW, R_TCP_STATE, R_PACKET_RATE, R_BIT_RATE, R_CONN_RATE, R_QUOTA, R_FLOW_TABLE, R_GSO, R_CHECKSUM,
	R_INTERNAL, R_IPV6_OFF, R_TLS_OFF, R_SRC_INTERFACE,
	R_MAX = 64,
};

enum { CLASS_PUBLIC = 1, CLASS_PRIVATE, CLASS_HOST, CLASS_ENDPOINT };

#define MAGIC 0x31575244 // "DRW1"
#define NO_RULE 0xffff

// Rows of the table.

struct identity { // row 0
	__u32 magic;
	__u32 gen;
	__u8 guest_mac[6];
	__u8 gateway_mac[6];
	__be32 guest4, gateway4, endpoint4;
	__u32 guest6[4], gateway6[4], endpoint6[4];
	__u32 guest_ll[4], gateway_ll[4];
	__u8 has6;
	__u8 fallback[2]; // the default verdicts
	__u8 words;	  // of 64 rules that are in use
	__u32 claim;	  // of the slot: whose table this is
	__u8 limited[2];  // by direction: whether there are limits
	__u8 names;	  // whether rules have names
	__u8 tags;	  // whether rules have tags of endpoints
	__u8 checks;	  // whether names of rules are checked
	__u8 pad;
	__be16 tls_port; // of the gateway, where they are; 0 is nowhere
	__u8 rest[32];
};

struct limits {
	__u64 bit_mult, bit_burst, packet_mult, packet_burst, conn_mult, conn_burst;
	__u64 quota;
};

struct tables { // row 1
	__u32 addr4, addr6;
	__u32 ports[2][2]; // by direction; TCP, UDP
	__u32 icmp[2];
	__u32 allow, reject; // sets of rules
	__u32 tags;	     // by the tag's hash
	__u32 checked;	     // by port: sets of rules whose names are checked there
	struct limits limits[2];
};

#define WORDS 16

struct bits { // one for each rule
	__u64 w[WORDS];
};

struct set {
	struct bits bits;
	__u32 some; // a bit for each word that is not zero
	__u32 pad[7];
};

struct node4 {
	__u32 key[16], val[16];
};

struct node6 {
	__u64 hi[8], lo[8];
	__u32 val[8];
};

struct row {
	union {
		struct identity id;
		struct tables tab;
		struct set set;
		struct node4 n4;
		struct node6 n6;
	};
};

_Static_assert(sizeof(struct row) == 160, "size of a row");
_Static_assert(sizeof(struct identity) == 160, "size of the first row");
_Static_assert(sizeof(struct tables) == 160, "size of the second row");

struct table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP | BPF_F_MMAPABLE); // tables differ in size, and are filled in place
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct row));
};

#define SLOTS 8192 // endpoints of a host: netpolicy/programs.go has the same number

// tagged is an endpoint as others see it. Its claim tells it from one that had its address before,
// and its edition these tags from those that it had before.
#define TAGS 8

struct tagged {
	__u32 claim;
	__u32 edition;
	// Its device, and the network namespace of that: no packet of the endpoint's comes to the host otherwise.
	__u64 netns;
	__u32 ifindex;
	__u32 pad;
	__u64 tag[TAGS]; // hashes; 0 is none
};

// endpoints holds all endpoints of the host, by address. An endpoint is in it before its device is
// up, and until it is down.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * SLOTS); // IPv4 and IPv6
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(key_size, 16);
	__type(value, struct tagged);
} endpoints SEC(".maps");

// policies holds the tables, of which each endpoint may have two: slot * 2 + which. It is read
// once for each packet.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2 * SLOTS);
	__type(key, __u32);
	__array(values, struct table);
} policies SEC(".maps");

// A pin is what the resolver has found. An entry counts for one generation of the
// table only, so that it changes together with the table.
struct pin_key {
	__u32 addr[4]; // or NAME_SET, 0, 0 and the number of a set of names: no public address looks like it
	__u32 gen;
};

#define NAME_SET 0xffffffff

// A pin says which rules match an address, and how that becomes less as names expire:
// the first slot whose time is not up counts.
#define TIMES 4

struct pin {
	__u64 expires[TIMES]; // ascending
	struct bits set[TIMES];
	__u32 name_sets[TIMES]; // numbers of sets of matching names; 0 is none
};

// The sizes of maps inside of others are those that the loader gives to each endpoint's.
struct pin_map {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(key_size, sizeof(struct pin_key));
	__uint(value_size, sizeof(struct pin));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__array(values, struct pin_map);
} pins SEC(".maps");

struct flow_key {
	__u32 peer[4];
	__be16 peer_port, guest_port;
	__u8 proto;
	__u8 six; // an IPv6 address may look like one of IPv4 here
	__u8 pad[2];
};

enum { OPENING = 1, ESTABLISHED, CLOSING, ONE_WAY, BOTH_WAYS, ECHO, ALIAS };

struct counter {
	__u64 packets, bytes;
};

// Nothing decides by first, count and rule: they are for those who read the map.
struct flow {
	__u64 seen;
	__u64 first;	// when it was opened
	struct counter count[2]; // by direction
	__u32 gen;
	__u32 claim; // of the peer, if it is an endpoint
	__u16 rule;  // of the table gen; NO_RULE is the default
	__u8 state;
	__u8 opener; // direction
	__u8 fin;    // bit for each direction
	__u8 cut;    // it is not allowed any more, and only there for those who read the map
	__be16 via;  // its name is checked: the guest's port on the host; else 0
	__u32 edition; // of the peer's tags, if it is an endpoint
	__u32 name_set; // the peer's names when the flow was opened: the number of their set; 0 is none
	__u8 class;    // of the peer, by the table gen
	__u8 pad[7];
};

_Static_assert(sizeof(struct flow) == 80, "size of a flow");

// An alias is in the flow table too, by what the host knows a flow by whose name is
// checked: the gateway and its port for those, and the guest's port on the host (via). It
// says which flow that is, and counts as long as that one lives and has this via.
struct alias {
	__u64 zero;
	__u32 peer[4];
	__be16 peer_port, guest_port;
	__u8 pad[30];
	__u8 state; // ALIAS, where a flow has its state
	__u8 rest[21];
};

_Static_assert(sizeof(struct alias) == sizeof(struct flow), "size of an alias");
_Static_assert(__builtin_offsetof(struct alias, state) == __builtin_offsetof(struct flow, state), "state of an alias");

struct flow_map {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(struct flow_key));
	__uint(value_size, sizeof(struct flow));
};

// flows holds the flows, of which each endpoint has two maps: slot * 2 has those that are opening, closing or have had
// no answer, and slot * 2 + 1 those that last, so that no number of the others takes their room.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2 * SLOTS);
	__type(key, __u32);
	__array(values, struct flow_map);
} flows SEC(".maps");

// usage of each direction that outlives a swap of the table. A map inside of another
// cannot have a lock (before Linux 6.2), so all endpoints' are in one: slot * 2 + direction.
struct usage {
	struct bpf_spin_lock lock;
	__u32 suppressed; // events not sent
	__u64 bit_tat, packet_tat, conn_tat, event_tat;
	__u64 used;   // bytes, against the quota
	__u64 active; // when a packet passed last
	__u64 opened; // flows
};

_Static_assert(sizeof(struct usage) == 64, "size of the usage");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * SLOTS);
	__type(key, __u32);
	__type(value, struct usage);
} usages SEC(".maps");

// counters by direction, verdict and reason: (direction * 3 + verdict) * R_MAX + reason. Behind
// them are those of runs by each of the endpoint's tables: how many have begun (packets), which the
// endpoint's own program counts, and how many have ended (bytes).
#define RUNS (2 * 3 * R_MAX)

struct counter_map {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RUNS + 2);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct counter));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__array(values, struct counter_map);
} counters SEC(".maps");

struct event {
	__u64 time;
	__u32 peer[4];
	__u32 gen;
	__u32 len;
	__u32 suppressed;
	__u16 rule;
	__be16 peer_port, guest_port;
	__be16 ethertype;
	__u8 verdict, reason, dir, proto;
};

_Static_assert(sizeof(struct event) == 48, "size of an event");

struct event_ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__array(values, struct event_ring);
} events SEC(".maps");

// calls is where endpoints' own programs find these: by direction. The kernel empties it when
// no process and no pin holds it any more; nothing passes then.
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 2);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} calls SEC(".maps");

// Otherwise the compiler leaves these types out of BTF, and Go has no structs of them.
const struct event *unused_event __attribute__((unused));
const struct tagged *unused_tagged __attribute__((unused));
const struct counter *unused_counter __attribute__((unused));
const struct flow *unused_flow __attribute__((unused));
const struct alias *unused_alias __attribute__((unused));
const struct flow_key *unused_flow_key __attribute__((unused));
const struct pin *unused_pin __attribute__((unused));
const struct pin_key *unused_pin_key __attribute__((unused));

// Tests set the clock and look into the decision. Both are dead code otherwise.
const volatile __u32 testing = 0;
__u64 test_now = 0;

#define NS_PER_S 1000000000ull
#define EVENT_COST (NS_PER_S / 100) // 100 events a second,
#define EVENT_BURST NS_PER_S	    // 100 at once

// Frames with this mark are answers that from_guest has made. The loader chooses it at
// random; nobody but the host can mark frames.
const volatile __u32 answer_mark = 0;

// Frames with this mark come from the packet waker: they waited for the endpoint to wake, and their sources to_waker
// has checked.
#define waker_mark (~answer_mark)

// packet is what is known of one.
struct packet {
	__u64 now;
	__u32 slot;
	__u32 peer[4];
	__be16 peer_port, guest_port;
	__be16 ethertype;
	__u16 rule;
	__u32 l4, l4_len; // offset in the frame, bytes
	__u32 bytes, segments;
	__u32 set;
	__u32 claim, edition; // of a peer that is an endpoint, which rules were matched with
	__u32 name_set; // of the peer's names that rules were matched with
	__u8 dir, proto, six, flags; // flags: of TCP, or the type of ICMP
	__u8 verdict, opens, fin, next;
	// Of an ICMP error: what it quotes.
	__u32 quoted[4];
	__u8 related;
	__u8 summed; // what is known of the checksum, if it is from the guest
	__u8 check;  // the rules open it for its name, which is to be checked
	__u8 class;
	__u8 from_waker; // the packet waker has checked by which interface it came
	__u8 reevaluates; // a flow is judged anew, by the names that it was opened with
	__be16 via;  // of its flow
};

// load copies from a fixed offset of the frame. Anything but 0 is a failure.
static __always_inline int load(struct __sk_buff *skb, const __u32 at, void *to, const __u32 n)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + at + n <= end) {
		__builtin_memcpy(to, data + at, n);
		return 0;
	}
	return bpf_skb_load_bytes(skb, at, to, n);
}

static __always_inline const struct row *row(void *table, __u32 i)
{
	i &= 0xffffff;
	return bpf_map_lookup_elem(table, &i);
}

// bounded masks an index where the compiler cannot see it, so that it neither leaves the
// mask out nor mixes it with other arithmetic: the verifier has to see it right before
// the access.
#define bounded(i, mask) ({ __u64 bounded_i = (i); asm volatile("%0 &= %1" : "+r"(bounded_i) : "i"(mask)); bounded_i; })

// The searches below have no branches that depend on data: each would double what the
// verifier has to look at.

// find4 finds the value of the last key that is not above x. A root is the row of a
// tree's top and, in its highest byte, the number of levels.
static __noinline __u32 find4(void *table, __u32 root, __u32 x)
{
	__u32 depth = root >> 24, at = root;

	for (__u32 i = 0; i < 5; i++) {
		const struct row *r = row(table, at);
		__u64 pos, limit = (__u64)x + 1;

		if (!r)
			return 0;
		// The highest bit of key - limit says that key < limit.
		pos = ((__u64)r->n4.key[8] - limit) >> 63 << 3;
		pos += ((__u64)r->n4.key[bounded(pos + 4, 15)] - limit) >> 63 << 2;
		pos += ((__u64)r->n4.key[bounded(pos + 2, 15)] - limit) >> 63 << 1;
		pos += ((__u64)r->n4.key[bounded(pos + 1, 15)] - limit) >> 63;
		at = r->n4.val[bounded(pos, 15)];
		if (i + 1 >= depth)
			return at;
	}
	return 0;
}

static __always_inline __u64 below(__u64 a, __u64 b) // a < b, as 0 or 1
{
	return ((~a & b) | (~(a ^ b) & (a - b))) >> 63;
}

static __always_inline __u64 reached(const struct row *r, __u64 i, __u64 hi, __u64 lo)
{
	__u64 h, l;

	i = bounded(i, 7);
	h = r->n6.hi[i];
	l = r->n6.lo[i];

	return below(h, hi) | ((below(hi, h) | below(lo, l)) ^ 1);
}

static __noinline __u32 find6(void *table, __u32 root, __u64 hi, __u64 lo)
{
	__u32 depth = root >> 24, at = root;

	for (__u32 i = 0; i < 6; i++) {
		const struct row *r = row(table, at);
		__u64 pos;

		if (!r)
			return 0;
		pos = reached(r, 4, hi, lo) << 2;
		pos += reached(r, pos + 2, hi, lo) << 1;
		pos += reached(r, pos + 1, hi, lo);
		at = r->n6.val[bounded(pos, 7)];
		if (i + 1 >= depth)
			return at;
	}
	return 0;
}

// Positions of single bits by a de Bruijn sequence.
static const __u8 bit_of[64] = {
	0,  1,  48, 2,	57, 49, 28, 3,	61, 58, 50, 42, 38, 29, 17, 4,	62, 55, 59, 36, 53, 51,
	43, 22, 45, 39, 33, 30, 24, 18, 12, 5,	63, 47, 56, 27, 60, 41, 37, 16, 54, 35, 52, 21,
	44, 32, 23, 11, 46, 26, 40, 15, 34, 20, 31, 10, 25, 14, 19, 9,	13, 8,	7,  6,
};

static __always_inline __u32 lowest_bit(__u64 w)
{
	return bit_of[bounded(((w & -w) * 0x03f79d71b4cb0a89ull) >> 58, 63)];
}

static __always_inline bool same6(const __u32 *a, const __u32 *b)
{
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]));
}

static __always_inline bool same_mac(const __u8 *a, const __u8 *b)
{
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) | (a[4] ^ b[4]) | (a[5] ^ b[5]));
}

static __always_inline void set4(__u32 *peer, __be32 a)
{
	peer[0] = 0;
	peer[1] = 0;
	peer[2] = bpf_htonl(0xffff);
	peer[3] = a;
}

// first finds the first rule in all of: addresses (or the resolver's) and ports.
__noinline int first(const struct set *a, const struct bits *d, const struct set *p)
{
	__u32 some;

	if (!a || !d || !p)
		return NO_RULE;
	some = p->some;
	if (d == &a->bits)
		some &= a->some;
	for (__u32 i = 0; i < WORDS; i++) {
		__u64 at, w;

		if (!some)
			return NO_RULE;
		at = bounded(lowest_bit(some), WORDS - 1);
		w = (a->bits.w[at] | d->w[at]) & p->bits.w[at];
		if (w)
			return at * 64 + lowest_bit(w);
		some &= some - 1;
	}
	return NO_RULE;
}

// first_unchecked is first without those of the resolver's that are checked.
__noinline int first_unchecked(const struct set *a, const struct bits *d, const struct set *p, const struct bits *checked)
{
	__u32 some;

	if (!a || !d || !p || !checked)
		return NO_RULE;
	some = p->some;
	for (__u32 i = 0; i < WORDS; i++) {
		__u64 at, w;

		if (!some)
			return NO_RULE;
		at = bounded(lowest_bit(some), WORDS - 1);
		w = (a->bits.w[at] | (d->w[at] & ~checked->w[at])) & p->bits.w[at];
		if (w)
			return at * 64 + lowest_bit(w);
		some &= some - 1;
	}
	return NO_RULE;
}

// tag_search goes through an endpoint's tags. It is on the stack, of which there is little.
struct tag_search {
	void *table;
	const struct tagged *t;
	const struct row *s;
	__u32 root, rule;
};

static long search_tag(__u32 i, struct tag_search *x)
{
	const struct row *r;
	__u64 tag = x->t->tag[bounded(i, TAGS - 1)];
	__u32 rule;

	if (!tag)
		return 1;
	r = row(x->table, find6(x->table, x->root, tag, 0));
	if (!r)
		return 1;
	rule = first(&r->set, &r->set.bits, &x->s->set);
	if (rule < x->rule)
		x->rule = rule;
	return 0;
}

// first_tagged finds the first rule that matches an endpoint by one of its tags. With bpf_loop
// the verifier looks at the search for one tag, not for all.
static __noinline __u32 first_tagged(void *table, __u32 root, const struct tagged *t, const struct row *s)
{
	struct tag_search x = { .table = table, .t = t, .s = s, .root = root, .rule = NO_RULE };

	if (!t || !s)
		return NO_RULE;
	bpf_loop(TAGS, search_tag, &x, 0);
	return x.rule;
}

// pinned finds what the resolver has found for a packet's peer, or what a flow's names mean now. It is apart for
// evaluate's stack.
static __noinline struct pin *pinned(const struct row *r0, const struct packet *p)
{
	void *map = bpf_map_lookup_elem(&pins, &p->slot);
	struct pin_key k = {};

	if (p->reevaluates) {
		if (!p->name_set)
			return 0;
		k.addr[0] = NAME_SET;
		k.addr[3] = p->name_set;
	} else {
		k.addr[0] = p->peer[0];
		k.addr[1] = p->peer[1];
		k.addr[2] = p->peer[2];
		k.addr[3] = p->peer[3];
	}
	k.gen = r0->id.gen;
	return map ? bpf_map_lookup_elem(map, &k) : 0;
}

// verdict_of is what a rule says, or the default if there is none. It is apart for evaluate's stack.
static __noinline int verdict_of(void *table, const struct row *r0, __u32 dir, __u32 class, __u32 rule)
{
	dir &= 1;
	if (rule < WORDS * 64) {
		__u64 w = bounded(rule >> 6, WORDS - 1);
		const struct row *r1 = row(table, 1), *s = r1 ? row(table, r1->tab.allow) : 0;

		if (!s)
			return DENY;
		if ((s->set.bits.w[w] >> (rule & 63)) & 1)
			return ALLOW;
		s = row(table, r1->tab.reject);
		if (s && (s->set.bits.w[w] >> (rule & 63)) & 1)
			return REJECT;
		return DENY;
	}
	if (r0->id.fallback[dir] == ALLOW)
		return class == CLASS_PUBLIC ? ALLOW : DENY;
	return r0->id.fallback[dir] == REJECT ? REJECT : DENY;
}

// evaluate matches rules with a packet's peer, and returns a verdict. A rule that matches
// for its names alone, at a port where they are checked, does not match UDP; TCP that it
// opens is checked, unless the rules allow it without.
static __noinline int evaluate(void *table, const struct row *r0, struct packet *p, __u32 dir, __be16 port)
{
	const struct row *r1 = row(table, 1), *a, *s;
	const struct bits *d;
	struct pin *v = 0;
	__u32 set, rule;

	p->rule = NO_RULE;
	p->claim = 0;
	p->edition = 0;
	p->check = 0;
	if (!p->reevaluates)
		p->name_set = 0;
	if (!r1)
		return DENY;
	dir &= 1;
	if (p->proto == IPPROTO_TCP)
		set = find4(table, r1->tab.ports[dir][0], bpf_ntohs(port));
	else if (p->proto == IPPROTO_UDP)
		set = find4(table, r1->tab.ports[dir][1], bpf_ntohs(port));
	else
		set = r1->tab.icmp[dir];
	a = row(table, p->set);
	s = row(table, set);
	if (!a || !s)
		return DENY;
	d = &a->set.bits;
	if (r0->id.names && dir == EGRESS && p->class == CLASS_PUBLIC) {
		v = pinned(r0, p);
		if (v) {
#pragma unroll
			for (int i = TIMES - 1; i >= 0; i--)
				if (p->now < v->expires[i]) {
					d = &v->set[i];
					if (!p->reevaluates)
						p->name_set = v->name_sets[i];
				}
		}
	}
	rule = first(&a->set, d, &s->set);
	if (v && r0->id.checks && rule < WORDS * 64 && (p->proto == IPPROTO_TCP || p->proto == IPPROTO_UDP)) {
		const struct row *c = row(table, find4(table, r1->tab.checked, bpf_ntohs(port)));
		__u64 w = bounded(rule >> 6, WORDS - 1);

		if (!c)
			return DENY;
		if (((c->set.bits.w[w] & ~a->set.bits.w[w]) >> (rule & 63)) & 1) {
			__u32 other = first_unchecked(&a->set, d, &s->set, &c->set.bits);

			if (p->proto == IPPROTO_UDP)
				rule = other;
			else
				p->check = verdict_of(table, r0, dir, p->class, other) != ALLOW;
		}
	}
	if (r0->id.tags && p->class == CLASS_ENDPOINT) {
		const struct tagged *t = bpf_map_lookup_elem(&endpoints, p->peer);

		if (t) {
			__u32 other = first_tagged(table, r1->tab.tags, t, s);

			p->claim = t->claim;
			p->edition = t->edition;
			if (other < rule)
				rule = other;
		}
	}
	if (rule < WORDS * 64)
		p->rule = rule;
	return verdict_of(table, r0, dir, p->class, rule);
}

struct arp {
	__be16 htype, ptype;
	__u8 hlen, plen;
	__be16 op;
	__u8 sender_mac[6];
	__u8 sender[4];
	__u8 target_mac[6];
	__u8 target[4];
};

static __noinline int check_arp(struct __sk_buff *skb, const struct identity *id, __u32 dir)
{
	struct arp a;
	__be32 sender, target;

	if (load(skb, ETH_HLEN, &a, sizeof(a)))
		return R_TRUNCATED;
	__builtin_memcpy(&sender, a.sender, 4);
	__builtin_memcpy(&target, a.target, 4);
	if (a.htype != bpf_htons(1) || a.ptype != bpf_htons(ETH_P_IP) || a.hlen != 6 || a.plen != 4)
		return R_ARP;
	if (a.op != bpf_htons(1) && a.op != bpf_htons(2))
		return R_ARP;
	if (dir == EGRESS) {
		if (!same_mac(a.sender_mac, id->guest_mac))
			return R_ARP;
		if (sender != id->guest4 && !(sender == 0 && a.op == bpf_htons(1)))
			return R_ARP;
		if (target != id->gateway4 && target != id->guest4)
			return R_ARP;
	} else {
		if (!same_mac(a.sender_mac, id->gateway_mac) || sender != id->gateway4 || target != id->guest4)
			return R_ARP;
	}
	return R_LINK;
}

struct ipv4 {
	__u8 version_ihl, tos;
	__be16 len, id, frag;
	__u8 ttl, proto;
	__be16 check;
	__be32 src, dst;
};

struct ipv6 {
	__be32 flow;
	__be16 len;
	__u8 next, hops;
	__u32 src[4], dst[4];
};

struct nd {
	__u8 type, code;
	__be16 check;
	__be32 reserved;
	__u32 target[4];
};

struct nd_option {
	__u8 type, len;
	__u8 mac[6];
};

static __always_inline bool is_nd(__u8 type)
{
	return (type >= 130 && type <= 137) || type == 143;
}

static __noinline int check_nd(struct __sk_buff *skb, const struct identity *id, __u32 dir, const struct ipv6 *h,
			       const __u8 *dst_mac)
{
	const __u32 *self = dir == EGRESS ? id->guest6 : id->gateway6;
	const __u32 *self_ll = dir == EGRESS ? id->guest_ll : id->gateway_ll;
	const __u32 *other = dir == EGRESS ? id->gateway6 : id->guest6;
	const __u32 *other_ll = dir == EGRESS ? id->gateway_ll : id->guest_ll;
	const __u8 *mac = dir == EGRESS ? id->guest_mac : id->gateway_mac;
	__u32 len = bpf_ntohs(h->len), low;
	bool unspecified = !(h->src[0] | h->src[1] | h->src[2] | h->src[3]), self_target;
	struct nd_option o;
	struct nd n;

	if (h->hops != 255 || (len != 24 && len != 32))
		return R_ND;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + 40, &n, sizeof(n)))
		return R_TRUNCATED;
	if ((n.type != 135 && n.type != 136) || n.code != 0)
		return R_ND;
	if (unspecified) {
		if (n.type != 135)
			return R_ND;
	} else if (!same6(h->src, self) && !same6(h->src, self_ll)) {
		return R_ND;
	}
	if ((h->dst[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000)) {
		if ((h->dst[0] & bpf_htonl(0xffff0000)) != bpf_htonl(0xff020000))
			return R_ND;
		__builtin_memcpy(&low, dst_mac + 2, 4);
		if (dst_mac[0] == 0x33 && dst_mac[1] == 0x33 && low != h->dst[3])
			return R_ND;
	} else {
		if (!same6(h->dst, other) && !same6(h->dst, other_ll))
			return R_ND;
		if (dst_mac[0] == 0x33 && dst_mac[1] == 0x33)
			return R_ND;
	}
	self_target = same6(n.target, self) || same6(n.target, self_ll);
	if (!self_target && (n.type == 136 || (!same6(n.target, other) && !same6(n.target, other_ll))))
		return R_ND;
	if (len == 32) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 40 + 24, &o, sizeof(o)))
			return R_TRUNCATED;
		if (o.len != 1)
			return R_ND;
		if (unspecified) {
			if (o.type != 14)
				return R_ND;
		} else if (o.type != n.type - 134 || !same_mac(o.mac, mac)) {
			return R_ND;
		}
	}
	return R_LINK;
}

// check_length: the packet lies in the frame, and only short frames are padded.
static __always_inline bool bad_length(__u32 packet, __u32 frame)
{
	return packet > frame || (packet < frame && frame > ETH_ZLEN);
}

static __always_inline int parse4(struct __sk_buff *skb, const struct identity *id, struct packet *p)
{
	struct ipv4 h;
	__u32 ihl, len;

	if (load(skb, ETH_HLEN, &h, sizeof(h)))
		return R_TRUNCATED;
	ihl = (h.version_ihl & 15) * 4;
	len = bpf_ntohs(h.len);
	if (h.version_ihl >> 4 != 4 || ihl < 20 || len < ihl || bad_length(ETH_HLEN + len, skb->len) || h.ttl == 0)
		return R_IP_HEADER;
	if (ihl != 20)
		return R_IP_OPTIONS;
	if (h.frag & bpf_htons(0xbfff))
		return R_FRAGMENT;
	if (h.proto != IPPROTO_TCP && h.proto != IPPROTO_UDP && h.proto != IPPROTO_ICMP)
		return R_PROTOCOL;
	p->proto = h.proto;
	p->l4 = ETH_HLEN + 20;
	p->l4_len = len - 20;
	if (p->dir == EGRESS) {
		set4(p->peer, h.dst);
		if (h.src != id->guest4)
			return R_SRC_IP;
	} else {
		set4(p->peer, h.src);
		if (h.dst != id->endpoint4)
			return R_DST_IP;
	}
	return 0;
}

static __noinline int parse6(struct __sk_buff *skb, const struct identity *id, struct packet *p, const __u8 *dst_mac)
{
	struct ipv6 h;
	__u32 len;
	__u8 type = 0;

	if (load(skb, ETH_HLEN, &h, sizeof(h)))
		return R_TRUNCATED;
	if (!id->has6)
		return R_IPV6_OFF;
	len = bpf_ntohs(h.len);
	if ((bpf_ntohl(h.flow) >> 28) != 6 || len == 0 || bad_length(ETH_HLEN + 40 + len, skb->len) || h.hops == 0)
		return R_IP_HEADER;
	switch (h.next) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_ICMPV6:
		break;
	case 44:
		return R_FRAGMENT;
	case 0: case 43: case 51: case 60: case 135: case 139: case 140:
		return R_EXT_HEADER;
	default:
		return R_PROTOCOL;
	}
	p->proto = h.next;
	p->six = 1;
	p->l4 = ETH_HLEN + 40;
	p->l4_len = len;
	if (p->dir == EGRESS)
		__builtin_memcpy(p->peer, h.dst, 16);
	else
		__builtin_memcpy(p->peer, h.src, 16);
	if (h.next == IPPROTO_ICMPV6 && len >= 8) {
		if (load(skb, ETH_HLEN + 40, &type, 1))
			return R_TRUNCATED;
		if (is_nd(type))
			return check_nd(skb, id, p->dir, &h, dst_mac);
	}
	if (dst_mac[0] == 0x33 && dst_mac[1] == 0x33)
		return R_DST_MAC;
	if (p->dir == EGRESS) {
		if (!same6(h.src, id->guest6))
			return R_SRC_IP;
	} else if (!same6(h.dst, id->endpoint6)) {
		return R_DST_IP;
	}
	return 0;
}

struct tcp {
	__be16 src, dst;
	__be32 seq, ack;
	__u8 offset, flags;
	__be16 window, check, urgent;
};

struct udp {
	__be16 src, dst, len, check;
};

struct icmp {
	__u8 type, code;
	__be16 check, id, seq;
};

#define FIN 1
#define SYN 2
#define RST 4
#define ACK 16

static __always_inline bool bad_flags(__u8 f)
{
	if (f & SYN)
		return f & (FIN | RST);
	if (f & RST)
		return f & FIN;
	return !(f & ACK);
}

// The kernel's sk_buff, as far as it is needed to see what checksum the guest asked
// for, and in which network namespace this is: the program's own context does not tell.
struct net {
	__u64 net_cookie;
} __attribute__((preserve_access_index));

typedef struct {
	struct net *net;
} __attribute__((preserve_access_index)) possible_net_t;

struct net_device {
	possible_net_t nd_net;
} __attribute__((preserve_access_index));

struct sk_buff {
	struct net_device *dev;
	unsigned char *head, *data;
	__u8 ip_summed : 2;
	__u16 csum_start, csum_offset;
} __attribute__((preserve_access_index));

#define CHECKSUM_COMPLETE 2
#define CHECKSUM_PARTIAL 3

static __always_inline __u8 summed(struct __sk_buff *ctx)
{
	struct sk_buff *skb = (void *)ctx;

	return BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed);
}

// bad_checksum_request says whether a checksum that the guest has left to others will be
// stored elsewhere than in the checksum field of TCP or UDP.
static __noinline int bad_checksum_request(struct __sk_buff *ctx, const struct packet *p)
{
	struct sk_buff *skb = (void *)ctx;
	unsigned char *head = 0, *data = 0;
	__u16 start = 0, offset = 0;

	if (bpf_core_read(&head, sizeof(head), &skb->head) || bpf_core_read(&data, sizeof(data), &skb->data) ||
	    bpf_core_read(&start, sizeof(start), &skb->csum_start) || bpf_core_read(&offset, sizeof(offset), &skb->csum_offset))
		return 1;
	if (start != (__u64)data - (__u64)head + p->l4)
		return 1;
	if (p->proto == IPPROTO_TCP)
		return offset != 16;
	return p->proto != IPPROTO_UDP || offset != 6;
}

static __always_inline int load_l4(struct __sk_buff *skb, const struct packet *p, void *to, const __u32 n)
{
	return p->six ? load(skb, ETH_HLEN + 40, to, n) : load(skb, ETH_HLEN + 20, to, n);
}

static __always_inline void set_ports(struct packet *p, __be16 src, __be16 dst)
{
	p->peer_port = p->dir == EGRESS ? dst : src;
	p->guest_port = p->dir == EGRESS ? src : dst;
}

static __always_inline int parse_l4(struct __sk_buff *skb, struct packet *p)
{
	__u32 gso = skb->gso_size, headers = p->l4;
	bool dhcp = false;

	if (p->proto == IPPROTO_TCP) {
		struct tcp t;
		__u32 len;

		if (p->l4_len < sizeof(t) || load_l4(skb, p, &t, sizeof(t)))
			return R_L4_HEADER;
		len = (t.offset >> 4) * 4;
		if (len < sizeof(t) || len > p->l4_len || t.src == 0 || t.dst == 0 || bad_flags(t.flags))
			return R_L4_HEADER;
		headers += len;
		p->flags = t.flags;
		set_ports(p, t.src, t.dst);
	} else if (p->proto == IPPROTO_UDP) {
		struct udp u;

		if (p->l4_len < sizeof(u) || load_l4(skb, p, &u, sizeof(u)))
			return R_L4_HEADER;
		if (bpf_ntohs(u.len) != p->l4_len || u.src == 0 || u.dst == 0)
			return R_L4_HEADER;
		headers += sizeof(u);
		set_ports(p, u.src, u.dst);
		for (__u32 i = 0; i < 2; i++) {
			__u16 port = bpf_ntohs(i ? u.src : u.dst);

			dhcp |= p->six ? port == 546 || port == 547 : port == 67 || port == 68;
		}
	} else {
		struct icmp c;

		if (p->l4_len < sizeof(c) || load_l4(skb, p, &c, sizeof(c)))
			return R_L4_HEADER;
		p->flags = c.type;
		p->guest_port = c.id;
	}
	p->bytes = skb->len;
	p->segments = 1;
	if (gso) {
		__u32 payload;

		if (gso < 8 || (p->proto != IPPROTO_TCP && (p->proto != IPPROTO_UDP || p->dir == EGRESS)))
			return R_GSO;
		payload = skb->len > headers ? skb->len - headers : 0;
		if (payload > gso) {
			p->segments = (payload + gso - 1) / gso;
			p->bytes += (p->segments - 1) * headers;
		}
	}
	if (p->dir == EGRESS) {
		p->summed = summed(skb);
		if (p->summed == CHECKSUM_PARTIAL && bad_checksum_request(skb, p))
			return R_CHECKSUM;
	}
	return dhcp ? R_DHCP : 0;
}

// parse returns R_LINK for what passes without rules, 0 for what they decide, or why
// the packet is denied.
static __always_inline int parse(struct __sk_buff *skb, const struct identity *id, struct packet *p)
{
	struct {
		__u8 dst[6], src[6];
		__be16 type;
	} eth;
	bool broadcast, multicast6;
	const __u8 *to;

	if (load(skb, 0, &eth, sizeof(eth)))
		return R_TRUNCATED;
	p->ethertype = eth.type;
	if (skb->vlan_present || eth.type == bpf_htons(0x8100) || eth.type == bpf_htons(0x88a8) || eth.type == bpf_htons(0x9100))
		return R_VLAN;
	if (eth.type != bpf_htons(ETH_P_ARP) && eth.type != bpf_htons(ETH_P_IP) && eth.type != bpf_htons(ETH_P_IPV6))
		return R_ETHERTYPE;
	if (p->dir == EGRESS && !same_mac(eth.src, id->guest_mac))
		return R_SRC_MAC;
	to = p->dir == EGRESS ? id->gateway_mac : id->guest_mac;
	broadcast = (eth.dst[0] & eth.dst[1] & eth.dst[2] & eth.dst[3] & eth.dst[4] & eth.dst[5]) == 0xff;
	multicast6 = eth.dst[0] == 0x33 && eth.dst[1] == 0x33;
	if (!same_mac(eth.dst, to) && !(broadcast && eth.type == bpf_htons(ETH_P_ARP)) &&
	    !(multicast6 && eth.type == bpf_htons(ETH_P_IPV6)))
		return R_DST_MAC;
	if (eth.type == bpf_htons(ETH_P_ARP))
		return check_arp(skb, id, p->dir);
	if (eth.type == bpf_htons(ETH_P_IP))
		return parse4(skb, id, p);
	return parse6(skb, id, p, eth.dst);
}

static __always_inline __u64 lifetime(__u8 state)
{
	switch (state) {
	case OPENING:
		return 60 * NS_PER_S;
	case ESTABLISHED:
		return 4 * 3600 * NS_PER_S;
	case BOTH_WAYS:
		return 180 * NS_PER_S;
	case ALIAS:
		return ~0ull >> 1; // it is for its flow to say
	}
	return 30 * NS_PER_S;
}

// classify looks the peer up in the table.
static __noinline int classify(void *table, struct packet *p, const __u32 *a)
{
	const struct row *r1 = row(table, 1);
	__u32 v;

	if (!r1)
		return R_NO_POLICY;
	if (p->six)
		v = find6(table, r1->tab.addr6, (__u64)bpf_ntohl(a[0]) << 32 | bpf_ntohl(a[1]),
			  (__u64)bpf_ntohl(a[2]) << 32 | bpf_ntohl(a[3]));
	else
		v = find4(table, r1->tab.addr4, bpf_ntohl(a[3]));
	p->class = v >> 24;
	p->set = v & 0xffffff;
	if (p->class == 0)
		return R_NO_POLICY;
	return p->class > CLASS_ENDPOINT ? R_FLOOR : 0;
}

// spoofed says whether a packet to the guest has a source that is not its own: one of the host's addresses, and the
// host has not made it; or that of another endpoint, and it has not come by that one's device. Who else can send
// packets to the host can put any source into them, and the host's routes need not notice (rp_filter 0 and 2, and
// IPv6). The kernel sets ingress_ifindex when a device gives it a packet, in each network namespace anew, and leaves it
// alone from there to here.
static __noinline bool spoofed(struct __sk_buff *skb, const struct packet *p, const __u32 *peer, __u32 class)
{
	struct sk_buff *kernel = (void *)skb;
	const struct tagged *t;

	if (p->dir == EGRESS || p->from_waker)
		return false;
	if (class == CLASS_HOST)
		return skb->ingress_ifindex != 0;
	if (class != CLASS_ENDPOINT)
		return false;
	t = bpf_map_lookup_elem(&endpoints, peer);
	return !t || t->ifindex != skb->ingress_ifindex || t->netns != BPF_CORE_READ(kernel, dev, nd_net.net, net_cookie);
}

// fresh finds the flow of a key, if it lives.
static __always_inline struct flow *fresh(void *map, const struct packet *p, const struct flow_key *k)
{
	struct flow *f = bpf_map_lookup_elem(map, k);

	return f && !f->cut && p->now < f->seen + lifetime(f->state) ? f : 0;
}

// is_current says whether a flow need not be judged anew: the table that has judged it is that
// of now, and so are the endpoint that it is with and that one's tags. Rules open other endpoints by their tags alone,
// so a flow with one has its claim.
static __always_inline bool is_current(const struct row *r0, const struct flow *f, const struct flow_key *k)
{
	const struct tagged *t;

	if (f->gen != r0->id.gen)
		return false;
	if (!f->claim)
		return true;
	t = bpf_map_lookup_elem(&endpoints, k->peer);
	return t && t->claim == f->claim && t->edition == f->edition;
}

// reevaluate judges a flow anew after a swap, or when the tags of the endpoint that it is with have changed: the packet
// that opened it, whose peer has been classified. A flow that is not allowed any more is gone, and so is one with an
// endpoint that is not there any more, though another may have its address.
static __always_inline bool reevaluate(void *table, const struct row *r0, struct packet *p, struct flow *f, const struct flow_key *k)
{
	__u8 opener = f->opener;
	int verdict;
	__u16 rule;

	// Its address may not be given for its names any more, which only new flows need.
	p->reevaluates = 1;
	p->name_set = f->name_set;
	verdict = evaluate(table, r0, p, opener, opener == EGRESS ? k->peer_port : k->guest_port);
	p->reevaluates = 0;
	rule = p->rule;
	p->rule = NO_RULE;
	// A connection that has not ended on the host cannot be checked from its midst on, and one that
	// has can only go on there.
	if (verdict != ALLOW || (f->claim && f->claim != p->claim) || (f->via ? !r0->id.tls_port : p->check)) {
		f->cut = 1;
		return false;
	}
	f->claim = p->claim;
	f->edition = p->edition;
	f->class = p->class;
	f->rule = rule;
	f->gen = r0->id.gen;
	return true;
}

// flows_of finds a map of the endpoint's flows: of those that last (1) or not (0).
static __always_inline void *flows_of(const struct packet *p, __u32 lasting)
{
	__u32 i = p->slot * 2 + lasting;

	return bpf_map_lookup_elem(&flows, &i);
}

static __always_inline bool lasts(__u8 state)
{
	return state == ESTABLISHED || state == BOTH_WAYS;
}

// find_other is find for what does not last.
static __noinline struct flow *find_other(void *lasting, const struct packet *p, const struct flow_key *k)
{
	void *brief = flows_of(p, 0);
	struct flow *f = brief ? fresh(brief, p, k) : 0;

	// Another processor may have moved it before this one has looked.
	return f ? f : fresh(lasting, p, k);
}

// find finds the flow of a key, if it lives.
static __always_inline struct flow *find(const struct packet *p, const struct flow_key *k)
{
	void *lasting = flows_of(p, 1);
	struct flow *f;

	if (!lasting)
		return 0;
	f = fresh(lasting, p, k);
	return f ? f : find_other(lasting, p, k);
}

// move puts a flow into the map that its new state belongs to, and with it what the host knows it by. It is there first
// and gone from the other one then, so that it is always found.
static __noinline int move(const struct packet *p, __u32 lasting, const struct flow_key *k, const struct flow *f, const struct identity *id)
{
	void *from = flows_of(p, !lasting), *to = flows_of(p, lasting);
	struct flow_key known = { .peer_port = id->tls_port, .guest_port = f->via, .proto = IPPROTO_TCP };
	const struct alias *a;

	if (!from || !to || bpf_map_update_elem(to, k, f, BPF_ANY))
		return -1;
	bpf_map_delete_elem(from, k);
	if (!known.guest_port)
		return 0;
	set4(known.peer, id->gateway4);
	a = bpf_map_lookup_elem(from, &known);
	if (a && a->state == ALIAS && !bpf_map_update_elem(to, &known, a, BPF_ANY))
		bpf_map_delete_elem(from, &known);
	return 0;
}

#define OPENS 1	 // the packet asks the rules, and opens a flow
#define BELONGS 2 // it belongs to a live one

// tcp_step says what a packet of TCP is to a flow, or why it is denied (as -reason).
static __always_inline int tcp_step(struct packet *p, const struct flow *f)
{
	__u8 flags = p->flags;

	p->next = 0;
	if ((flags & (SYN | ACK)) == SYN) {
		if (f && f->opener != p->dir && f->state != OPENING)
			return -R_TCP_STATE;
		p->next = OPENING;
		return OPENS;
	}
	if (!f)
		return -R_NO_FLOW;
	if (f->state == OPENING) {
		if (flags & RST) {
			p->next = CLOSING;
			return BELONGS;
		}
		if (f->opener == p->dir || !(flags & SYN))
			return -R_TCP_STATE;
		p->next = ESTABLISHED;
		return BELONGS;
	}
	if ((flags & SYN) && f->opener == p->dir)
		return -R_TCP_STATE;
	p->next = f->state;
	p->fin = f->fin;
	if (flags & FIN)
		p->fin |= 1 << (p->dir & 1);
	if ((flags & RST) || p->fin == 3)
		p->next = CLOSING;
	return BELONGS;
}

static __always_inline int other_step(struct packet *p, const struct flow *f)
{
	if (p->proto == IPPROTO_UDP) {
		if (!f) {
			p->next = ONE_WAY;
			return OPENS;
		}
		p->next = f->opener != p->dir ? BOTH_WAYS : f->state;
		return BELONGS;
	}
	p->next = ECHO;
	if (p->flags == (p->six ? 128 : 8))
		return f && f->opener == p->dir ? BELONGS : OPENS;
	return f && f->opener != p->dir ? BELONGS : -R_NO_FLOW;
}

static __always_inline int flow_step(struct packet *p, const struct flow *f)
{
	return p->proto == IPPROTO_TCP ? tcp_step(p, f) : other_step(p, f);
}

// quoted_flow finds the key of the flow that the packet quoted by an ICMP error is of.
__noinline int quoted_flow(struct __sk_buff *skb, const struct identity *id, const struct packet *p, struct flow_key *k)
{
	__be16 ports[3]; // or the head of an ICMP message
	__u32 at, head, src[4], dst[4];
	__u8 type;

	if (!id || !p || !k)
		return R_NO_POLICY;
	at = p->l4 + 8;
	head = p->six ? 40 : 20;
	k->six = p->six;
	if (p->l4_len < 8 + head + 8)
		return R_L4_HEADER;
	if (p->six) {
		struct ipv6 h;

		if (bpf_skb_load_bytes(skb, at, &h, sizeof(h)))
			return R_L4_HEADER;
		if ((bpf_ntohl(h.flow) >> 28) != 6)
			return R_NO_FLOW;
		k->proto = h.next;
		__builtin_memcpy(src, h.src, 16);
		__builtin_memcpy(dst, h.dst, 16);
	} else {
		struct ipv4 h;

		if (bpf_skb_load_bytes(skb, at, &h, sizeof(h)))
			return R_L4_HEADER;
		if (h.version_ihl != 0x45 || (h.frag & bpf_htons(0x1fff)))
			return R_NO_FLOW;
		k->proto = h.proto;
		set4(src, h.src);
		set4(dst, h.dst);
	}
	if (bpf_skb_load_bytes(skb, at + head, ports, sizeof(ports)))
		return R_L4_HEADER;
	// An error on egress quotes what the guest got, one on ingress what it sent.
	if (p->dir == EGRESS) {
		if (!same6(src, p->peer))
			return R_NO_FLOW;
		if (p->six ? !same6(dst, id->guest6) : dst[3] != id->guest4)
			return R_NO_FLOW;
		__builtin_memcpy(k->peer, src, 16);
	} else {
		if (p->six ? !same6(src, id->endpoint6) : src[3] != id->endpoint4)
			return R_NO_FLOW;
		__builtin_memcpy(k->peer, dst, 16);
	}
	if (k->proto == IPPROTO_TCP || k->proto == IPPROTO_UDP) {
		k->peer_port = p->dir == EGRESS ? ports[0] : ports[1];
		k->guest_port = p->dir == EGRESS ? ports[1] : ports[0];
	} else if (k->proto == p->proto) {
		type = *(__u8 *)ports;
		if (p->six ? type != 128 && type != 129 : type != 8 && type != 0)
			return R_NO_FLOW;
		k->guest_port = ports[2];
	} else {
		return R_NO_FLOW;
	}
	return 0;
}

// check_error finds the flow of the packet that an ICMP error quotes. Its key is the
// caller's, since the stack is short here.
static __noinline int check_error(struct __sk_buff *skb, void *table, const struct row *r0, struct packet *p, struct flow_key *k)
{
	struct flow *f;
	int err;

	err = quoted_flow(skb, &r0->id, p, k);
	if (err)
		return err;
	// From here the packet's peer is that of the flow, as a swapped table may have
	// to judge it again.
	if (p->dir == INGRESS) {
		err = classify(table, p, k->peer);
		if (err)
			return R_NO_FLOW;
		// On the way to the host or another endpoint there is nobody but the host and that one.
		if (skb->ingress_ifindex && spoofed(skb, p, k->peer, p->class))
			return R_NO_FLOW;
	}
	__builtin_memcpy(p->quoted, p->peer, 16);
	__builtin_memcpy(p->peer, k->peer, 16);
	p->proto = k->proto;
	p->related = 1;
	f = find(p, k);
	// The peer has no part in a connection that ends on the host.
	if (f && (f->via || f->state == ALIAS))
		f = 0;
	err = f && (is_current(r0, f, k) || reevaluate(table, r0, p, f, k)) ? 0 : R_NO_FLOW;
	p->proto = p->six ? IPPROTO_ICMPV6 : IPPROTO_ICMP; // not kept: the stack is short
	__builtin_memcpy(p->peer, p->quoted, 16);
	return err;
}

static __always_inline bool over(__u64 tat, __u64 mult, __u64 burst, __u64 units, __u64 now, __u64 *next)
{
	if (!mult) {
		*next = tat;
		return false;
	}
	if (tat < now)
		tat = now;
	*next = tat + (units * mult >> 20);
	return *next - now > burst;
}

// limit counts a packet against limits, or says which it exceeds.
__noinline int limit(const struct limits *l, const struct packet *p)
{
	__u64 bit_mult, bit_burst, packet_mult, packet_burst, conn_mult, conn_burst, quota;
	__u64 now, bytes, segments, opens, bit, packet, conn;
	struct usage *s;
	int reason = 0;
	__u32 i;

	if (!l || !p)
		return R_NO_POLICY;
	bit_mult = l->bit_mult;
	bit_burst = l->bit_burst;
	packet_mult = l->packet_mult;
	packet_burst = l->packet_burst;
	conn_mult = l->conn_mult;
	conn_burst = l->conn_burst;
	quota = l->quota;
	now = p->now;
	bytes = p->bytes;
	segments = p->segments;
	opens = p->opens;
	i = p->slot * 2 + (p->dir & 1);
	s = bpf_map_lookup_elem(&usages, &i);
	if (!s)
		return R_NO_POLICY;
	bpf_spin_lock(&s->lock);
	if (s->used + bytes > quota)
		reason = R_QUOTA;
	else if (over(s->packet_tat, packet_mult, packet_burst, segments, now, &packet))
		reason = R_PACKET_RATE;
	else if (over(s->bit_tat, bit_mult, bit_burst, bytes * 8, now, &bit))
		reason = R_BIT_RATE;
	else if (over(s->conn_tat, conn_mult, conn_burst, opens, now, &conn))
		reason = R_CONN_RATE;
	else {
		s->packet_tat = packet;
		s->bit_tat = bit;
		s->conn_tat = conn;
		__sync_fetch_and_add(&s->used, bytes);
		s->active = now;
	}
	bpf_spin_unlock(&s->lock);
	return reason;
}

// account counts a packet that may pass, or says which limit it exceeds.
static __always_inline int account(void *table, const struct row *r0, const struct packet *p)
{
	const struct row *r1;
	struct usage *s;
	__u32 i = p->slot * 2 + (p->dir & 1);

	if (r0->id.limited[p->dir & 1]) {
		r1 = row(table, 1);
		return r1 ? limit(&r1->tab.limits[p->dir & 1], p) : R_NO_POLICY;
	}
	// Nothing to decide, so no lock.
	s = bpf_map_lookup_elem(&usages, &i);
	if (!s)
		return R_NO_POLICY;
	__sync_fetch_and_add(&s->used, p->bytes);
	s->active = p->now;
	return 0;
}

// icmp_class says whether ICMP is an error (1) or echo (0), or why it is denied (as -reason).
static __always_inline int icmp_class(const struct packet *p)
{
	if (p->six) {
		if (p->flags >= 1 && p->flags <= 4)
			return 1;
		return p->flags == 128 || p->flags == 129 ? 0 : -R_ICMP_TYPE;
	}
	if (p->flags == 3 || p->flags == 11 || p->flags == 12)
		return 1;
	return p->flags == 8 || p->flags == 0 ? 0 : -R_ICMP_TYPE;
}

// open_flow records the flow that a packet opens. A SYN that is sent again belongs to the flow
// that it has opened before. The function is apart for its stack. Anything but 0 is why not.
static __noinline int open_flow(const struct flow_key *k, const struct packet *p, const struct flow *old, __u32 gen)
{
	__u32 dir = p->dir & 1, i = p->slot * 2 + dir;
	struct flow n = {
		.seen = p->now, .first = p->now, .gen = gen, .claim = p->claim, .rule = p->rule, .state = p->next, .opener = dir,
		.via = p->via, .edition = p->edition, .name_set = p->name_set, .class = p->class,
	};
	struct usage *s;
	bool again = old && old->state == OPENING && old->opener == dir;
	void *map;

	if (again) {
		n.first = old->first;
		n.count[0] = old->count[0];
		n.count[1] = old->count[1];
	}
	if (dir == EGRESS) {
		n.count[0].packets += p->segments;
		n.count[0].bytes += p->bytes;
	} else {
		n.count[1].packets += p->segments;
		n.count[1].bytes += p->bytes;
	}
	map = flows_of(p, 0);
	if (!map || bpf_map_update_elem(map, k, &n, BPF_ANY))
		return R_FLOW_TABLE;
	if (old && lasts(old->state)) { // it is opened anew
		map = flows_of(p, 1);
		if (map)
			bpf_map_delete_elem(map, k);
	}
	if (!again) {
		s = bpf_map_lookup_elem(&usages, &i);
		if (s)
			__sync_fetch_and_add(&s->opened, 1);
	}
	return 0;
}

// unalias finds the flow of a packet that the host has sent to a guest whose connection ends
// there.
static __noinline struct flow *unalias(struct packet *p, struct flow_key *k, const struct flow *f)
{
	const struct alias *a = (const void *)f;

	p->via = k->guest_port;
	__builtin_memcpy(k->peer, a->peer, 16);
	k->peer_port = a->peer_port;
	k->guest_port = a->guest_port;
	__builtin_memcpy(p->peer, a->peer, 16);
	p->peer_port = a->peer_port;
	p->guest_port = a->guest_port;
	f = find(p, k);
	return f && f->via == p->via ? (struct flow *)f : 0;
}

#define VIA_TRIES 8
#define VIA_STEP 7919

// reserve gives a flow whose name is to be checked its port on the host: the one that it has,
// or the guest's, or else one of some others that no other such flow has.
static __noinline int reserve(const struct identity *id, struct packet *p)
{
	void *brief = flows_of(p, 0), *lasting = flows_of(p, 1);
	struct flow_key k = { .peer_port = id->tls_port, .proto = IPPROTO_TCP }, main = { .proto = IPPROTO_TCP };
	struct alias a = { .peer_port = p->peer_port, .guest_port = p->guest_port, .state = ALIAS };
	__u32 port = bpf_ntohs(p->via ? p->via : p->guest_port);

	if (!brief || !lasting)
		return R_NO_POLICY;
	set4(k.peer, id->gateway4);
	__builtin_memcpy(a.peer, p->peer, 16);
	for (__u32 i = 0; i < VIA_TRIES; i++) {
		const struct alias *there;
		const struct flow *f;

		k.guest_port = bpf_htons(port ? port : 1);
		port = (port + VIA_STEP) & 0xffff;
		there = bpf_map_lookup_elem(lasting, &k);
		if (!there)
			there = bpf_map_lookup_elem(brief, &k);
		if (there && there->state != ALIAS)
			continue;
		if (there && !(same6(there->peer, a.peer) && there->peer_port == a.peer_port && there->guest_port == a.guest_port)) {
			__builtin_memcpy(main.peer, there->peer, 16);
			main.peer_port = there->peer_port;
			main.guest_port = there->guest_port;
			f = find(p, &main);
			if (f && f->via == k.guest_port)
				continue;
		}
		if (bpf_map_update_elem(brief, &k, &a, BPF_ANY))
			break;
		bpf_map_delete_elem(lasting, &k);
		p->via = k.guest_port;
		return 0;
	}
	return R_FLOW_TABLE;
}

// decide is all but the translation. It returns the reason, and leaves the verdict in p.
static __always_inline int decide(struct __sk_buff *skb, void *table, const struct row *r0, struct packet *p)
{
	struct flow_key k = {};
	struct flow *f = 0;
	int reason, step = 0, err;

	reason = parse(skb, &r0->id, p);
	if (reason == R_LINK)
		goto limits;
	if (reason)
		return reason;
	reason = parse_l4(skb, p);
	if (reason)
		return reason;
	if (p->proto == IPPROTO_ICMP || p->proto == IPPROTO_ICMPV6) {
		reason = classify(table, p, p->peer);
		if (reason)
			return reason;
		err = icmp_class(p);
		if (err < 0)
			return -err;
		if (err) {
			if (spoofed(skb, p, p->peer, p->class))
				return R_SRC_INTERFACE;
			reason = check_error(skb, table, r0, p, &k);
			if (reason)
				return reason;
			reason = R_RELATED;
			goto limits;
		}
	}
	__builtin_memcpy(k.peer, p->peer, 16);
	k.peer_port = p->peer_port;
	k.guest_port = p->guest_port;
	k.proto = p->proto;
	k.six = p->six;
	f = find(p, &k);
	if (f && f->state == ALIAS) {
		if (p->dir == EGRESS)
			return R_NO_FLOW;
		if (spoofed(skb, p, p->peer, CLASS_HOST))
			return R_SRC_INTERFACE;
		f = unalias(p, &k, f);
		if (!f)
			return R_NO_FLOW;
	} else if (f && f->via) {
		// What claims to be the peer does not belong to it: the host answers for it.
		if (p->dir == INGRESS)
			return R_NO_FLOW;
		p->via = f->via;
	}
	// A flow of this generation was judged by this table.
	if (!f || !is_current(r0, f, &k)) {
		if (!p->class) {
			reason = classify(table, p, p->peer);
			if (reason)
				return reason;
		}
		if (!p->via && spoofed(skb, p, k.peer, p->class))
			return R_SRC_INTERFACE;
		if (f && !reevaluate(table, r0, p, f, &k))
			f = 0;
	} else if (f->class != CLASS_PUBLIC && !p->via && spoofed(skb, p, k.peer, f->class)) {
		return R_SRC_INTERFACE;
	}
	step = flow_step(p, f);
	if (step < 0)
		return -step;
	reason = R_FLOW;
	if (step == OPENS) {
		int verdict;

		if (p->via && p->dir == INGRESS)
			return R_TCP_STATE;
		if (!p->class) {
			reason = classify(table, p, p->peer);
			if (reason)
				return reason;
		}
		verdict = evaluate(table, r0, p, p->dir, p->dir == EGRESS ? p->peer_port : p->guest_port);
		reason = p->rule == NO_RULE ? R_DEFAULT : R_RULE;
		if (verdict != ALLOW) {
			p->verdict = verdict;
			return reason;
		}
		if (!p->check)
			p->via = 0;
		else if (p->six || !r0->id.tls_port)
			return R_TLS_OFF;
		p->opens = 1;
	}
limits:
	err = account(table, r0, p);
	if (err)
		return err;
	if (step == OPENS) {
		if (p->check) {
			err = reserve(&r0->id, p);
			if (err)
				return err;
		}
		err = open_flow(&k, p, f, r0->id.gen);
		if (err)
			return err;
	} else if (f) {
		struct counter *c = &f->count[p->dir & 1];

		__sync_fetch_and_add(&c->packets, p->segments);
		__sync_fetch_and_add(&c->bytes, p->bytes);
		bool stays = lasts(f->state) == lasts(p->next);

		f->seen = p->now;
		f->state = p->next;
		f->fin = p->fin;
		if (!stays)
			move(p, lasts(p->next), &k, f, &r0->id);
	}
	p->verdict = ALLOW;
	return reason;
}

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

// quick4 replaces an address of IPv4 where the headers can be written to as they are, and
// says whether it could. Checksums are adjusted (RFC 1624, eqn. 3); a partial one, which
// is finished later, is not inverted. One of the whole frame would have to be adjusted as well.
static __always_inline bool quick4(struct __sk_buff *skb, const struct packet *p, __be32 old, __be32 new)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv4 *h = data + ETH_HLEN;
	struct tcp *t = data + ETH_HLEN + 20;
	struct udp *u = data + ETH_HLEN + 20;
	__u8 known = p->dir == EGRESS ? p->summed : summed(skb);
	__u32 diff = (__u16)~old + (__u16)(~old >> 16) + (__u16)new + (__u16)(new >> 16);

	if (p->related || known == CHECKSUM_COMPLETE || (void *)(h + 1) > end)
		return false;
	if (p->proto == IPPROTO_TCP) {
		if ((void *)(t + 1) > end)
			return false;
		if (known == CHECKSUM_PARTIAL)
			t->check = fold(t->check + diff);
		else
			t->check = ~fold((__u16)~t->check + diff);
	} else if (p->proto == IPPROTO_UDP) {
		if ((void *)(u + 1) > end)
			return false;
		// A checksum of 0 is none, and stays so.
		if (u->check) {
			__u16 sum = known == CHECKSUM_PARTIAL ? fold(u->check + diff) : ~fold((__u16)~u->check + diff);

			u->check = sum ? sum : 0xffff;
		}
	}
	h->check = ~fold((__u16)~h->check + diff);
	if (p->dir == EGRESS)
		h->src = new;
	else
		h->dst = new;
	return true;
}

// translate4 replaces an address in the IPv4 header, and in what an ICMP error quotes.
static __noinline int translate4(struct __sk_buff *skb, const struct packet *p, const struct identity *id)
{
	__be32 old, new;
	__u32 at;
	__u64 flags = 4 | BPF_F_PSEUDO_HDR;

	at = ETH_HLEN + (p->dir == EGRESS ? 12 : 16);
	old = p->dir == EGRESS ? id->guest4 : id->endpoint4;
	new = p->dir == EGRESS ? id->endpoint4 : id->guest4;
	if (old == new || quick4(skb, p, old, new))
		return 0;
	if (p->proto == IPPROTO_TCP) {
		if (bpf_l4_csum_replace(skb, ETH_HLEN + 20 + 16, old, new, flags))
			return -1;
	} else if (p->proto == IPPROTO_UDP) {
		// A checksum of 0 is none, and stays so.
		if (bpf_l4_csum_replace(skb, ETH_HLEN + 20 + 6, old, new, flags | BPF_F_MARK_MANGLED_0))
			return -1;
	} else if (p->related) {
		// The quoted header's checksum makes up for its address, so that the
		// checksum of the whole message stays.
		__u32 quoted = ETH_HLEN + 20 + 8;

		if (bpf_l3_csum_replace(skb, quoted + 10, old, new, 4) ||
		    bpf_skb_store_bytes(skb, quoted + (p->dir == EGRESS ? 16 : 12), &new, 4, 0))
			return -1;
	}
	if (bpf_l3_csum_replace(skb, ETH_HLEN + 10, old, new, 4))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, 4, 0);
}

// splice4 has the host's end of a connection whose name is checked stand in for the peer:
// the gateway's address and its port for that, and the guest's by another port if need be.
// Addresses and ports lie side by side, as there are no options.
static __noinline int splice4(struct __sk_buff *skb, const struct packet *p, const struct identity *id)
{
	struct ends {
		__be32 src, dst;
		__be16 sport, dport;
	} guest = { id->guest4, p->peer[3], p->guest_port, p->peer_port }, host = { id->endpoint4, id->gateway4, p->via, id->tls_port };
	struct ends peer = { p->peer[3], id->guest4, p->peer_port, p->guest_port }, back = { id->gateway4, id->endpoint4, id->tls_port, p->via };
	struct ends *old = p->dir == EGRESS ? &guest : &back, *new = p->dir == EGRESS ? &host : &peer;
	__u32 check = ETH_HLEN + 20 + 16, from, to;
	__s64 diff = bpf_csum_diff((void *)old, 8, (void *)new, 8, 0);

	if (diff < 0)
		return -1;
	from = *(__u32 *)&old->sport;
	to = *(__u32 *)&new->sport;
	if (bpf_l4_csum_replace(skb, check, 0, diff, BPF_F_PSEUDO_HDR) || bpf_l4_csum_replace(skb, check, from, to, 4) ||
	    bpf_l3_csum_replace(skb, ETH_HLEN + 10, 0, diff, 0))
		return -1;
	return bpf_skb_store_bytes(skb, ETH_HLEN + 12, new, sizeof(*new), 0);
}

__noinline int translate6(struct __sk_buff *skb, const struct packet *p, const struct identity *id)
{
	__u32 at, check;
	__u32 old[4], new[4];
	__s64 diff;

	if (!p || !id)
		return -1;
	at = ETH_HLEN + (p->dir == EGRESS ? 8 : 24);
	if (p->dir == EGRESS) {
		__builtin_memcpy(old, id->guest6, 16);
		__builtin_memcpy(new, id->endpoint6, 16);
	} else {
		__builtin_memcpy(old, id->endpoint6, 16);
		__builtin_memcpy(new, id->guest6, 16);
	}
	diff = bpf_csum_diff(old, 16, new, 16, 0);
	if (diff < 0)
		return -1;
	check = ETH_HLEN + 40 + (p->proto == IPPROTO_TCP ? 16 : p->proto == IPPROTO_UDP ? 6 : 2);
	if (p->related) {
		__u32 quoted = ETH_HLEN + 40 + 8;

		if (bpf_skb_store_bytes(skb, quoted + (p->dir == EGRESS ? 24 : 8), new, 16, 0) ||
		    bpf_l4_csum_replace(skb, check, 0, diff, 0))
			return -1;
	}
	if (bpf_l4_csum_replace(skb, check, 0, diff, BPF_F_PSEUDO_HDR | (p->proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0)))
		return -1;
	return bpf_skb_store_bytes(skb, at, new, 16, 0);
}

// count counts the packet.
static __always_inline void count(const struct packet *p, __u32 reason)
{
	void *map = bpf_map_lookup_elem(&counters, &p->slot);
	struct counter *c;
	__u32 i = ((p->dir & 1) * 3 + p->verdict) * R_MAX + (reason & (R_MAX - 1));

	c = map ? bpf_map_lookup_elem(map, &i) : 0;
	if (c) {
		c->packets += p->segments;
		c->bytes += p->bytes;
	}
}

// send_event sends an event of a packet that did not pass, and says whether there was time for one.
__noinline int send_event(struct __sk_buff *skb, const struct packet *p, __u32 reason, __u32 gen)
{
	struct event *e;
	struct usage *s;
	void *map;
	__u32 suppressed = 0, i, slot;
	bool send = false;

	if (!p)
		return 0;
	slot = p->slot;
	i = slot * 2 + (p->dir & 1);
	s = bpf_map_lookup_elem(&usages, &i);
	if (!s)
		return 0;
	// The time of events says which table has judged the packet.
	__u64 now = testing ? test_now : bpf_ktime_get_ns(), tat;

	bpf_spin_lock(&s->lock);
	tat = s->event_tat < now ? now : s->event_tat;
	if (tat + EVENT_COST - now <= EVENT_BURST) {
		s->event_tat = tat + EVENT_COST;
		suppressed = s->suppressed;
		s->suppressed = 0;
		send = true;
	} else {
		s->suppressed++;
	}
	bpf_spin_unlock(&s->lock);
	if (!send)
		return 0;
	map = bpf_map_lookup_elem(&events, &slot);
	if (!map)
		return 1;
	e = bpf_ringbuf_reserve(map, sizeof(*e), 0);
	if (!e) {
		// The reader is too slow: this event is counted as suppressed, too.
		bpf_spin_lock(&s->lock);
		s->suppressed += suppressed + 1;
		bpf_spin_unlock(&s->lock);
		return 1;
	}
	e->time = now;
	__builtin_memcpy(e->peer, p->peer, 16);
	e->gen = gen;
	e->len = skb->len;
	e->suppressed = suppressed;
	e->rule = p->rule;
	e->peer_port = p->peer_port;
	e->guest_port = p->guest_port;
	e->ethertype = p->ethertype;
	e->verdict = p->verdict;
	e->reason = reason;
	e->dir = p->dir;
	e->proto = p->proto;
	bpf_ringbuf_submit(e, 0);
	return 1;
}

// reset_for makes the TCP header of an answer to a segment (RFC 9293, 3.10.7.1).
static __always_inline void reset_for(struct tcp *t, __u32 l4_len)
{
	__u32 len = l4_len - (t->offset >> 4) * 4 + 1;
	__be16 port = t->src;

	t->src = t->dst;
	t->dst = port;
	if (t->flags & ACK) {
		t->seq = t->ack;
		t->ack = 0;
		t->flags = RST;
	} else {
		t->ack = bpf_htonl(bpf_ntohl(t->seq) + len); // only a SYN has no ACK
		t->seq = 0;
		t->flags = RST | ACK;
	}
	t->offset = 5 << 4;
	t->window = 0;
	t->check = 0;
	t->urgent = 0;
}

static __always_inline int turn(struct __sk_buff *skb, const struct identity *id)
{
	__u8 macs[12];

	__builtin_memcpy(macs, id->guest_mac, 6);
	__builtin_memcpy(macs + 6, id->gateway_mac, 6);
	return bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0);
}

// orphan says whether a packet of the guest's is of a TCP connection whose flow is not there any more: since the guest
// has slept, the flow table was full, or a new policy has cut it. The guest is told, or its programs would wait for
// long.
static __always_inline bool orphan(const struct packet *p, __u32 reason)
{
	return reason == R_NO_FLOW && p->proto == IPPROTO_TCP && !(p->flags & RST);
}

// answer4 turns a rejected packet into what the guest is told: a reset for TCP, else
// that communication is prohibited (RFC 1812, 5.2.7.1). Nothing is translated: the
// answer goes to the guest's own address.
__noinline int answer4(struct __sk_buff *skb, const struct packet *p, const struct identity *id)
{
	struct {
		__be32 src, dst;
		__u8 zero, proto;
		__be16 len;
	} pseudo;
	struct {
		struct ipv4 ip;
		union {
			struct tcp t;
			struct {
				struct icmp i;
				struct ipv4 quoted;
				__u32 ports[2];
			};
		};
	} a = {};
	__u32 len;
	__s64 sum;

	if (!p || !id)
		return -1;
	if (load(skb, ETH_HLEN, &a.quoted, sizeof(a.quoted)))
		return -1;
	a.ip.src = a.quoted.dst;
	a.ip.dst = a.quoted.src;
	a.ip.version_ihl = 0x45;
	a.ip.ttl = 64;
	if (p->proto == IPPROTO_TCP) {
		len = sizeof(struct ipv4) + sizeof(struct tcp);
		a.ip.proto = IPPROTO_TCP;
		if (load(skb, ETH_HLEN + 20, &a.t, sizeof(a.t)))
			return -1;
		reset_for(&a.t, p->l4_len);
		pseudo.src = a.ip.src;
		pseudo.dst = a.ip.dst;
		pseudo.zero = 0;
		pseudo.proto = IPPROTO_TCP;
		pseudo.len = bpf_htons(sizeof(struct tcp));
		sum = bpf_csum_diff(0, 0, (void *)&pseudo, sizeof(pseudo), 0);
		if (p->summed == CHECKSUM_PARTIAL)
			a.t.check = fold(sum);
		else
			a.t.check = ~fold(bpf_csum_diff(0, 0, (void *)&a.t, sizeof(a.t), sum));
	} else {
		len = sizeof(a);
		a.ip.proto = IPPROTO_ICMP;
		if (load(skb, ETH_HLEN + 20, &a.ports, sizeof(a.ports)))
			return -1;
		a.i.type = 3;
		a.i.code = 13;
		a.i.check = ~fold(bpf_csum_diff(0, 0, (void *)&a.i, sizeof(a) - sizeof(struct ipv4), 0));
	}
	a.ip.len = bpf_htons(len);
	a.ip.check = ~fold(bpf_csum_diff(0, 0, (void *)&a.ip, sizeof(a.ip), 0));
	if (bpf_skb_change_tail(skb, ETH_HLEN + len, 0) || turn(skb, id))
		return -1;
	if (p->proto == IPPROTO_TCP)
		return bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(struct ipv4) + sizeof(struct tcp), 0);
	return bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(a), 0);
}

// answer6 is the same for IPv6 (RFC 4443, 3.1).
__noinline int answer6(struct __sk_buff *skb, const struct packet *p, const struct identity *id)
{
	struct {
		struct ipv6 ip;
		union {
			struct tcp t;
			struct {
				struct icmp i;
				struct ipv6 quoted;
				__u32 ports[2];
			};
		};
	} a = {};
	__u32 len, tail[2];
	__s64 sum;

	if (!p || !id)
		return -1;
	if (load(skb, ETH_HLEN, &a.quoted, sizeof(a.quoted)))
		return -1;
	__builtin_memcpy(a.ip.src, a.quoted.dst, 16);
	__builtin_memcpy(a.ip.dst, a.quoted.src, 16);
	a.ip.flow = bpf_htonl(6u << 28);
	a.ip.hops = 64;
	a.ip.next = p->proto == IPPROTO_TCP ? IPPROTO_TCP : IPPROTO_ICMPV6;
	len = p->proto == IPPROTO_TCP ? sizeof(struct tcp) : sizeof(a) - sizeof(struct ipv6);
	a.ip.len = bpf_htons(len);
	tail[0] = bpf_htonl(len);
	tail[1] = bpf_htonl(a.ip.next);
	sum = bpf_csum_diff(0, 0, a.ip.src, 32, 0);
	sum = bpf_csum_diff(0, 0, tail, sizeof(tail), sum);
	if (p->proto == IPPROTO_TCP) {
		if (load(skb, ETH_HLEN + 40, &a.t, sizeof(a.t)))
			return -1;
		reset_for(&a.t, p->l4_len);
		if (p->summed == CHECKSUM_PARTIAL)
			a.t.check = fold(sum);
		else
			a.t.check = ~fold(bpf_csum_diff(0, 0, (void *)&a.t, sizeof(a.t), sum));
	} else {
		if (load(skb, ETH_HLEN + 40, &a.ports, sizeof(a.ports)))
			return -1;
		a.i.type = 1;
		a.i.code = 1;
		a.i.check = ~fold(bpf_csum_diff(0, 0, (void *)&a.i, sizeof(a) - sizeof(struct ipv6), sum));
	}
	if (bpf_skb_change_tail(skb, ETH_HLEN + 40 + len, 0) || turn(skb, id))
		return -1;
	if (p->proto == IPPROTO_TCP)
		return bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(struct ipv6) + sizeof(struct tcp), 0);
	return bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(a), 0);
}

// answer sends the guest its answer, through to_guest, which knows the mark.
static __noinline int answer(struct __sk_buff *skb, const struct row *r0, struct packet *p)
{
	if (!answer_mark)
		return TC_ACT_SHOT;
	if (p->six ? answer6(skb, p, &r0->id) : answer4(skb, p, &r0->id))
		return TC_ACT_SHOT;
	skb->mark = answer_mark;
	return bpf_redirect(skb->ifindex, 0);
}

// NO_TABLE is what an endpoint's own program says when it could not find out which table is in
// force, because tables were swapped again and again at that moment. It has counted no run then.
#define NO_TABLE 2

// leave says that a run is done with its table, so that the table may be changed. Nothing of
// the table may be read after it. The atomic addition is of one value for each processor; where a run may be
// moved to another one, the sum counts.
static __noinline void leave(__u32 slot, __u32 which)
{
	void *map = bpf_map_lookup_elem(&counters, &slot);
	__u32 i = RUNS + which;
	struct counter *c;

	if (!map || which >= NO_TABLE)
		return;
	c = bpf_map_lookup_elem(map, &i);
	if (c)
		__sync_fetch_and_add(&c->bytes, 1);
}

static __always_inline int handle(struct __sk_buff *skb, __u8 dir)
{
	struct packet p = { .dir = dir, .rule = NO_RULE, .slot = skb->cb[0] };
	__u32 claim = skb->cb[1], which = skb->cb[2], at = p.slot * 2 + which, reason = R_NO_POLICY;
	int event_sent = 0;
	void *table = which < NO_TABLE ? bpf_map_lookup_elem(&policies, &at) : 0;
	const struct row *r0 = 0;

	p.segments = 1;
	p.bytes = skb->len;
	if (dir == INGRESS && answer_mark && skb->mark == waker_mark) {
		p.from_waker = 1;
		skb->mark = 0;
	}
	if (table)
		r0 = row(table, 0);
	if (r0 && (r0->id.magic != MAGIC || r0->id.claim != claim))
		r0 = 0;
	if (r0) {
		// Only limits need a clock that is finer than the kernel's tick, which is
		// several times as dear.
		if (testing)
			p.now = test_now;
		else if (r0->id.limited[dir])
			p.now = bpf_ktime_get_ns();
		else
			p.now = bpf_ktime_get_coarse_ns();
		reason = decide(skb, table, r0, &p);
		if (p.verdict == ALLOW && reason != R_LINK &&
		    (p.via ? splice4(skb, &p, &r0->id) : p.six ? translate6(skb, &p, &r0->id) : translate4(skb, &p, &r0->id))) {
			p.verdict = DENY;
			reason = R_INTERNAL;
		}
	}
	if (p.verdict > REJECT)
		p.verdict = DENY;
	count(&p, reason);
	if (p.verdict != ALLOW)
		event_sent = send_event(skb, &p, reason, r0 ? r0->id.gen : 0);
	if (testing) {
		skb->cb[2] = reason;
		skb->cb[3] = p.verdict;
		skb->cb[4] = p.rule;
	}
	if (p.verdict == ALLOW)
		return TC_ACT_OK;
	if (dir == EGRESS && event_sent && r0 && (p.verdict == REJECT || orphan(&p, reason)))
		return answer(skb, r0, &p);
	return TC_ACT_SHOT;
}

SEC("tc")
int from_guest(struct __sk_buff *skb)
{
	__u32 slot = skb->cb[0], which = skb->cb[2];
	int action = handle(skb, EGRESS);

	leave(slot, which);
	return action;
}

SEC("tc")
int to_guest(struct __sk_buff *skb)
{
	__u32 slot = skb->cb[0], which = skb->cb[2];
	int action = TC_ACT_OK;

	if (answer_mark && skb->mark == answer_mark)
		skb->mark = 0;
	else
		action = handle(skb, INGRESS);
	leave(slot, which);
	return action;
}

// The ranges in which endpoints have their addresses, for to_waker.
const volatile __be32 range4 = 0, mask4 = 0;
const volatile __u32 range6[2] = {}; // a prefix of 64 bits

// to_waker sees what comes to the packet waker's device, to which the addresses of sleeping endpoints lead
// (GuardWaker). What is held there reaches the endpoint as if the host had made it, so this is where it is known which
// interface it came by. A source of the host's, or of an endpoint's, has to be the sender's own. The device has no link
// layer.
SEC("tc")
int to_waker(struct __sk_buff *skb)
{
	struct bpf_fib_lookup back = { .ifindex = skb->ingress_ifindex };
	bool endpoint;
	long err;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		back.family = 2; // AF_INET
		if (bpf_skb_load_bytes(skb, 12, &back.ipv4_dst, 4))
			return TC_ACT_SHOT;
		endpoint = mask4 && (back.ipv4_dst & mask4) == range4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		back.family = 10; // AF_INET6
		if (bpf_skb_load_bytes(skb, 8, back.ipv6_dst, 16))
			return TC_ACT_SHOT;
		endpoint = back.ipv6_dst[0] == range6[0] && back.ipv6_dst[1] == range6[1];
	} else {
		return TC_ACT_SHOT;
	}
	if (!skb->ingress_ifindex)
		return endpoint ? TC_ACT_SHOT : TC_ACT_OK;
	err = bpf_fib_lookup(skb, &back, sizeof(back), 0);
	// The way to an endpoint that is awake is its device; to one that sleeps, it is the packet waker's.
	if (endpoint)
		return err == BPF_FIB_LKUP_RET_SUCCESS && back.ifindex == skb->ingress_ifindex ? TC_ACT_OK : TC_ACT_SHOT;
	// An address of the host's is not one that packets are forwarded to.
	return err == BPF_FIB_LKUP_RET_NOT_FWDED || err == BPF_FIB_LKUP_RET_FWD_DISABLED || err < 0 ? TC_ACT_SHOT : TC_ACT_OK;
}

// bpf_probe_read_kernel and others are for programs under the GPL only.
char _license[] SEC("license") = "GPL";
