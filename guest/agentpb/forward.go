package agentpb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
)

// The protocol of the forward port, where the host opens connections that end at a socket in the guest. The host
// sends one request, the agent one answer. After an answer of CodeOK to OpDial or OpAccept the connection carries
// the bytes of the socket, in the frames of package guest/internal/relay; after CodeOK to OpListen, announcements
// (Announcement).
//
// All numbers are big-endian. A request is
//
//	"DF", version (1 byte), op (1), network (1), zero (1), length (2), timeout in ms (4),
//	zero (4), and as many bytes of payload as length says: the address for OpDial and
//	OpListen; for OpAccept the two tokens of 8 bytes.
//
// An answer is
//
//	"DF", version (1 byte), code (1), zero (2), length (2), and as many bytes of text: the
//	agent's address of the socket after CodeOK, else what went wrong. After CodeOK to
//	OpListen it begins with the token of the listener, 8 bytes.
const (
	// ForwardPort is the vsock port on which the agent serves this protocol.
	ForwardPort = 1025

	forwardMagic   = "DF"
	forwardVersion = 1

	// Sizes in bytes.
	ForwardRequestSize = 16
	ForwardAnswerSize  = 8
	AnnouncementSize   = 10
	TokenSize          = 8
	// MaxForwardAddress bounds an address, and MaxForwardText the text of an answer.
	MaxForwardAddress = 512
	MaxForwardText    = 1024

	// EndListener is what the host writes on the connection of a listener to end it. The agent closes the connection
	// once the listener is closed. Any other byte means the same. So does the end of the connection, but then the
	// host gets no confirmation.
	EndListener = 'E'
)

// ForwardOp is what a request asks for.
type ForwardOp uint8

// Requests.
const (
	// OpDial: connect to the address.
	OpDial ForwardOp = 1
	// OpListen: listen at the address for as long as this connection lives.
	OpListen ForwardOp = 2
	// OpAccept: take over a connection that was announced.
	OpAccept ForwardOp = 3
)

// Network is the kind of socket in the guest.
type Network uint8

// Networks. A UDP datagram follows its length in the stream, 2 bytes. UDP is for OpDial only.
const (
	TCP  Network = 1
	Unix Network = 2
	UDP  Network = 3
)

// networkNames are package net's names of the networks.
var networkNames = [...]string{TCP: "tcp", Unix: "unix", UDP: "udp"}

// String returns package net's name of the network.
func (n Network) String() string {
	if int(n) < len(networkNames) && networkNames[n] != "" {
		return networkNames[n]
	}
	return fmt.Sprintf("network %d", uint8(n))
}

// ParseNetwork returns the network with that name: "tcp", "unix" or "udp".
func ParseNetwork(name string) (Network, bool) {
	for n, s := range networkNames {
		if s != "" && s == name {
			return Network(n), true
		}
	}
	return 0, false
}

// ForwardCode says how a request ended.
type ForwardCode uint8

// Codes of answers.
const (
	CodeOK          ForwardCode = 0
	CodeInvalid     ForwardCode = 1 // malformed request
	CodeRefused     ForwardCode = 2 // no listener there
	CodeUnreachable ForwardCode = 3 // no route, or no such host
	CodeTimeout     ForwardCode = 4
	CodeNotFound    ForwardCode = 5 // no such Unix socket, or the announced connection is gone
	CodeDenied      ForwardCode = 6
	CodeInUse       ForwardCode = 7 // the address is in use
	CodeLimit       ForwardCode = 8 // too many connections
	CodeFailed      ForwardCode = 9 // anything else
)

// ForwardErrors maps errors of the system to codes: the agent encodes them so, and the host decodes them so.
var ForwardErrors = []struct {
	Err  error
	Code ForwardCode
}{
	{syscall.ECONNREFUSED, CodeRefused}, {syscall.EADDRINUSE, CodeInUse}, {syscall.ETIMEDOUT, CodeTimeout},
	{fs.ErrNotExist, CodeNotFound}, {fs.ErrPermission, CodeDenied},
	{syscall.EHOSTUNREACH, CodeUnreachable}, {syscall.ENETUNREACH, CodeUnreachable}, {syscall.EADDRNOTAVAIL, CodeUnreachable},
}

