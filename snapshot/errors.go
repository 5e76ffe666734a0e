package snapshot

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"
)

// Errors of snapshots. Test for them with errors.Is. The message says which file, where in it, and what to do.
var (
	// ErrNotFound: there is no snapshot of that name.
	ErrNotFound = errors.New("no such snapshot")
	// ErrIncomplete: files are missing or shorter than the manifest says.
	ErrIncomplete = errors.New("snapshot is incomplete")
	// ErrCorrupt: bytes are not what was written. The error is always a *CorruptError.
	ErrCorrupt = errors.New("snapshot is corrupt")
	// ErrVersion: the snapshot has a format that this version does not read.
	ErrVersion = errors.New("snapshot has another format version")
	// ErrForeign: it is not a snapshot, or its machine cannot run on this host.
	ErrForeign = errors.New("snapshot is foreign to this host")
	// ErrExists: a snapshot or another file already has that name.
	ErrExists = errors.New("snapshot exists already")
	// ErrNoSpace: the file system is full (or a quota is used up).
	ErrNoSpace = errors.New("not enough disk space for the snapshot")
	// ErrBase: a delta cannot be made on that base.
	ErrBase = errors.New("unusable base for a delta")
	// ErrSpec: the caller asked for something that a snapshot cannot hold.
	ErrSpec = errors.New("unusable snapshot description")
)

// CorruptError says which bytes cannot be trusted. It matches ErrCorrupt.
type CorruptError struct {
	// File is the file's name inside the snapshot directory.
	File string
	// Offset is the position of the damaged piece in that file, in bytes.
	Offset int64
	// What names the damaged piece and says what is wrong with it.
	What string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%s at byte %d: %s: %v: restore it from a copy or use another snapshot",
		e.File, e.Offset, e.What, ErrCorrupt)
}

// Is makes errors.Is(err, ErrCorrupt) true.
func (e *CorruptError) Is(target error) bool { return target == ErrCorrupt }

func corrupt(file string, off int64, format string, args ...any) error {
	return &CorruptError{File: file, Offset: off, What: fmt.Sprintf(format, args...)}
}

// readError wraps an error from reading n bytes at off of a snapshot file. A file that ends early gets
// ErrIncomplete; other errors keep their own type.
func readError(file string, off int64, n int, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("reading %d bytes of %s at byte %d: the file ends there: %w", n, file, off, ErrIncomplete)
	}
	return fmt.Errorf("reading %d bytes of %s at byte %d: %w", n, file, off, err)
}

// writeError wraps an error from creating a snapshot and adds ErrNoSpace or ErrExists where it applies.
func writeError(doing string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%s: %w: %w: free some, nothing has been changed", doing, ErrNoSpace, err)
	case errors.Is(err, fs.ErrExist), errors.Is(err, unix.ENOTEMPTY):
		return fmt.Errorf("%s: %w: %w: choose another name or remove it first", doing, ErrExists, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
