package link

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/drowse-vm/drowse/netpolicy/bpf"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// A flow outlives the name history of its peer's address. So it keeps the number of a set of names: those that the
// address had when the flow was opened, and that rules had. A new policy judges the flow by that set.

// nameSetKey replaces the address in a key of pins: see bpf/endpoint.c.
const nameSetKey = ^uint32(0)

// nameSets are the sets of names that flows may refer to. The zero value is empty.
type nameSets struct {
	names map[uint32][]string
	ids   map[string]uint32
	last  uint32
	full  uint64 // when there last was no room, on the kernel's clock
}

// forgetEvery is the least time between two searches for unused sets, after one found no room.
const forgetEvery = 1e9

// forever returns the names with an expiry that never comes.
func forever(names []string) map[string]uint64 {
	all := map[string]uint64{}
	for _, n := range names {
		all[n] = ^uint64(0)
	}
	return all
}

// nameSetID returns the number of a set of names; 0 if there are too many sets. The lock is held.
func (e *engine) nameSetID(names []string) uint32 {
	k := &e.nameSets
	sorted := slices.Sorted(slices.Values(names))
	key := strings.Join(sorted, " ")
	if id, ok := k.ids[key]; ok {
		return id
	}
	if len(k.names) >= maxNameSets {
		if now := flow.Now(); k.full == 0 || now-k.full >= forgetEvery {
			if err := e.dropNameSets(); err != nil || len(k.names) >= maxNameSets {
				k.full = now
			}
		}
		if len(k.names) >= maxNameSets {
			return 0
		}
	}
	if k.ids == nil {
		k.ids, k.names = map[string]uint32{}, map[uint32][]string{}
	}
	k.last++
	if k.last == 0 {
		k.last++
	}
	k.ids[key], k.names[k.last] = k.last, sorted
	return k.last
}

// dropNameSets drops the sets that neither a flow nor an address has. The lock is held.
func (e *engine) dropNameSets() error {
	used := map[uint32]bool{}
	var pk bpf.EndpointPinKey
	var pin bpf.EndpointPin
	pins := e.pinned.Iterate()
	for pins.Next(&pk, &pin) {
		if pk.Addr[0] != nameSetKey && pk.Gen == e.gen {
			for _, id := range pin.NameSets {
				used[id] = true
			}
		}
	}
	if err := pins.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("looking for names that are in use: %w", err)
	}
	// The flows come after the pins: a flow opened meanwhile is among the flows, or its names are among the pins.
	if err := e.flowTable().NameSets(used); err != nil {
		return fmt.Errorf("looking for names that are in use: %w", err)
	}
	maps.DeleteFunc(e.nameSets.ids, func(_ string, id uint32) bool { return !used[id] })
	maps.DeleteFunc(e.nameSets.names, func(id uint32, _ []string) bool { return !used[id] })
	return nil
}
