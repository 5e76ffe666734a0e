//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// maxBenchAgents bounds the agents of a benchmark. maxBlk bounds the size of its file and of its requests.
const maxBenchAgents, maxBlk = 4096, 1 << 20

// suite adds all benchmarks, in the order in which "bench all" runs them.
func (m *benches) suite() {
	const (
		poolHelp = "whether what can be is made ahead: no, yes, or both"
		ruleHelp = "numbers of rules of a policy"
	)

	b := m.add("guest_instruction", "How long an instruction takes that a guest executes as its kernel does", 0.2, "runs=3 warmup=0", bench.Instructions)
	b.onHost = true
	b.runs(50, "runs for each mix of instructions", 2, "runs")

	b = m.add("boot", "From the beginning of a VM's process to the call of its agent", 5, "runs=1 warmup=0", bench.Boots)
	b.runs(10, "boots for each size and number of CPUs", 1, "boots")
	b.sizes(spec.DefaultMemoryMiB)
	b.numbers(&b.VCPUs, "vcpus", []int{spec.DefaultVCPUs}, 1, 0, "numbers of CPUs of the guest")

	b = m.add("resume_entry", "From the call that restores a VM to its first KVM_RUN", 4, "runs=3 warmup=1 memory=256", bench.ResumeEntry)
	b.runs(100, "runs for each size", 5, "runs")
	b.sizes(256, 4096, 8192)
	b.noYes(&b.Pools, "pool", poolHelp, no, yes)

	m.resumeReady(poolHelp)

	b = m.add("resume_answer", "From the call that restores a VM to the answer of a process that was there",
		20, "runs=3 warmup=1 memory=256 depth=1", bench.ResumeAnswer)
	b.runs(100, "runs for each size", 5, "runs")
	b.depth("each VM")
	b.sizes(128, 512)
	b.peers()

	b = m.add("resume_exec", "From the call that restores a VM to the output of a command in a shell that was there",
		4, "runs=3 warmup=1 memory=256 depth=1", bench.ResumeExec)
	b.runs(100, "runs for each size", 5, "runs")
	b.depth("each VM")
	b.sizes(512)

	m.exec()

	b = m.add("guest_profile", "What a guest's processor does for a command, by function of its kernel", 2, "runs=1 warmup=0 memory=256", bench.GuestProfile)
	b.runs(10, "commands", 2, "commands")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")

	b = m.add("sleep sleep_bytes", "From the call that puts a VM to sleep until its process is gone, and what is written",
		4, "runs=3 warmup=0 memory=256 dirty=0,1", bench.Sleeps)
	b.runs(20, "sleeps for each size and amount", 2, "sleeps")
	b.sizes(512)
	b.numbers(&b.DirtyMiB, "dirty", []int{0, 64}, 0, 0, "how much the guest changes before each sleep, in MiB, up to half of RAM")

	b = m.add("snapshot_pause snapshot_bytes", "How long a running guest stands still for a snapshot, and what is written",
		8, "runs=3 warmup=0 memory=256 dirty=0,1", bench.Snapshots)
	b.runs(20, "snapshots for each size and amount", 2, "snapshots")
	b.sizes(512, 4096)
	b.numbers(&b.DirtyMiB, "dirty", []int{0, 16, 64, 256}, 0, 0, "how much the guest changes before each snapshot, in MiB, up to half of RAM")

	m.deltaBytes()

	b = m.add("restore_depth", "From the call that restores a VM to an agent that answers, by the length of the chain of deltas",
		12, "runs=3 warmup=0 settle=0s depths=1,4", bench.RestoreDepth)
	b.runs(20, "restores of each depth", 2, "restores")
	b.size(256, "RAM in MiB")
	b.duration(&b.Settle, "settle", 2*time.Minute, 0, 0, "how long the guest has after its boot")
	b.numbers(&b.Depths, "depths", []int{1, 10, 100, 1000}, 0, 0, "lengths of the chain to restore from")

	b = m.add("fork_pause fork_ready", "How long a running guest stands still for a fork, and how long until its children answer",
		6, "runs=3 warmup=0 memory=256 used=0", bench.Forks)
	b.runs(20, "forks for each row", 2, "forks")
	b.number(&b.Count, "count", 1, 1, sandbox.MaxForks, "children of each fork")
	b.sizes(512)
	b.numbers(&b.UsedMiB, "used", []int{0, 64, 256}, 0, 0, "how much of it a program in the guest has in use, in MiB, up to half of RAM")
	b.Flags().BoolVar(&b.Busy, "busy", false, "let that program write to all of it while the guest is forked")

	b = m.add("fork_density", "What memory the forks of a guest with a live interpreter take", 3, "forks=2 memory=256", bench.ForkDensity)
	b.number(&b.Count, "forks", 50, 1, sandbox.MaxForks, "children to make")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")

	m.density()

	b = m.add("growth growth_slope", "What one sandbox takes in stores with more and more others that sleep", 15, "runs=2 warmup=0 memory=256 sandboxes=16,20 snapshots=4", bench.Growth)
	b.runs(20, "rounds", 2, "rounds")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")
	b.numbers(&b.Sandboxes, "sandboxes", []int{10, 1000, 10_000}, 1, bench.MaxSandboxes, "numbers of other sandboxes in a store")
	b.number(&b.Snapshots, "snapshots", 10, 1, state.MaxSleeps, "snapshots of each of them")

	b = m.add("concurrent_resume", "How long VMs take that are woken at once, and what processors they need for it",
		8, "runs=2 warmup=0 at-once=1,2 memory=256", bench.ConcurrentResume)
	b.runs(100, "wakes for each number of VMs, in at least five rounds", 1, "rounds")
	b.duration(&b.StayAwake, "awake", 0, 0, 0, "how long the VMs of a round stay awake: from three seconds on they keep pages for the next")
	b.numbers(&b.AtOnce, "at-once", []int{1, 4, 20}, 1, bench.MaxAtOnce, "numbers of VMs to wake at once")
	b.noYes(&b.Pools, "pool", poolHelp, no, yes)
	b.size(spec.DefaultMemoryMiB, "RAM of each in MiB")

	b = m.add("wake_touch", "From a connection, or a packet, to a VM that sleeps until its answer", 6, "runs=3 warmup=1 memory=256 depth=1", bench.WakeTouch)
	b.runs(100, "wakes by each kind of touch; one that is not answered ends it with an error", 5, "wakes")
	b.depth("the VM")
	b.size(512, "RAM in MiB")
	b.number(&b.Processes, "processes", 1, 0, 0, "processes that the supervisor keeps ready, 0 for none")
	b.duration(&b.Settle, "settle", 500*time.Millisecond, 0, 0, "how long the VM sleeps before it is touched")

	b = m.add("gateway gateway_added", "From a request through the gateway to its answer, beside the same request without it", 10, "runs=3 warmup=1 memory=256 depth=1", bench.Gateway)
	b.runs(100, "rounds", 5, "rounds")
	b.depth("the VM")
	b.size(512, "RAM in MiB")
	b.duration(&b.Settle, "settle", 500*time.Millisecond, 0, 0, "how long the VM sleeps before a request")

	b = m.add("vsock_rtt", "From a ping of the agent in a running guest to its answer", 1, "runs=10 warmup=2 memory=256", bench.VsockRTT)
	b.runs(1000, "pings", 20, "pings")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")

	b = m.add("blk", "How fast a guest reads and writes its disk, in sequence and at random", 5, "runs=2 warmup=0 memory=256 file=2 requests=10", bench.Blk)
	b.runs(20, "runs of each kind", 1, "runs")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")
	b.number(&b.FileMiB, "file", 64, 1, maxBlk, "size of the file, in MiB")
	b.number(&b.Requests, "requests", 1000, 1, maxBlk, "requests of a run at random")

	b = m.add("policy_packet", "How long the programs of a policy take for a packet, beside an empty program",
		1, "runs=3 warmup=0 packets=1000 rules=1,1000", bench.PolicyPacket)
	b.onHost = true
	b.runs(100, "runs for each row", 5, "runs")
	b.number(&b.Packets, "packets", 10000, 1, 1<<24, "packets of a run, which is their average")
	b.numbers(&b.Rules, "rules", []int{1, 10, 100, 1000}, 1, bench.MaxRules, ruleHelp)

	b = m.add("policy_swap", "How long a swap of a policy takes while packets are judged", 1, "runs=3 warmup=0 rules=10 agents=0,2", bench.PolicySwap)
	b.onHost = true
	b.runs(200, "swaps for each number of rules", 5, "swaps")
	b.numbers(&b.Rules, "rules", []int{10, 100, 1000}, 1, bench.MaxRules, ruleHelp)
	b.numbers(&b.Agents, "agents", []int{0, 1000}, 0, maxBenchAgents, "numbers of other agents that have a policy on a device meanwhile")

	m.policyAttach()

	b = m.add("policy_throughput policy_throughput_ratio", "How much passes between a guest and its host through a policy, beside none",
		16, "runs=1 warmup=0 rules=1,1000 send=1s", bench.PolicyThroughput)
	b.runs(10, "runs for each direction and policy", 1, "runs")
	b.words(&b.Links, "link", bench.ThroughputLinks, bench.ThroughputLinks, "what the policy is on: tap, a guest's device, or veth, a device between threads of this process")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")
	b.numbers(&b.Rules, "rules", []int{1, 100, 1000}, 1, bench.MaxRules, ruleHelp)
	b.duration(&b.Send, "send", 5*time.Second, time.Millisecond, bench.MaxSend, "how long is sent in a run")
}

