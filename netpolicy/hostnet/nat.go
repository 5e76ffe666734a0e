package hostnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// InterfacePrefix is the prefix of the names of endpoints' TAP devices.
const InterfacePrefix = "drowse"

// InterfaceName returns the name of the TAP device of an endpoint with this id of 32 hex digits. No other endpoint
// has the same name, so that cleanup after a killed process never removes another endpoint's device.
func InterfaceName(id string) string { return InterfacePrefix + id[:min(9, len(id))] }

// Names in nftables. Only this package uses the table.
const (
	tableName   = "drowse"
	chainNAT    = "postrouting"
	chainGuard  = "forward"
	chainRA     = "accept_ra"
	chainSource = "sources"
	chainStray  = "strays"
	guardWords  = "drowse: forward only from and to VMs"
	rangePrefix = "drowse: agents "
	ownPrefix   = "drowse: from agents alone "
	strayPrefix = "drowse: to agents alone "
)

// family has the differences between IPv4 and IPv6.
type family struct {
	table     nftables.TableFamily
	source    uint32 // offset of the source address in a header
	length    uint32 // of an address, in bytes
	forward   string // file of the sysctl for forwarding
	sysctl    string // its name
	advertise bool   // whether router advertisements configure the host
}

var (
	// RFC 791, 3.1.
	ip4 = &family{nftables.TableFamilyIPv4, 12, 4, "/proc/sys/net/ipv4/ip_forward", "net.ipv4.ip_forward", false}
	// RFC 8200, 3.
	ip6 = &family{nftables.TableFamilyIPv6, 8, 16, "/proc/sys/net/ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding", true}
)

// confDir has a directory of sysctls for each interface, and the directories all and default.
const confDir = "/proc/sys/net/ipv6/conf"

func familyOf(in netip.Prefix) *family {
	if in.Addr().Is4() {
		return ip4
	}
	return ip6
}

// ErrNAT means that the host cannot translate addresses.
var ErrNAT = errors.New("the kernel does not take the table of nftables")

// Status is what this package has set up on the host.
type Status struct {
	// Ranges are the translated ranges.
	Ranges []string `json:"ranges"`
	// Forwarding is net.ipv4.ip_forward. Guarded is set if Forward switched it on, for endpoints alone.
	Forwarding bool `json:"forwarding"`
	Guarded    bool `json:"guarded"`
	// Forwarding6 and Guarded6 are the same for net.ipv6.conf.all.forwarding and Forward6.
	Forwarding6 bool `json:"forwarding6"`
	Guarded6    bool `json:"guarded6"`
}

// locked runs do while no other process runs it.
func locked(do func() error) error {
	dir := filepath.Dir(DefaultDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(dir, "nat.lock")
	f, err := osfile.OpenLocked(context.Background(), path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if err != nil {
		return err
	}
	defer f.Close()
	return do()
}

// nft is a connection to nftables, for the table of a family.
type nft struct {
	family *family
	conn   *nftables.Conn
	table  *nftables.Table
}

func open(f *family) (*nft, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("reaching nftables: %w: %w", ErrNAT, err)
	}
	return &nft{f, c, &nftables.Table{Family: f.table, Name: tableName}}, nil
}

// find returns the table, or nil if there is none.
func (n *nft) find() (*nftables.Table, error) {
	t, err := n.conn.ListTableOfFamily(tableName, n.family.table)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for a table of nftables: %w: %w", ErrNAT, err)
	}
	return t, nil
}

// comments returns those of a chain's rules; none if the chain does not exist.
func (n *nft) comments(chain string) ([]string, error) {
	rules, err := n.rules(chain)
	var out []string
	for _, r := range rules {
		text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
		out = append(out, text)
	}
	return out, err
}

// rules returns the rules of a chain; none if the chain does not exist.
func (n *nft) rules(chain string) ([]*nftables.Rule, error) {
	t, err := n.find()
	if t == nil || err != nil {
		return nil, err
	}
	rules, err := n.conn.GetRules(n.table, &nftables.Chain{Name: chain, Table: n.table})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing rules of nftables: %w: %w", ErrNAT, err)
	}
	return rules, nil
}

func (n *nft) flush() error {
	if err := n.conn.Flush(); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: run as root, or with CAP_NET_ADMIN", err)
		}
		return fmt.Errorf("changing nftables: %w: %w", ErrNAT, err)
	}
	return nil
}

// notEndpoints matches packets whose interface is not an endpoint's.
func notEndpoints(key expr.MetaKey) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		// Data shorter than a name compares the prefix alone.
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte(InterfacePrefix)},
	}
}

