package process

import (
	"time"

	"github.com/drowse-vm/drowse/snapshot/pager"
)

// keepDelay is how long after its wake a VM adds to the cache of pages: what it needs first
// is known then, and others that were woken with it are awake.
const keepDelay = pager.DefaultRecordTime

// keepPages adds what this wake had to decompress to the cache of pages, in the background.
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
		if err := p.in.KeepPages(p.lasting); err != nil && p.lasting.Err() == nil {
			p.log.Info("the next wake will decompress what this one has", "cause", err)
		}
	})
}
