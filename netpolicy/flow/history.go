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

// History has the names that addresses were given for, and those of rules: events and records of flows say both. The
// zero value is empty.
type History struct {
	mu     sync.Mutex // guards what follows
	names  map[netip.Addr][]givenName
	tables []ruleNames // the oldest first
}

// givenName is a name that the guest got an address for, and when.
type givenName struct {
	name string
	at   uint64 // on the coarse clock, which no packet is judged on before
}

// ruleNames is what a generation's rules are called.
type ruleNames struct {
	gen   uint32
	rules []string
}

// Given notes that the guest got an address for a name.
func (h *History) Given(name string, a netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.names == nil {
		h.names = map[netip.Addr][]givenName{}
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
	h.names[a] = append(list, givenName{name, Coarse()})
}

// Name is the last name that an address was given for until a moment.
func (h *History) Name(a netip.Addr, until uint64) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, given := range slices.Backward(h.names[a]) {
		if given.at <= until {
			return given.name
		}
	}
	return ""
}

// Install notes what the rules of a generation are called.
func (h *History) Install(gen uint32, rules []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tables) >= maxTables {
		h.tables = slices.Delete(h.tables, 0, 1)
	}
	h.tables = append(h.tables, ruleNames{gen, rules})
}

// Rule is what a rule of a generation is called; empty if it is none, or not known any more.
func (h *History) Rule(gen uint32, rule int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.tables {
		if x.gen == gen && rule >= 0 && rule < len(x.rules) {
			return x.rules[rule]
		}
	}
	return ""
}
