package vsock

import "sync/atomic"

// Stats counts what a device has done since it was made.
type Stats struct {
	// Connections is how many have been established, in both directions.
	Connections uint64
	// Refused counts connections that could not be established.
	Refused uint64
	// PacketsToGuest and PacketsFromGuest count packets, BytesToGuest and
	// BytesFromGuest their payload.
	PacketsToGuest, BytesToGuest     uint64
	PacketsFromGuest, BytesFromGuest uint64
	// Violations counts packets of the guest that break the protocol: a
	// payload longer than its packet, unknown operations, more than the
	// credit. Their connection was reset.
	Violations uint64
	// Ignored counts packets of the guest with foreign addresses.
	Ignored uint64
	// DroppedResets counts resets that were not sent because too many were
	// waiting already.
	DroppedResets uint64
	// ShortBuffers counts receive buffers of the guest that cannot hold a
	// packet.
	ShortBuffers uint64
	// Open is how many host clients are connected and connections of the guest's to the host are open, and Uses
	// how many there ever were: what others do with the guest. Left out are those at whose other end this process is,
	// and clients that have said so ("CONNECT port idle").
	Open, Uses uint64
	// Buffered is how many bytes of the guest wait for host clients that do
	// not read.
	Buffered uint64
}

type counters struct {
	connections, refused             atomic.Uint64
	packetsToGuest, bytesToGuest     atomic.Uint64
	packetsFromGuest, bytesFromGuest atomic.Uint64
	violations, ignored              atomic.Uint64
	droppedResets, shortBuffers      atomic.Uint64
	open, uses                       atomic.Uint64
	buffered                         atomic.Uint64
}

// Stats returns the current counts.
func (d *Device) Stats() Stats {
	c := &d.stats
	return Stats{
		Connections:      c.connections.Load(),
		Refused:          c.refused.Load(),
		PacketsToGuest:   c.packetsToGuest.Load(),
		BytesToGuest:     c.bytesToGuest.Load(),
		PacketsFromGuest: c.packetsFromGuest.Load(),
		BytesFromGuest:   c.bytesFromGuest.Load(),
		Violations:       c.violations.Load(),
		Ignored:          c.ignored.Load(),
		DroppedResets:    c.droppedResets.Load(),
		ShortBuffers:     c.shortBuffers.Load(),
		Open:             c.open.Load(),
		Uses:             c.uses.Load(),
		Buffered:         c.buffered.Load(),
	}
}
