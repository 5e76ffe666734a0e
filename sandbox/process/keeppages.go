package process

import (
	"math"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// keepDelay is how long after its wake a VM adds to the page cache. By then it is known what the VM needs first,
// and VMs that were woken with it are awake.
const keepDelay = pager.DefaultRecordTime

// keepPages adds the pages that this wake had to decompress to the page cache, in the background.
func (p *process) keepPages() {
	if !p.in.Caches() {
		return
	}
	p.background.Go(func() {
		if wait.For(p.lasting, keepDelay) != nil {
			return
		}
		p.op.Lock()
		id, limited := p.r.ID, p.quota.limit > 0
		p.op.Unlock()
		err := p.addPages(id, limited, p.in.MissedPages())
		if err != nil && p.lasting.Err() == nil {
			p.log.Info("the next wake will decompress what this one has", "cause", err)
		}
	})
}

// addPages adds pages to the cache, within the disk quotas of the VMs that they count for: this one, or the one that
// has written the memory that this one came back from. Only a VM itself knows what its quota has left.
func (p *process) addPages(id string, limited bool, missed []uint64) error {
	if len(missed) == 0 {
		return nil
	}
	uses, err := p.store.PageUses(id, filepath.Base(p.from))
	if err != nil {
		return err
	}
	left, wrote := int64(math.MaxInt64), int64(0)
	if limited {
		room, settle, ok := p.beginPages()
		if !ok {
			return nil
		}
		left = room
		defer func() { settle(wrote) }()
	}
	return instance.KeepPages(p.lasting, p.store.PageCacheDir(), p.from, missed, func(file string, n int64) bool {
		u, known := uses[file]
		if !known || u.Others || u.Own && n > left-wrote {
			return false
		}
		if u.Own {
			wrote += n
		}
		return true
	})
}
