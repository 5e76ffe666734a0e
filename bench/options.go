package bench

import "time"

// Options say how to measure. Each benchmark reads some of them and ignores the others.
type Options struct {
	// N is the number of runs for each row, after Warmup runs that do not count. Wakes at once are grouped into rounds,
	// at least minRounds of them, or N if that is less. Warmup then counts rounds.
	N, Warmup int
	// MemoryMiB are the sizes of guest RAM to compare, or the one size of all guests. VCPUs are numbers of CPUs.
	// Each size is measured with each number.
	MemoryMiB, VCPUs []int
	// DirtyMiB is how much memory the guest changes before each sleep or snapshot. UsedMiB is how much memory a
	// program in it has in use when it forks. Amounts above half of RAM are left out. Busy keeps that program
	// writing to random pages of it. Otherwise it waits.
	DirtyMiB, UsedMiB []int
	Busy              bool
	// Depth is how often each VM has slept and been woken before: its snapshot is that many deltas away from a
	// full one. Depths are lengths of chains of deltas to compare, where 0 is a full snapshot.
	Depth  int
	Depths []int
	// Count is how many children a fork makes, up to sandbox.MaxForks.
	Count int
	// Asleep is how many VMs there are. Awake is how many of them wake, up to Asleep and MaxAtOnce.
	Asleep, Awake int
	// Sandboxes are numbers of other sandboxes in a store, which have Snapshots kept sleeps each.
	Sandboxes []int
	Snapshots int
	// AtOnce are how many VMs wake at once in a round. StayAwake is how long they stay awake before they sleep
	// again. After three seconds they have kept the pages that they had to decompress.
	AtOnce    []int
	StayAwake time.Duration
	// Settle is how long to leave a guest alone before a look or a touch. Idle is how long it then idles, for a
	// snapshot or while its processor time is counted.
	Settle, Idle time.Duration
	// WrittenMiB is how much a guest writes to files, and LeftMiB how much of that it keeps.
	WrittenMiB, LeftMiB int
	// FileMiB is the size of the file that a guest reads and writes. Requests is the random requests in a run.
	FileMiB, Requests int

	// Caches are the states of the page cache to measure in turn, out of the list Caches. None means warm only.
	// Each turn measures peers once, with a warm cache, and compares them with the first of these.
	Caches []string
	// Pools are whether KVM's part of a VM, and its process if it has one of its own, is prebuilt, to measure in
	// turn. None means no.
	Pools []bool
	// PageCaches are whether a restore finds pages that an earlier one decompressed, to measure in turn. The first
	// restore of each kind does not count, so Warmup must be 2 or more to have all pages: see package pagecache.
	PageCaches []bool
	// Peers are other monitors to measure in turn with drowse, out of the list Peers. A peer that cannot run here
	// has a row that says why. PeerUsedMiB is how much memory a process in a peer's guest has in use.
	Peers       []string
	PeerUsedMiB int
	// UsedPercent is the part of RAM that a program has in use, in drowse's guest and in those of peers alike,
	// beyond their own needs. A quarter of each page is random.
	UsedPercent int

	// Ways and ToRun are how callers run what, out of the lists Ways and ExecCommands. Create also measures
	// sandboxes that are made for it, with Template from a template once there is one. Serve runs a "drowse serve" of
	// each build meanwhile. Beside is the program of another build, and BesideState its state directory.
	Ways, ToRun             []string
	Create, Template, Serve bool
	Beside, BesideState     string

	// Rules are the numbers of rules of a policy, 1 to MaxRules. Packets is how many packets a run judges. The
	// run's value is their average.
	Rules   []int
	Packets int
	// Agents are the numbers of other agents on the host that have a policy on a device meanwhile, or the one
	// number of agents that get one.
	Agents []int
	// Processes is how many processes the supervisor keeps ready, as for drowse serve, or how many more agents a new
	// process each attaches, as VMs do. Helper is the command for that. It calls PolicyAttachHelper with its arguments.
	Processes int
	Helper    []string
	// Links are the links of a policy, out of ThroughputLinks. Send is the sending time of a run, up to MaxSend.
	Links []string
	Send  time.Duration
}

// mib returns the RAM size of all guests, for benchmarks with one size.
func (o Options) mib() int { return o.MemoryMiB[0] }
