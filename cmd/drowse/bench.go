//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/drowse-vm/drowse/bench"
)

func (a *app) benchCommand() *cobra.Command {
	var e bench.Env
	cmd := group(&cobra.Command{
		Use: "bench", Short: "Measure what drowse promises",
		Long: `Measure what drowse promises. The output is a table, with -o json one document, and with
-o benchstat the runs in the format of Go benchmarks, for benchstat.`,
	})
	f := cmd.PersistentFlags()
	f.StringVar(&e.Image, "image", "debian-python", "image of the guest")
	f.StringVar(&e.Kernel, "kernel", "", "kernel of the guest, as for run")
	m := &benches{app: a, env: &e}
	m.suite()
	for _, b := range m.all {
		cmd.AddCommand(b.Command)
	}
	cmd.AddCommand(m.everything(), a.benchCompare(), a.benchReport(), a.benchAttach())
	return cmd
}

// benches is the list of all benchmarks.
type benches struct {
	app *app
	env *bench.Env
	all []*benchmark
}

// measure is a benchmark of package bench.
type measure func(context.Context, bench.Env, bench.Options) ([]bench.Row, error)

// benchmark is a command that measures.
type benchmark struct {
	*cobra.Command
	measure measure
	bench.Options
	// checks refuse senseless options, each with a usage error.
	checks []func() error
	// onHost means that it needs no guests, and so neither a store nor an agent.
	onHost bool
	// minutes is about how long it takes with its defaults on a KVM that interprets the guest's kernel. It only
	// weighs what is left against what is done. quick has options that make it short, for a test run.
	minutes float64
	quick   string
}

// add adds a command that measures, with its own name and aliases.
func (m *benches) add(names, short string, minutes float64, quick string, measure measure) *benchmark {
	words := strings.Fields(names)
	b := &benchmark{measure: measure, minutes: minutes, quick: quick}
	b.Command = &cobra.Command{
		Use: words[0], Aliases: words[1:], Short: short, Args: cobra.NoArgs, Annotations: asBenchstat,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.check(); err != nil {
				return err
			}
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
		},
	}
	m.all = append(m.all, b)
	return b
}

// check refuses senseless options.
func (b *benchmark) check() error {
	for _, check := range b.checks {
		if err := check(); err != nil {
			return usageError{err}
		}
	}
	return nil
}

func (b *benchmark) checked(check func() error) { b.checks = append(b.checks, check) }

// within refuses a flag's value that is out of bounds. most is 0 if there is no upper bound.
func within[T int | time.Duration](name string, v, least, most T) error {
	switch {
	case most == 0 && v < least:
		return fmt.Errorf("--%s %v: use %v or more", name, v, least)
	case most != 0 && (v < least || v > most):
		return fmt.Errorf("--%s %v: use %v to %v", name, v, least, most)
	}
	return nil
}

// number adds a flag for a number.
func (b *benchmark) number(to *int, name string, value, least, most int, help string) {
	b.Flags().IntVar(to, name, value, help)
	b.checked(func() error { return within(name, *to, least, most) })
}

// numbers adds a flag for a list of at least one number.
func (b *benchmark) numbers(to *[]int, name string, values []int, least, most int, help string) {
	b.Flags().IntSliceVar(to, name, values, help)
	b.checked(func() error {
		for _, v := range *to {
			if err := within(name, v, least, most); err != nil {
				return err
			}
		}
		return nil
	})
}

// duration adds a flag for a duration.
func (b *benchmark) duration(to *time.Duration, name string, value, least, most time.Duration, help string) {
	b.Flags().DurationVar(to, name, value, help)
	b.checked(func() error { return within(name, *to, least, most) })
}

// words adds a flag for words of a list: at least one, if it has defaults.
func (b *benchmark) words(to *[]string, name string, values, list []string, help string) {
	b.Flags().StringSliceVar(to, name, values, help)
	b.checked(func() error {
		for _, w := range *to {
			if !slices.Contains(list, w) {
				return fmt.Errorf("--%s %q: there are %s", name, w, strings.Join(list, ", "))
			}
		}
		if len(*to) == 0 && len(values) > 0 {
			return fmt.Errorf("--%s: name at least one of %s", name, strings.Join(list, ", "))
		}
		return nil
	})
}

