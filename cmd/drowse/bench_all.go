//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/internal/osfile"
)

// weight returns how long a benchmark takes in proportion to others.
func (o *allOptions) weight(b *benchmark) float64 {
	if b.minutes > 0 && !o.quick {
		return b.minutes
	}
	return 1
}

// allOptions are the options of bench all.
type allOptions struct {
	quick       bool
	runs        int
	only, skip  []string
	out, resume string
}

// everything returns the command that runs all benchmarks.
func (m *benches) everything() *cobra.Command {
	var o allOptions
	cmd := &cobra.Command{
		Use: "all", Short: "Run all benchmarks, one after another", Args: cobra.NoArgs, Annotations: asBenchstat,
		Long: `Run all benchmarks, one after another, each with its default options, and resume_ready beside
all other monitors, with a quarter of 128 and of 512 MiB in use. This takes hours.

If a benchmark fails, the others still run. Its row says why, and the exit status is 1. An
interrupt ends the current benchmark; the results before it are printed.

--only and --skip choose by name, with * and ? as in a shell. --out keeps a JSON file of all
results so far. --resume takes results from such a file, if they had the same options and did
not fail. The file must come from this machine and build.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return m.runAll(cmd.Context(), &o) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.quick, "quick", false, "few runs and small guests, to check that all benchmarks work; ignore the figures")
	f.IntVar(&o.runs, "runs", 0, "number of runs of each benchmark that has --runs")
	f.StringSliceVar(&o.only, "only", nil, "benchmarks to run, by name or pattern")
	f.StringSliceVar(&o.skip, "skip", nil, "benchmarks to skip, by name or pattern")
	f.StringVar(&o.out, "out", "", "file for the report, as JSON, written after each benchmark")
	f.StringVar(&o.resume, "resume", "", "report to continue; may be the same file as --out, even if that does not exist yet")
	return cmd
}

// runAll runs the chosen benchmarks.
func (m *benches) runAll(ctx context.Context, o *allOptions) error {
	chosen, err := m.choose(o)
	if err != nil {
		return err
	}
	report := bench.NewReport(nil)
	before, err := o.before(report)
	if err != nil {
		return err
	}
	var toRun []*benchmark
	for _, b := range chosen {
		if rows := before.By(b.line()); rows != nil {
			m.app.log.Info(fmt.Sprintf("%s: %d rows are from %s", b.Name(), len(rows), o.resume))
			continue
		}
		toRun = append(toRun, b)
		before = before.Without(b.line())
	}
	// Keep every row that is not measured again, so that writing the report loses nothing.
	report.Add(before.Rows...)
	if err := m.prepare(slices.ContainsFunc(toRun, func(b *benchmark) bool { return !b.onHost })); err != nil {
		return err
	}
	begin := time.Now()
	var errs []error
	for i, b := range toRun {
		if err := ctx.Err(); err != nil {
			errs = append(errs, fmt.Errorf("interrupted before %s: %w", b.Name(), err))
			break
		}
		m.app.log.Info(o.estimate(toRun, i, time.Since(begin)))
		rows, err := m.run(ctx, b)
		if err != nil {
			errs = append(errs, err)
			rows = append(rows, bench.Row{Name: b.Name(), Params: map[string]any{}, Skipped: err.Error(), Failed: true, Command: b.line()})
		}
		report.Add(rows...)
		if err := o.save(report); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(m.print(report), errors.Join(errs...))
}

// choose returns the benchmarks to run, in their order, with their options set.
func (m *benches) choose(o *allOptions) (chosen []*benchmark, err error) {
	if err := within("runs", o.runs, 0, 0); err != nil {
		return nil, usageError{err}
	}
	only, err := m.match(o.only)
	if err != nil {
		return nil, err
	}
	skip, err := m.match(o.skip)
	if err != nil {
		return nil, err
	}
	for _, b := range m.all {
		if len(o.only) > 0 && !only[b] || skip[b] {
			continue
		}
		if err := o.set(b); err != nil {
			return nil, err
		}
		chosen = append(chosen, b)
	}
	if len(chosen) == 0 {
		return nil, usageError{errors.New("--only and --skip leave no benchmark")}
	}
	return chosen, nil
}

// match returns the benchmarks whose names match a pattern. A pattern without a match is a usage error.
func (m *benches) match(patterns []string) (map[*benchmark]bool, error) {
	found := map[*benchmark]bool{}
	for _, p := range patterns {
		known := false
		var names []string
		for _, b := range m.all {
			names = append(names, b.Name())
			for _, name := range append([]string{b.Name()}, b.Aliases...) {
				ok, err := path.Match(p, name)
				if err != nil {
					return nil, usageError{fmt.Errorf("pattern %q: %w", p, err)}
				}
				if ok {
					known, found[b] = true, true
				}
			}
		}
		if !known {
			return nil, usageError{fmt.Errorf("no benchmark is called %q: there are %s", p, strings.Join(names, ", "))}
		}
	}
	return found, nil
}

// set sets the options of a benchmark.
func (o *allOptions) set(b *benchmark) error {
	options := map[string]string{}
	if b.Name() == "resume_ready" {
		// With a quarter of RAM in use, at two sizes: a peer loads unused memory at almost no cost, so a ratio
		// without used memory says little.
		options["peer"], options["memory"], options["used-percent"] = strings.Join(bench.Peers, ","), "128,512", "25"
	}
	if o.quick {
		for option := range strings.FieldsSeq(b.quick) {
			flag, value, _ := strings.Cut(option, "=")
			options[flag] = value
		}
	}
	if o.runs > 0 && b.Flags().Lookup("runs") != nil {
		options["runs"] = strconv.Itoa(o.runs)
	}
	for flag, value := range options {
		if err := b.Flags().Set(flag, value); err != nil {
			return fmt.Errorf("%s: --%s %s: %w", b.Name(), flag, value, err)
		}
	}
	return b.check()
}

// before returns the report to continue, or an empty one.
func (o *allOptions) before(now bench.Report) (bench.Report, error) {
	if o.resume == "" {
		return bench.Report{}, nil
	}
	f, err := os.Open(o.resume)
	if errors.Is(err, fs.ErrNotExist) && o.resume == o.out {
		return bench.Report{}, nil
	}
	if err != nil {
		return bench.Report{}, fmt.Errorf("going on with a report: %w", err)
	}
	defer f.Close()
	r, err := bench.ReadReport(f)
	if err == nil {
		err = now.GoesOn(r)
	}
	if err != nil {
		return bench.Report{}, fmt.Errorf("going on with %s: %w", o.resume, err)
	}
	return r, nil
}

// save writes the results so far.
func (o *allOptions) save(r bench.Report) error {
	if o.out == "" {
		return nil
	}
	var doc bytes.Buffer
	if err := printJSON(&doc, r); err != nil {
		return err
	}
	return osfile.WriteFile(o.out, doc.Bytes(), 0o644)
}

// estimate names the benchmark that begins, and estimates the time for it and the rest from the time of those
// before it.
func (o *allOptions) estimate(all []*benchmark, at int, took time.Duration) string {
	text := fmt.Sprintf("measuring %s, %d of %d", all[at].Name(), at+1, len(all))
	if at == 0 {
		return text
	}
	done, rest := 0.0, 0.0
	for i, b := range all {
		if i < at {
			done += o.weight(b)
		} else {
			rest += o.weight(b)
		}
	}
	return fmt.Sprintf("%s, after %s; about %s are left", text, roughly(took), roughly(time.Duration(float64(took)*rest/done)))
}

// roughly formats a duration for people.
func roughly(d time.Duration) string {
	if d >= time.Minute {
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return d.Round(time.Second).String()
}
