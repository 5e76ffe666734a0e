package forward

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// ErrSpec says that the text of a forward is malformed.
var ErrSpec = errors.New("not a forward: use [BIND:]PORT:[HOST:]PORT, with unix:PATH in place of either side, or udp: before it")

// Address is the address of a socket. Network is "tcp", "unix" or "udp".
type Address struct{ Network, Address string }

// String returns the address in the form that Parse reads.
func (a Address) String() string {
	switch a.Network {
	case "unix":
		return "unix:" + a.Address
	case "udp":
		return "udp:" + a.Address
	}
	return a.Address
}

// Spec is a forward: where to accept connections, and where to carry them.
type Spec struct{ Listen, Dial Address }

// String returns both sides in full.
func (s Spec) String() string { return s.Listen.String() + " -> " + s.Dial.String() }

// loopback is the default host of both sides.
const loopback = "127.0.0.1"

// maxUnixPath is the kernel's limit for the path of a Unix socket, in bytes: unix(7).
const maxUnixPath = 107

// Parse reads "[BIND:]PORT:[HOST:]PORT". Either side may be "unix:PATH", with a path that is absolute and contains
// no colon. An IPv6 address must be in brackets. The default for the bind address and the host is 127.0.0.1. If
// there are three parts, a number as the first is a port. Only the listening side may have port 0. With "udp:" in
// front, both sides are UDP. The error wraps ErrSpec.
func Parse(s string) (Spec, error) {
	inner, ok := strings.CutPrefix(s, "udp:")
	if !ok {
		return parse(s)
	}
	spec, err := parse(inner)
	if err != nil {
		return Spec{}, err
	}
	if spec.Listen.Network != "tcp" || spec.Dial.Network != "tcp" {
		return Spec{}, fmt.Errorf("%q: UDP has no Unix sockets: %w", s, ErrSpec)
	}
	spec.Listen.Network, spec.Dial.Network = "udp", "udp"
	return spec, nil
}

// hostPart is a name, an IPv4 address, or an IPv6 address in brackets.
const hostPart = `(\[[^\]]*\]|[^:\[\]]+)`

// form is what parse reads: the path, or the host and the port of either side.
var form = lazyregexp.New(`^(?:unix:([^:]*)|(?:` + hostPart + `:)??(\d+)):(?:unix:([^:]*)|(?:` + hostPart + `:)?(\d+))$`)

func parse(s string) (spec Spec, err error) {
	m := form.FindStringSubmatch(s)
	if m == nil {
		return Spec{}, fmt.Errorf("%q: %w", s, ErrSpec)
	}
	if spec.Listen, err = address(m[1], m[2], m[3], 0); err == nil {
		spec.Dial, err = address(m[4], m[5], m[6], 1)
	}
	if err != nil {
		return Spec{}, fmt.Errorf("%q: %w: %w", s, err, ErrSpec)
	}
	return spec, nil
}

// address makes an Address of a path, if port is empty, else of a host and a port of at least the given number.
func address(path, host, port string, least uint64) (Address, error) {
	if port == "" {
		if !strings.HasPrefix(path, "/") || len(path) > maxUnixPath || strings.ContainsRune(path, 0) {
			return Address{}, fmt.Errorf("the path of a Unix socket is absolute and has at most %d bytes", maxUnixPath)
		}
		return Address{"unix", path}, nil
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n < least {
		return Address{}, fmt.Errorf("port %q is not one of %d to 65535", port, least)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(inner, "]")
		if net.ParseIP(host) == nil {
			return Address{}, errors.New("brackets are for an IPv6 address")
		}
	}
	if host == "" {
		host = loopback
	}
	if strings.ContainsAny(host, " \t\r\n\x00/") {
		return Address{}, fmt.Errorf("%q is no host", host)
	}
	a := Address{"tcp", net.JoinHostPort(host, strconv.FormatUint(n, 10))}
	if len(a.Address) > agentpb.MaxForwardAddress {
		return Address{}, errors.New("an address is too long")
	}
	return a, nil
}
