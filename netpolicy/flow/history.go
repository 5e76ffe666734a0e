package flow

import (
	"net/netip"
	"slices"
	"sync"
)

// Bounds of a History: addresses, names of one address, and tables whose rule names are kept.
const (
	maxAddresses = 4096
	maxNames     = 4
	maxTables    = 8
)

// History records which names an endpoint's addresses had when, and the names of its rules by generation, for
// events and records of flows. The zero value is empty.
type History struct {
	mu     sync.Mutex // guards what follows
	names  map[netip.Addr][]nameEntry
	tables []ruleNames // the oldest first
}

// nameEntry is a name that the resolver resolved to an address, and when.
type nameEntry struct {
	name string
	at   uint64 // by Coarse: a packet that is judged later has no earlier time
}

// ruleNames are the names of a generation's rules.
type ruleNames struct {
	gen   uint32
	rules []string
}

// AddName adds a name that the resolver resolved to an address.
func (h *History) AddName(name string, a netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.names == nil {
		h.names = map[netip.Addr][]nameEntry{}
	}
	list, ok := h.names[a]
	if !ok && len(h.names) >= maxAddresses {
		for old := range h.names {
			delete(h.names, old) // an arbitrary one
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

// NameAt returns the last name that an address had at a time or before.
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

// RuleName returns the name of a generation's rule; empty if there is none, or it is no longer kept.
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
