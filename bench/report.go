package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm"
)

// Report is what a benchmark run prints.
type Report struct {
	Machine Machine `json:"machine"`
	// Commit is the measured revision, with "+dirty" if the work tree was changed, or "unknown" if the build does
	// not say.
	Commit string `json:"commit"`
	Rows   []Row  `json:"rows"`
}

// Row is one number under one set of parameters.
type Row struct {
	Name   string         `json:"name"`
	Params map[string]any `json:"params"`
	Unit   string         `json:"unit"`
	N      int64          `json:"n"`
	P50    float64        `json:"p50"`
	P90    float64        `json:"p90"`
	P99    float64        `json:"p99"`
	// Stages are the medians of the number's parts, in the same unit.
	Stages map[string]float64 `json:"stages"`
	// Faults are the medians for one run, by kind.
	Faults map[string]float64 `json:"faults"`
	// Counts are the medians of what the kernel has counted in one run, by the names CountNames. Uncounted says why one
	// of them is missing. Both are nil in rows that count nothing.
	Counts    map[string]float64 `json:"counts,omitempty"`
	Uncounted map[string]string  `json:"uncounted,omitempty"`
	// MiBTouched is the median of the guest memory that one run touched.
	MiBTouched float64 `json:"mib_touched"`
	// StateMiB is the guest's memory in the state that it resumes from: pages that are not all zeros.
	StateMiB float64 `json:"state_mib,omitempty"`
	// P50Low and P50High hold the median that endless runs would have, with a confidence
	// of 95% if the runs are independent. Both are 0 for fewer than 6 runs.
	P50Low  float64 `json:"p50_low,omitempty"`
	P50High float64 `json:"p50_high,omitempty"`
	// Histogram has a value in the row's unit and the number of runs that took it, in
	// ascending order: at most MaxBuckets pairs, of three digits.
	Histogram [][2]float64 `json:"histogram,omitempty"`
	// Goal is the number's goal, and whether it meets it. Nil means no goal.
	Goal *RowGoal `json:"goal,omitempty"`
	// Skipped says why nothing was measured. All figures are 0 then. Failed means that the benchmark failed or was
	// interrupted.
	Skipped string `json:"skipped,omitempty"`
	Failed  bool   `json:"failed,omitempty"`
	// Command measures the row again, with its non-default options. Began is when it began, and Load the host's
	// load average over one minute then.
	Command string    `json:"command,omitempty"`
	Began   time.Time `json:"began,omitzero"`
	Load    float64   `json:"load1,omitempty"`

	err error // of a run whose value was out of bounds
}

// Machine describes where a number was measured.
type Machine struct {
	CPU       string `json:"cpu"`
	CPUs      int    `json:"cpus"`
	MemoryMiB uint64 `json:"memory_mib"`
	Kernel    string `json:"kernel"`
	KVM       string `json:"kvm"` // "hardware" or "soft"
	// Load is the host's load average over one minute, and Time the time, when the run began. Figures from a busy
	// machine mean little.
	Load      float64   `json:"load1"`
	GoVersion string    `json:"go"`
	Time      time.Time `json:"time"`
}

// NewReport describes this machine in its present state, and this build. A run calls it before it measures, and
// adds its rows later.
func NewReport(rows []Row) Report {
	m := Machine{CPUs: runtime.NumCPU(), GoVersion: runtime.Version(), KVM: "hardware", Time: time.Now().UTC(), CPU: cpuModel()}
	if vmm.SoftKVM() {
		m.KVM = "soft"
	}
	m.MemoryMiB, m.Load = memoryAndLoad()
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	r := Report{Machine: m, Commit: commit(), Rows: []Row{}}
	r.Add(rows...)
	return r
}

// memoryAndLoad returns the host's memory in MiB and its load average over one minute, or 0 if they are unknown.
func memoryAndLoad() (mib uint64, load float64) {
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) != nil {
		return 0, 0
	}
	const scale = 1 << 16 // SI_LOAD_SHIFT
	return si.Totalram * uint64(si.Unit) >> 20, float64(si.Loads[0]) / scale
}

// Add adds rows, and gives all rows their goals. Some goals compare rows.
func (r *Report) Add(rows ...Row) {
	r.Rows = append(r.Rows, rows...)
	applyGoals(r.Rows, Goals)
}

// Run measures, and notes the command in the rows. After an error it also returns the rows measured before.
func Run(command string, measure func() ([]Row, error)) ([]Row, error) {
	began := time.Now().UTC()
	_, load := memoryAndLoad()
	rows, err := measure()
	for i := range rows {
		rows[i].Command, rows[i].Began, rows[i].Load = command, began, load
		err = errors.Join(err, rows[i].err)
	}
	return rows, err
}

