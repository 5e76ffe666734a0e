package vsock

import "sync/atomic"

// Stats are the counters of a device since New.
type Stats struct {
	// PacketsToGuest and PacketsFromGuest count packets.
	PacketsToGuest, PacketsFromGuest atomic.Uint64
	// Violations counts packets of the guest that break the protocol: a payload longer than its packet, unknown
	// operations, more than the credit. The device resets their connection.
	Violations atomic.Uint64
	// Ignored counts packets of the guest with foreign addresses.
	Ignored atomic.Uint64
	// ShortBuffers counts receive buffers of the guest that cannot hold a packet.
	ShortBuffers atomic.Uint64
	// Open counts the connected host clients and the guest's open connections to the host, and Uses all of them
	// since New: what others do with the guest. Both leave out connections with this process at the other end, and
	// clients that have sent "CONNECT port idle".
	Open, Uses atomic.Uint64
	// Buffered counts bytes of the guest that wait for host clients that do not read.
	Buffered atomic.Uint64
}

// Stats returns the counters, which continue to count.
func (d *Device) Stats() *Stats { return &d.stats }
