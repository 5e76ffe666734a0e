package page

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of the input.
const (
	// MaxBytes bounds one input.
	MaxBytes = 64 << 20
	// MaxReports and MaxRows bound a page.
	MaxReports, MaxRows = 64, 5000

	maxText    = 300  // characters of a string; the rest is cut off
	maxNamed   = 64   // parameters, stages or faults of a row
	maxBuckets = 4000 // pairs of a histogram
	maxNotes   = 100

	// Figures are 0 or within these bounds: charts cannot show a wider range.
	minNumber, maxNumber = 1e-12, 1e15
)

// ErrInput means that the input is not a report of a benchmark.
var ErrInput = errors.New("no report of a benchmark")

// Page collects the content of a page.
type Page struct {
	reports []report
	rows    []row
	notes   []string
}

// report is a document of `drowse bench -o json`, without its rows.
type report struct {
	Number int // from 1
	File   string
	Facts  []fact
	Rows   int
}

// fact is a fact about a machine, or a parameter.
type fact struct {
	Name, Value string
	number      *float64 // if it is one
}

// named is a number with a name.
type named struct {
	Name  string
	Value float64
}

// Ref returns the value as a pointer, like figures that may be missing.
func (n named) Ref() *float64 { return &n.Value }

// row is a bench.Row. A missing number is nil.
type row struct {
	Report                                  int // the number of its report
	Name, Unit, Skipped                     string
	Params                                  []fact // by name
	N, P50, P90, P99, Low, High, MiB, State *float64
	Stages, Faults, Counts                  []named
	Uncounted                               []fact // what is missing of the counts, and why
	Goal                                    *goal
	histogram                               [][2]float64
}

// Count returns the median of a count, or nil.
func (r row) Count(name string) *float64 {
	for _, c := range r.Counts {
		if c.Name == name {
			return c.Ref()
		}
	}
	return nil
}

// goal is the goal of a row: some of its limits, and the report's verdict.
type goal struct {
	P50, P99, Within, AtLeast *float64
	Over                      string
	Met, FewRuns              bool
}

// Add reads reports: JSON documents, one after another. file is their name on the page. The error wraps ErrInput
// if there is no report, or if there is anything else. Reports read before an error count.
func (p *Page) Add(file string, r io.Reader) error {
	in := &io.LimitedReader{R: r, N: MaxBytes + 1}
	d := json.NewDecoder(in)
	for n := 0; ; n++ {
		var doc json.RawMessage
		err := d.Decode(&doc)
		switch {
		case in.N <= 0:
			return fmt.Errorf("%w: %s has more than %d MiB", ErrInput, file, MaxBytes>>20)
		case errors.Is(err, io.EOF) && n > 0:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: %s is empty: write to it with `drowse bench NAME -o json`", ErrInput, file)
		case err != nil:
			return fmt.Errorf("%w: %s: %w", ErrInput, file, err)
		}
		if err := p.add(file, doc); err != nil {
			return err
		}
	}
}

func (p *Page) add(file string, doc json.RawMessage) error {
	var all struct {
		Machine json.RawMessage
		Commit  json.RawMessage
		Rows    []json.RawMessage
	}
	if err := json.Unmarshal(doc, &all); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrInput, file, err)
	}
	if all.Rows == nil {
		return fmt.Errorf("%w: %s has no rows", ErrInput, file)
	}
	if len(p.reports) == MaxReports {
		return fmt.Errorf("%w: %s is one too many: a page has up to %d", ErrInput, file, MaxReports)
	}
	r := report{Number: len(p.reports) + 1, File: text(file), Rows: len(all.Rows)}
	where := fmt.Sprintf("report %d", r.Number)
	r.Facts = append([]fact{{Name: "commit", Value: "unknown"}}, p.facts(where+", machine", all.Machine)...)
	var commit string
	if json.Unmarshal(all.Commit, &commit) == nil && commit != "" {
		r.Facts[0].Value = text(commit)
	}
	p.reports = append(p.reports, r)
	for i, raw := range all.Rows {
		if len(p.rows) == MaxRows {
			p.note("%s: %d rows are left out: a page has up to %d", where, len(all.Rows)-i, MaxRows)
			break
		}
		where := fmt.Sprintf("%s, row %d", where, i+1)
		var fields map[string]json.RawMessage
		if json.Unmarshal(raw, &fields) != nil || fields == nil {
			p.note("%s is left out: it is no object", where)
			continue
		}
		p.rows = append(p.rows, p.row(where, r.Number, fields))
	}
	return nil
}

