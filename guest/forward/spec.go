package forward

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ErrSpec says that a forward is not written as it should be.
var ErrSpec = errors.New("not a forward: use [BIND:]PORT:[HOST:]PORT, with unix:PATH in place of either side, or udp: before it")

// Address is a socket: Network is "tcp", "unix" or "udp".
type Address struct{ Network, Address string }

// String is how Parse would read it.
func (a Address) String() string {
	switch a.Network {
	case "unix":
		return "unix:" + a.Address
	case "udp":
		return "udp:" + a.Address
	}
	return a.Address
}

// Spec is a forward: where connections are accepted, and where they go.
type Spec struct{ Listen, Dial Address }

// String says it with both sides in full.
func (s Spec) String() string { return s.Listen.String() + " -> " + s.Dial.String() }

// loopback is where both sides are unless another address is named.
const loopback = "127.0.0.1"

// maxUnixPath is the kernel's limit for the path of a Unix socket, in bytes: unix(7).
const maxUnixPath = 107

// Parse reads "[BIND:]PORT:[HOST:]PORT". Either side may be "unix:PATH", with a path that
// is absolute and contains no colon; a host that is an IPv6 address stands in brackets.
// Without a bind address or a host, 127.0.0.1 is meant. Of three parts, the first is a port
// if it is a number. Port 0 is for the listening side only. "udp:" before all of it makes both
// sides UDP. The error wraps ErrSpec.
func Parse(s string) (Spec, error) {
	inner, ok := strings.CutPrefix(s, "udp:")
	if !ok {
		return parse(s)
	}
	spec, err := parse(inner)
	if err == nil && (spec.Listen.Network != "tcp" || spec.Dial.Network != "tcp") {
		return Spec{}, fmt.Errorf("%q: UDP has no Unix sockets: %w", s, ErrSpec)
	}
	spec.Listen.Network, spec.Dial.Network = "udp", "udp"
	if err != nil {
		spec = Spec{}
	}
	return spec, err
}

func parse(s string) (Spec, error) {
	fail := func(why string) (Spec, error) { return Spec{}, fmt.Errorf("%q: %s: %w", s, why, ErrSpec) }
	parts, err := split(s)
	if err != nil {
		return fail(err.Error())
	}
	var spec Spec
	// One side is taken from the front, and what remains is the other.
	rest, ok := cutUnix(parts, &spec.Listen)
	if !ok {
		n := len(parts)
		tail := 1 // parts of the other side
		if n >= 2 && parts[n-2] == "unix" {
			tail = 2
		} else if n == 4 || n == 3 && isNumber(parts[0]) {
			tail = 2
		}
		if n-tail < 1 || n-tail > 2 {
			return fail("too few or too many parts")
		}
		if spec.Listen, err = tcp(parts[:n-tail], 0); err != nil {
			return fail(err.Error())
		}
		rest = parts[n-tail:]
	}
	if end, ok := cutUnix(rest, &spec.Dial); ok {
		rest = end
	} else if len(rest) > 0 && len(rest) <= 2 {
		if spec.Dial, err = tcp(rest, 1); err != nil {
			return fail(err.Error())
		}
		rest = nil
	}
	if len(rest) != 0 || spec.Dial.Network == "" {
		return fail("too few or too many parts")
	}
	for _, a := range []Address{spec.Listen, spec.Dial} {
		if a.Network == "unix" && (!strings.HasPrefix(a.Address, "/") || len(a.Address) > maxUnixPath || strings.ContainsRune(a.Address, 0)) {
			return fail(fmt.Sprintf("the path of a Unix socket is absolute and has at most %d bytes", maxUnixPath))
		}
		if len(a.Address) > agentpb.MaxForwardAddress {
			return fail("an address is too long")
		}
	}
	return spec, nil
}

// split cuts at colons outside of brackets, and takes the brackets off.
func split(s string) ([]string, error) {
	var parts []string
	for {
		if strings.HasPrefix(s, "[") {
			host, rest, ok := strings.Cut(s[1:], "]")
			if !ok || net.ParseIP(host) == nil {
				return nil, errors.New("brackets are for an IPv6 address")
			}
			parts = append(parts, host)
			if rest == "" {
				return parts, nil
			}
			if rest[0] != ':' {
				return nil, errors.New("a colon is missing")
			}
			s = rest[1:]
			continue
		}
		part, rest, more := strings.Cut(s, ":")
		parts = append(parts, part)
		if !more {
			return parts, nil
		}
		s = rest
	}
}

// cutUnix takes "unix", PATH from the front.
func cutUnix(parts []string, a *Address) ([]string, bool) {
	if len(parts) < 2 || parts[0] != "unix" {
		return parts, false
	}
	*a = Address{"unix", parts[1]}
	return parts[2:], true
}

func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 64)
	return err == nil
}

// tcp makes an address of [HOST, ]PORT.
func tcp(parts []string, least uint64) (Address, error) {
	host, port := loopback, parts[len(parts)-1]
	if len(parts) == 2 {
		host = parts[0]
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n < least {
		return Address{}, fmt.Errorf("port %q is not one of %d to 65535", port, least)
	}
	if host == "" || strings.ContainsAny(host, " \t\r\n\x00/") {
		return Address{}, fmt.Errorf("%q is no host", host)
	}
	return Address{"tcp", net.JoinHostPort(host, strconv.FormatUint(n, 10))}, nil
}
