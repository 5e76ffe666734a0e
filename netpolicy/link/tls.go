package link

import (
	"fmt"
	"net/netip"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// Checked returns the flow of a connection from a port of the endpoint's address to Environment.TLSPort. It fails
// with ErrNoFlow if no such flow lives.
func (l *Link) Checked(port uint16) (flow.Checked, error) { return l.eng.checked(port, flow.Now()) }

// Lives reports whether c is still the same flow, and may carry packets by the policy that last judged it.
func (l *Link) Lives(c flow.Checked) (bool, error) { return l.eng.flowTable().Lives(c, flow.Now()) }

// OpensName reports whether the rules open a flow whose client sent name as the server name: a rule's names match
// if one of them is that name, and the peer's address was pinned for one of them when the flow was opened. name is
// in lower case, without a final dot; empty is none. It looks up the peer's class anew. A single Spec answers: the
// installed one.
func (l *Link) OpensName(c flow.Checked, name string) bool {
	return l.eng.opensName(c, name, flow.Now())
}

func (e *engine) checked(port uint16, now uint64) (flow.Checked, error) {
	e.mu.Lock()
	s := e.spec
	e.mu.Unlock()
	if s == nil || s.TLSPort() == 0 {
		return flow.Checked{}, fmt.Errorf("finding the flow of a checked connection: %w: names are not checked", flow.ErrNoFlow)
	}
	return e.flowTable().Checked(netip.AddrPortFrom(netpolicy.TheWire.Gateway4, s.TLSPort()), port, now)
}

func (e *engine) opensName(c flow.Checked, name string, now uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec == nil {
		return false
	}
	// These are the names that the flow was opened for. They may have expired since.
	at := now
	if c.Generation == e.gen {
		at = c.Opened
	}
	names, ok := e.nameSets.names[c.NameSet]
	if !ok {
		names = e.pinnedAt(c.Peer.Addr(), at)
	}
	_, ok = e.spec.OpensName(c.Peer, names, name)
	return ok
}

// Opens reports whether the rules let the endpoint open a TCP connection over IPv4 to a peer that is neither the
// host nor an endpoint. rule is the rule that decided, as in RuleName of the Spec; empty is none. name is the
// server name that the connection is certain to have in TLS: see OpensName. Opens is for connections made on the
// endpoint's behalf. A single Spec answers: the installed one.
func (l *Link) Opens(peer netip.AddrPort, name string) (rule string, ok bool) {
	return l.eng.opens(peer, name, flow.Now())
}

func (e *engine) opens(peer netip.AddrPort, name string, now uint64) (rule string, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec == nil || !peer.Addr().Is4() || peer.Port() == 0 {
		return "", false
	}
	i, ok := e.spec.Opens(peer, e.pinnedAt(peer.Addr(), now), name)
	return e.spec.RuleName(i), ok
}

// pinnedAt returns the names that an address is pinned for at a time. The lock is held.
func (e *engine) pinnedAt(a netip.Addr, at uint64) (names []string) {
	for n, until := range e.names[a] {
		if at < until {
			names = append(names, n)
		}
	}
	return names
}
