package records

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Tx is a change under way. Nobody else changes anything meanwhile, so what is read from files in it and written is not
// older than what it replaces.
type Tx struct {
	ctx context.Context
	tx  *sql.Tx
}

// Update runs f in a transaction, which is committed, and on disk, when Update returns nil. Otherwise nothing has
// changed. It waits up to 5 s for others that write.
func (d *DB) Update(ctx context.Context, f func(*Tx) error) error {
	tx, err := d.sql.BeginTx(ctx, nil) // BEGIN IMMEDIATE
	if err != nil {
		return fmt.Errorf("writing the records: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // nothing is left to roll back after Commit
	if err := f(&Tx{ctx, tx}); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("writing the records: %w", err)
	}
	return nil
}

// Known is what the index has of a sandbox that is there.
type Known struct {
	ID, Name string
	Class    string
	Status   Status
	// Stamp is what Put was given: it tells whether the files have changed.
	Stamp string
}

// Known returns the index without the rows, by name.
func (t *Tx) Known() (map[string]Known, error) {
	rows, err := t.tx.QueryContext(t.ctx, "SELECT id, name, class, status, stamp FROM sandboxes WHERE removed = 0")
	if err != nil {
		return nil, fmt.Errorf("reading the records: %w", err)
	}
	defer rows.Close()
	out := map[string]Known{}
	for rows.Next() {
		var k Known
		if err := rows.Scan(&k.ID, &k.Name, &k.Class, &k.Status, &k.Stamp); err != nil {
			return nil, fmt.Errorf("reading the records: %w", err)
		}
		out[k.Name] = k
	}
	return out, rows.Err()
}

func (t *Tx) exec(query string, args ...any) error {
	if _, err := t.tx.ExecContext(t.ctx, query, args...); err != nil {
		return fmt.Errorf("writing the records: %w", err)
	}
	return nil
}

// nanos is a time as a column has it.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func encode(v any) (string, error) {
	text, err := json.Marshal(v)
	return string(text), err
}

// Put adds a sandbox or replaces what is known of it. Another one that has its name is marked as removed. Texts that
// are too long are cut.
func (t *Tx) Put(s Sandbox, stamp string) error {
	s, err := s.bounded()
	if err != nil {
		return err
	}
	s.Removed = time.Time{}
	doc, err := encode(s)
	if err != nil {
		return fmt.Errorf("writing the records: %w", err)
	}
	var old, class string
	err = t.tx.QueryRowContext(t.ctx, "SELECT id, class FROM sandboxes WHERE name = ? AND removed = 0 AND id <> ?", s.Name, s.ID).Scan(&old, &class)
	switch {
	case err == nil:
		if err := t.Gone(Known{ID: old, Name: s.Name, Class: class}, time.Now()); err != nil {
			return err
		}
	case !errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("reading the records: %w", err)
	}
	var (
		oldDoc, oldStamp string
		removed          int64
	)
	err = t.tx.QueryRowContext(t.ctx, "SELECT doc, stamp, removed FROM sandboxes WHERE id = ?", s.ID).Scan(&oldDoc, &oldStamp, &removed)
	if err == nil && oldDoc == doc && oldStamp == stamp && removed == 0 {
		return nil // nothing to wait for the disk for
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("reading the records: %w", err)
	}
	err = t.exec(`INSERT INTO sandboxes (id, name, class, owner, status, expires, removed, stamp, doc) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?)
		ON CONFLICT (id) DO UPDATE SET name = excluded.name, class = excluded.class, owner = excluded.owner, status = excluded.status,
			expires = excluded.expires, removed = 0, stamp = excluded.stamp, doc = excluded.doc`,
		s.ID, s.Name, string(s.Class), s.Owner, string(s.Status), nanos(s.Expires), cut(stamp, maxText), doc)
	if err != nil {
		return err
	}
	if err := t.exec("DELETE FROM tags WHERE sandbox = ?", s.ID); err != nil {
		return err
	}
	for _, tag := range s.Tags {
		if err := t.exec("INSERT OR IGNORE INTO tags (sandbox, tag) VALUES (?, ?)", s.ID, tag); err != nil {
			return err
		}
	}
	return nil
}

