package records

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Filter says which sandboxes are listed. The zero value of a field leaves none out.
type Filter struct {
	Owner string
	Class lifetime.Class
	// Tags it has all of, and Statuses one of.
	Tags     []string
	Statuses []Status
	// After leaves out those up to this name: Page.Next of the page before.
	After string
	// Limit is the most of a page: 1 to MaxPage; 0 is DefaultPage.
	Limit int
}

// Check refuses a filter that is out of bounds.
func (f Filter) Check() error {
	if f.Limit < 0 || f.Limit > MaxPage {
		return fmt.Errorf("%w: a page of %d: use 1 to %d", ErrInvalid, f.Limit, MaxPage)
	}
	if err := CheckText("owner", f.Owner, MaxOwner); err != nil {
		return err
	}
	if f.Class != "" {
		if err := f.Class.Check(); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	for _, s := range f.Statuses {
		if !slices.Contains(Statuses, s) {
			return fmt.Errorf("%w: status %q: use one of %s", ErrInvalid, s, statusList())
		}
	}
	if len(f.After) > maxName {
		return fmt.Errorf("%w: a page after a name of %d bytes", ErrInvalid, len(f.After))
	}
	return CheckTags(f.Tags)
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

// Matches says whether a sandbox is one of those that are listed, its place in the order aside.
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
	// Next is Filter.After of the next page, empty if this is the last.
	Next string `json:"next,omitempty"`
}

// PageOf is the page of a list that is in no database. The list is in the order of names.
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

// At is a sandbox's status when its time may be over.
func (s Sandbox) At(now time.Time) Sandbox {
	if !s.Status.Live() && lifetime.Expired(s.Expires, now) {
		s.Status = Expired
	}
	return s
}

// effective is At in SQL, with now as its parameter.
const effective = "CASE WHEN status NOT IN ('creating', 'running', 'waiting') AND expires <> 0 AND expires <= ? THEN 'expired' ELSE status END"

// List returns a page of the sandboxes that are there. now decides which have expired.
func (d *DB) List(ctx context.Context, f Filter, now time.Time) (Page, error) {
	if err := f.Check(); err != nil {
		return Page{}, err
	}
	where, args := []string{"removed = 0", "name > ?"}, []any{nanos(now), f.After}
	add := func(cond string, arg any) { where, args = append(where, cond), append(args, arg) }
	if f.Owner != "" {
		add("owner = ?", f.Owner)
	}
	if f.Class != "" {
		add("class = ?", string(f.Class))
	}
	for _, t := range f.Tags {
		add("EXISTS (SELECT 1 FROM tags WHERE tag = ? AND sandbox = sandboxes.id)", t)
	}
	query := "SELECT doc, " + effective + " AS now_status, removed FROM sandboxes WHERE " + strings.Join(where, " AND ")
	if n := len(f.Statuses); n > 0 {
		query += " AND now_status IN (?" + strings.Repeat(", ?", n-1) + ")"
		for _, s := range f.Statuses {
			args = append(args, string(s))
		}
	}
	// One more tells whether there is another page.
	query += " ORDER BY name LIMIT ?"
	list, err := d.sandboxes(ctx, query, append(args, f.limit()+1)...)
	if err != nil {
		return Page{}, err
	}
	p := Page{Sandboxes: list}
	if len(list) > f.limit() {
		p.Sandboxes = list[:f.limit()]
		p.Next = p.Sandboxes[f.limit()-1].Name
	}
	return p, nil
}

// Find returns a sandbox by its name or id: the one that is there, or else the one of that name that was removed last,
// as long as its history is kept. The error is ErrNotFound otherwise.
func (d *DB) Find(ctx context.Context, nameOrID string, now time.Time) (Sandbox, error) {
	list, err := d.sandboxes(ctx, "SELECT doc, "+effective+", removed FROM sandboxes WHERE name = ? OR id = ? ORDER BY removed = 0 DESC, removed DESC LIMIT 1",
		nanos(now), nameOrID, nameOrID)
	if err != nil {
		return Sandbox{}, err
	}
	if len(list) == 0 {
		return Sandbox{}, fmt.Errorf("%w: %s", ErrNotFound, cut(nameOrID, maxName))
	}
	return list[0], nil
}

func (d *DB) sandboxes(ctx context.Context, query string, args ...any) ([]Sandbox, error) {
	out := []Sandbox{}
	err := d.each(ctx, query, args, func(rows *sql.Rows) error {
		var (
			doc     string
			status  Status
			removed int64
			s       Sandbox
		)
		if err := rows.Scan(&doc, &status, &removed); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(doc), &s); err != nil {
			return fmt.Errorf("%w: a row that is no JSON: %w", ErrDamaged, err)
		}
		s.Status, s.Tags = status, sorted(s.Tags)
		if s.Tags == nil {
			s.Tags = []string{}
		}
		if removed != 0 {
			s.Removed = time.Unix(0, removed).UTC()
		}
		out = append(out, s)
		return nil
	})
	return out, err
}

func (d *DB) each(ctx context.Context, query string, args []any, f func(*sql.Rows) error) error {
	rows, err := d.sql.QueryContext(ctx, query, args...)
	if err != nil {
		return fmt.Errorf("reading the records: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := f(rows); err != nil {
			return fmt.Errorf("reading the records: %w", err)
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading the records: %w", err)
	}
	return nil
}

// Span says which part of a history is read, the newest first.
type Span struct {
	// Before leaves out what began or was at this time or later; zero leaves nothing out.
	Before time.Time
	// Limit is 1 to MaxPage; 0 is DefaultPage.
	Limit int
}

func (s Span) bounds() (before int64, limit int, err error) {
	if s.Limit < 0 || s.Limit > MaxPage {
		return 0, 0, fmt.Errorf("%w: a page of %d: use 1 to %d", ErrInvalid, s.Limit, MaxPage)
	}
	before, limit = nanos(s.Before), s.Limit
	if before == 0 {
		before = 1<<63 - 1
	}
	if limit == 0 {
		limit = DefaultPage
	}
	return before, limit, nil
}

// Runs returns commands that were run in a sandbox, by its id, the newest first.
func (d *DB) Runs(ctx context.Context, id string, s Span) ([]Run, error) {
	return history[Run](ctx, d, "SELECT doc FROM runs WHERE sandbox = ? AND begun < ? ORDER BY begun DESC, id LIMIT ?", id, s)
}

// Sleeps returns what a sandbox has slept in, by its id, the newest first.
func (d *DB) Sleeps(ctx context.Context, id string, s Span) ([]Sleep, error) {
	return history[Sleep](ctx, d, "SELECT doc FROM sleeps WHERE sandbox = ? AND asleep < ? ORDER BY asleep DESC, snapshot LIMIT ?", id, s)
}

func history[T any](ctx context.Context, d *DB, query, id string, s Span) ([]T, error) {
	before, limit, err := s.bounds()
	if err != nil {
		return nil, err
	}
	out := []T{}
	err = d.each(ctx, query, []any{id, before, limit}, func(rows *sql.Rows) error {
		var doc string
		if err := rows.Scan(&doc); err != nil {
			return err
		}
		var v T
		if err := json.Unmarshal([]byte(doc), &v); err != nil {
			return errors.Join(ErrDamaged, err)
		}
		out = append(out, v)
		return nil
	})
	return out, err
}
