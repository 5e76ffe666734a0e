package hostnet

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy"
)

// RangeEnv names the range of endpoints' addresses on this host, as 10.200.0.0/16. All
// processes with endpoints must have the same.
const RangeEnv = "DROWSE_AGENT_RANGE"

// Range6Env names the range of endpoints' IPv6 addresses, as fd64:726f:7773:2::/64.
const Range6Env = "DROWSE_AGENT_RANGE6"

// DefaultDir is where addresses are taken. It has to be of this host and this boot.
const DefaultDir = "/run/drowse/addresses"

// DefaultRange is where endpoints have their addresses if nothing else is said.
var DefaultRange = netip.MustParsePrefix("10.200.0.0/16")

// DefaultRange6 is where they have their IPv6 addresses: unique local ones (RFC 4193),
// since the host translates them.
var DefaultRange6 = netip.MustParsePrefix("fd64:726f:7773:2::/64")

// Bounds of a range's length: the larger has addresses for half a million endpoints.
const (
	minRangeBits = 13
	maxRangeBits = 30
)

// What can be wrong with addresses, for errors.Is.
var (
	ErrRange = errors.New("unusable range of endpoints' addresses")
	ErrFull  = errors.New("all addresses of endpoints are taken")
)

// Range is the range of endpoints' addresses that $DROWSE_AGENT_RANGE names, or DefaultRange.
func Range() (netip.Prefix, error) { return named(RangeEnv, DefaultRange, CheckRange) }

// Range6 is the range of endpoints' IPv6 addresses that $DROWSE_AGENT_RANGE6 names, or
// DefaultRange6.
func Range6() (netip.Prefix, error) { return named(Range6Env, DefaultRange6, checkRange6) }

// named is the range that a variable of the environment names.
func named(env string, usual netip.Prefix, check func(netip.Prefix) error) (netip.Prefix, error) {
	text := os.Getenv(env)
	if text == "" {
		return usual, nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, fmt.Errorf("$%s: %w: %.60q is not like %v", env, ErrRange, text, usual)
	}
	if err := check(p); err != nil {
		return p, fmt.Errorf("$%s: %w", env, err)
	}
	return p, nil
}

// checkRange6 says whether endpoints can have their IPv6 addresses in a range.
func checkRange6(p netip.Prefix) error {
	wire := netip.PrefixFrom(netpolicy.TheWire.Gateway6, 64).Masked()
	switch {
	case !p.IsValid() || !p.Addr().Is6() || p.Addr().Is4In6() || p != p.Masked() || p.Bits() != 64 || !netpolicy.AllPrivate(p):
		return fmt.Errorf("%w: %v: use an IPv6 prefix of 64 bits of unique local addresses, as %v", ErrRange, p, DefaultRange6)
	case p.Overlaps(wire):
		return fmt.Errorf("%w: %v: every guest has %v for itself", ErrRange, p, wire)
	case p.Contains(netip.MustParseAddr("fd00:ec2::254")) || p.Contains(netip.MustParseAddr("fd20:ce::254")):
		return fmt.Errorf("%w: %v: a metadata service has an address in it", ErrRange, p)
	}
	return nil
}

// Address6 is the IPv6 address of an endpoint that has an IPv4 address: the range, and that
// address in its last four bytes. So whoever holds the one has the other to itself, as long as
// all of the host have one range. It fails with ErrRange if an interface of the host is in that range.
func Address6(in netip.Prefix, own netip.Addr) (netip.Addr, error) {
	if err := checkRange6(in); err != nil {
		return netip.Addr{}, err
	}
	if err := clash(in, Range6Env); err != nil {
		return netip.Addr{}, err
	}
	b, four := in.Addr().As16(), own.As4()
	copy(b[12:], four[:])
	return netip.AddrFrom16(b), nil
}

