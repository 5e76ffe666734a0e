package agentpb

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The registers of the handover device, through which the agent talks to the VMM. Package devices/handover, the
// host's side, has the same values.
const (
	HandoverPort = 0x620

	HandoverStatus  = 0
	HandoverData    = 1
	HandoverCommand = 2

	StatusWait    = 1
	StatusGoOn    = 2
	StatusResumed = 3

	CommandStandBy = 1
	CommandDone    = 2
	CommandFailed  = 3
	CommandAsk     = 4
)

// Sizes in bytes.
const (
	// HandoverEntropy is how many random bytes a message carries.
	HandoverEntropy = 64
	// HandoverSize is the size of an encoded message.
	HandoverSize = handoverHeader + HandoverEntropy + MaxHostname

	handoverHeader = 16
)

// ErrHandover says that bytes are not a message.
var ErrHandover = errors.New("not a handover message")

// Handover is the message that brings a restored guest up to date: a ResumeRequest that needs no RPC.
type Handover struct {
	WallNanos int64 // Unix time
	Entropy   [HandoverEntropy]byte
	// NewIdentity is for a clone: it gets a new boot id and machine id, and Hostname if that is not empty.
	NewIdentity bool
	Hostname    string
}

// Layout, little-endian: version, flags, length of the host name, 5 bytes of zeros, wall
// clock (8 bytes), entropy, host name and zeros up to HandoverSize.
const (
	handoverVersion     = 1
	handoverNewIdentity = 1
)

// Encode writes the message. It fails if the host name is too long.
func (m *Handover) Encode(b *[HandoverSize]byte) error {
	if len(m.Hostname) > MaxHostname {
		return fmt.Errorf("%w: a host name of %d bytes, at most %d", ErrHandover, len(m.Hostname), MaxHostname)
	}
	*b = [HandoverSize]byte{0: handoverVersion, 2: byte(len(m.Hostname))}
	if m.NewIdentity {
		b[1] = handoverNewIdentity
	}
	binary.LittleEndian.PutUint64(b[8:], uint64(m.WallNanos))
	copy(b[handoverHeader:], m.Entropy[:])
	copy(b[handoverHeader+HandoverEntropy:], m.Hostname)
	return nil
}

// Decode reads a message.
func (m *Handover) Decode(b *[HandoverSize]byte) error {
	if b[0] != handoverVersion || b[1]&^handoverNewIdentity != 0 || b[2] > MaxHostname {
		return fmt.Errorf("%w: it begins with % x", ErrHandover, b[:handoverHeader])
	}
	m.NewIdentity = b[1]&handoverNewIdentity != 0
	m.WallNanos = int64(binary.LittleEndian.Uint64(b[8:]))
	copy(m.Entropy[:], b[handoverHeader:])
	m.Hostname = ""
	if n := int(b[2]); n > 0 {
		m.Hostname = string(b[handoverHeader+HandoverEntropy:][:n])
	}
	return nil
}