// noYes is a flag that takes no, yes, or both.
func (b *benchmark) noYes(to *[]bool, name, help string, values ...string) {
	var given []string
	b.words(&given, name, values, []string{no, yes}, help)
	b.checked(func() error {
		*to = nil
		for _, w := range given {
			*to = append(*to, w == yes)
		}
		return nil
	})
}

// runs adds the flags for the number of runs. called is the help's word for a run.
func (b *benchmark) runs(n int, each string, warmup int, called string) {
	b.number(&b.N, "runs", n, 1, 0, each)
	b.number(&b.Warmup, "warmup", warmup, 0, 0, called+" before that do not count")
}

// sizes adds the flag for the sizes of RAM to compare.
func (b *benchmark) sizes(mib ...int) {
	b.numbers(&b.MemoryMiB, "memory", mib, 1, 0, "sizes of RAM in MiB")
}

// size adds the flag for the RAM size of all guests.
func (b *benchmark) size(mib int, help string) {
	b.MemoryMiB = []int{mib}
	b.number(&b.MemoryMiB[0], "memory", mib, 1, 0, help)
}

// depth adds the flag for how often VMs have slept before.
func (b *benchmark) depth(of string) {
	b.number(&b.Depth, "depth", 10, 0, 0, "how often "+of+" has slept and been woken before")
}

// peers adds the flags for other monitors.
func (b *benchmark) peers() {
	b.words(&b.Peers, "peer", nil, bench.Peers, "other monitors to measure in turn with drowse: "+strings.Join(bench.Peers, ", "))
	b.number(&b.PeerUsedMiB, "peer-used", bench.DefaultPeerUsedMiB, 0, 0, "memory that a process in a peer's guest has in use, in MiB")
	b.checked(func() error {
		if len(b.Peers) > 0 && b.PeerUsedMiB > slices.Min(b.MemoryMiB)/2 {
			return errors.New("--peer-used must be at most half of --memory")
		}
		return nil
	})
}

// run measures. After an error it also returns the rows measured before.
func (m *benches) run(ctx context.Context, b *benchmark) ([]bench.Row, error) {
	rows, err := bench.Run(b.line(), func() ([]bench.Row, error) { return b.measure(ctx, *m.env, b.Options) })
	if err != nil {
		err = fmt.Errorf("measuring %s: %w", b.Name(), err)
	}
	return rows, err
}

// line returns the command with its non-default options, which measures the same again. It has options of all
// benchmarks, but not those of all of drowse.
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

// prepare opens the store, if the benchmarks need guests.
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
	if m.env.Program, err = os.Executable(); err != nil {
		return err
	}
	m.env.PeerGuest = filepath.Join(filepath.Dir(m.env.Launcher.Command[0]), "drowse-peer-guest")
	return nil
}

// benchstat is an output format of the commands with asBenchstat.
const benchstat = "benchstat"

var asBenchstat = map[string]string{formatAnnotation: benchstat}

func (m *benches) print(r bench.Report) error {
	if m.app.output == benchstat {
		return r.Benchstat(m.app.stdout)
	}
	return m.app.print(r, func(w io.Writer) { r.Text(w) })
}

// benchAttach is the process that policy_attach starts.
func (a *app) benchAttach() *cobra.Command {
	return &cobra.Command{
		Use: "attach ROOT DEVICE RULES", Short: "Be a process that attaches one policy", Hidden: true, Args: cobra.ExactArgs(3),
		RunE: func(_ *cobra.Command, args []string) error {
			rules, err := strconv.Atoi(args[2])
			if err = errors.Join(err, within("rules", rules, 1, bench.MaxRules)); err != nil {
				return usageError{err}
			}
			times, err := bench.PolicyAttachHelper(args[0], args[1], rules)
			if err != nil {
				return err
			}
			return json.NewEncoder(a.stdout).Encode(times)
		},
	}
}
