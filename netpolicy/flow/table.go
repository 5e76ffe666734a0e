package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// Table is the flow table of one endpoint, in maps of the programs.
type Table struct {
	// Flows and Lasting are the maps; Lasting has the established or answered flows.
	Flows, Lasting *ebpf.Map
	// Usages has the usage of the network of all endpoints: two entries from Slot*2 on, egress and ingress.
	Usages *ebpf.Map
	Slot   uint32
	// History names addresses and rules.
	History *History
}

type key = bpf.EndpointFlowKey

// The states of flows, numbered as in bpf/endpoint.c.
const (
	stateOpening = iota + 1
	stateEstablished
	stateClosing
	stateOneWay
	stateBothWays
	stateEcho
	stateAlias // no flow of its own: it leads to a flow
)

var stateNames = map[uint8]string{
	stateOpening: "opening", stateEstablished: "established", stateClosing: "closing", stateOneWay: "one-way",
	stateBothWays: "answered", stateEcho: "echo",
}

// flowLife returns how long a flow lives after a packet, as in bpf/endpoint.c.
func flowLife(state uint8) time.Duration {
	switch state {
	case stateOpening:
		return 60 * time.Second
	case stateEstablished:
		return 4 * time.Hour
	case stateBothWays:
		return 180 * time.Second
	}
	return 30 * time.Second
}

// flowSlack is how long after its life a flow counts as ended. The programs' clock is up to a tick behind, and a
// packet may still be passing through the programs.
const flowSlack = time.Second

func peerOf(k *key) netip.Addr {
	var b [16]byte
	for i, w := range k.Peer {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	a := netip.AddrFrom16(b)
	if k.Six == 0 {
		a = a.Unmap()
	}
	return a
}

// port converts a port from the programs' network byte order to the host's, or back.
func port(p uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], p)
	return binary.BigEndian.Uint16(b[:])
}

// noRule is the rule number that the programs write if no rule decided.
const noRule = 0xffff

// activity returns how many flows were ever opened, and when the last packet passed.
func (t *Table) activity() (opened, active uint64, err error) {
	for d := range netpolicy.Directions {
		u, err := Usage(t.Usages, t.Slot, d)
		if err != nil {
			return 0, 0, err
		}
		opened += u.Opened
		active = max(active, u.Active)
	}
	return opened, active, nil
}

// Usage reads the network usage of an endpoint in a direction, given by its number.
func Usage(usages *ebpf.Map, slot uint32, direction int) (u bpf.EndpointUsage, err error) {
	if err := usages.LookupWithFlags(slot*2+uint32(direction), &u, ebpf.LookupLock); err != nil {
		return u, fmt.Errorf("reading the use of the network: %w", err)
	}
	return u, nil
}

// reader reads a flow table in batches, and reuses its buffers.
type reader struct {
	keys   []key
	values []bpf.EndpointFlow
}

// Bounds of a batch. The kernel returns whole buckets of its hash table, as many as fit, and fails if the first
// does not fit; a bucket has one entry on average.
const (
	flowBatch     = 512
	flowBatchMost = netpolicy.MaxFlows
)

// each calls fn for each flow. A flow that stays comes once. Flows that come or go meanwhile may be missed.
func (r *reader) each(m *ebpf.Map, fn func(*key, *bpf.EndpointFlow)) error {
	if r.keys == nil {
		r.keys, r.values = make([]key, flowBatch), make([]bpf.EndpointFlow, flowBatch)
	}
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, r.keys, r.values, nil)
		if errors.Is(err, unix.ENOSPC) && len(r.keys) < flowBatchMost {
			r.keys, r.values = make([]key, 2*len(r.keys)), make([]bpf.EndpointFlow, 2*len(r.values))
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("reading the flow table: %w", err)
		}
		for i := range n {
			fn(&r.keys[i], &r.values[i])
		}
		if err != nil {
			return nil
		}
	}
}

// behind returns the key of the flow that an alias leads to.
func (t *Table) behind(alias key) (key, error) {
	var a bpf.EndpointAlias
	// The order of lookups is that of find in bpf/endpoint.c.
	err := t.Lasting.Lookup(&alias, &a)
	for _, m := range []*ebpf.Map{t.Flows, t.Lasting} {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = m.Lookup(&alias, &a)
		}
	}
	if err != nil {
		return key{}, flowError(err)
	}
	if a.State != stateAlias {
		return key{}, flowError(ebpf.ErrKeyNotExist)
	}
	return key{Peer: a.Peer, PeerPort: a.PeerPort, GuestPort: a.GuestPort, Proto: unix.IPPROTO_TCP}, nil
}

// find returns the flow with a key.
func (t *Table) find(k key) (*bpf.EndpointFlow, error) {
	// An ended flow may still be in the other map. The lasting map is read twice: a flow may move there meanwhile.
	var last *bpf.EndpointFlow
	for _, m := range []*ebpf.Map{t.Lasting, t.Flows, t.Lasting} {
		var f bpf.EndpointFlow
		err := m.Lookup(&k, &f)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, flowError(err)
		}
		if err == nil && (last == nil || f.First >= last.First) {
			last = &f
		}
	}
	if last == nil {
		return nil, flowError(ebpf.ErrKeyNotExist)
	}
	return last, nil
}

func flowError(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = ErrNoFlow
	}
	return fmt.Errorf("finding the flow of a checked connection: %w", err)
}

// keyOf returns the key of a flow of TCP over IPv4.
func keyOf(peer netip.AddrPort, guestPort uint16) key {
	k := key{PeerPort: port(peer.Port()), GuestPort: port(guestPort), Proto: unix.IPPROTO_TCP}
	b := peer.Addr().As16()
	for i := range k.Peer {
		k.Peer[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return k
}

// NameSets adds to used the numbers of the name sets of all flows: see bpf.EndpointFlow. It reads the flows that
// do not last both first and last, since a flow may move between the maps.
func (t *Table) NameSets(used map[uint32]bool) error {
	var r reader
	for _, m := range []*ebpf.Map{t.Flows, t.Lasting, t.Flows} {
		err := r.each(m, func(_ *key, f *bpf.EndpointFlow) {
			if f.State != stateAlias {
				used[f.NameSet] = true
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
