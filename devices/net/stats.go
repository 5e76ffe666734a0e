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
	// Refused counts frames of the guest that the host's kernel did not take:
	// it found them malformed, or the interface is down.
	Refused atomic.Uint64
	// TooLong and TooShort count frames for the guest that were dropped: they
	// did not fit in the guest's buffers, or are none.
	TooLong, TooShort atomic.Uint64
	// Waits counts how often the backend took no more for a while.
	Waits atomic.Uint64
}

// Stats are the counts, which go on.
func (d *Device) Stats() *Stats { return &d.stats }
