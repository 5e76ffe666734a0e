package records

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Names of the files in the directory of a store. SQLite adds -wal and -shm to the first.
const (
	fileName = "records.db"
	lockName = "records.lock"
	// damagedInfix stands between the name and the time of a database that was put aside.
	damagedInfix = ".damaged-"
)

const (
	// busyTime is how long is waited for another process that writes.
	busyTime = 5 * time.Second
	// asideTime is how long is waited for others to close a damaged database.
	asideTime = 2 * time.Second
	// pollTime is between two tries to have the database write ahead.
	pollTime = 5 * time.Millisecond
	// maxConns are the connections of one DB.
	maxConns = 4
)

// DB is an open database. Its methods may be called from any goroutine, and by any number of processes at once.
type DB struct {
	sql  *sql.DB
	lock *os.File
	// Moved is not nil if Open has found a damaged database and put it aside.
	Moved *Moved
}

// Moved says what has become of a damaged database.
type Moved struct {
	To    string // its path now
	Cause error
}

// Options of Open.
type Options struct {
	// Check has the whole database checked, which takes as long as reading it.
	Check bool

	// steps are the migrations, and aside how long is waited for others to close a damaged database; for tests.
	steps []string
	aside time.Duration
}

// Open opens or makes the database of a store's directory. A damaged one is put aside, which DB.Moved tells: the new
// one is empty and has to be filled. The errors are ErrNewer, ErrDamaged if it could not be put aside, the context's
// and those of files.
func Open(ctx context.Context, dir string, o Options) (*DB, error) {
	if o.steps == nil {
		o.steps = migrations
	}
	if o.aside == 0 {
		o.aside = asideTime
	}
	path := filepath.Join(dir, fileName)
	d, err := open(ctx, dir, o)
	if !damaged(err) {
		return d, wrapOpen(path, err)
	}
	moved, merr := putAside(ctx, dir, o)
	if merr != nil {
		return nil, fmt.Errorf("opening the records %s: %w: %w: %w: end what uses them, or move the file away", path, ErrDamaged, err, merr)
	}
	if d, err = open(ctx, dir, o); err != nil {
		return nil, wrapOpen(path, err)
	}
	d.Moved = moved
	return d, nil
}

func wrapOpen(path string, err error) error {
	if err == nil || errors.Is(err, ErrNewer) {
		return err
	}
	return fmt.Errorf("opening the records %s: %w", path, err)
}

func open(ctx context.Context, dir string, o Options) (d *DB, err error) {
	lock, err := lockFile(ctx, dir, osfile.Shared, busyTime)
	if err != nil {
		return nil, err
	}
	d = &DB{lock: lock}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	path := filepath.Join(dir, fileName)
	// For root alone, as all of a store; SQLite gives its other files the same mode.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return d, err
	}
	if err := f.Close(); err != nil {
		return d, err
	}
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {
		fmt.Sprintf("busy_timeout(%d)", busyTime.Milliseconds()),
		"synchronous(FULL)", "foreign_keys(1)", "secure_delete(1)", "trusted_schema(0)", "cell_size_check(1)", "temp_store(MEMORY)",
	}}
	u := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	if d.sql, err = sql.Open("sqlite", u.String()); err != nil {
		return d, err
	}
	d.sql.SetMaxOpenConns(maxConns)
	if err := useWAL(ctx, d.sql); err != nil {
		return d, err
	}
	if err := migrate(ctx, d.sql, o.steps); err != nil {
		return d, err
	}
	if o.Check {
		err = d.Check(ctx)
	}
	return d, err
}

// useWAL has the database write ahead. Two processes that find a new one may be in each other's way, in which no busy
// handler helps: https://www.sqlite.org/wal.html, "Sometimes Queries Return SQLITE_BUSY In WAL Mode".
func useWAL(ctx context.Context, db *sql.DB) error {
	for deadline := time.Now().Add(busyTime); ; {
		var mode string
		err := db.QueryRowContext(ctx, "PRAGMA journal_mode").Scan(&mode)
		if err == nil && mode != "wal" {
			err = db.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode)
		}
		if err == nil && mode != "wal" {
			return fmt.Errorf("the file system cannot have a database that is written ahead: its journal is %q", mode)
		}
		if code(err) != sqlite3.SQLITE_BUSY || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollTime):
		}
	}
}

// errOpen is how waiting for a lock ends.
var errOpen = fmt.Errorf("another process has them open: %w", osfile.ErrLocked)

// lockFile takes the lock that each open DB shares, and that is held alone to put a database aside.
func lockFile(ctx context.Context, dir string, mode osfile.LockMode, patience time.Duration) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errOpen)
	defer cancel()
	return osfile.OpenLocked(ctx, filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600, mode)
}

// putAside moves a damaged database away, when nobody has it open. If somebody else has done so by then, it does
// nothing.
func putAside(ctx context.Context, dir string, o Options) (*Moved, error) {
	lock, err := lockFile(ctx, dir, osfile.Exclusive, o.aside)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	path := filepath.Join(dir, fileName)
	cause := stillDamaged(ctx, path, o)
	if !damaged(cause) {
		return nil, cause
	}
	to := path + damagedInfix + time.Now().UTC().Format("20060102T150405.000000000Z")
	// The log first: without it the file is at most older than it was, and a log without its file is of no use.
	for _, suffix := range []string{"-wal", "-shm", ""} {
		if err := os.Rename(path+suffix, to+suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return &Moved{To: to, Cause: cause}, osfile.SyncDir(dir)
}

// stillDamaged looks at a database that nobody else has open.
func stillDamaged(ctx context.Context, path string, o Options) error {
	u := url.URL{Scheme: "file", Path: path}
	db, err := sql.Open("sqlite", u.String())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := migrate(ctx, db, o.steps); err != nil {
		return err
	}
	return check(ctx, db)
}

// Close closes the database.
func (d *DB) Close() error {
	var err error
	if d.sql != nil {
		err = d.sql.Close()
	}
	return errors.Join(err, d.lock.Close())
}

// Check reads all of the database: ErrDamaged says what is wrong with it. Closing and opening it with Options.Check
// puts it aside then.
func (d *DB) Check(ctx context.Context) error { return check(ctx, d.sql) }

func check(ctx context.Context, db *sql.DB) error {
	var says string
	if err := db.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&says); err != nil {
		return err
	}
	if says != "ok" {
		return fmt.Errorf("%w: %s", ErrDamaged, cut(says, maxText))
	}
	return nil
}

// code is SQLite's primary result code of an error, 0 for what is none of its own: https://www.sqlite.org/rescode.html.
func code(err error) int {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return 0
	}
	return e.Code() & 0xff
}

// damaged says that an error means a file that is no database, or not whole.
func damaged(err error) bool {
	switch code(err) {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return true
	}
	return errors.Is(err, ErrDamaged)
}

// Damaged says that an error of a DB means that it is damaged: close it, and open it again with Options.Check.
func Damaged(err error) bool { return damaged(err) }
