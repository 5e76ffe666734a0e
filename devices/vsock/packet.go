package vsock

import "encoding/binary"

// HostCID is the context ID of the host (virtio 1.2, 5.10.4).
const HostCID = 2

// headerSize is the size of struct virtio_vsock_hdr in bytes (virtio 1.2, 5.10.6).
const headerSize = 44

// typeStream is the only socket type that the device supports.
const typeStream = 1

// Operations of packets (virtio 1.2, 5.10.6).
const (
	opRequest       = 1
	opResponse      = 2
	opReset         = 3
	opShutdown      = 4
	opData          = 5
	opCreditUpdate  = 6
	opCreditRequest = 7
)

// Flags of opShutdown: the sender of the packet will not receive, or not send, any more (virtio 1.2, 5.10.6.5).
const (
	shutdownReceive = 1
	shutdownSend    = 2
	shutdownBoth    = shutdownReceive | shutdownSend
)

// eventTransportReset is VIRTIO_VSOCK_EVENT_TRANSPORT_RESET (virtio 1.2,
// 5.10.6.7), and eventSize the size of struct virtio_vsock_event.
const (
	eventTransportReset = 0
	eventSize           = 4
)

// header is struct virtio_vsock_hdr.
type header struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	len              uint32
	typ, op          uint16
	flags            uint32
	bufAlloc         uint32
	fwdCnt           uint32
}

func (h *header) decode(p *[headerSize]byte) {
	le := binary.LittleEndian
	h.srcCID = le.Uint64(p[0:])
	h.dstCID = le.Uint64(p[8:])
	h.srcPort = le.Uint32(p[16:])
	h.dstPort = le.Uint32(p[20:])
	h.len = le.Uint32(p[24:])
	h.typ = le.Uint16(p[28:])
	h.op = le.Uint16(p[30:])
	h.flags = le.Uint32(p[32:])
	h.bufAlloc = le.Uint32(p[36:])
	h.fwdCnt = le.Uint32(p[40:])
}

func (h *header) encode(p *[headerSize]byte) {
	le := binary.LittleEndian
	le.PutUint64(p[0:], h.srcCID)
	le.PutUint64(p[8:], h.dstCID)
	le.PutUint32(p[16:], h.srcPort)
	le.PutUint32(p[20:], h.dstPort)
	le.PutUint32(p[24:], h.len)
	le.PutUint16(p[28:], h.typ)
	le.PutUint16(p[30:], h.op)
	le.PutUint32(p[32:], h.flags)
	le.PutUint32(p[36:], h.bufAlloc)
	le.PutUint32(p[40:], h.fwdCnt)
}
