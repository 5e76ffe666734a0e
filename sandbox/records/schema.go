package records

import (
	"context"
	"database/sql"
	"fmt"
)

// applicationID marks the file as one of these: PRAGMA application_id.
const applicationID = 0x64727773 // "drws"

// migrations are what makes each version of the schema of the one before; the number of the version is PRAGMA
// user_version. One that has been released is never changed: a change is another one at the end. All times are
// nanoseconds since 1970, 0 for none; doc is the row as JSON, and the other columns are what is searched by.
// docs/FORMAT.md says the same.
var migrations = []string{
	// 1: the index.
	`CREATE TABLE sandboxes (
		id      TEXT PRIMARY KEY,
		name    TEXT NOT NULL,
		class   TEXT NOT NULL,
		owner   TEXT NOT NULL,
		status  TEXT NOT NULL,
		expires INTEGER NOT NULL,
		removed INTEGER NOT NULL,
		stamp   TEXT NOT NULL,
		doc     TEXT NOT NULL CHECK (length(doc) <= 262144)
	) STRICT, WITHOUT ROWID;
	CREATE UNIQUE INDEX sandboxes_name ON sandboxes (name) WHERE removed = 0;
	CREATE INDEX sandboxes_owner ON sandboxes (owner, name);
	CREATE INDEX sandboxes_removed ON sandboxes (removed) WHERE removed <> 0;
	CREATE TABLE tags (
		tag     TEXT NOT NULL,
		sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
		PRIMARY KEY (sandbox, tag)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX tags_tag ON tags (tag, sandbox);`,

	// 2: what sandboxes have slept in.
	`CREATE TABLE sleeps (
		sandbox  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
		snapshot TEXT NOT NULL,
		asleep   INTEGER NOT NULL,
		doc      TEXT NOT NULL CHECK (length(doc) <= 4096),
		PRIMARY KEY (sandbox, snapshot)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX sleeps_time ON sleeps (sandbox, asleep);`,

	// 3: what was run in them.
	`CREATE TABLE runs (
		sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
		id      TEXT NOT NULL,
		begun   INTEGER NOT NULL,
		open    INTEGER NOT NULL, -- 1 as long as its end may still come
		doc     TEXT NOT NULL CHECK (length(doc) <= 65536),
		PRIMARY KEY (sandbox, id)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX runs_time ON runs (sandbox, begun);`,
}

// Version is that of the schema.
var Version = len(migrations)

// migrate brings the database to the version that this package knows, each step in a transaction. Another process may
// do so at the same time: the version is looked at again when the transaction has begun.
func migrate(ctx context.Context, db *sql.DB, steps []string) error {
	for {
		done, err := migrateOnce(ctx, db, steps)
		if err != nil || done {
			return err
		}
	}
}

func migrateOnce(ctx context.Context, db *sql.DB, steps []string) (done bool, err error) {
	var version int
	if err := db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return false, err
	}
	if version == len(steps) {
		return true, nil
	}
	if version > len(steps) || version < 0 {
		return false, newer(version, len(steps))
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback() }() // nothing is left to roll back after Commit
	if err := tx.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return false, err
	}
	if version >= len(steps) || version < 0 {
		return false, nil // somebody else has done it: look again
	}
	if _, err := tx.ExecContext(ctx, steps[version]); err != nil {
		return false, fmt.Errorf("migrating the records from version %d to %d: %w", version, version+1, err)
	}
	// A pragma takes no parameters; both are numbers of ours.
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d; PRAGMA application_id = %d", version+1, applicationID)); err != nil {
		return false, fmt.Errorf("migrating the records from version %d to %d: %w", version, version+1, err)
	}
	return false, tx.Commit()
}

func newer(version, known int) error {
	return fmt.Errorf("%w: their schema has version %d, and this build knows %d: use a newer build, or move records.db away and have it made anew, without the history of removed sandboxes",
		ErrNewer, version, known)
}
