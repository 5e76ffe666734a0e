package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// MaxReportBytes bounds a report to read.
const MaxReportBytes = 64 << 20

var (
	// ErrReport means that the input is not a report.
	ErrReport = errors.New("no report of benchmarks")
	// ErrOther means that a report is of another machine or build, so that its rows cannot stand beside new ones.
	ErrOther = errors.New("the report is not of this machine and build")
)

// ReadReport reads one report in JSON. Its error wraps ErrReport if the input is not one.
func ReadReport(r io.Reader) (Report, error) {
	text, err := io.ReadAll(io.LimitReader(r, MaxReportBytes+1))
	if err != nil {
		return Report{}, err
	}
	if len(text) > MaxReportBytes {
		return Report{}, fmt.Errorf("%w: it has more than %d MiB", ErrReport, MaxReportBytes>>20)
	}
	var out Report
	if err := json.Unmarshal(text, &out); err != nil {
		return Report{}, fmt.Errorf("%w: %w", ErrReport, err)
	}
	if out.Rows == nil {
		return Report{}, fmt.Errorf("%w: it has no rows", ErrReport)
	}
	return out, nil
}

// GoesOn returns nil if an earlier report can be continued: it has the same machine, kernel and build, of a commit
// without changes. Otherwise the error wraps ErrOther and lists the differences.
func (r Report) GoesOn(before Report) error {
	a, b := before.Machine, r.Machine
	for _, f := range []struct {
		name       string
		before, is any
	}{
		{"commit", before.Commit, r.Commit}, {"CPU", a.CPU, b.CPU}, {"number of CPUs", a.CPUs, b.CPUs}, {"memory in MiB", a.MemoryMiB, b.MemoryMiB},
		{"kernel", a.Kernel, b.Kernel}, {"kind of KVM", a.KVM, b.KVM}, {"version of Go", a.GoVersion, b.GoVersion},
	} {
		if f.before != f.is {
			return fmt.Errorf("%w: its %s is %v, and now %v", ErrOther, f.name, f.before, f.is)
		}
	}
	if r.Commit == unknownCommit || strings.HasSuffix(r.Commit, changedTree) {
		return fmt.Errorf("%w: its commit is %q, which any build can have: build from a commit without changes", ErrOther, r.Commit)
	}
	return nil
}

// By returns the rows that a command measured, or nil if it has not run or has failed.
func (r Report) By(command string) (rows []Row) {
	for _, row := range r.Rows {
		if row.Command != command {
			continue
		}
		if row.Failed {
			return nil
		}
		rows = append(rows, row)
	}
	return rows
}

// Without returns the report without the rows of a command.
func (r Report) Without(command string) Report {
	r.Rows = slices.DeleteFunc(slices.Clone(r.Rows), func(row Row) bool { return row.Command == command })
	return r
}