func rangeWords(in netip.Prefix) string { return rangePrefix + in.String() }

// Translate makes the host translate what endpoints in a range, of IPv4 or IPv6, send to interfaces other than
// endpoints'. It changes nothing if the rule exists, and may be called from several processes at once.
func Translate(in netip.Prefix) error {
	check := CheckRange
	if familyOf(in) == ip6 {
		check = checkRange6
	}
	if err := check(in); err != nil {
		return err
	}
	f := familyOf(in)
	return once(f, rangeWords(in), &nftables.Chain{
		Name: chainNAT, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	}, &expr.Masq{}, f.from(in), notEndpoints(expr.MetaKeyOIFNAME))
}

// once adds a rule to a chain, unless it exists. The rule counts the packets that match, and does something to them.
func once(f *family, words string, chain *nftables.Chain, does expr.Any, match ...[]expr.Any) error {
	return locked(func() error {
		n, err := open(f)
		if err != nil {
			return err
		}
		have, err := n.comments(chain.Name)
		if err != nil || slices.Contains(have, words) {
			return err
		}
		return n.add(chain, words, append(slices.Concat(match...), &expr.Counter{}, does))
	})
}

// add adds a rule, with its chain and the table if they are missing.
func (n *nft) add(chain *nftables.Chain, words string, exprs []expr.Any) error {
	n.conn.AddTable(n.table)
	chain.Table = n.table
	n.conn.AddChain(chain)
	n.conn.AddRule(&nftables.Rule{Table: n.table, Chain: chain, Exprs: exprs, UserData: comment(words)})
	return n.flush()
}

func comment(words string) []byte { return userdata.AppendString(nil, userdata.TypeComment, words) }

// from matches packets with a source in a range.
func (f *family) from(in netip.Prefix) []expr.Any { return f.address(f.source, in) }

// address matches packets with an address in a range, at this offset of their header.
func (f *family) address(offset uint32, in netip.Prefix) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.length},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.length, Mask: net.CIDRMask(in.Bits(), int(8*f.length)), Xor: make([]byte, f.length)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: in.Addr().AsSlice()},
	}
}

// Own makes the host drop packets with a source in a range of endpoints that did not come by an endpoint's
// interface. The programs of endpoints reject such packets anyway; this keeps them from the host itself. Like
// Translate, it changes nothing if the rule exists.
func Own(in netip.Prefix) error {
	f := familyOf(in)
	return once(f, ownPrefix+in.String(), &nftables.Chain{
		Name: chainSource, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	}, &expr.Verdict{Kind: expr.VerdictDrop}, f.from(in), notEndpoints(expr.MetaKeyIIFNAME))
}

// Contain makes the host drop what an endpoint sends to an address in a range of endpoints that would leave by another
// interface than an endpoint's: the endpoint with that address has been killed, or is not there yet, and the host's
// routes may lead to a stranger with the same address. Like Translate, it changes nothing if the rule exists.
func Contain(in netip.Prefix) error {
	f := familyOf(in)
	return once(f, strayPrefix+in.String(), &nftables.Chain{
		Name: chainStray, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	}, &expr.Verdict{Kind: expr.VerdictDrop}, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(InterfacePrefix)},
	}, f.address(f.source+f.length, in), notEndpoints(expr.MetaKeyOIFNAME))
}

// Forwarding reports whether the host forwards IPv4 packets.
func Forwarding() (bool, error) { return ip4.forwarding() }

// Forwarding6 reports whether the host forwards IPv6 packets; a host without IPv6 does not.
func Forwarding6() (bool, error) { return ip6.forwarding() }

func (f *family) forwarding() (bool, error) {
	b, err := os.ReadFile(f.forward)
	if f == ip6 && errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking whether the host forwards packets: %w", err)
	}
	return !bytes.Equal(bytes.TrimSpace(b), []byte("0")), nil
}

func (f *family) setForwarding(value string) error {
	if err := os.WriteFile(f.forward, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("setting %s to %s: %w", f.sysctl, value, err)
	}
	return nil
}

// Forward makes the host forward IPv4 packets, if it does not yet. It first adds a rule that drops all packets but
// those from and to endpoints' interfaces. It reports whether it changed anything. If forwarding is already on, it
// adds no rule.
func Forward() (changed bool, err error) { return ip4.doForward() }

// Forward6 is Forward for IPv6. A host that forwards accepts no more routes from router advertisements (accept_ra
// 1; ip-sysctl.rst of Linux), and would lose its own way out. So Forward6 makes interfaces that accept them now
// continue to do so (accept_ra 2).
func Forward6() (changed bool, err error) { return ip6.doForward() }

