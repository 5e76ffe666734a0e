package net

import "encoding/binary"

// HeaderSize is the size of struct virtio_net_hdr with its num_buffers, in bytes
// (virtio 1.2, 5.1.6).
const HeaderSize = 12

// Offsets in the header, its flags and its kinds of segmentation.
const (
	headerFlags      = 0
	headerGSOType    = 1
	headerLen        = 2
	headerGSOSize    = 4
	headerCsumStart  = 6
	headerCsumOffset = 8
	headerNumBuffers = 10

	flagNeedsCsum = 1

	gsoNone  = 0
	gsoTCPv4 = 1
	gsoTCPv6 = 4
	gsoECN   = 0x80
)

// Sizes of frames in bytes, without the virtio header.
const (
	ethernetHeader = 14
	vlanTag        = 4
	minFrame       = ethernetHeader
	defaultMTU     = 1500
	// maxPayload is the largest segment that TCP hands down, in one IP packet.
	maxPayload = 65535
	maxFrame   = maxPayload + ethernetHeader + vlanTag
)

// valid reports whether a driver with the given features may send this header with a frame of n bytes (virtio 1.2,
// 5.1.6.2).
func valid(p *[HeaderSize]byte, n int, features uint64) bool {
	if n < minFrame || n > maxFrame {
		return false
	}
	le := binary.LittleEndian
	needsCsum := p[headerFlags]&flagNeedsCsum != 0
	if needsCsum {
		start, offset := int(le.Uint16(p[headerCsumStart:])), int(le.Uint16(p[headerCsumOffset:]))
		if features&featureCsum == 0 || start+offset+2 > n {
			return false
		}
	}
	gso := p[headerGSOType]
	var want uint64
	switch gso &^ gsoECN {
	case gsoNone:
		return gso == gsoNone
	case gsoTCPv4:
		want = featureHostTSO4
	case gsoTCPv6:
		want = featureHostTSO6
	default:
		return false
	}
	if gso&gsoECN != 0 {
		want |= featureHostECN
	}
	return features&want == want && needsCsum && le.Uint16(p[headerGSOSize:]) > 0 && int(le.Uint16(p[headerLen:])) <= n
}