func (p *Page) row(where string, report int, fields map[string]json.RawMessage) row {
	number := func(name string) *float64 { return p.number(where, name, fields[name]) }
	words := func(name string) string {
		var s string
		if raw := fields[name]; !null(raw) && json.Unmarshal(raw, &s) != nil {
			p.note("%s: %q is no string", where, name)
		}
		return text(s)
	}
	r := row{
		Report: report, Name: words("name"), Unit: words("unit"), Skipped: words("skipped"),
		Params: p.facts(where, fields["params"]),
		N:      number("n"), P50: number("p50"), P90: number("p90"), P99: number("p99"),
		Low: number("p50_low"), High: number("p50_high"), MiB: number("mib_touched"), State: number("state_mib"),
		Stages: p.numbers(where, "stages", fields["stages"]), Faults: p.numbers(where, "faults", fields["faults"]),
		Counts: p.numbers(where, "counts", fields["counts"]), Uncounted: p.facts(where+", uncounted", fields["uncounted"]),
		histogram: p.histogram(where, fields["histogram"]),
	}
	if r.Name == "" {
		r.Name = "(no name)"
	}
	if r.Skipped != "" {
		// Its figures are zeros.
		r.N, r.P50, r.P90, r.P99, r.MiB, r.State, r.histogram = nil, nil, nil, nil, nil, nil, nil
		return r
	}
	r.Goal = p.goal(where, fields["goal"], r)
	return r
}

// goal reads the goal of a row. A goal that claims to be met counts as missed if the figures do not confirm it.
func (p *Page) goal(where string, raw json.RawMessage, r row) *goal {
	if null(raw) {
		return nil
	}
	var fields map[string]json.RawMessage
	var met, few *bool
	if json.Unmarshal(raw, &fields) != nil || json.Unmarshal(fields["met"], &met) != nil || met == nil {
		p.note("%s: its goal is left out: it does not say whether it is met", where)
		return nil
	}
	number := func(name string) *float64 { return p.number(where+", goal", name, fields[name]) }
	g := &goal{P50: number("p50"), P99: number("p99"), Within: number("within"), AtLeast: number("at_least"), Met: *met}
	var over string
	_ = json.Unmarshal(fields["over"], &over) // it only explains
	g.Over = text(over)
	if !null(fields["few_runs"]) && json.Unmarshal(fields["few_runs"], &few) == nil && few != nil {
		g.FewRuns = *few
	}
	for _, l := range []struct {
		v, limit *float64
		least    bool
	}{{r.P50, g.P50, false}, {r.P50, g.Within, false}, {r.P99, g.P99, false}, {r.P50, g.AtLeast, true}} {
		if g.Met && l.limit != nil && (l.v == nil || *l.v > *l.limit && !l.least || *l.v < *l.limit && l.least) {
			p.note("%s: it says that its goal is met, and its figures do not", where)
			g.Met = false
		}
	}
	return g
}

// String returns the goal in words.
func (g *goal) String() string {
	verdict := "missed: "
	if g.Met {
		verdict = "met: "
	}
	var limits []string
	for _, l := range []struct {
		name, why string
		limit     *float64
	}{{"p50 ≤ ", "", g.P50}, {"p50 ≤ ", " (by the fastest in " + g.Over + ")", g.Within}, {"p99 ≤ ", "", g.P99}, {"p50 ≥ ", "", g.AtLeast}} {
		if l.limit != nil {
			limits = append(limits, l.name+figure(*l.limit)+l.why)
		}
	}
	verdict += strings.Join(limits, ", ")
	if g.FewRuns {
		verdict += " (few runs)"
	}
	return verdict
}