func (f *family) doForward() (changed bool, err error) {
	err = locked(func() error {
		on, err := f.forwarding()
		if on || err != nil {
			return err
		}
		n, err := open(f)
		if err != nil {
			return err
		}
		if err := n.guard(); err != nil {
			return err
		}
		if f.advertise {
			if err := n.keepAdvertised(); err != nil {
				return err
			}
		}
		changed = true
		return f.setForwarding("1")
	})
	return changed, err
}

// guard adds the rule that drops packets neither from nor to an endpoint, unless the chain has a rule.
func (n *nft) guard() error {
	have, err := n.comments(chainGuard)
	if err != nil || len(have) > 0 {
		return err
	}
	chain := &nftables.Chain{
		Name: chainGuard, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	}
	exprs := append(notEndpoints(expr.MetaKeyIIFNAME), notEndpoints(expr.MetaKeyOIFNAME)...)
	return n.add(chain, guardWords, append(exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}))
}

// keepAdvertised makes interfaces that accept router advertisements continue to do so. It first records them in a
// chain that no rule jumps to: the record lasts as long as the guard, and is in the same network namespace.
func (n *nft) keepAdvertised() error {
	entries, err := os.ReadDir(confDir)
	if err != nil {
		return fmt.Errorf("looking at the host's interfaces: %w", err)
	}
	noted, err := n.comments(chainRA)
	if err != nil {
		return err
	}
	chain := n.conn.AddChain(&nftables.Chain{Name: chainRA, Table: n.table})
	var names []string
	for _, e := range entries {
		// New interfaces inherit from default. all has no effect.
		if e.Name() == "all" || e.Name() == "lo" || strings.HasPrefix(e.Name(), InterfacePrefix) {
			continue
		}
		if v, err := os.ReadFile(acceptRA(e.Name())); err != nil || string(bytes.TrimSpace(v)) != "1" {
			continue // it is gone, or accepts none
		}
		names = append(names, e.Name())
		if !slices.Contains(noted, e.Name()) {
			n.conn.AddRule(&nftables.Rule{Table: n.table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}, UserData: comment(e.Name())})
		}
	}
	if err := n.flush(); err != nil {
		return err
	}
	for _, name := range names {
		if err := setAcceptRA(name, "2"); err != nil {
			return err
		}
	}
	return nil
}

func acceptRA(name string) string { return filepath.Join(confDir, name, "accept_ra") }

func setAcceptRA(name, value string) error {
	err := os.WriteFile(acceptRA(name), []byte(value+"\n"), 0o644)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("setting net.ipv6.conf.%s.accept_ra to %s: %w", name, value, err)
	}
	return nil
}

// Remove undoes Translate, Own, Contain, Bound, Forward and Forward6: first forwarding, if they switched it on, then
// the tables. Missing tables are not an error.
func Remove() error {
	return locked(func() error { return errors.Join(ip4.remove(), ip6.remove()) })
}

func (f *family) remove() error {
	n, err := open(f)
	if err != nil {
		return err
	}
	t, err := n.find()
	if t == nil || err != nil {
		return err
	}
	guard, err := n.comments(chainGuard)
	if err != nil {
		return err
	}
	if len(guard) > 0 {
		if err := f.setForwarding("0"); err != nil {
			return err
		}
	}
	names, err := n.comments(chainRA)
	if err != nil {
		return err
	}
	for _, name := range names {
		// Another value was set on purpose since.
		if v, err := os.ReadFile(acceptRA(name)); err != nil || string(bytes.TrimSpace(v)) != "2" {
			continue
		}
		if err := setAcceptRA(name, "1"); err != nil {
			return err
		}
	}
	n.conn.DelTable(n.table)
	return n.flush()
}

// Look returns what this package has set up on the host.
func Look() (s Status, err error) {
	s.Ranges = []string{}
	for _, f := range []struct {
		family              *family
		forwarding, guarded *bool
	}{{ip4, &s.Forwarding, &s.Guarded}, {ip6, &s.Forwarding6, &s.Guarded6}} {
		if *f.forwarding, err = f.family.forwarding(); err != nil {
			return s, err
		}
		n, err := open(f.family)
		if err != nil {
			return s, err
		}
		nat, err := n.comments(chainNAT)
		if err != nil {
			return s, err
		}
		for _, c := range nat {
			if r, ok := strings.CutPrefix(c, rangePrefix); ok {
				s.Ranges = append(s.Ranges, r)
			}
		}
		guard, err := n.comments(chainGuard)
		if err != nil {
			return s, err
		}
		*f.guarded = len(guard) > 0
	}
	return s, nil
}
