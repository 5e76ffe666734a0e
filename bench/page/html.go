package page

import (
	"fmt"
	"html/template"
	"io"
	"sync"

	_ "embed"
)

//go:embed page.html.tmpl
var source string

// templ is parsed when it is used: this package is part of every start of the command line.
var templ = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("page").Funcs(template.FuncMap{"figure": optional}).Parse(source))
})

func optional(v *float64) string {
	if v == nil {
		return "–"
	}
	return figure(*v)
}

// section is a heading with charts.
type section struct {
	Title, Text string
	Charts      []chart
}

// axes are the parameters over which charts are drawn.
var axes = []struct{ param, title, unit string }{
	{"memory_mib", "By size of RAM", "MiB of RAM"},
	{"sandboxes", "By sandboxes in the store", "other sandboxes"},
	{"depth", "By depth of the chain", "deltas between the snapshot and a full one"},
	{"dirty_mib", "By memory changed", "MiB changed before each snapshot"},
	{"used_mib", "By memory in use", "MiB in use by a program in the guest"},
	{"at_once", "By number at once", "VMs at once"},
}

// HTML writes the page with all reports added so far. The same input gives the same output.
func (p *Page) HTML(w io.Writer) error {
	rows := make([]*row, len(p.rows))
	for i := range p.rows {
		rows[i] = &p.rows[i]
	}
	notes := p.notes
	left := maxCharts
	var sections []section
	add := func(title, text string, charts []chart) {
		if len(charts) > left {
			notes = append(notes[:len(notes):len(notes)], fmt.Sprintf("%s: %d charts are left out: a page has up to %d", title, len(charts)-left, maxCharts))
			charts = charts[:left]
		}
		if len(charts) == 0 {
			return
		}
		for i := range charts {
			charts[i].ID = maxCharts - left + i
		}
		left -= len(charts)
		sections = append(sections, section{title, text, charts})
	}
	add("Beside other monitors", "Runs of each were taken in turn, on the same machine.", p.peers(rows))
	add("Distributions", "The part of all runs that took at most so much.", p.distributions(rows))
	for _, a := range axes {
		add(a.title, "", p.against(rows, a.param, a.unit))
	}
	add("Stages", "Medians of what a number is made of. Some run side by side, so they need not add up to the whole.", p.stages(rows))
	err := templ().Execute(w, map[string]any{
		"Reports": p.reports, "Sections": sections, "Rows": p.rows, "Notes": notes,
		"Bounds": p.bounds(rows), "Instruction": nanosecondsText(softCosts.instruction),
		"Fault": nanosecondsText(softCosts.fault), "Shadow": nanosecondsText(softCosts.shadow),
	})
	if err != nil {
		return fmt.Errorf("writing the page: %w", err)
	}
	return nil
}