// CheckRange says whether endpoints can have their addresses in a range.
func CheckRange(p netip.Prefix) error {
	wire := netip.PrefixFrom(netpolicy.TheWire.Gateway4, 30).Masked()
	switch {
	case !p.IsValid() || !p.Addr().Is4() || p != p.Masked() || p.Bits() < minRangeBits || p.Bits() > maxRangeBits:
		return fmt.Errorf("%w: %v: use an IPv4 prefix of %d to %d bits, without bits behind it", ErrRange, p, minRangeBits, maxRangeBits)
	case p.Overlaps(wire):
		return fmt.Errorf("%w: %v: every guest has %v for itself", ErrRange, p, wire)
	case p.Contains(netip.AddrFrom4([4]byte{100, 100, 100, 200})):
		return fmt.Errorf("%w: %v: 100.100.100.200 is a metadata service's", ErrRange, p)
	case !netpolicy.AllPrivate(p):
		return fmt.Errorf("%w: %v: use a private one, as %v", ErrRange, p, DefaultRange)
	}
	return nil
}

// Address is an endpoint's, until Release or the end of the process.
type Address struct {
	addr netip.Addr
	path string
	file *os.File
}

// Addr is the address.
func (a *Address) Addr() netip.Addr { return a.addr }

// Release gives the address back.
func (a *Address) Release() error {
	if a.file == nil {
		return nil
	}
	// While the lock is held, so that nobody has this file any more; see take.
	err := errors.Join(os.Remove(a.path), a.file.Close())
	a.file = nil
	return err
}

// Take takes an address of a range for an endpoint: the same as the last time, if nobody else
// has that by now. dir is where the host's addresses are taken; empty is DefaultDir.
// It fails with ErrFull, or with ErrRange if an interface of the host is in that range.
func Take(dir string, in netip.Prefix, endpoint string) (*Address, error) {
	dir = cmp.Or(dir, DefaultDir)
	if err := CheckRange(in); err != nil {
		return nil, err
	}
	if err := clash(in, RangeEnv); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("taking an address: %w", err)
	}
	n := choices(in)
	for i := range n {
		a, err := take(dir, choice(in, endpoint, i), endpoint)
		if a != nil || err != nil {
			return a, err
		}
	}
	return nil, fmt.Errorf("taking an address in %v: %w: name a larger range in $%s", in, ErrFull, RangeEnv)
}

// First is the address of a range that Take gives to an endpoint if nobody else has it.
func First(in netip.Prefix, endpoint string) netip.Addr { return choice(in, endpoint, 0) }

// choices are how many addresses of a range endpoints can have: neither the first nor the last
// one, which mean the network and broadcast elsewhere.
func choices(in netip.Prefix) uint32 { return uint32(1)<<(32-in.Bits()) - 2 }

// choice is what is tried for an endpoint after i others.
func choice(in netip.Prefix, endpoint string, i uint32) netip.Addr {
	h := fnv.New32a()
	_, _ = h.Write([]byte(endpoint)) // never fails
	first := in.Addr().As4()
	n := choices(in)
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(first[:])+1+(h.Sum32()%n+i)%n)
	return netip.AddrFrom4(b)
}

// take takes one address; nil if another process has it.
func take(dir string, addr netip.Addr, endpoint string) (*Address, error) {
	a := &Address{addr: addr, path: filepath.Join(dir, addr.String())}
	f, err := osfile.TryOpenLocked(a.path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if errors.Is(err, osfile.ErrLocked) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("taking the address %v: %w", addr, err)
	}
	a.file = f
	// For people who look there. Not worth a failure.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%s %d\n", endpoint, os.Getpid())
	return a, nil
}

// clash refuses a range in which the host has a network of its own. env names the range.
func clash(in netip.Prefix, env string) error {
	all, err := netpolicy.InterfaceAddresses()
	if err != nil {
		return err
	}
	for _, p := range all {
		if in.Overlaps(p.Masked()) {
			return fmt.Errorf("%w: %v: the host has the address %v: name another range in $%s", ErrRange, in, p, env)
		}
	}
	return nil
}

// Sweep removes the files of addresses that killed processes had. They are free without
// that. dir is as for Take.
func Sweep(dir string) error {
	dir = cmp.Or(dir, DefaultDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("tidying up addresses: %w", err)
	}
	var errs []error
	for _, e := range entries {
		addr, err := netip.ParseAddr(e.Name())
		if err != nil || addr.String() != e.Name() {
			continue // not of this package
		}
		a, err := take(dir, addr, "sweep")
		if a != nil {
			err = a.Release()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
