package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy"
)

// ErrTarget is an invalid host and port of a request.
var ErrTarget = errors.New("not a possible target")

// Target is the destination of a request.
type Target struct {
	// Host is a name in lower case, or an IPv4 address.
	Host string
	// Address is not valid if Host is a name.
	Address netip.Addr
	Port    uint16
}

// String returns host and port.
func (t Target) String() string { return t.Host + ":" + strconv.Itoa(int(t.Port)) }

// ParseTarget reads "host" or "host:port". A missing port is deflt, and an error if that is 0. ParseTarget refuses
// ambiguous hosts: addresses in other forms than four decimal numbers, names that end in a number (which some
// programs take for addresses) or in a dot, user names, escapes, IPv6. Errors wrap ErrTarget.
func ParseTarget(s string, deflt uint16) (Target, error) {
	bad := func(why string) (Target, error) {
		return Target{}, fmt.Errorf("%w: %.80q: %s", ErrTarget, s, why)
	}
	const longest = 253 + 1 + 5
	if s == "" || len(s) > longest {
		return bad("a host has 1 to 253 bytes")
	}
	t := Target{Port: deflt}
	host, port, has := strings.Cut(s, ":")
	if has {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || port[0] < '1' || port[0] > '9' {
			return bad("a port is 1 to 65535; there is no IPv6")
		}
		t.Port = uint16(n)
	}
	if t.Port == 0 {
		return bad("it has no port")
	}
	t.Host = strings.ToLower(host)
	if a, err := netip.ParseAddr(t.Host); err == nil {
		if !a.Is4() || a.String() != t.Host {
			return bad("write an address as four decimal numbers")
		}
		t.Address = a
		return t, nil
	}
	if !netpolicy.ValidName(t.Host) {
		return bad("neither a name of at most 253 bytes nor an IPv4 address")
	}
	last := t.Host[strings.LastIndexByte(t.Host, '.')+1:]
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") && strings.Trim(last[2:], "0123456789abcdef") == "" {
		return bad("a name does not end in a number: write an address as four decimal numbers")
	}
	return t, nil
}
