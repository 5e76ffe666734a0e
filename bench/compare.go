package bench

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// Build is a build of drowse with a state directory that it may use.
type Build struct{ Program, State string }

// Figures are what the runs of all rounds took.
type Figures struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
}

// Compared is a row of two builds. Ratio is the new median by the old one; RatioLow and RatioHigh are the smallest and
// the largest ratio of one round. A row that one of them lacks has N 0 there, and no ratio.
type Compared struct {
	Row       string  `json:"row"`
	Unit      string  `json:"unit"`
	Old       Figures `json:"old"`
	New       Figures `json:"new"`
	Ratio     float64 `json:"ratio,omitempty"`
	RatioLow  float64 `json:"ratio_low,omitempty"`
	RatioHigh float64 `json:"ratio_high,omitempty"`
}

// Compare measures two builds in turn: each round runs "drowse bench -o json" with args of both, in the reverse order
// of the round before. It returns their rows in the order of the old build's.
func Compare(ctx context.Context, old, new Build, args []string, rounds int, say func(string)) ([]Compared, error) {
	sides := [2]Build{old, new}
	var order []string
	units := map[string]string{}
	samples := map[string]*[2][][]float64{} // of a row: for each build, the runs of each round
	for round := range rounds {
		for i := range sides {
			side := (i + round) % 2
			say(fmt.Sprintf("round %d of %d: %s", round+1, rounds, sides[side].Program))
			report, err := sides[side].run(ctx, args)
			if err != nil {
				return nil, fmt.Errorf("measuring %s: %w", sides[side].Program, err)
			}
			for _, r := range report.Rows {
				if r.Skipped != "" || r.N == 0 {
					continue
				}
				name := strings.TrimPrefix(r.statName(), "Benchmark")
				if samples[name] == nil {
					samples[name], units[name] = &[2][][]float64{}, r.Unit
					order = append(order, name)
				}
				samples[name][side] = append(samples[name][side], r.samples())
			}
		}
	}
	var out []Compared
	for _, name := range order {
		s := samples[name]
		c := Compared{Row: name, Unit: units[name], Old: figures(s[0]), New: figures(s[1])}
		if c.Old.P50 > 0 && c.New.N > 0 {
			c.Ratio = c.New.P50 / c.Old.P50
			for i := range min(len(s[0]), len(s[1])) {
				ratio := figures(s[1][i:i+1]).P50 / figures(s[0][i:i+1]).P50
				c.RatioLow, c.RatioHigh = min(cmp.Or(c.RatioLow, ratio), ratio), max(c.RatioHigh, ratio)
			}
		}
		out = append(out, c)
	}
	return out, nil
}

// figures returns the percentiles of the runs of all rounds.
func figures(rounds [][]float64) Figures {
	all := slices.Concat(rounds...)
	if len(all) == 0 {
		return Figures{}
	}
	slices.Sort(all)
	rank := func(p int) float64 { return all[(len(all)-1)*p/100] }
	return Figures{len(all), rank(50), rank(90)}
}

// endTime is how long a build may take to remove its guests when it is told to end.
const endTime = time.Minute

// run runs the benchmarks of a build.
func (b Build) run(ctx context.Context, args []string) (Report, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, b.Program, append([]string{"--state", b.State, "bench", "-o", "json"}, args...)...)
	cmd.Stdout, cmd.Stderr = &limited{w: &out, left: MaxReportBytes}, &limited{w: &errs, left: 1 << 20}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, endTime
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(errs.String()+"\n"+out.String()), "\n")
		return Report{}, fmt.Errorf("%w: %s", err, oneLine(strings.Join(lines[max(0, len(lines)-3):], " ")))
	}
	return ReadReport(&out)
}

// limited passes on the first bytes, and drops the rest.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	if _, err := l.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteCompared writes a table.
func WriteCompared(w io.Writer, rows []Compared) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "row\tunit\told n\tp50\tp90\tnew n\tp50\tp90\tnew/old\tof rounds\t")
	for _, r := range rows {
		ratio, of := "-", "-"
		if r.Ratio > 0 {
			ratio, of = fmt.Sprintf("%.2f", r.Ratio), fmt.Sprintf("%.2f to %.2f", r.RatioLow, r.RatioHigh)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%.3f\t%.3f\t%d\t%.3f\t%.3f\t%s\t%s\t\n",
			r.Row, r.Unit, r.Old.N, r.Old.P50, r.Old.P90, r.New.N, r.New.P50, r.New.P90, ratio, of)
	}
	return t.Flush()
}
