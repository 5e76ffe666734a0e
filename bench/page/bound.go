package page

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// kind is the relation of a stage to the number of its row.
type kind int

const (
	host   kind = iota // a part of it, in which the host works; the default
	guest              // a part of it, in which the guest runs
	within             // a part of another stage
	beside             // not a part of it: it runs meanwhile, comes before or after, or is another figure
)

// kinds are the kinds of the benchmarks' stages. A key with a row's name in front is for that row alone.
var kinds = map[string]kind{
	// Of a restore. The first four make the prebuilt VM in the background: the wait for them is the stage
	// prebuilt. The next runs while devices are made: the wait for it is import.
	"create_vm": beside, "memory": beside, "irqchip": beside, "vcpus": beside,
	"kvm_state": beside,
	"guest":     guest, "agent_reached": within, "agent_answer": within, "dial": guest, "attach": guest, "command": guest,
	"policy_attach/attach": host, "fork_density/guest": host,
	"child": guest, "answer": guest,
	"snapshot_pause/save": beside, "fork_ready/save": beside, "fork_ready/durable": beside, "policy_swap/compile": beside, "policy_swap/cpu": beside,
	"concurrent_resume/first": beside, "concurrent_resume/median": beside, "concurrent_resume/last": beside,
	"boot/run": beside, "processes": beside, "disk": beside, "pss": beside, "pss_total": beside, "image": beside, "total": beside,
}

func kindOf(row, stage string) kind {
	if k, ok := kinds[row+"/"+stage]; ok {
		return k
	}
	return kinds[stage]
}

// costs are the times of counted events in nanoseconds. 0 means unknown.
type costs struct {
	// instruction is the cost of an instruction of the guest's kernel that KVM interprets. fault is that of a page
	// for which the guest waits until the pager has loaded it. shadow is that of any other page that KVM enters
	// into its own table at the guest's first touch.
	instruction, fault, shadow float64
	// measured means that the report has measured instruction.
	measured bool
}

// softCosts are the costs of a KVM that interprets, measured on one host (AMD EPYC, Linux 6.18). They have the
// right size, but are not measurements of a report's machine. A KVM on virtualisation hardware does not interpret,
// and the cost of its faults is unknown.
var softCosts = costs{instruction: 330, fault: 130_000, shadow: 35_000}

// nanoseconds has the nanoseconds in one of each unit of time.
var nanoseconds = map[string]float64{"ns": 1, "µs": 1e3, "us": 1e3, "ms": 1e6, "s": 1e9}

// bound is what limits a row's number, as far as the row shows it.
type bound struct {
	Row   *row
	Stage string   // the largest; empty if none is a part of the number
	Value float64  // its median
	Share *float64 // of the row's median, in percent
	By    string
	// Sum shows the calculation.
	Sum string
	// Native is the median without the interpretation of instructions. It is nil if there was none, or if its
	// share is unknown.
	Native *float64
}

// Ref returns the value of the largest stage, or nil if there is none.
func (b bound) Ref() *float64 {
	if b.Stage == "" {
		return nil
	}
	return &b.Value
}

// bounds returns the bounds of the rows that have stages or a goal.
func (p *Page) bounds(rows []*row) (out []bound) {
	perReport := make([]*costs, len(p.reports))
	for i := range perReport {
		perReport[i] = p.costsOf(rows, i+1)
	}
	for _, r := range rows {
		if b := boundOf(r, perReport[r.Report-1]); r.Skipped == "" && r.P50 != nil && (b.Stage != "" || r.Goal != nil) {
			out = append(out, b)
		}
	}
	return out
}

// costsOf returns the costs for a report's rows. An instruction costs what the report measured with a kernel's share of
// memory, or else what the first report of the same machine did. Nil means a KVM that does not interpret.
func (p *Page) costsOf(rows []*row, report int) *costs {
	own := p.reports[report-1]
	if own.fact("kvm") != "soft" {
		return nil
	}
	c := softCosts
	for _, r := range rows {
		if r.Name != "guest_instruction" || r.Unit != "ns" || r.param("mix").Value != "mixed" || r.P50 == nil || *r.P50 <= 0 {
			continue
		}
		if r.Report == report || !c.measured && own.sameMachine(p.reports[r.Report-1]) {
			c.instruction, c.measured = *r.P50, true
		}
	}
	return &c
}

