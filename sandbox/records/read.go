package records

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Filter selects the sandboxes of a list. The zero value of a field selects all.
type Filter struct {
	Owner string
	Class lifetime.Class
	// A sandbox must have all of Tags, and one of Statuses.
	Tags     []string
	Statuses []Status
	// After leaves out all names up to this one: Page.Next of the page before.
	After string
	// Limit is the most sandboxes of a page: 1 to MaxPage; 0 is DefaultPage.
	Limit int
}

// Check returns an error for a filter that is out of bounds.
func (f Filter) Check() error {
	if f.Limit < 0 || f.Limit > MaxPage {
		return spec.InField("limit", fmt.Errorf("%w: a page of %d: use 1 to %d", ErrInvalid, f.Limit, MaxPage))
	}
	if err := spec.CheckText(ErrInvalid, "owner", f.Owner, MaxOwner); err != nil {
		return spec.InField("owner", err)
	}
	if f.Class != "" {
		if err := f.Class.Check(); err != nil {
			return spec.InField("class", fmt.Errorf("%w: %w", ErrInvalid, err))
		}
	}
	for _, s := range f.Statuses {
		if !slices.Contains(Statuses, s) {
			return spec.InField("status", fmt.Errorf("%w: status %q: use one of %s", ErrInvalid, s, statusList()))
		}
	}
	if len(f.After) > maxName {
		return spec.InField("after", fmt.Errorf("%w: a page after a name of %d bytes", ErrInvalid, len(f.After)))
	}
	return spec.InField("tag", spec.CheckTags(ErrInvalid, f.Tags, MaxTags))
}

func statusList() string {
	var names []string
	for _, s := range Statuses {
		names = append(names, string(s))
	}
	return strings.Join(names, ", ")
}

func (f Filter) limit() int {
	if f.Limit == 0 {
		return DefaultPage
	}
	return f.Limit
}

// Matches reports whether the filter selects a sandbox. It ignores After and Limit.
func (f Filter) Matches(s Sandbox) bool {
	switch {
	case f.Owner != "" && s.Owner != f.Owner, f.Class != "" && s.Class != f.Class:
		return false
	case len(f.Statuses) > 0 && !slices.Contains(f.Statuses, s.Status):
		return false
	}
	for _, t := range f.Tags {
		if !slices.Contains(s.Tags, t) {
			return false
		}
	}
	return true
}

// Page is a part of a list, in the order of names.
type Page struct {
	Sandboxes []Sandbox `json:"sandboxes"`
	// Next is Filter.After of the next page; empty on the last page.
	Next string `json:"next,omitempty"`
}

// PageOf returns the page of a list that a filter asks for. The list must be in the order of names.
func PageOf(all []Sandbox, f Filter) Page {
	p := Page{Sandboxes: []Sandbox{}}
	for _, s := range all {
		if s.Name <= f.After || !f.Matches(s) {
			continue
		}
		if len(p.Sandboxes) == f.limit() {
			p.Next = p.Sandboxes[len(p.Sandboxes)-1].Name
			break
		}
		p.Sandboxes = append(p.Sandboxes, s)
	}
	return p
}

// At returns the sandbox with its status at a time, when it may have expired.
func (s Sandbox) At(now time.Time) Sandbox {
	if !s.Status.Live() && lifetime.Expired(s.Expires, now) {
		s.Status = Expired
	}
	return s
}

// Span selects the part of a history to read, the newest first.
type Span struct {
	// Before leaves out entries of this time or later; zero leaves out none.
	Before time.Time
	// Limit is the most entries: 1 to MaxPage; 0 is DefaultPage.
	Limit int
}

// Check returns an error for a span that is out of bounds.
func (s Span) Check() error {
	if s.Limit < 0 || s.Limit > MaxPage {
		return spec.InField("limit", fmt.Errorf("%w: a page of %d: use 1 to %d", ErrInvalid, s.Limit, MaxPage))
	}
	return nil
}

// Part is a span of a history, collected from its entries in any order. Its memory is bounded by Span.Limit.
type Part[T any] struct {
	Span Span
	// At returns the time of an entry.
	At  func(T) time.Time
	all []T
}

// Add adds an entry, which Newest returns if it is in the span.
func (p *Part[T]) Add(v T) {
	if !p.Span.Before.IsZero() && !p.At(v).Before(p.Span.Before) {
		return
	}
	if p.all = append(p.all, v); len(p.all) >= 2*MaxPage {
		p.all = p.Newest()
	}
}

// Newest returns the entries of the span, the newest first; at equal times, the last added first.
func (p *Part[T]) Newest() []T {
	out := append([]T{}, p.all...)
	slices.Reverse(out)
	slices.SortStableFunc(out, func(a, b T) int { return p.At(b).Compare(p.At(a)) })
	return out[:min(len(out), cmp.Or(p.Span.Limit, DefaultPage))]
}
