package disk

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// Errors that a caller may have to distinguish. They are wrapped with the path and the cause, so test for them
// with errors.Is.
var (
	// ErrCorrupt: a header, map or table breaks its checksum or a rule of the format.
	ErrCorrupt = errors.New("layer is corrupt")
	// ErrTruncated: a layer file is shorter than its header says.
	ErrTruncated = errors.New("layer is truncated")
	// ErrVersion: a layer was written in a format that this build does not read.
	ErrVersion = errors.New("layer has an unknown format version")
	// ErrMissingParent: a stack lacks a layer, or its layers do not belong together.
	ErrMissingParent = errors.New("layer's parent is not the one below it")
	// ErrMerging: an older version was interrupted while it merged two layers, and one of them is usable only
	// below the other.
	ErrMerging = errors.New("a merge of two layers was interrupted")
	// ErrReadOnly: the disk was opened read-only or has no writable top.
	ErrReadOnly = errors.New("disk is read-only")
	// ErrSealed: the layer on top is sealed and cannot be written; Fork a new top over it.
	ErrSealed = errors.New("top layer is sealed")
	// ErrInUse: another open disk, here or in another process, holds the layer's lock.
	ErrInUse = errors.New("layer is in use")
	// ErrNoSpace: the host's file system or quota is full. The caller may retry when there is space.
	ErrNoSpace = errors.New("no space on the host")
	// ErrIO: the host failed to read or write.
	ErrIO = errors.New("host I/O error")
	// ErrSyncFailed: a sync failed, so the disk can no longer promise a flush. Go back to the last snapshot, or
	// open the stack again, which keeps what was flushed before the failure.
	ErrSyncFailed = errors.New("an earlier flush failed")
	// ErrRange: a range is outside the disk, or its length is not positive.
	ErrRange = errors.New("range is outside of the disk")
	// ErrDamaged: a file system needs more repair than e2fsck -p does without asking.
	ErrDamaged = errors.New("the file system is damaged")
	// ErrClosed: the disk is closed.
	ErrClosed = errors.New("disk is closed")
	// ErrTooManyLayers: the stack is too deep, see MaxLayers. Squash layers.
	ErrTooManyLayers = errors.New("too many layers")
	// ErrSize: a disk size is not a positive multiple of BlockSize up to MaxSize.
	ErrSize = errors.New("bad disk size")
)

// ioError wraps an error of the host into ErrNoSpace or ErrIO, unless it is typed already, and keeps the cause.
func ioError(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNoSpace), errors.Is(err, ErrIO), errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: %w", doing, err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%s: %w (free space on the host and try again): %w", doing, ErrNoSpace, err)
	}
	return fmt.Errorf("%s: %w: %w", doing, ErrIO, err)
}