// fact returns a report's fact about its machine, or "".
func (r report) fact(name string) string {
	for _, f := range r.Facts {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// sameMachine reports whether another report has the same processor, kernel and kind of KVM.
func (r report) sameMachine(other report) bool {
	for _, name := range []string{"cpu", "kernel", "kvm"} {
		if v := r.fact(name); v == "" || v != other.fact(name) {
			return false
		}
	}
	return true
}

// boundOf returns what limits a row. Without costs it calculates nothing.
func boundOf(r *row, c *costs) bound {
	b := bound{Row: r}
	inGuest, largest := 0.0, host
	for _, s := range r.Stages {
		k := kindOf(r.Name, s.Name)
		if k == within || k == beside {
			continue
		}
		if k == guest {
			inGuest += s.Value
		}
		if s.Value > b.Value {
			b.Stage, b.Value, largest = s.Name, s.Value, k
		}
	}
	if b.Stage == "" || r.P50 == nil {
		return b
	}
	if *r.P50 > 0 {
		share := 100 * b.Value / *r.P50
		b.Share = &share
	}
	unit := nanoseconds[r.Unit]
	switch {
	case unit == 0:
		// A number of memory or a rate, not a time.
	case r.Name == "concurrent_resume" && b.processors():
	case largest == host:
		b.By = "host work"
	case c == nil:
		b.By = "the guest, or host work for it"
	default:
		b.reckon(inGuest, unit, *c)
	}
	return b
}

// reckon divides the time in the guest, in the row's unit, into counted events at their cost and the rest.
func (b *bound) reckon(inGuest, unit float64, c costs) {
	count := map[string]float64{}
	for _, f := range b.Row.Faults {
		count[f.Name] = f.Value
	}
	faults := count["read"] + count["write"]
	instructions := "instructions"
	if c.measured {
		instructions = "instructions as measured"
	}
	terms := []struct {
		by, what    string
		count, cost float64
	}{
		{"guest instructions", instructions, count["emulated"], c.instruction},
		{"page faults", "pages waited for", faults, c.fault},
		{"page faults", "other pages touched", max(0, count["kvm_pages"]-faults), c.shadow},
	}
	by := map[string]float64{}
	var words []string
	rest := inGuest
	for _, t := range terms {
		if t.count == 0 {
			continue
		}
		took := t.count * t.cost / unit
		words = append(words, fmt.Sprintf("%s %s × %s = %s %s", figure(t.count), t.what, nanosecondsText(t.cost), figure(took), b.Row.Unit))
		// Counters are read a little after the number's end, so a term is at most the remaining time.
		took = min(took, rest)
		by[t.by] += took
		rest -= took
	}
	if len(words) == 0 {
		b.By = "the guest: nothing is counted"
		return
	}
	if native := *b.Row.P50 - by["guest instructions"]; by["guest instructions"] > 0 && native > 0 {
		b.Native = &native
	}
	by["host work"] = rest
	other := fmt.Sprintf("host work otherwise %s %s", figure(rest), b.Row.Unit)
	if n := count["exits"]; n > 0 {
		other += fmt.Sprintf(" (%s exits)", figure(n))
	}
	b.Sum = fmt.Sprintf("%s; %s; of %s %s in the guest", strings.Join(words, "; "), other, figure(inGuest), b.Row.Unit)
	for _, name := range slices.Sorted(maps.Keys(by)) {
		if b.By == "" || by[name] > by[b.By] {
			b.By = name
		}
	}
}

// processors reports whether VMs that wake at once share processors. Each of them needs its stage cpu of one
// processor.
func (b *bound) processors() bool {
	n, cpus := b.Row.param("at_once").number, b.Row.param("cpus").number
	if b.Stage != "cpu" || n == nil || cpus == nil || !(*n > *cpus) || !(*cpus >= 1) {
		return false
	}
	b.By = "processors"
	b.Sum = fmt.Sprintf("%s VMs × %s %s of processor time / %s CPUs = %s %s for the last",
		figure(*n), figure(b.Value), b.Row.Unit, figure(*cpus), figure(*n*b.Value / *cpus), b.Row.Unit)
	return true
}

// nanosecondsText returns a cost in its usual unit.
func nanosecondsText(ns float64) string {
	if ns >= 1000 {
		return figure(ns/1000) + " µs"
	}
	return figure(ns) + " ns"
}