func cpuModel() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, value, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// The commit if the build does not say it, and the suffix for a changed work tree.
const unknownCommit, changedTree = "unknown", "+dirty"

// Commit can be set by the linker. Otherwise it comes from the build information.
var Commit string

func commit() string {
	if Commit != "" {
		return Commit
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return unknownCommit
	}
	rev, dirty := unknownCommit, ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			rev = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = changedTree
		}
	}
	return rev + dirty
}

// Text writes the report as a table.
func (r Report) Text(w io.Writer) {
	fmt.Fprintf(w, "%s, %d CPUs, %d MiB, Linux %s, %s KVM, load %.1f, commit %s\n\n",
		r.Machine.CPU, r.Machine.CPUs, r.Machine.MemoryMiB, r.Machine.Kernel, r.Machine.KVM, r.Machine.Load, r.Commit)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	counts := slices.ContainsFunc(r.Rows, func(row Row) bool { return row.Counts != nil || row.Uncounted != nil })
	fmt.Fprint(t, "name\tparameters\tn\tp50\tp90\tp99\tunit\t")
	if counts {
		fmt.Fprint(t, strings.Join(CountNames, "\t")+"\t")
	}
	fmt.Fprintln(t, "MiB touched\tgoal\t")
	for _, row := range r.Rows {
		if row.Skipped != "" {
			fmt.Fprintf(t, "%s\t%s\t-\t-\t-\t-\t%s\t", row.Name, sorted(row.Params), row.Unit)
		} else {
			fmt.Fprintf(t, "%s\t%s\t%d\t%.3f\t%.3f\t%.3f\t%s\t", row.Name, sorted(row.Params), row.N, row.P50, row.P90, row.P99, row.Unit)
		}
		for _, name := range CountNames {
			if n, ok := row.Counts[name]; ok {
				fmt.Fprintf(t, "%.0f\t", n)
			} else if counts {
				fmt.Fprint(t, "-\t")
			}
		}
		if row.Skipped != "" {
			fmt.Fprint(t, "-\t-\t\n")
		} else {
			fmt.Fprintf(t, "%.1f\t%s\t\n", row.MiBTouched, row.Goal)
		}
	}
	t.Flush()
	for _, why := range r.uncounted() {
		fmt.Fprintln(w, "\n"+why)
	}
	for _, row := range r.Rows {
		if row.Skipped != "" {
			fmt.Fprintf(w, "\n%s %s: not measured: %s\n", row.Name, sorted(row.Params), strings.ReplaceAll(row.Skipped, "\n", "; "))
		}
		if len(row.Stages) > 0 {
			fmt.Fprintf(w, "\n%s %s, medians in %s:\n", row.Name, sorted(row.Params), row.Unit)
			for _, name := range slices.Sorted(maps.Keys(row.Stages)) {
				fmt.Fprintf(w, "  %-12s %.3f\n", name, row.Stages[name])
			}
		}
	}
}

// uncounted says which counts are missing in which rows, and why: a line for each reason.
func (r Report) uncounted() (lines []string) {
	rows := map[string][]string{}
	for _, row := range r.Rows {
		for _, name := range slices.Sorted(maps.Keys(row.Uncounted)) {
			why := fmt.Sprintf("%s not counted: %s", name, oneLine(row.Uncounted[name]))
			if !slices.Contains(rows[why], row.Name) {
				rows[why] = append(rows[why], row.Name)
			}
		}
	}
	for _, why := range slices.Sorted(maps.Keys(rows)) {
		lines = append(lines, strings.Join(rows[why], ", ")+": "+why)
	}
	return lines
}

func sorted(params map[string]any) string {
	var words []string
	for k, v := range params {
		words = append(words, fmt.Sprintf("%s=%v", k, v))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// unit is the unit of a row, and how many recorded units make one. Times are recorded in nanoseconds, memory in
// bytes, and other fractions in thousandths.
type unit struct {
	name  string
	scale float64
}

const (
	perMs       = 1e6
	pagesPerMiB = 256
	mibBytes    = 1 << 20
	thousandths = 1000
)

var (
	inMs      = unit{"ms", perMs}
	inNs      = unit{"ns", 1}
	inMiB     = unit{"MiB", mibBytes}
	inKiB     = unit{"KiB", 1 << 10}
	inRate    = unit{"MiB/s", thousandths}
	inIOPS    = unit{"IOPS", thousandths}
	inPercent = unit{"%", thousandths}
	inRatio   = unit{"x", thousandths}
)

// series collects the measurements of one row's runs. A value out of bounds is an error of the row.
type series struct {
	unit
	total  *hdrhistogram.Histogram
	stages map[string]*hdrhistogram.Histogram
	faults map[string]*hdrhistogram.Histogram
	pages  *hdrhistogram.Histogram
	// counts are those of each run, and uncounted why some are missing.
	counts    map[string][]float64
	uncounted map[string]string
	err       error
}

// Bounds of recorded values: 1 to 10^12, nanoseconds or counts, to three digits.
func histogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, 1_000_000_000_000, 3) }

