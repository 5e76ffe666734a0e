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

// RangeEnv is the variable with the range of endpoints' addresses on this host, such as 10.200.0.0/16. It must be
// the same in all processes with endpoints.
const RangeEnv = "DROWSE_AGENT_RANGE"

// Range6Env is the variable with the range of endpoints' IPv6 addresses, such as fd64:726f:7773:2::/64.
const Range6Env = "DROWSE_AGENT_RANGE6"

// HelperEnv is the variable with the socket of the helper that makes networks for users without root.
const HelperEnv = "DROWSE_NET_SOCKET"

// DefaultDir is the directory of address locks. It must belong to this host and this boot.
const DefaultDir = "/run/drowse/addresses"

// DefaultRange is the range of endpoints' addresses unless $DROWSE_AGENT_RANGE names another.
var DefaultRange = netip.MustParsePrefix("10.200.0.0/16")

// DefaultRange6 is the default range of IPv6 addresses: unique local ones (RFC 4193), since the host translates them.
var DefaultRange6 = netip.MustParsePrefix("fd64:726f:7773:2::/64")

// Bounds of a range's prefix length: the largest range has addresses for half a million endpoints.
const (
	minRangeBits = 13
	maxRangeBits = 30
)

// Errors of addresses, for errors.Is.
var (
	ErrRange = errors.New("unusable range of endpoints' addresses")
	ErrFull  = errors.New("all addresses of endpoints are taken")
)

// Range returns the range of endpoints' addresses in $DROWSE_AGENT_RANGE, or DefaultRange.
func Range() (netip.Prefix, error) { return named(RangeEnv, DefaultRange, CheckRange) }

// Range6 returns the range of endpoints' IPv6 addresses in $DROWSE_AGENT_RANGE6, or DefaultRange6.
func Range6() (netip.Prefix, error) { return named(Range6Env, DefaultRange6, checkRange6) }

// named returns the range in an environment variable.
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

// checkRange6 checks that endpoints can have their IPv6 addresses in a range.
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

// Address6 returns the IPv6 address of an endpoint with an IPv4 address: the prefix of the range, with the IPv4
// address in the last four bytes. So the owner of the IPv4 address also owns this one, as long as the whole host
// uses one range. It fails with ErrRange if an interface of the host has an address in that range.
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

// CheckRange checks that endpoints can have their addresses in a range.
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

// Address is an address that an endpoint owns until Release or the end of the process.
type Address struct {
	addr netip.Addr
	path string
	file *os.File
}

// Addr returns the address.
func (a *Address) Addr() netip.Addr { return a.addr }

// Release gives the address back.
func (a *Address) Release() error {
	if a.file == nil {
		return nil
	}
	// Remove the file while the lock is held, so that no other process has this file open afterwards; see take.
	err := errors.Join(os.Remove(a.path), a.file.Close())
	a.file = nil
	return err
}

// Take takes an address of a range for an endpoint: the same as the last time, unless another process has it now.
// dir is the directory of the host's address locks; empty is DefaultDir. It fails with ErrFull, or with ErrRange
// if an interface of the host has an address in that range.
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

// First returns the address of a range that Take gives to an endpoint if it is free.
func First(in netip.Prefix, endpoint string) netip.Addr { return choice(in, endpoint, 0) }

// choices returns how many addresses of a range endpoints can have: all but the first and the last one, which are
// the network and broadcast addresses elsewhere.
func choices(in netip.Prefix) uint32 { return uint32(1)<<(32-in.Bits()) - 2 }

// choice returns the address to try for an endpoint after i others.
func choice(in netip.Prefix, endpoint string, i uint32) netip.Addr {
	h := fnv.New32a()
	_, _ = h.Write([]byte(endpoint)) // never fails
	first := in.Addr().As4()
	n := choices(in)
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(first[:])+1+(h.Sum32()%n+i)%n)
	return netip.AddrFrom4(b)
}

// take takes one address; nil if another process holds it.
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
	// This text is for people. A failure to write it does not matter.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%s %d\n", endpoint, os.Getpid())
	return a, nil
}

// clash refuses a range that overlaps a network of the host. env is the range's variable.
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

// Sweep removes the address files of killed processes. Their addresses are free even without that. dir is as for Take.
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
