package bench

import "time"

// Options say how numbers are measured. Each benchmark takes some of them, and knows none of the others.
type Options struct {
	// N is the number of runs for each row, after Warmup that do not count. Wakes at once come in rounds of as many as
	// are woken, of which there are at least minRounds, or N if that is less; Warmup are rounds then.
	N, Warmup int
	// MemoryMiB are the sizes of guest RAM to compare, or the one that all guests have; VCPUs are numbers of CPUs. Each
	// size is measured with each number.
	MemoryMiB, VCPUs []int
	// DirtyMiB is how much the guest changes before each sleep or snapshot, and UsedMiB how much memory a program in it
	// has in use as it is forked. What does not fit into half of RAM is left out. Busy keeps that program writing to
	// random pages of it meanwhile; otherwise it waits.
	DirtyMiB, UsedMiB []int
	Busy              bool
	// Depth is how often each VM has slept and been woken before: its snapshot is that many deltas away from a full one.
	// Depths are lengths of chains of deltas to compare: 0 is a full snapshot.
	Depth  int
	Depths []int
	// Count is how many children a fork makes, up to sandbox.MaxForks.
	Count int
	// Asleep is how many VMs there are, and Awake how many of them are woken: up to Asleep and MaxAtOnce.
	Asleep, Awake int
	// AtOnce are how many VMs are woken at once in a round. StayAwake is how long they stay awake before they sleep
	// again: after three seconds they have kept the pages that they had to decompress.
	AtOnce    []int
	StayAwake time.Duration
	// Settle is how long a guest is left alone before it is looked at or touched, and Idle how long it then has nothing
	// to do, for a snapshot or while its processor time is counted.
	Settle, Idle time.Duration
	// WrittenMiB is how much a guest writes to files, and LeftMiB how much of that it leaves there.
	WrittenMiB, LeftMiB int
	// FileMiB is the size of the file that a guest reads and writes, and Requests how many are made at random in a run.
	FileMiB, Requests int

	// Caches are the states of the page cache to measure in turn, out of the list Caches; none is warm alone. Peers are
	// measured once in each turn, with theirs warm, and compared with the first of these.
	Caches []string
	// Pools are whether what can be is made ahead, to measure in turn: what KVM has of a VM, and its process if it has
	// one of its own; none is no.
	Pools []bool
	// PageCaches are whether a restore finds pages that one before has decompressed, to measure in turn. A restore of
	// each kind that does not count comes first, so Warmup must be 2 or more to have them all: see package pagecache.
	PageCaches []bool
	// Peers are other monitors to measure in turn with drowse, out of the list Peers. One that cannot be measured here
	// has a row that says why. PeerUsedMiB is how much memory a process in a peer's guest has in use.
	Peers       []string
	PeerUsedMiB int
	// UsedPercent is the part of RAM that a program has in use, in drowse's guest and in those of peers alike, besides
	// what they need without it; a quarter of each page is random.
	UsedPercent int

	// Rules are numbers of rules of a policy, 1 to MaxRules, and Packets how many are judged in a run, which is their
	// average.
	Rules   []int
	Packets int
	// Agents are numbers of other agents of the host that have a policy on a device meanwhile, or the one of those that
	// get one.
	Agents []int
	// Processes is how many the supervisor keeps ready, as for drowse serve; or how many further agents are attached by
	// a new process each, which is what VMs do, by the command Helper, which calls PolicyAttachHelper with what follows.
	Processes int
	Helper    []string
	// Links are what a policy is on, out of ThroughputLinks. Send is how long a sender sends in a run, up to MaxSend.
	Links []string
	Send  time.Duration
}

// mib is the size of RAM of all guests, where there is one.
func (o Options) mib() int { return o.MemoryMiB[0] }