func (m *benches) resumeReady(poolHelp string) {
	b := m.add("resume_ready", "From the call that restores a VM to its agent's answer", 20, "runs=3 warmup=1 memory=256 depth=1 used-percent=5", bench.ResumeReady)
	b.runs(100, "runs for each size", 5, "runs")
	b.depth("each VM")
	b.sizes(512)
	b.words(&b.Caches, "cache", bench.Caches, bench.Caches, "states of the page cache: warm, cold, or both")
	b.noYes(&b.Pools, "pool", poolHelp, no)
	b.noYes(&b.PageCaches, "page-cache", "whether a restore finds pages that one before has decompressed: no, yes, or both", no)
	b.number(&b.UsedPercent, "used-percent", 0, 0, 50, "part of RAM that a program has in use, in all guests, besides what they need without it")
	b.peers()
}

func (m *benches) exec() {
	b := m.add("exec create_exec exec_asleep exec_awake", "From a caller's command to its output, in a sandbox that is new, sleeps, or is awake",
		15, "runs=1 warmup=0 memory=256 by=cli,go commands=true", bench.Execs)
	b.runs(20, "runs of each command by each way", 1, "runs")
	b.size(spec.DefaultMemoryMiB, "RAM in MiB")
	b.words(&b.Ways, "by", bench.Ways, bench.Ways, "how the caller runs it: "+strings.Join(bench.Ways, ", "))
	b.words(&b.ToRun, "commands", bench.ExecCommands, bench.ExecCommands, "what: "+strings.Join(bench.ExecCommands, ", "))
	b.duration(&b.Settle, "settle", 500*time.Millisecond, 0, 0, "how long a sandbox sleeps before")
	f := b.Flags()
	f.BoolVar(&b.Create, "create", true, "also measure new sandboxes")
	f.BoolVar(&b.Template, "template", true, "start new sandboxes from a template, once there is one")
	f.BoolVar(&b.Serve, "serve", true, "run a \"drowse serve\" meanwhile")
	f.StringVar(&b.Beside, "beside", "", "program of another build of drowse to measure in turn, by its command line")
	f.StringVar(&b.BesideState, "beside-state", "", "its state directory")
	b.checked(func() error {
		switch {
		case !b.Serve && slices.Contains(b.Ways, "http"):
			return errors.New("--by http needs --serve")
		case (b.Beside == "") != (b.BesideState == ""):
			return errors.New("--beside needs --beside-state, and the reverse")
		}
		return nil
	})
}

