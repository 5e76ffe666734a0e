package page

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// chart is a picture in SVG. Lengths are in its own units: pixels, on a page that is wide enough.
type chart struct {
	ID            int
	Title, Note   string
	Width, Height float64
	Lines         []line
	Rects         []rect
	Paths         []path
	Texts         []label
	Legend        []entry
}

type line struct {
	X1, Y1, X2, Y2 string
	Class          string
	Color          string // empty: the class's color
}

type rect struct{ X, Y, Width, Height, Color, Title string }

type path struct{ Points, Color, Dash, Title string }

type label struct{ X, Y, Anchor, Text string }

type entry struct{ Color, Dash, Text string }

// Bounds of the charts.
const (
	maxCharts = 120
	maxSeries = 12
)

// Colours that people with any colour vision can tell apart (M. Okabe and K. Ito, "Color Universal Design", 2008),
// without the two that do not show on white or black. Further lines are dashed.
var colors = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"}

var dashes = []string{"", "6 3", "2 3"}

func style(i int) (color, dash string) {
	return colors[i%len(colors)], dashes[i/len(colors)%len(dashes)]
}

func px(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

// axis maps values to lengths.
type axis struct {
	lo, hi   float64
	log      bool
	from, to float64
}

// newAxis returns an axis for all values, which must be sane. It is logarithmic if they are more than wide times
// apart and none is 0. Otherwise it begins at 0.
func newAxis(values []float64, wide, from, to float64) axis {
	lo, hi := slices.Min(values), slices.Max(values)
	a := axis{lo: 0, hi: hi, from: from, to: to}
	if lo > 0 && hi/lo > wide {
		a.lo, a.log = lo, true
	}
	if a.hi <= a.lo {
		a.hi = a.lo + 1
	}
	return a
}

func (a axis) at(v float64) float64 {
	f := (v - a.lo) / (a.hi - a.lo)
	if a.log {
		f = math.Log(v/a.lo) / math.Log(a.hi/a.lo)
	}
	return a.from + min(max(f, 0), 1)*(a.to-a.from)
}

// ticks returns up to about ten values to write at the axis.
func (a axis) ticks() (out []float64) {
	if a.log {
		decades := math.Log10(a.hi / a.lo)
		steps := []float64{1, 2, 5}
		if decades > 3 {
			steps = steps[:1]
		}
		stride := int(decades/10) + 1
		for e := int(math.Floor(math.Log10(a.lo))); e <= int(math.Ceil(math.Log10(a.hi))); e += stride {
			for _, s := range steps {
				if v := s * math.Pow10(e); v >= a.lo && v <= a.hi {
					out = append(out, v)
				}
			}
		}
		return out
	}
	step := math.Pow(10, math.Floor(math.Log10((a.hi-a.lo)/5)))
	for _, s := range []float64{5, 2, 1} {
		if (a.hi-a.lo)/(step*s) >= 4 {
			step *= s
			break
		}
	}
	for i := 0; i <= 20; i++ {
		if v := a.lo + float64(i)*step; v <= a.hi {
			out = append(out, v)
		}
	}
	return out
}

// marks returns the values themselves, if they are few and far enough apart to read, and ticks otherwise.
func (a axis) marks(values []float64) []float64 {
	const apart = 40
	own := slices.Compact(slices.Sorted(slices.Values(values)))
	for i, v := range own {
		if i > 0 && a.at(v)-a.at(own[i-1]) < apart {
			return a.ticks()
		}
	}
	return own
}

const (
	plotWidth, plotHeight = 720, 300
	left, right, top      = 64, 16, 12
	bottom                = 44
	barHeight, barStep    = 14, 22
	barLeft, barRight     = 250, 110
)

// plot returns a chart with two axes.
func plot(title string, x, y axis, xName, yName string, xTicks, yTicks []float64, yText func(float64) string) chart {
	c := chart{Title: title, Width: plotWidth, Height: plotHeight}
	for _, v := range yTicks {
		at := px(y.at(v))
		c.Lines = append(c.Lines, line{X1: px(left), X2: px(plotWidth - right), Y1: at, Y2: at, Class: "grid"})
		c.Texts = append(c.Texts, label{X: px(left - 6), Y: px(y.at(v) + 4), Anchor: "end", Text: yText(v)})
	}
	for _, v := range xTicks {
		at := px(x.at(v))
		c.Lines = append(c.Lines, line{X1: at, X2: at, Y1: px(top), Y2: px(plotHeight - bottom), Class: "grid"})
		c.Texts = append(c.Texts, label{X: at, Y: px(plotHeight - bottom + 16), Anchor: "middle", Text: figure(v)})
	}
	if x.log {
		xName += " (logarithmic)"
	}
	c.Texts = append(c.Texts, label{X: px((left + plotWidth - right) / 2), Y: px(plotHeight - 8), Anchor: "middle", Text: xName},
		label{X: px(left), Y: px(top - 2), Anchor: "start", Text: yName})
	return c
}

// groups returns the rows of each kind, in the order of their first rows.
func groups(rows []*row, kind func(*row) string) (out [][]*row) {
	index := map[string]int{}
	for _, r := range rows {
		k := kind(r)
		i, ok := index[k]
		if !ok {
			i = len(out)
			index[k] = i
			out = append(out, nil)
		}
		out[i] = append(out[i], r)
	}
	return out
}

// labels returns the differences between rows, with their report if there are several.
func (p *Page) labels(rows []*row, but ...string) []string {
	same := but
	for _, f := range rows[0].Params {
		if !slices.ContainsFunc(rows, func(r *row) bool { return r.param(f.Name).Value != f.Value }) {
			same = append(slices.Clip(same), f.Name)
		}
	}
	out := make([]string, len(rows))
	for i, r := range rows {
		words := r.without(same...)
		if len(p.reports) > 1 {
			words = fmt.Sprintf("report %d %s", r.Report, words)
		}
		if out[i] = strings.TrimSpace(words); out[i] == "" {
			out[i] = r.Name
		}
	}
	return out
}

func byName(r *row) string { return r.Name + "\x00" + r.Unit }

// distributions draws the share of runs that took at most a given time.
func (p *Page) distributions(rows []*row) (out []chart) {
	rows = only(rows, func(r *row) bool { return len(r.histogram) > 0 })
	for _, group := range groups(rows, byName) {
		for some := range slices.Chunk(group, maxSeries) {
			var values []float64
			for _, r := range some {
				for _, b := range r.histogram {
					values = append(values, b[0])
				}
			}
			x := newAxis(values, 20, left, plotWidth-right)
			y := axis{lo: 0, hi: 1, from: plotHeight - bottom, to: top}
			c := plot(some[0].Name, x, y, some[0].Unit, "", x.ticks(), []float64{0, 0.25, 0.5, 0.75, 0.9, 1}, func(v float64) string { return figure(100*v) + "%" })
			for i, text := range p.labels(some) {
				color, dash := style(i)
				n := 0.0
				for _, b := range some[i].histogram {
					n += b[1]
				}
				var points strings.Builder
				sum := 0.0
				for _, b := range some[i].histogram {
					fmt.Fprintf(&points, "%s,%s ", px(x.at(b[0])), px(y.at(sum/n)))
					sum += b[1]
					fmt.Fprintf(&points, "%s,%s ", px(x.at(b[0])), px(y.at(sum/n)))
				}
				fmt.Fprintf(&points, "%s,%s", px(x.to), px(y.at(1)))
				text += ", " + figure(n) + " runs"
				c.Paths = append(c.Paths, path{Points: points.String(), Color: color, Dash: dash, Title: text})
				c.Legend = append(c.Legend, entry{color, dash, text})
			}
			out = append(out, c)
		}
	}
	return out
}

// against draws medians over a parameter, for rows that differ only in it, with strokes up to the 90th and the
// 99th percentile.
func (p *Page) against(rows []*row, name, unit string) (out []chart) {
	rows = only(rows, func(r *row) bool {
		f := r.param(name)
		return r.P50 != nil && f.number != nil && sane(*f.number)
	})
	for _, group := range groups(rows, byName) {
		var series [][]*row
		for _, s := range groups(group, func(r *row) string { return fmt.Sprint(r.Report, " ", r.without(name)) }) {
			slices.SortStableFunc(s, func(a, b *row) int { return cmp.Compare(*a.param(name).number, *b.param(name).number) })
			if *s[0].param(name).number < *s[len(s)-1].param(name).number {
				series = append(series, s)
			}
		}
		for some := range slices.Chunk(series, maxSeries) {
			var xs, ys []float64
			firsts := make([]*row, len(some))
			for i, s := range some {
				firsts[i] = s[0]
				for _, r := range s {
					xs = append(xs, *r.param(name).number)
					ys = append(ys, *r.P50, value(r.P99, *r.P50), value(r.P90, *r.P50))
				}
			}
			x, y := newAxis(xs, 4, left+12, plotWidth-right-12), newAxis(ys, math.Inf(1), plotHeight-bottom, top)
			c := plot(some[0][0].Name, x, y, unit, some[0][0].Unit, x.marks(xs), y.ticks(), figure)
			c.Note = "Lines join medians. A stroke goes up to the 99th percentile, with a mark at the 90th."
			for i, text := range p.labels(firsts, name) {
				color, dash := style(i)
				var points []string
				for _, r := range some[i] {
					// Put strokes beside each other, not on each other.
					at := x.at(*r.param(name).number) + 3*float64(i) - 1.5*float64(len(some)-1)
					points = append(points, px(at)+","+px(y.at(*r.P50)))
					c.whisker(at, y, r, color)
				}
				c.Paths = append(c.Paths, path{Points: strings.Join(points, " "), Color: color, Dash: dash, Title: text})
				c.Legend = append(c.Legend, entry{color, dash, text})
			}
			out = append(out, c)
		}
	}
	return out
}

func (c *chart) whisker(at float64, y axis, r *row, color string) {
	c.Lines = append(c.Lines, line{X1: px(at), X2: px(at), Y1: px(y.at(*r.P50)), Y2: px(y.at(value(r.P99, *r.P50))), Class: "data", Color: color})
	if r.P90 != nil {
		c.Lines = append(c.Lines, line{X1: px(at - 4), X2: px(at + 4), Y1: px(y.at(*r.P90)), Y2: px(y.at(*r.P90)), Class: "data", Color: color})
	}
	c.Rects = append(c.Rects, rect{X: px(at - 3), Y: px(y.at(*r.P50) - 3), Width: "6.0", Height: "6.0", Color: color,
		Title: fmt.Sprintf("%s: p50 %s %s", r.Label(), figure(*r.P50), r.Unit)})
}

// stages draws the parts of the rows.
func (p *Page) stages(rows []*row) (out []chart) {
	for _, r := range only(rows, func(r *row) bool { return len(r.Stages) > 0 && r.Skipped == "" }) {
		bars := make([]bar, len(r.Stages))
		for i, s := range r.Stages {
			bars[i] = bar{text: s.Name, value: s.Value, unit: r.Unit, color: colors[0]}
		}
		title := r.Name + " " + r.Label()
		if len(p.reports) > 1 {
			title = fmt.Sprintf("report %d: %s", r.Report, title)
		}
		out = append(out, drawBars(title, bars))
	}
	return out
}

// evident are parameters that bars leave out: the table has them.
var evident = []string{"peer", "peer_version", "peer_machine", "peer_cpu", "guest", "memory_mib", "vcpus", "cache", "pool"}

// peers draws the figures of several monitors side by side.
func (p *Page) peers(rows []*row) (out []chart) {
	for _, group := range groups(rows, func(r *row) string {
		return fmt.Sprint(r.Report, "\x00", byName(r), "\x00", r.param("memory_mib").Value)
	}) {
		if !slices.ContainsFunc(group, func(r *row) bool { return r.param("peer").Value != "" }) {
			continue
		}
		if mixed := slices.ContainsFunc(group, func(r *row) bool { return r.param("peer").Value == "" }); !mixed && len(group) == 1 && group[0].Skipped == "" {
			continue // a ratio: the table has it
		}
		var bars []bar
		for _, r := range group {
			who := r.param("peer").Value
			if who == "" {
				who = "drowse"
			}
			b := bar{text: strings.TrimSpace(who + " " + r.without(evident...)), unit: r.Unit, color: colors[1]}
			if who == "drowse" {
				b.color = colors[0]
			}
			switch {
			case r.P50 == nil && r.Skipped != "":
				b.missing = "not measured"
			case r.P50 == nil:
				b.missing = "no figure"
			default:
				b.value, b.p90, b.p99 = *r.P50, r.P90, r.P99
			}
			bars = append(bars, b)
		}
		title := group[0].Name
		if mib := group[0].param("memory_mib").Value; mib != "" {
			title += ", " + mib + " MiB"
		}
		if len(p.reports) > 1 {
			title = fmt.Sprintf("report %d: %s", group[0].Report, title)
		}
		c := drawBars(title, bars)
		c.Note = "Bars are medians. A stroke goes up to the 99th percentile, with a mark at the 90th. What the guests are differs: see the parameters in the table."
		out = append(out, c)
	}
	return out
}

// bar is a median, with strokes if there are percentiles.
type bar struct {
	text, unit, color string
	value             float64
	p90, p99          *float64
	missing           string // why there is no value
}

func drawBars(title string, bars []bar) chart {
	c := chart{Title: title, Width: plotWidth, Height: float64(len(bars)*barStep + 12)}
	values := []float64{0}
	for _, b := range bars {
		values = append(values, b.value, value(b.p99, b.value), value(b.p90, b.value))
	}
	x := newAxis(values, math.Inf(1), barLeft, plotWidth-barRight)
	for i, b := range bars {
		y := float64(i*barStep + 6)
		c.Texts = append(c.Texts, label{X: px(barLeft - 6), Y: px(y + 11), Anchor: "end", Text: shorten(b.text, 36)})
		if b.missing != "" {
			c.Texts = append(c.Texts, label{X: px(barLeft + 4), Y: px(y + 11), Anchor: "start", Text: b.missing})
			continue
		}
		text := figure(b.value) + " " + b.unit
		c.Rects = append(c.Rects, rect{X: px(barLeft), Y: px(y), Width: px(x.at(b.value) - barLeft), Height: px(barHeight), Color: b.color, Title: b.text + ": " + text})
		end := x.at(b.value)
		if b.p99 != nil {
			end = max(end, x.at(*b.p99))
			c.Lines = append(c.Lines, line{X1: px(x.at(b.value)), X2: px(x.at(*b.p99)), Y1: px(y + 7), Y2: px(y + 7), Class: "whisker"})
		}
		if b.p90 != nil {
			c.Lines = append(c.Lines, line{X1: px(x.at(*b.p90)), X2: px(x.at(*b.p90)), Y1: px(y + 2), Y2: px(y + 12), Class: "whisker"})
		}
		c.Texts = append(c.Texts, label{X: px(end + 6), Y: px(y + 11), Anchor: "start", Text: shorten(text, 20)})
	}
	return c
}

func shorten(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func value(v *float64, otherwise float64) float64 {
	if v == nil {
		return otherwise
	}
	return *v
}

func only(rows []*row, keep func(*row) bool) (out []*row) {
	for _, r := range rows {
		if keep(r) {
			out = append(out, r)
		}
	}
	return out
}
