package rpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// A packet is a header, the method's name in the first packet of a call or post, and a part of the body:
//
//	0   kind
//	1   length of the method's name
//	2   number of files, 16 bits
//	4   length of the whole message's body, 32 bits
//	8   id, 64 bits
//
// All numbers are little-endian. Each packet but the last of a message is full.
const (
	packetSize = 64 << 10
	headerSize = 16
	maxMethod  = 64
)

type kind uint8

const (
	kindCall   kind = 1 + iota // is answered by kindReply or kindError with the same id
	kindPost                   // the same, but the answer only says that it has been served
	kindReply                  // body: the reply
	kindError                  // body: wireError
	kindCancel                 // nobody waits any more for the answer to this id
	kindRest                   // the next part of the body of the message before
)

// ErrProtocol is in the error of a connection whose peer broke a rule.
var ErrProtocol = errors.New("the peer broke the protocol")

func broken(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

type message struct {
	kind   kind
	id     uint64
	method string
	body   []byte
	files  []*os.File

	// Of a message to send.
	begun    bool
	sent     int     // bytes of the body
	answered *served // what the message answers, until its last packet is about to be sent
}

func (m *message) closeFiles() {
	closeAll(m.files)
	m.files = nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// header appends the header of the next packet, and the name if it is the first.
func (m *message) header(b []byte) []byte {
	k, method, files := m.kind, m.method, len(m.files)
	if m.begun {
		k, method, files = kindRest, "", 0
	}
	b = append(b, byte(k), byte(len(method)))
	b = binary.LittleEndian.AppendUint16(b, uint16(files))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.body)))
	b = binary.LittleEndian.AppendUint64(b, m.id)
	return append(b, method...)
}

// An assembler makes messages of the packets of a peer that may be hostile. It holds at most one that is incomplete.
type assembler struct {
	maxMessage, maxFiles int

	begun *message
	total int // length of the begun message's body
}

// add returns the message that the packet completes, or nil if more packets follow. It owns the descriptors.
func (a *assembler) add(p []byte, fds []int) (m *message, err error) {
	defer func() {
		if err != nil {
			closeFDs(fds)
		}
	}()
	if len(p) < headerSize {
		return nil, broken("a packet of %d bytes has no header", len(p))
	}
	k, nameLen := kind(p[0]), int(p[1])
	files, total := int(binary.LittleEndian.Uint16(p[2:])), uint64(binary.LittleEndian.Uint32(p[4:]))
	id, rest := binary.LittleEndian.Uint64(p[8:]), p[headerSize:]
	switch {
	case files != len(fds):
		return nil, broken("a packet announces %d files and has %d", files, len(fds))
	case files > a.maxFiles:
		return nil, broken("a message has %d files, and the limit is %d", files, a.maxFiles)
	case total > uint64(a.maxMessage):
		return nil, broken("a message has %d bytes, and the limit is %d", total, a.maxMessage)
	case nameLen > len(rest) || nameLen > maxMethod:
		return nil, broken("the name of a method has %d bytes", nameLen)
	}
	method, part := rest[:nameLen], rest[nameLen:]

	if m = a.begun; m != nil {
		if k != kindRest || id != m.id || nameLen != 0 || files != 0 || int(total) != a.total {
			return nil, broken("another message begins inside of one")
		}
	} else {
		if err := checkFirst(k, method, files, int(total)); err != nil {
			return nil, err
		}
		m = &message{kind: k, id: id, method: string(method)}
		a.total = int(total)
	}
	if want := min(a.total-len(m.body), packetSize-headerSize-nameLen); len(part) != want {
		return nil, broken("a packet has %d bytes of a body, and should have %d", len(part), want)
	}
	if m != a.begun {
		m.body = make([]byte, 0, a.total)
		for _, fd := range fds {
			m.files = append(m.files, os.NewFile(uintptr(fd), "file of "+m.method))
		}
	}
	m.body = append(m.body, part...)
	if a.begun = m; len(m.body) < a.total {
		return nil, nil
	}
	a.begun = nil
	return m, nil
}

func checkFirst(k kind, method []byte, files, total int) error {
	switch k {
	case kindCall, kindPost:
		if !validMethod(string(method)) {
			return broken("%q is no name of a method", method)
		}
		if k == kindPost && files != 0 {
			return broken("a post has files")
		}
		return nil
	case kindReply, kindError, kindCancel:
		if len(method) != 0 || k != kindReply && files != 0 || k == kindCancel && total != 0 {
			return broken("a message of kind %d has what it must not have", k)
		}
		return nil
	}
	return broken("a message of kind %d begins", k)
}

// drop forgets an incomplete message.
func (a *assembler) drop() {
	if a.begun != nil {
		a.begun.closeFiles()
		a.begun = nil
	}
}

func validMethod(name string) bool {
	for _, r := range name {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
		case r == '.', r == '_', r == '-', r == '/':
		default:
			return false
		}
	}
	return 0 < len(name) && len(name) <= maxMethod
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
