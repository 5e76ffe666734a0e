package bench

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// MaxSamples bounds the lines of a row in Benchstat's output.
const MaxSamples = 2000

// statUnits maps the units of rows to units that benchstat knows, with the factor.
var statUnits = map[string]struct {
	name  string
	scale float64
}{
	"ns": {"ns/op", 1}, "ms": {"ns/op", perMs},
	"KiB": {"B/op", 1 << 10}, "MiB": {"B/op", mibBytes}, "MiB/s": {"B/s", mibBytes},
	"IOPS": {"IOPS", 1}, "%": {"percent", 1}, "x": {"ratio", 1},
}

// moreIsBetter are the units that are rates.
var moreIsBetter = []string{"MiB/s", "IOPS"}

// outcomes are parameters that were measured themselves. Two runs of the same benchmark differ in them.
var outcomes = []string{"packets", "total_ms", "measured_kib", "pause_ms", "ready_ms", "cpu_p99_ms"}

// Benchstat writes the runs of all rows in the format of Go's benchmarks (go.dev/design/14313-benchmark-format),
// which benchstat compares. Each run is a line with its value to three digits, in ascending order. Of more than
// MaxSamples runs it writes that many, at even distances of rank. Parameters are in the name. Comments have what
// differs between compared runs, such as the commit. The median counts of a row are a line of their own.
func (r Report) Benchstat(w io.Writer) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "# commit %s, Linux %s, %d CPUs, %d MiB, load %.2f, %s\n", oneLine(r.Commit), oneLine(r.Machine.Kernel),
		r.Machine.CPUs, r.Machine.MemoryMiB, r.Machine.Load, r.Machine.Time.UTC().Format("2006-01-02T15:04:05Z"))
	fmt.Fprintf(b, "goos: linux\ngoarch: amd64\npkg: github.com/drowse-vm/drowse/bench\ncpu: %s\nkvm: %s\n", oneLine(r.Machine.CPU), oneLine(r.Machine.KVM))
	for _, unit := range moreIsBetter {
		fmt.Fprintf(b, "Unit %s better=higher\n", statUnits[unit].name)
	}
	for _, row := range r.Rows {
		name := row.statName()
		if row.Skipped != "" {
			fmt.Fprintf(b, "# %s: not measured: %s\n", name, oneLine(row.Skipped))
			continue
		}
		unit, ok := statUnits[row.Unit]
		if !ok {
			unit.name, unit.scale = statWord(row.Unit), 1
		}
		for _, v := range row.samples() {
			fmt.Fprintf(b, "%s 1 %s %s\n", name, strconv.FormatFloat(v*unit.scale, 'g', -1, 64), unit.name)
		}
		if len(row.Counts) > 0 {
			fmt.Fprintf(b, "%s 1", name)
			for _, count := range slices.Sorted(maps.Keys(row.Counts)) {
				fmt.Fprintf(b, " %.0f %s/op", row.Counts[count], statWord(count))
			}
			fmt.Fprintln(b)
		}
	}
	return b.Flush()
}

// statName returns the name and the parameters of a row, without outcomes.
func (r Row) statName() string {
	var name strings.Builder
	name.WriteString("Benchmark")
	for _, word := range strings.Split(r.Name, "_") {
		if word != "" {
			name.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	for _, k := range slices.Sorted(maps.Keys(r.Params)) {
		if !slices.Contains(outcomes, k) {
			name.WriteString("/" + statWord(k) + "=" + statWord(fmt.Sprint(r.Params[k])))
		}
	}
	return name.String()
}

// statWord replaces what would divide a line or a name.
func statWord(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '/' || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return '_'
		}
		return r
	}, s)
}

// oneLine returns the text without line breaks.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// samples returns up to MaxSamples runs of a row from its histogram, or the median alone if it has no histogram.
func (r Row) samples() []float64 {
	total := 0.0
	for _, b := range r.Histogram {
		total += max(b[1], 0)
	}
	n := int(min(total, MaxSamples))
	if n < 1 {
		return []float64{r.P50}
	}
	out := make([]float64, 0, n)
	// Take the rank in the middle of each of n equal parts.
	at, seen := 0, 0.0
	for i := range n {
		rank := (float64(i) + 0.5) * total / float64(n)
		for at < len(r.Histogram)-1 && seen+max(r.Histogram[at][1], 0) < rank {
			seen += max(r.Histogram[at][1], 0)
			at++
		}
		out = append(out, r.Histogram[at][0])
	}
	return out
}
