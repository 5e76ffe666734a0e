package process

import (
	"time"

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
		select {
		case <-p.lasting.Done():
			return
		case <-time.After(keepDelay):
		}
		err := instance.KeepPages(p.lasting, p.store.PageCacheDir(), p.from, p.in.MissedPages())
		if err != nil && p.lasting.Err() == nil {
			p.log.Info("the next wake will decompress what this one has", "cause", err)
		}
	})
}