// ErrForward says that bytes are not a message of the forward port.
var ErrForward = errors.New("not a message of the forward port")

// ForwardRequest is the head of a request; its payload follows.
type ForwardRequest struct {
	Op        ForwardOp
	Network   Network
	Length    int    // of the payload, in bytes
	TimeoutMs uint32 // for OpDial; 0 is the agent's default
}

// Encode writes the head.
func (r *ForwardRequest) Encode(b *[ForwardRequestSize]byte) {
	*b = [ForwardRequestSize]byte{0: forwardMagic[0], 1: forwardMagic[1], 2: forwardVersion, 3: byte(r.Op), 4: byte(r.Network)}
	binary.BigEndian.PutUint16(b[6:], uint16(r.Length))
	binary.BigEndian.PutUint32(b[8:], r.TimeoutMs)
}

// Decode reads a head and checks it. The error wraps ErrForward.
func (r *ForwardRequest) Decode(b *[ForwardRequestSize]byte) error {
	if string(b[:2]) != forwardMagic || b[2] != forwardVersion || b[5] != 0 || binary.BigEndian.Uint32(b[12:]) != 0 {
		return fmt.Errorf("%w: a request that begins with % x", ErrForward, b[:])
	}
	r.Op, r.Network = ForwardOp(b[3]), Network(b[4])
	r.Length = int(binary.BigEndian.Uint16(b[6:]))
	r.TimeoutMs = binary.BigEndian.Uint32(b[8:])
	switch r.Op {
	case OpDial, OpListen:
		if r.Length == 0 || r.Length > MaxForwardAddress {
			return fmt.Errorf("%w: an address of %d bytes, at most %d", ErrForward, r.Length, MaxForwardAddress)
		}
	case OpAccept:
		if r.Length != 2*TokenSize {
			return fmt.Errorf("%w: tokens of %d bytes", ErrForward, r.Length)
		}
	default:
		return fmt.Errorf("%w: request %d", ErrForward, r.Op)
	}
	return nil
}

// ForwardAnswer is the head of an answer; its text follows.
type ForwardAnswer struct {
	Code   ForwardCode
	Length int // of the text, in bytes
}

// Encode writes the head.
func (a *ForwardAnswer) Encode(b *[ForwardAnswerSize]byte) {
	*b = [ForwardAnswerSize]byte{0: forwardMagic[0], 1: forwardMagic[1], 2: forwardVersion, 3: byte(a.Code)}
	binary.BigEndian.PutUint16(b[6:], uint16(a.Length))
}

// Decode reads a head and checks it. The error wraps ErrForward.
func (a *ForwardAnswer) Decode(b *[ForwardAnswerSize]byte) error {
	if string(b[:2]) != forwardMagic || b[2] != forwardVersion || b[4] != 0 || b[5] != 0 {
		return fmt.Errorf("%w: an answer that begins with % x", ErrForward, b[:])
	}
	a.Code, a.Length = ForwardCode(b[3]), int(binary.BigEndian.Uint16(b[6:]))
	if a.Length > MaxForwardText {
		return fmt.Errorf("%w: an answer with %d bytes of text, at most %d", ErrForward, a.Length, MaxForwardText)
	}
	return nil
}

// Announcement is the head of what the agent sends on the connection of a listener when a client has connected: the
// token of the connection, for OpAccept, and the length of the client's address, at most MaxForwardAddress bytes,
// which follows.
type Announcement struct {
	Token  uint64
	Length int
}

// Encode writes the head.
func (a *Announcement) Encode(b *[AnnouncementSize]byte) {
	binary.BigEndian.PutUint64(b[0:], a.Token)
	binary.BigEndian.PutUint16(b[8:], uint16(a.Length))
}

// Decode reads a head and checks it. The error wraps ErrForward.
func (a *Announcement) Decode(b *[AnnouncementSize]byte) error {
	a.Token, a.Length = binary.BigEndian.Uint64(b[0:]), int(binary.BigEndian.Uint16(b[8:]))
	if a.Length > MaxForwardAddress {
		return fmt.Errorf("%w: an address of %d bytes, at most %d", ErrForward, a.Length, MaxForwardAddress)
	}
	return nil
}
