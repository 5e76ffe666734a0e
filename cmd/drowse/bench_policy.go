package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var errRules = usageError{fmt.Errorf("--rules must be 1 to %d", bench.MaxRules)}

// maxBenchAgents bounds the agents of a benchmark.
const maxBenchAgents = 4096

func badRules(rules []int) bool {
	return len(rules) == 0 || slices.Min(rules) < 1 || slices.Max(rules) > bench.MaxRules
}

func (m *benches) policyPacket() *cobra.Command {
	var o bench.PolicyPacketOptions
	cmd := m.hostCommand("policy_packet", "How long the programs of a policy take for a packet, beside an empty program", func(ctx context.Context) ([]bench.Row, error) {
		const most = 1 << 24
		switch {
		case o.N < 1, o.Warmup < 0, o.Packets < 1, o.Packets > most:
			return nil, usageError{fmt.Errorf("--runs must be 1 or more, --warmup 0 or more, --packets 1 to %d", most)}
		case badRules(o.Rules):
			return nil, errRules
		}
		return bench.PolicyPacket(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each row")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntVar(&o.Packets, "packets", 10000, "packets of a run, which is their average")
	f.IntSliceVar(&o.Rules, "rules", []int{1, 10, 100, 1000}, "numbers of rules of a policy")
	return cmd
}

func (m *benches) policySwap() *cobra.Command {
	var o bench.PolicySwapOptions
	cmd := m.hostCommand("policy_swap", "How long a swap of a policy takes while packets are judged", func(ctx context.Context) ([]bench.Row, error) {
		switch {
		case o.N < 1, o.Warmup < 0:
			return nil, errRuns
		case badRules(o.Rules):
			return nil, errRules
		case len(o.Agents) == 0, slices.Min(o.Agents) < 0, slices.Max(o.Agents) > maxBenchAgents:
			return nil, usageError{fmt.Errorf("--agents must be 0 to %d", maxBenchAgents)}
		}
		return bench.PolicySwap(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 200, "swaps for each number of rules")
	f.IntVar(&o.Warmup, "warmup", 5, "swaps before that do not count")
	f.IntSliceVar(&o.Rules, "rules", []int{10, 100, 1000}, "numbers of rules of a policy")
	f.IntSliceVar(&o.Agents, "agents", []int{0, 1000}, "numbers of other agents that have a policy on a device meanwhile")
	return cmd
}

func (m *benches) policyAttach() *cobra.Command {
	var o bench.PolicyAttachOptions
	cmd := m.hostCommand("policy_attach", "How long it takes to put a policy on a device, and the memory of an agent", func(ctx context.Context) ([]bench.Row, error) {
		switch {
		case o.Agents < 1, o.Agents > maxBenchAgents, o.Processes < 0, o.Processes > maxBenchAgents:
			return nil, usageError{fmt.Errorf("--agents must be 1 to %d, --processes 0 to %d", maxBenchAgents, maxBenchAgents)}
		case badRules([]int{o.Rules}):
			return nil, errRules
		}
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		o.Helper = []string{self, "bench", "attach"}
		return bench.PolicyAttach(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.Agents, "agents", 1000, "agents that there are at once")
	f.IntVar(&o.Processes, "processes", 50, "further agents, each attached by a process of its own")
	f.IntVar(&o.Rules, "rules", 10, "rules of each policy")
	return cmd
}

func (m *benches) policyThroughput() *cobra.Command {
	var o bench.PolicyThroughputOptions
	cmd := m.command("policy_throughput", "How much passes between a guest and its host through a policy, beside none", func(ctx context.Context) ([]bench.Row, error) {
		switch {
		case o.N < 1, o.Warmup < 0, o.MemoryMiB < 1:
			return nil, errRuns
		case len(o.Links) == 0 || slices.ContainsFunc(o.Links, func(l string) bool { return !slices.Contains(bench.ThroughputLinks, l) }):
			return nil, usageError{fmt.Errorf("--link: there are %s", strings.Join(bench.ThroughputLinks, ", "))}
		case o.Send < time.Millisecond, o.Send > bench.MaxSend:
			return nil, usageError{fmt.Errorf("--send must be 1ms to %v", bench.MaxSend)}
		case badRules(o.Rules):
			return nil, errRules
		}
		return bench.PolicyThroughput(ctx, *m.env, o)
	})
	cmd.Aliases = []string{"policy_throughput_ratio"}
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 10, "runs for each direction and policy")
	f.IntVar(&o.Warmup, "warmup", 1, "runs before that do not count")
	f.StringSliceVar(&o.Links, "link", bench.ThroughputLinks, "what the policy is on: tap, a guest's device, or veth, a device between threads of this process")
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM in MiB")
	f.IntSliceVar(&o.Rules, "rules", []int{1, 100, 1000}, "numbers of rules of a policy")
	f.DurationVar(&o.Send, "send", 5*time.Second, "how long is sent in a run")
	return cmd
}

// benchAttach is a process of policy_attach.
func (a *app) benchAttach() *cobra.Command {
	return &cobra.Command{
		Use: "attach ROOT DEVICE RULES", Short: "Be a process that attaches one policy", Hidden: true, Args: cobra.ExactArgs(3),
		RunE: func(_ *cobra.Command, args []string) error {
			rules, err := strconv.Atoi(args[2])
			if err != nil || badRules([]int{rules}) {
				return usageError{errors.Join(errRules, err)}
			}
			times, err := bench.PolicyAttachHelper(args[0], args[1], rules)
			if err != nil {
				return err
			}
			return json.NewEncoder(a.stdout).Encode(times)
		},
	}
}