// Gone notes that a sandbox is not there any more, if it has still the name that is known. Its history stays for
// HistoryTime; of an ephemeral one nothing stays. One that is noted already keeps its time.
func (t *Tx) Gone(k Known, at time.Time) error {
	if k.Class == string(lifetime.Ephemeral) {
		return t.exec("DELETE FROM sandboxes WHERE id = ? AND name = ?", k.ID, k.Name)
	}
	return t.exec("UPDATE sandboxes SET removed = ?, stamp = '' WHERE id = ? AND name = ? AND removed = 0", max(nanos(at), 1), k.ID, k.Name)
}

// ForgetRemovedBefore deletes what is left of sandboxes that were removed before a time, and returns how many these
// were.
func (t *Tx) ForgetRemovedBefore(at time.Time) (int64, error) {
	res, err := t.tx.ExecContext(t.ctx, "DELETE FROM sandboxes WHERE removed <> 0 AND removed < ?", nanos(at))
	if err != nil {
		return 0, fmt.Errorf("writing the records: %w", err)
	}
	return res.RowsAffected()
}

// PutSleeps adds sleeps of a sandbox that Put knows. Those that are there already stay as they are; of all, the newest
// MaxSleeps are kept.
func (t *Tx) PutSleeps(id string, sleeps []Sleep) error {
	for _, s := range sleeps {
		s, err := s.bounded()
		if err != nil {
			return err
		}
		doc, err := encode(s)
		if err != nil {
			return fmt.Errorf("writing the records: %w", err)
		}
		if err := t.exec("INSERT OR IGNORE INTO sleeps (sandbox, snapshot, asleep, doc) VALUES (?, ?, ?, ?)", id, s.Snapshot, nanos(s.Asleep), doc); err != nil {
			return err
		}
	}
	return t.exec(`DELETE FROM sleeps WHERE sandbox = ?1 AND asleep <
		(SELECT asleep FROM sleeps WHERE sandbox = ?1 ORDER BY asleep DESC LIMIT 1 OFFSET ?2)`, id, MaxSleeps-1)
}

// RunsSince is from when on the runs of a sandbox have to be told again: the beginning of the oldest one whose end may
// still come, else that of the newest one; zero if there is none.
func (t *Tx) RunsSince(id string) (time.Time, error) {
	var at sql.NullInt64
	err := t.tx.QueryRowContext(t.ctx, `SELECT coalesce(
		(SELECT min(begun) FROM runs WHERE sandbox = ?1 AND open = 1),
		(SELECT max(begun) FROM runs WHERE sandbox = ?1))`, id).Scan(&at)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the records: %w", err)
	}
	if !at.Valid {
		return time.Time{}, nil
	}
	return time.Unix(0, at.Int64).UTC(), nil
}

// openRun is the State of a run whose end may still come.
const openRun = "running"

// PutRuns adds runs of a sandbox that Put knows, or what has become of them: one that has ended is not open again. Of
// all, the newest MaxRuns are kept.
func (t *Tx) PutRuns(id string, runs []Run) error {
	for _, r := range runs {
		r, err := r.bounded()
		if err != nil {
			return err
		}
		doc, err := encode(r)
		if err != nil {
			return fmt.Errorf("writing the records: %w", err)
		}
		open := 0
		if r.State == openRun {
			open = 1
		}
		err = t.exec(`INSERT INTO runs (sandbox, id, begun, open, doc) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (sandbox, id) DO UPDATE SET open = excluded.open, doc = excluded.doc WHERE runs.open = 1`,
			id, r.ID, nanos(r.Begun), open, doc)
		if err != nil {
			return err
		}
	}
	return t.exec(`DELETE FROM runs WHERE sandbox = ?1 AND begun <
		(SELECT begun FROM runs WHERE sandbox = ?1 ORDER BY begun DESC LIMIT 1 OFFSET ?2)`, id, MaxRuns-1)
}

// sorted returns the tags in order, each once.
func sorted(tags []string) []string {
	out := slices.Clone(tags)
	slices.Sort(out)
	return slices.Compact(out)
}
