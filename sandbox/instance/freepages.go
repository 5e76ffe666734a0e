package instance

import (
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/freepages"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A snapshot stores where the guest's kernel says which pages are free, among the states of its parts.
const (
	freePagesName = "free-pages"
	freePagesKind = "drowse-struct-pages"
)

// locateFreePages notes where the guest's kernel says which pages are free, if it does.
func (in *Instance) locateFreePages(r guest.Ready) {
	if r.VMCoreInfoSize == 0 {
		in.log.Info("the guest does not say which pages are free: snapshots store what is in them")
		return
	}
	m, err := freepages.Locate(in.mem, guestmem.GPA(r.VMCoreInfo), r.VMCoreInfoSize)
	if err != nil {
		in.log.Warn("snapshots store what is in free pages", "cause", err)
		return
	}
	in.structPages = m
}

// freePages returns those candidates that the guest does not use, or nil if that is unknown. The machine must be
// paused.
func (in *Instance) freePages(candidates *guestmem.PageSet) (*guestmem.PageSet, error) {
	if in.structPages == nil {
		return nil, nil
	}
	tables, err := in.machine.PageTables()
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		if !in.structPages.Holds(in.mem, t.CR3, t.Levels) {
			// For this capture only, or permanently: the guest may have started another kernel.
			in.log.Warn("the guest runs on unknown page tables: the snapshot has what is in free pages")
			return nil, nil
		}
	}
	begin := time.Now()
	free, err := in.structPages.Free(in.mem, candidates)
	if err != nil {
		return nil, err
	}
	in.log.Debug("free pages", "pages", free.Len(), "of", candidates.Len(), "took", time.Since(begin))
	return free, nil
}

// freePagesPayload returns what a snapshot stores of structPages; false if there is nothing.
func (in *Instance) freePagesPayload() (snapshot.Payload, bool) {
	if in.structPages == nil {
		return snapshot.Payload{}, false
	}
	return snapshot.Payload{Name: freePagesName, Kind: freePagesKind, Version: freepages.Version, Data: in.structPages.Encode()}, true
}

// takeFreePages separates the payload of freePagesPayload from the states of a machine. The payload only helps:
// one of another version is ignored.
func (in *Instance) takeFreePages(all []snapshot.Payload) (states []snapshot.Payload, err error) {
	for _, p := range all {
		if p.Kind != freePagesKind {
			states = append(states, p)
			continue
		}
		if p.Version != freepages.Version {
			continue
		}
		if in.structPages != nil {
			return nil, fmt.Errorf("%w: it says twice which pages are free", snapshot.ErrCorrupt)
		}
		if in.structPages, err = freepages.Decode(p.Data, in.mem); err != nil {
			return nil, errors.Join(snapshot.ErrCorrupt, err)
		}
	}
	return states, nil
}

// allPages returns all pages of the guest's RAM.
func (in *Instance) allPages() *guestmem.PageSet {
	all := guestmem.NewPageSet(in.mem.Size() / guestmem.PageSize)
	all.Add(0, all.Pages())
	return all
}
