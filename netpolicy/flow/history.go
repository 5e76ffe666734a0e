package flow

import (
	"net/netip"
	"slices"
	"sync"
)

// Bounds of a History: addresses, names of one address, and tables whose rules may still be named.
const (
	maxAddresses = 4096
	maxNames     = 4
	maxTables    = 8
)

// History is the name history of an endpoint: which names its addresses had when, and its rules by generation. Events
// and records of flows have both. The zero value is empty.
type History struct {
	mu     sync.Mutex // guards what follows
	names  map[netip.Addr][]nameEntry
	tables []ruleNames // the oldest first
}

// nameEntry is a name that the resolver has answered with an address, and when.
type nameEntry struct {
	name string
	at   uint64 // on the coarse clock, which no packet is judged on before
}

// ruleNames are the names of a generation's rules.
type ruleNames struct {
	gen   uint32
	rules []string
}

// AddName adds a name that the resolver has answered with an address.
func (h *History) AddName(name string, a netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.names == nil {
		h.names = map[netip.Addr][]nameEntry{}
	}
	list, ok := h.names[a]
	if !ok && len(h.names) >= maxAddresses {
		for old := range h.names {
			delete(h.names, old) // any one
			break
		}
	}
	if n := len(list); n > 0 && list[n-1].name == name {
		return
	}
	if len(list) >= maxNames {
		list = slices.Delete(list, 0, 1)
	}
	h.names[a] = append(list, nameEntry{name, Coarse()})
}

// NameAt is the last name that an address had until a moment.
func (h *History) NameAt(a netip.Addr, until uint64) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, entry := range slices.Backward(h.names[a]) {
		if entry.at <= until {
			return entry.name
		}
	}
	return ""
}

// AddRules adds the names of a generation's rules.
func (h *History) AddRules(gen uint32, rules []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tables) >= maxTables {
		h.tables = slices.Delete(h.tables, 0, 1)
	}
	h.tables = append(h.tables, ruleNames{gen, rules})
}

// RuleName is the name of a generation's rule; empty if there is none, or it is not kept any more.
func (h *History) RuleName(gen uint32, rule int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.tables {
		if x.gen == gen && rule >= 0 && rule < len(x.rules) {
			return x.rules[rule]
		}
	}
	return ""
}
