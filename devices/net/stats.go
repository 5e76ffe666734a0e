package net

import "sync/atomic"

// Stats counts what a device has done since it was made.
type Stats struct {
	// FramesToGuest and FramesFromGuest count frames that were passed on.
	FramesToGuest, FramesFromGuest atomic.Uint64
	// Malformed counts frames of the guest that are too short or too long, or
	// whose header makes no sense.
	Malformed atomic.Uint64
	// LinkDown counts frames of the guest that were dropped because the link
	// was down.
	LinkDown atomic.Uint64
	// Refused counts frames of the guest that the host's kernel refused: they were malformed, or the interface was
	// down.
	Refused atomic.Uint64
	// TooLong and TooShort count dropped frames for the guest: they did not fit in its buffers, or were too short
	// to be frames.
	TooLong, TooShort atomic.Uint64
	// Waits counts how often the backend was full.
	Waits atomic.Uint64
}

// Stats returns the live counters.
func (d *Device) Stats() *Stats { return &d.stats }
