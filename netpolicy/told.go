package netpolicy

import (
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Bounds of what is remembered to name what is told of: names of one address, and tables
// whose rules may still be named. Addresses are at most maxPins.
const (
	maxAsked  = 4
	maxTables = 8
)

// told remembers how names led to addresses, and what rules are called, so that whoever reads
// events and flows learns of both. The zero value is empty.
type nameHistory struct {
	mu     sync.Mutex // guards what follows
	names  map[netip.Addr][]asked
	tables []ruleNames // the oldest first
}

// asked is a name that the guest got an address for, and when.
type asked struct {
	name string
	at   uint64 // on the coarse clock, which no packet is judged on before
}

// ruleNames is what a generation's rules are called.
type ruleNames struct {
	gen   uint32
	rules []string
}

// coarse is the clock of bpf_ktime_get_coarse_ns. It is behind ktime by up to a tick, so
// that what happens after a moment on it is never seen as before.
func coarse() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano())
}

func (t *nameHistory) asked(name string, a netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = map[netip.Addr][]asked{}
	}
	list, ok := t.names[a]
	if !ok && len(t.names) >= maxPins {
		for old := range t.names {
			delete(t.names, old) // any one
			break
		}
	}
	if n := len(list); n > 0 && list[n-1].name == name {
		return
	}
	if len(list) >= maxAsked {
		list = append(list[:0], list[1:]...)
	}
	t.names[a] = append(list, asked{name, coarse()})
}

// name is the last name that an address was given for until a moment.
func (t *nameHistory) name(a netip.Addr, until uint64) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.names[a]
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].at <= until {
			return list[i].name
		}
	}
	return ""
}

func (t *nameHistory) judges(gen uint32, rules []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.tables) >= maxTables {
		t.tables = append(t.tables[:0], t.tables[1:]...)
	}
	t.tables = append(t.tables, ruleNames{gen, rules})
}

func (t *nameHistory) rule(gen uint32, rule int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.tables {
		if x.gen == gen && rule >= 0 && rule < len(x.rules) {
			return x.rules[rule]
		}
	}
	return ""
}
