package hostnet

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Names of the chain and of its rules in nftables.
const (
	chainBound  = "connections"
	boundPrefix = "drowse: connections of each of "
	morePrefix  = "drowse: connections of "
)

// Connections returns how many entries the host's connection tracking may have for an endpoint with a policy: as
// many as the programs track flows. The programs forget the oldest flow; the host's tracking refuses the next
// connection. Closed entries of TCP (TIME_WAIT, up to 2 minutes) do not count; the policy's limit of connections a
// second bounds them.
func Connections(p *netpolicy.Policy) int { return cmp.Or(p.Flows, netpolicy.DefaultFlows) }

// Bound keeps an endpoint from filling the host's connection tracking: the host drops the first packet of a connection
// if its source already has as many as allowed. A rule for the range allows each endpoint netpolicy.DefaultFlows. This
// endpoint gets a rule of its own if connections differs. Like Translate, Bound changes nothing if the rules exist. The
// rule of an endpoint that is gone stays until Bound is called for the next endpoint with its address.
func Bound(in netip.Prefix, own netip.Addr, connections int) error {
	return locked(func() error {
		n, err := open(familyOf(in))
		if err != nil {
			return err
		}
		rules, err := n.rules(chainBound)
		if err != nil {
			return err
		}
		all, words := boundPrefix+in.String(), fmt.Sprintf("%s%v: %d", morePrefix, own, connections)
		usual := connections == netpolicy.DefaultFlows
		has, changed := map[string]bool{}, false
		for _, r := range rules {
			text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			if strings.HasPrefix(text, fmt.Sprintf("%s%v: ", morePrefix, own)) && (usual || text != words) {
				changed = true
				if err := n.conn.DelRule(r); err != nil {
					return fmt.Errorf("changing nftables: %w: %w", ErrNAT, err)
				}
				continue
			}
			has[text] = true
		}
		n.conn.AddTable(n.table)
		chain := &nftables.Chain{
			Name: chainBound, Table: n.table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle, // after the connection is looked up
		}
		if !has[all] {
			changed = true
			n.conn.AddChain(chain)
			if err := n.boundEach(chain, in, all); err != nil {
				return err
			}
		}
		if !usual && !has[words] {
			changed = true
			n.conn.AddChain(chain)
			note := comment(words)
			one := netip.PrefixFrom(own, own.BitLen())
			// InsertRule puts each rule first, so the last one inserted comes first.
			n.conn.InsertRule(&nftables.Rule{Table: n.table, Chain: chain, UserData: note, Exprs: append(n.family.opens(one), &expr.Verdict{Kind: expr.VerdictAccept})})
			n.conn.InsertRule(&nftables.Rule{
				Table: n.table, Chain: chain, UserData: note,
				Exprs: append(n.family.opens(one), over(connections), &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}),
			})
		}
		if !changed {
			return nil
		}
		return n.flush()
	})
}

// boundEach adds the rule for all endpoints of a range. Its set has the endpoints with connections, and their counts.
func (n *nft) boundEach(chain *nftables.Chain, in netip.Prefix, words string) error {
	kind := nftables.TypeIPAddr
	if n.family == ip6 {
		kind = nftables.TypeIP6Addr
	}
	set := &nftables.Set{
		Table: n.table, Name: "connections_" + strings.NewReplacer(".", "_", ":", "_", "/", "_").Replace(in.String()),
		KeyType: kind, Dynamic: true, Size: netpolicy.MaxEndpoints,
	}
	if err := n.conn.AddSet(set, nil); err != nil {
		return fmt.Errorf("changing nftables: %w: %w", ErrNAT, err)
	}
	n.conn.AddRule(&nftables.Rule{
		Table: n.table, Chain: chain, UserData: comment(words),
		Exprs: slices.Concat(n.family.opens(in), []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: n.family.source, Len: n.family.length},
			&expr.Dynset{
				SrcRegKey: 1, SetName: set.Name, SetID: set.ID, Operation: unix.NFT_DYNSET_OP_ADD,
				Exprs: []expr.Any{over(netpolicy.DefaultFlows)},
			},
			&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop},
		}),
	})
	return nil
}

// opens matches the first packet of a connection from a range.
func (f *family) opens(in netip.Prefix) []expr.Any {
	return append(f.from(in),
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitNEW), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	)
}

// over matches when there are more connections than the given number.
func over(connections int) *expr.Connlimit {
	return &expr.Connlimit{Count: uint32(connections), Flags: expr.NFT_CONNLIMIT_F_INV}
}
