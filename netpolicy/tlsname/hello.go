package tlsname

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"unicode"

	"golang.org/x/crypto/cryptobyte"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Errors of a ClientHello, for errors.Is. ErrShort means that Hello needs more bytes.
var (
	ErrShort  = errors.New("the ClientHello is not complete")
	ErrHello  = errors.New("no ClientHello of TLS")
	ErrNoName = errors.New("the ClientHello has no server name")
	ErrECH    = errors.New("the ClientHello is encrypted, or pretends to be")
)

// MaxHello is the most bytes of a ClientHello, with its records' headers. Browsers' have less than 2 KiB.
const MaxHello = 16 << 10

// Constants of TLS.
const (
	recordHeader    = 5       // RFC 8446, 5.1
	maxRecord       = 1 << 14 // the same
	handshakeHeader = 4       // RFC 8446, 4
	randomBytes     = 32

	typeChangeCipherSpec = 20
	typeAlert            = 21
	typeHandshake        = 22
	typeApplicationData  = 23

	clientHello = 1
	serverHello = 2

	extServerName = 0      // RFC 6066, 3
	extESNI       = 0xffce // draft-ietf-tls-esni before 08
	extECH        = 0xfe0d // RFC 9849; GREASE of it looks the same
	nameTypeHost  = 0
)

// Hello reads the ClientHello at the beginning of what a client sends. It returns the server name, in lower case,
// and how many bytes of b the hello's records have. It ignores what follows them. The hello may span any number of
// records.
//
// If more is needed, it fails with ErrShort, and n is how many bytes of b the next call needs at least, at most
// MaxHello. It fails with ErrNoName without a server name, and with ErrECH for an Encrypted ClientHello or what
// looks like one. Anything else that violates RFC 8446, 4.1.2, or RFC 6066, 3, is ErrHello: SSL 2, an extension
// that comes twice, no or more than one name in the list, a name that is an address or not of DNS, bytes after the
// hello in its last record.
func Hello(b []byte) (name string, n int, err error) {
	msg, n, err := handshake(b)
	if err != nil {
		return "", n, err
	}
	name, err = serverName(msg)
	return name, n, err
}

// handshake assembles the first message of the handshake from its records. With ErrShort, n is how many bytes it
// needs at least.
func handshake(b []byte) (msg []byte, n int, err error) {
	for {
		rest := b[n:]
		if len(rest) > 0 && rest[0] != typeHandshake || n+recordHeader > MaxHello {
			return nil, 0, ErrHello
		}
		if len(rest) < recordHeader {
			return nil, n + recordHeader, ErrShort
		}
		version, size := binary.BigEndian.Uint16(rest[1:]), int(binary.BigEndian.Uint16(rest[3:]))
		if version < 0x0301 || version > 0x0303 || size == 0 || size > maxRecord || n+recordHeader+size > MaxHello {
			return nil, 0, ErrHello
		}
		have := rest[recordHeader:min(len(rest), recordHeader+size)]
		msg = append(msg, have...)
		if len(msg) > 0 && msg[0] != clientHello {
			return nil, 0, ErrHello
		}
		if len(have) < size {
			return nil, n + recordHeader + size, ErrShort
		}
		n += recordHeader + size
		if len(msg) < handshakeHeader {
			continue
		}
		want := handshakeHeader + int(binary.BigEndian.Uint32(msg)&0xffffff)
		switch {
		case want > MaxHello || len(msg) > want:
			return nil, 0, ErrHello
		case len(msg) == want:
			return msg[handshakeHeader:], n, nil
		}
	}
}

func serverName(msg []byte) (string, error) {
	s := cryptobyte.String(msg)
	var version uint16
	var session, suites, compression, exts cryptobyte.String
	if !s.ReadUint16(&version) || !s.Skip(randomBytes) || !s.ReadUint8LengthPrefixed(&session) ||
		!s.ReadUint16LengthPrefixed(&suites) || !s.ReadUint8LengthPrefixed(&compression) ||
		version < 0x0301 || version > 0x0303 || len(session) > 32 || suites.Empty() || len(suites)%2 != 0 || compression.Empty() {
		return "", ErrHello
	}
	if s.Empty() {
		return "", ErrNoName // TLS 1.2 and before may have no extensions
	}
	if !s.ReadUint16LengthPrefixed(&exts) || !s.Empty() {
		return "", ErrHello
	}
	seen := map[uint16]bool{}
	name, named, hidden := "", false, false
	for !exts.Empty() {
		var typ uint16
		var body, list, host cryptobyte.String
		if !exts.ReadUint16(&typ) || !exts.ReadUint16LengthPrefixed(&body) || seen[typ] {
			return "", ErrHello
		}
		seen[typ] = true
		switch typ {
		case extECH, extESNI:
			hidden = true
		case extServerName:
			var kind uint8
			if !body.ReadUint16LengthPrefixed(&list) || !body.Empty() ||
				!list.ReadUint8(&kind) || kind != nameTypeHost || !list.ReadUint16LengthPrefixed(&host) || !list.Empty() {
				return "", ErrHello
			}
			if name, named = normal(string(host)); !named {
				return "", ErrHello
			}
		}
	}
	switch {
	case hidden:
		return "", ErrECH
	case !named:
		return "", ErrNoName
	}
	return name, nil
}

// normal returns a host name in lower case, if it is a DNS name (RFC 1035, 2.3.4; RFC 6066, 3: ASCII, without a
// final dot) and not an address. Some resolvers take a name whose last label is all digits for an address.
func normal(host string) (string, bool) {
	// Lower case is ambiguous beyond ASCII: U+212A (Kelvin sign) also becomes k.
	if strings.ContainsFunc(host, func(c rune) bool { return c > unicode.MaxASCII }) {
		return "", false
	}
	n := strings.ToLower(host)
	last := n[strings.LastIndexByte(n, '.')+1:]
	if _, err := netip.ParseAddr(n); err == nil || !netpolicy.ValidName(n) || strings.Trim(last, "0123456789") == "" {
		return "", false
	}
	return n, true
}

// retryRandom is the random of a ServerHello that asks for another ClientHello (RFC 8446, 4.1.3).
var retryRandom = [randomBytes]byte{
	0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
	0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
}

// answerHead is how many bytes of a server's answer show whether it asks for another hello: the headers of a
// record and a message, the version, and the random.
const answerHead = recordHeader + handshakeHeader + 2 + randomBytes

// asksAgain reports whether a server's answer asks for another hello, and whether the bytes so far are enough to know.
func asksAgain(b []byte) (again, known bool) {
	if len(b) > 0 && b[0] != typeHandshake || len(b) > recordHeader && b[recordHeader] != serverHello {
		return false, true
	}
	if len(b) < answerHead {
		return false, false
	}
	return [randomBytes]byte(b[answerHead-randomBytes:answerHead]) == retryRandom, true
}
