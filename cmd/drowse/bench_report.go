//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/bench/page"
	"github.com/drowse-vm/drowse/internal/osfile"
)

func (a *app) benchReport() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use: "report [FILE.json ...]", Annotations: asBenchstat, Short: "Make one HTML page of benchmark results",
		Long: `Make one HTML page of the results that benchmarks printed with -o json.

It reads files, or stdin without arguments or for "-". The page has no scripts and needs no
network. It shows distributions, stages, latency by RAM size and by chain depth, other monitors
side by side, machines and commits, the goals that are met, what limits a number, and all rows.

With -o benchstat it writes the runs in the format of Go benchmarks instead.`,
		RunE: func(_ *cobra.Command, args []string) error {
			if a.json() {
				return usageError{errors.New("bench report writes HTML: its input is the JSON")}
			}
			if len(args) == 0 {
				args = []string{"-"}
			}
			doc, err := a.report(args)
			if err != nil {
				return err
			}
			if out == "" {
				_, err := a.stdout.Write(doc)
				return err
			}
			return osfile.WriteFile(out, doc, 0o644)
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "output file, instead of stdout")
	return cmd
}

// report makes the page of the given report files.
func (a *app) report(names []string) ([]byte, error) {
	var p page.Page
	var out bytes.Buffer
	for _, name := range names {
		in, err := input(name, os.Stdin)
		if err != nil {
			return nil, fmt.Errorf("reading a report: %w", err)
		}
		called := filepath.Base(name)
		if name == "-" {
			called = "stdin"
		}
		if a.output != benchstat {
			err = p.Add(called, in)
		} else if report, rerr := bench.ReadReport(in); rerr != nil {
			err = fmt.Errorf("%s: %w", called, rerr)
		} else {
			err = report.Benchstat(&out)
		}
		if err = errors.Join(err, in.Close()); err != nil {
			return nil, fmt.Errorf("reading a report: %w", err)
		}
	}
	if a.output == benchstat {
		return out.Bytes(), nil
	}
	err := p.HTML(&out)
	return out.Bytes(), err
}
