package net

import "sync/atomic"

// Stats counts what a device has done since it was made.
type Stats struct {
	// FramesToGuest and FramesFromGuest count frames that were passed on,
	// BytesToGuest and BytesFromGuest their bytes without the virtio header.
	FramesToGuest, BytesToGuest     uint64
	FramesFromGuest, BytesFromGuest uint64
	// Malformed counts frames of the guest that are too short or too long, or
	// whose header makes no sense.
	Malformed uint64
	// LinkDown counts frames of the guest that were dropped because the link
	// was down.
	LinkDown uint64
	// Refused counts frames of the guest that the host's kernel did not take:
	// it found them malformed, or the interface is down.
	Refused uint64
	// TooLong and TooShort count frames for the guest that were dropped: they
	// did not fit in the guest's buffers, or are none.
	TooLong, TooShort uint64
	// Waits counts how often the backend took no more for a while.
	Waits uint64
	// ShortBuffers counts receive buffers that cannot take a byte.
	ShortBuffers uint64
}

type counters struct {
	framesToGuest, bytesToGuest     atomic.Uint64
	framesFromGuest, bytesFromGuest atomic.Uint64
	malformed, linkDown, refused    atomic.Uint64
	tooLong, tooShort               atomic.Uint64
	waits, shortBuffers             atomic.Uint64
}

// Stats returns the current counts.
func (d *Device) Stats() Stats {
	c := &d.stats
	return Stats{
		FramesToGuest:   c.framesToGuest.Load(),
		BytesToGuest:    c.bytesToGuest.Load(),
		FramesFromGuest: c.framesFromGuest.Load(),
		BytesFromGuest:  c.bytesFromGuest.Load(),
		Malformed:       c.malformed.Load(),
		LinkDown:        c.linkDown.Load(),
		Refused:         c.refused.Load(),
		TooLong:         c.tooLong.Load(),
		TooShort:        c.tooShort.Load(),
		Waits:           c.waits.Load(),
		ShortBuffers:    c.shortBuffers.Load(),
	}
}