func newSeries(u unit) *series {
	return &series{
		unit: u, total: histogram(), pages: histogram(),
		stages: map[string]*hdrhistogram.Histogram{}, faults: map[string]*hdrhistogram.Histogram{}, counts: map[string][]float64{},
	}
}

func (s *series) record(h *hdrhistogram.Histogram, v int64) {
	if err := h.RecordValue(v); err != nil && s.err == nil {
		s.err = fmt.Errorf("recording a run: %w", err)
	}
}

// add records the value of a run, touched the pages that it used.
func (s *series) add(v int64)         { s.record(s.total, v) }
func (s *series) touched(pages int64) { s.record(s.pages, pages) }

// stage records a part of a run in the row's unit. fault records how often something happened in it.
func (s *series) stage(name string, v int64) { s.into(s.stages, name, v) }
func (s *series) fault(name string, n int64) { s.into(s.faults, name, n) }

// stagesOf records parts of a run that a VM's process reported, in milliseconds.
func (s *series) stagesOf(all map[string]float64, names ...string) {
	for _, name := range names {
		s.stage(name, ns(all[name]))
	}
}

// portion records a / b in thousandths.
func (s *series) portion(a, b float64) { s.add(max(1, int64(a/b*thousandths))) }

func (s *series) into(m map[string]*hdrhistogram.Histogram, key string, v int64) {
	if m[key] == nil {
		m[key] = histogram()
	}
	s.record(m[key], v)
}

// ns converts milliseconds to nanoseconds.
func ns(ms float64) int64 { return int64(ms * perMs) }

func medians(m map[string]*hdrhistogram.Histogram, scale float64) map[string]float64 {
	out := map[string]float64{}
	for k, h := range m {
		out[k] = float64(h.ValueAtQuantile(50)) / scale
	}
	return out
}

// row returns the series in its unit.
func (s *series) row(name string, params map[string]any) Row {
	h := s.total
	q := func(p float64) float64 { return float64(h.ValueAtQuantile(p)) / s.scale }
	r := Row{
		Name: name, Params: params, Unit: s.name, N: h.TotalCount(), P50: q(50), P90: q(90), P99: q(99), Histogram: buckets(h, s.scale),
		Stages: medians(s.stages, s.scale), Faults: medians(s.faults, 1), MiBTouched: float64(s.pages.ValueAtQuantile(50)) / pagesPerMiB, err: s.err,
	}
	r.Counts, r.Uncounted = s.medianCounts()
	if k := rankOfMedian(r.N); k > 0 {
		n := float64(r.N)
		r.P50Low, r.P50High = q(100*float64(k)/n), q(100*float64(r.N+1-k)/n)
	}
	return r
}

// MaxBuckets bounds the pairs of a row's histogram.
const MaxBuckets = 1000

// buckets returns the recorded values and how often each came. A value is the highest one that counts as the same.
// If there are too many, neighbours merge.
func buckets(h *hdrhistogram.Histogram, scale float64) [][2]float64 {
	var all [][2]float64
	highest := h.Max()
	for _, bar := range h.Distribution() {
		if bar.Count > 0 {
			all = append(all, [2]float64{float64(min(bar.To, highest)) / scale, float64(bar.Count)})
		}
	}
	var out [][2]float64
	for some := range slices.Chunk(all, max(1, (len(all)+MaxBuckets-1)/MaxBuckets)) {
		count := 0.0
		for _, b := range some {
			count += b[1]
		}
		out = append(out, [2]float64{some[len(some)-1][0], count})
	}
	return out
}

// rankOfMedian returns the largest k such that the k-th smallest and the k-th largest of n values enclose the
// median with a confidence of 95%: no more than 2.5% of n fair coins show fewer than k heads. It returns 0 if
// there is none. (Conover, Practical Nonparametric Statistics, section 3.2.)
func rankOfMedian(n int64) int64 {
	sum, k := 0.0, int64(0)
	for ; k <= n/2; k++ {
		// n over k, by the logarithm of the gamma function, which does not overflow.
		a, _ := math.Lgamma(float64(n + 1))
		b, _ := math.Lgamma(float64(k + 1))
		c, _ := math.Lgamma(float64(n - k + 1))
		if sum += math.Exp(a - b - c - float64(n)*math.Ln2); sum > 0.025 {
			break
		}
	}
	return k
}