func (m *benches) deltaBytes() {
	b := m.add("delta_bytes", "What a snapshot writes after an idle second, and after files have come and gone",
		8, "runs=1 memory=256 written=2 left=1 settle=1s", bench.Deltas)
	b.number(&b.N, "runs", 5, 1, 0, "snapshots of each kind")
	b.size(512, "RAM in MiB")
	b.duration(&b.Idle, "idle", time.Second, 0, 0, "how long the guest is idle")
	b.number(&b.WrittenMiB, "written", 100, 0, 0, "how much it writes to files, in MiB")
	b.number(&b.LeftMiB, "left", 5, 0, 0, "how much of that it leaves there, in MiB")
	b.duration(&b.Settle, "settle", 10*time.Second, 0, 0, "how long it has then until the snapshot")
	b.checked(func() error {
		if b.LeftMiB > b.WrittenMiB {
			return errors.New("--left must be at most --written")
		}
		return nil
	})
}

func (m *benches) density() {
	b := m.add("density", "What VMs cost that sleep, and those that idle", 6, "asleep=3 awake=2 memory=256 settle=1s idle=2s", bench.Density)
	b.number(&b.Asleep, "asleep", 100, 1, 0, "VMs that sleep")
	b.number(&b.Awake, "awake", 50, 1, bench.MaxAtOnce, "how many of them to wake then")
	b.size(spec.DefaultMemoryMiB, "RAM of each in MiB")
	b.duration(&b.Settle, "settle", time.Minute, 0, 0, "how long those are left alone before they are looked at")
	b.duration(&b.Idle, "idle", time.Minute, time.Second, 0, "how long their processor time is counted then")
	b.checked(func() error {
		if b.Awake > b.Asleep {
			return fmt.Errorf("--awake %d: there are no more than --asleep %d", b.Awake, b.Asleep)
		}
		return nil
	})
}

func (m *benches) policyAttach() {
	b := m.add("policy_attach", "How long it takes to put a policy on a device, and the memory of an agent", 1, "agents=3 processes=1", bench.PolicyAttach)
	b.onHost, b.Agents, b.Rules = true, []int{0}, []int{0}
	b.number(&b.Agents[0], "agents", 1000, 1, maxBenchAgents, "agents that there are at once")
	b.number(&b.Processes, "processes", 50, 0, maxBenchAgents, "further agents, each attached by a process of its own")
	b.number(&b.Rules[0], "rules", 10, 1, bench.MaxRules, "rules of each policy")
	b.checked(func() error {
		self, err := os.Executable()
		b.Helper = []string{self, "bench", "attach"}
		return err
	})
}
