package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/drowse-vm/drowse/bench"
)

func (a *app) benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what drowse promises", Args: cobra.NoArgs,
		Long: `Measure what drowse promises. Stdout gets a table, with -o json one document, and with
-o benchstat the runs in the format of Go's benchmarks, which benchstat compares.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var e bench.Env
	f := cmd.PersistentFlags()
	f.StringVar(&e.Image, "image", "debian-python", "image of the guest")
	f.StringVar(&e.Kernel, "kernel", "", "kernel of the guest, as for run")
	m := &benches{app: a, env: &e}
	cmd.AddCommand(
		m.instruction(), m.boot(), m.entry(), m.ready(), m.exec(), m.sleep(), m.snapshot(), m.delta(), m.depth(), m.fork(), m.forkDensity(), m.density(),
		m.concurrent(), m.touch(), m.vsock(), m.blk(), m.policyPacket(), m.policySwap(), m.policyAttach(), m.policyThroughput(),
	)
	// It knows those above.
	cmd.AddCommand(m.everything(), a.benchReport(), a.benchAttach())
	return cmd
}

// benches are all benchmarks.
type benches struct {
	app *app
	env *bench.Env
	all []*benchmark
}

// benchmark is a command that measures. measure returns a usage error for options that make
// no sense.
type benchmark struct {
	*cobra.Command
	measure func(context.Context) ([]bench.Row, error)
	// onHost says that it needs no guests, and so neither a store nor an agent.
	onHost bool
}

// command is a command that measures, with its own name.
func (m *benches) command(use, short string, measure func(context.Context) ([]bench.Row, error)) *cobra.Command {
	b := &benchmark{measure: measure, Command: &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, Annotations: asBenchstat}}
	b.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := m.prepare(!b.onHost); err != nil {
			return err
		}
		report := bench.NewReport(nil)
		rows, err := m.run(cmd.Context(), b)
		if err != nil {
			return err
		}
		report.Add(rows...)
		return m.print(report)
	}
	m.all = append(m.all, b)
	return b.Command
}

// hostCommand is a command that measures without guests.
func (m *benches) hostCommand(use, short string, measure func(context.Context) ([]bench.Row, error)) *cobra.Command {
	cmd := m.command(use, short, measure)
	m.all[len(m.all)-1].onHost = true
	return cmd
}

// run measures. What was measured before an error is returned with it.
func (m *benches) run(ctx context.Context, b *benchmark) ([]bench.Row, error) {
	rows, err := bench.Run(b.line(), func() ([]bench.Row, error) { return b.measure(ctx) })
	if err != nil {
		err = fmt.Errorf("measuring %s: %w", b.Name(), err)
	}
	return rows, err
}

// line is the command with its options that are not the default, which measures the same
// again. Options of all of drowse do not count, those of all benchmarks do.
func (b *benchmark) line() string {
	words := []string{"drowse", "bench", b.Name()}
	add := func(f *pflag.Flag) {
		if v := strings.Trim(f.Value.String(), "[]"); v != strings.Trim(f.DefValue, "[]") {
			words = append(words, "--"+f.Name+"="+v)
		}
	}
	if b.HasParent() {
		b.Parent().PersistentFlags().VisitAll(add)
	}
	b.LocalNonPersistentFlags().VisitAll(add)
	return strings.Join(words, " ")
}

// prepare opens the store, if guests are needed.
func (m *benches) prepare(guests bool) (err error) {
	m.env.Progress = func(s string) { m.app.log.Info(s) }
	if !guests {
		return nil
	}
	if m.env.Store, err = m.app.store(); err != nil {
		return err
	}
	if m.env.Launcher, err = m.app.launcher(); err != nil {
		return err
	}
	m.env.PeerGuest = filepath.Join(filepath.Dir(m.env.Launcher.Command[0]), "drowse-peer-guest")
	return nil
}

// benchstat is the output format of that name, which commands with asBenchstat have.
const benchstat = "benchstat"

var asBenchstat = map[string]string{formatAnnotation: benchstat}

func (m *benches) print(r bench.Report) error {
	if m.app.output == benchstat {
		return r.Benchstat(m.app.stdout)
	}
	return m.app.print(r, func(w io.Writer) { r.Text(w) })
}

var errRuns = usageError{errors.New("--runs must be 1 or more, --warmup 0 or more, and lists must not be empty")}

// measuring measures by options that are not bad for errRuns.
func measuring[O any](m *benches, o *O, measure func(context.Context, bench.Env, O) ([]bench.Row, error), bad func() bool) func(context.Context) ([]bench.Row, error) {
	return func(ctx context.Context) ([]bench.Row, error) {
		if bad() {
			return nil, errRuns
		}
		return measure(ctx, *m.env, *o)
	}
}

func (m *benches) entry() *cobra.Command {
	var o bench.ResumeEntryOptions
	var pool []string
	cmd := m.command("resume_entry", "From the call that restores a VM to its first KVM_RUN", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 {
			return nil, errRuns
		}
		var err error
		if o.Pools, err = pools(pool); err != nil {
			return nil, err
		}
		return bench.ResumeEntry(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{256, 4096, 8192}, "sizes of RAM in MiB")
	f.StringSliceVar(&pool, "pool", []string{poolNo, poolYes}, poolHelp)
	return cmd
}

// Whether what can be is made ahead: what KVM has of a VM, and its process if it has one of its own.
const (
	poolNo, poolYes = "no", "yes"
	poolHelp        = "whether what can be is made ahead: no, yes, or both"
)

func pools(words []string) (all []bool, err error) { return noYes("pool", words) }

// noYes is the value of a flag that takes no, yes, or both.
func noYes(name string, words []string) (all []bool, err error) {
	for _, w := range words {
		if w != poolNo && w != poolYes {
			return nil, usageError{fmt.Errorf("--%s %q: use %s or %s", name, w, poolNo, poolYes)}
		}
		all = append(all, w == poolYes)
	}
	if len(all) == 0 {
		return nil, errRuns
	}
	return all, nil
}

func (m *benches) ready() *cobra.Command {
	var o bench.ResumeReadyOptions
	var pool, pages []string
	cmd := m.command("resume_ready", "From the call that restores a VM to its agent's answer", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || o.Depth < 0 || len(o.MemoryMiB) == 0 {
			return nil, errRuns
		}
		for _, p := range o.Peers {
			if !slices.Contains(bench.Peers, p) {
				return nil, usageError{fmt.Errorf("--peer %q: there are %s", p, strings.Join(bench.Peers, ", "))}
			}
		}
		for _, c := range o.Caches {
			if !slices.Contains(bench.Caches, c) {
				return nil, usageError{fmt.Errorf("--cache %q: there are %s", c, strings.Join(bench.Caches, ", "))}
			}
		}
		if o.PeerUsedMiB < 0 || len(o.Peers) > 0 && o.PeerUsedMiB > slices.Min(o.MemoryMiB)/2 {
			return nil, usageError{errors.New("--peer-used must be 0 or more, and at most half of --memory")}
		}
		if o.UsedPercent < 0 || o.UsedPercent > 50 {
			return nil, usageError{errors.New("--used-percent must be 0 to 50")}
		}
		var err error
		if o.Pools, err = pools(pool); err != nil {
			return nil, err
		}
		if o.PageCaches, err = noYes("page-cache", pages); err != nil {
			return nil, err
		}
		return bench.ResumeReady(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntVar(&o.Depth, "depth", 10, "how often each VM has slept and been woken before")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512}, "sizes of RAM in MiB")
	f.StringSliceVar(&o.Caches, "cache", bench.Caches, "states of the page cache: warm, cold, or both")
	f.StringSliceVar(&pool, "pool", []string{poolNo}, poolHelp)
	f.StringSliceVar(&pages, "page-cache", []string{poolNo}, "whether a restore finds pages that one before has decompressed: no, yes, or both")
	f.StringSliceVar(&o.Peers, "peer", nil, "other monitors to measure in turn with drowse: "+strings.Join(bench.Peers, ", "))
	f.IntVar(&o.UsedPercent, "used-percent", 0, "part of RAM that a program has in use, in all guests, besides what they need without it")
	f.IntVar(&o.PeerUsedMiB, "peer-used", bench.DefaultPeerUsedMiB, "memory that a process in a peer's guest has in use, in MiB")
	return cmd
}

func (m *benches) snapshot() *cobra.Command {
	var o bench.SnapshotOptions
	cmd := m.command("snapshot_pause", "How long a running guest stands still for a snapshot, and what is written", measuring(m, &o, bench.Snapshots, func() bool { return o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 || len(o.DirtyMiB) == 0 }))
	cmd.Aliases = []string{"snapshot_bytes"}
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "snapshots for each size and amount")
	f.IntVar(&o.Warmup, "warmup", 2, "snapshots before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512, 4096}, "sizes of RAM in MiB")
	f.IntSliceVar(&o.DirtyMiB, "dirty", []int{0, 16, 64, 256}, "how much the guest changes before each snapshot, in MiB, up to half of RAM")
	return cmd
}

func (m *benches) delta() *cobra.Command {
	var o bench.DeltaOptions
	cmd := m.command("delta_bytes", "What a snapshot writes after an idle second, and after files have come and gone", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.MemoryMiB < 1 || o.Idle < 0 || o.Settle < 0 || o.LeftMiB < 0 || o.WrittenMiB < o.LeftMiB {
			return nil, usageError{errors.New("--runs and --memory must be 1 or more, times 0 or more, and --left at most --written")}
		}
		return bench.Deltas(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 5, "snapshots of each kind")
	f.IntVar(&o.MemoryMiB, "memory", 512, "RAM in MiB")
	f.DurationVar(&o.Idle, "idle", time.Second, "how long the guest is idle")
	f.IntVar(&o.WrittenMiB, "written", 100, "how much it writes to files, in MiB")
	f.IntVar(&o.LeftMiB, "left", 5, "how much of that it leaves there, in MiB")
	f.DurationVar(&o.Settle, "settle", 10*time.Second, "how long it has then until the snapshot")
	return cmd
}

func (m *benches) depth() *cobra.Command {
	var o bench.DepthOptions
	cmd := m.command("restore_depth", "From the call that restores a VM to an agent that answers, by the length of the chain of deltas", measuring(m, &o, bench.RestoreDepth, func() bool { return o.N < 1 || o.Warmup < 0 || len(o.Depths) == 0 || o.MemoryMiB < 1 || o.Settle < 0 }))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "restores of each depth")
	f.IntVar(&o.Warmup, "warmup", 2, "restores before that do not count")
	f.IntVar(&o.MemoryMiB, "memory", 256, "RAM in MiB")
	f.DurationVar(&o.Settle, "settle", 2*time.Minute, "how long the guest has after its boot")
	f.IntSliceVar(&o.Depths, "depths", []int{1, 10, 100, 1000}, "lengths of the chain to restore from")
	return cmd
}