// histogram reads pairs of values and counts. It returns all or none: a part of a histogram would be a false
// picture.
func (p *Page) histogram(where string, raw json.RawMessage) [][2]float64 {
	if null(raw) {
		return nil
	}
	var pairs [][]float64
	if json.Unmarshal(raw, &pairs) != nil || len(pairs) > maxBuckets {
		p.note("%s: its histogram is left out: it is not one of up to %d pairs of numbers", where, maxBuckets)
		return nil
	}
	out := make([][2]float64, 0, len(pairs))
	for i, b := range pairs {
		if len(b) != 2 || !sane(b[0]) || !sane(b[1]) || b[1] <= 0 || i > 0 && b[0] <= pairs[i-1][0] {
			p.note("%s: its histogram is left out: pair %d is not a value above the one before and a count", where, i+1)
			return nil
		}
		out = append(out, [2]float64{b[0], b[1]})
	}
	return out
}

func (p *Page) number(where, name string, raw json.RawMessage) *float64 {
	if null(raw) {
		return nil
	}
	var v float64
	if json.Unmarshal(raw, &v) != nil || !sane(v) {
		p.note("%s: %q is not 0 or a number from %g to %g", where, name, minNumber, maxNumber)
		return nil
	}
	return &v
}

func (p *Page) numbers(where, name string, raw json.RawMessage) (out []named) {
	for _, f := range p.facts(where, raw) {
		switch {
		case f.number == nil || !sane(*f.number):
			p.note("%s: %s: %q is not 0 or a number from %g to %g", where, name, f.Name, minNumber, maxNumber)
		default:
			out = append(out, named{f.Name, *f.number})
		}
	}
	return out
}

// facts reads an object, sorted by name. It keeps strings, numbers and truth values. Everything else stays JSON.
func (p *Page) facts(where string, raw json.RawMessage) (out []fact) {
	if null(raw) {
		return nil
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil {
		p.note("%s: what should be an object is none", where)
		return nil
	}
	for i, k := range slices.Sorted(maps.Keys(m)) {
		if i == maxNamed {
			p.note("%s: %d of %d names are left out", where, len(m)-maxNamed, len(m))
			break
		}
		f := fact{Name: text(k)}
		var v any
		_ = json.Unmarshal(m[k], &v) // valid as part of the whole; a number out of range stays text
		switch v := v.(type) {
		case string:
			f.Value = text(v)
		case float64:
			f.Value, f.number = figure(v), &v
		default:
			var b bytes.Buffer
			if json.Compact(&b, m[k]) == nil {
				f.Value = text(b.String())
			}
		}
		out = append(out, f)
	}
	return out
}

func (p *Page) note(format string, args ...any) {
	switch len(p.notes) {
	case maxNotes:
		p.notes = append(p.notes, "and more like these")
	case maxNotes + 1:
	default:
		p.notes = append(p.notes, fmt.Sprintf(format, args...))
	}
}

func null(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// sane reports whether a figure can be drawn.
func sane(v float64) bool { return v == 0 || v >= minNumber && v <= maxNumber }

// text bounds a string, and removes characters that could reorder or hide the text around it.
func text(s string) string {
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, s)
	if n := utf8.RuneCountInString(s); n > maxText {
		s = string([]rune(s)[:maxText]) + "…"
	}
	return s
}

// figure formats a number with four digits, or with all digits of a whole number.
func figure(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1e9 {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// param returns a parameter of a row, or an empty one.
func (r *row) param(name string) fact {
	if i := slices.IndexFunc(r.Params, func(f fact) bool { return f.Name == name }); i >= 0 {
		return r.Params[i]
	}
	return fact{}
}

// without returns the parameters as words, without some of them.
func (r *row) without(names ...string) string {
	var words []string
	for _, f := range r.Params {
		if !slices.Contains(names, f.Name) {
			words = append(words, f.Name+"="+f.Value)
		}
	}
	return strings.Join(words, " ")
}

// Label returns all parameters as words.
func (r *row) Label() string { return r.without() }
