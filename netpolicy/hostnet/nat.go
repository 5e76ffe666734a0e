package hostnet

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// InterfacePrefix begins the names of agents' TAP devices.
const InterfacePrefix = "drowse"

// Names in nftables. Nothing else uses the table.
const (
	tableName   = "drowse"
	chainNAT    = "postrouting"
	chainGuard  = "forward"
	guardWords  = "drowse: forward only from and to VMs"
	sourceAt    = 12 // of an IPv4 header (RFC 791, 3.1)
	forwardFile = "/proc/sys/net/ipv4/ip_forward"
)

// ErrNAT is a host that cannot translate addresses.
var ErrNAT = errors.New("the kernel does not take the table of nftables")

// Status is what there is of this package's on the host.
type Status struct {
	// Ranges are translated.
	Ranges []string `json:"ranges"`
	// Forwarding is net.ipv4.ip_forward. Guarded says that it was switched on by
	// Forward, and is for agents alone.
	Forwarding bool `json:"forwarding"`
	Guarded    bool `json:"guarded"`
}

// locked does something that no other process does at the same time.
func locked(do func() error) error {
	dir := filepath.Dir(DefaultDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "nat.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return do()
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("locking %s: %w", f.Name(), err)
		}
	}
}

// nft is a conversation about the table.
type nft struct {
	conn  *nftables.Conn
	table *nftables.Table
}

func open() (*nft, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("reaching nftables: %w: %w", ErrNAT, err)
	}
	return &nft{c, &nftables.Table{Family: nftables.TableFamilyIPv4, Name: tableName}}, nil
}

// find returns the table, or nil if there is none.
func (n *nft) find() (*nftables.Table, error) {
	all, err := n.conn.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return nil, fmt.Errorf("listing tables of nftables: %w: %w", ErrNAT, err)
	}
	for _, t := range all {
		if t.Name == tableName {
			return t, nil
		}
	}
	return nil, nil
}

// comments are those of a chain's rules; none if there is no such chain.
func (n *nft) comments(chain string) ([]string, error) {
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
	out := []string{}
	for _, r := range rules {
		text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
		out = append(out, text)
	}
	return out, nil
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

// notAgents matches packets whose interface is not an agent's.
func notAgents(key expr.MetaKey) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		// Less than a whole name compares its beginning.
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte(InterfacePrefix)},
	}
}

func rangeWords(in netip.Prefix) string { return "drowse: agents " + in.String() }

// Translate has the host translate what agents in a range send to other interfaces than
// agents'. It changes nothing when that is so already, and may be called from several
// processes at once.
func Translate(in netip.Prefix) error {
	if err := CheckRange(in); err != nil {
		return err
	}
	return locked(func() error {
		n, err := open()
		if err != nil {
			return err
		}
		have, err := n.comments(chainNAT)
		if err != nil {
			return err
		}
		for _, c := range have {
			if c == rangeWords(in) {
				return nil
			}
		}
		n.conn.AddTable(n.table)
		chain := n.conn.AddChain(&nftables.Chain{
			Name: chainNAT, Table: n.table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		mask := net.CIDRMask(in.Bits(), 32)
		exprs := append([]expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: sourceAt, Len: 4},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: in.Addr().AsSlice()},
		}, notAgents(expr.MetaKeyOIFNAME)...)
		n.conn.AddRule(&nftables.Rule{
			Table: n.table, Chain: chain, Exprs: append(exprs, &expr.Counter{}, &expr.Masq{}),
			UserData: userdata.AppendString(nil, userdata.TypeComment, rangeWords(in)),
		})
		return n.flush()
	})
}

// Forwarding says whether the host forwards IPv4 packets.
func Forwarding() (bool, error) {
	b, err := os.ReadFile(forwardFile)
	if err != nil {
		return false, fmt.Errorf("looking whether the host forwards packets: %w", err)
	}
	return !bytes.Equal(bytes.TrimSpace(b), []byte("0")), nil
}

func setForwarding(value string) error {
	if err := os.WriteFile(forwardFile, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("setting net.ipv4.ip_forward to %s: %w", value, err)
	}
	return nil
}

// Forward has the host forward IPv4 packets, if it does not yet: those from and to agents'
// interfaces alone, since a rule drops all others first. It reports whether it has changed
// something. Where forwarding was on already, it adds no rule.
func Forward() (changed bool, err error) {
	err = locked(func() error {
		on, err := Forwarding()
		if on || err != nil {
			return err
		}
		n, err := open()
		if err != nil {
			return err
		}
		have, err := n.comments(chainGuard)
		if err != nil {
			return err
		}
		if len(have) == 0 {
			n.conn.AddTable(n.table)
			chain := n.conn.AddChain(&nftables.Chain{
				Name: chainGuard, Table: n.table, Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
			})
			exprs := append(notAgents(expr.MetaKeyIIFNAME), notAgents(expr.MetaKeyOIFNAME)...)
			n.conn.AddRule(&nftables.Rule{
				Table: n.table, Chain: chain, Exprs: append(exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}),
				UserData: userdata.AppendString(nil, userdata.TypeComment, guardWords),
			})
			if err := n.flush(); err != nil {
				return err
			}
		}
		changed = true
		return setForwarding("1")
	})
	return changed, err
}

// Remove takes away what Translate and Forward have made: first forwarding, if Forward has
// switched it on, then the table. It is no error if there is nothing.
func Remove() error {
	return locked(func() error {
		n, err := open()
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
			if err := setForwarding("0"); err != nil {
				return err
			}
		}
		n.conn.DelTable(n.table)
		return n.flush()
	})
}

// Look says what there is.
func Look() (s Status, err error) {
	s.Ranges = []string{}
	if s.Forwarding, err = Forwarding(); err != nil {
		return s, err
	}
	n, err := open()
	if err != nil {
		return s, err
	}
	nat, err := n.comments(chainNAT)
	if err != nil {
		return s, err
	}
	for _, c := range nat {
		if r, ok := strings.CutPrefix(c, "drowse: agents "); ok {
			s.Ranges = append(s.Ranges, r)
		}
	}
	guard, err := n.comments(chainGuard)
	s.Guarded = len(guard) > 0
	return s, err
}
