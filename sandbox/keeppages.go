package sandbox

import (
	"context"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// NoPageCacheEnv, set to anything, makes wakes do without a cache of decompressed pages: each
// then decompresses what it needs, and nothing is written below pages/ of the store.
const NoPageCacheEnv = "DROWSE_NO_PAGE_CACHE"

// keepDelay is how long after its wake a VM adds to the cache of pages: what it needs first
// is known then, and others that were woken with it are awake.
const keepDelay = pager.DefaultRecordTime

// keepNice is the priority of adding to the cache.
const keepNice = 19

// keepPages adds what this wake had to decompress to the cache of pages, in the background.
func (p *process) keepPages() {
	if p.in.cached == nil {
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

// KeepPages puts pages that the restore had to decompress until now into Parts.PageCache,
// for the next restore of the snapshot or of a relative of it. It takes the time of
// decompressing them once more, at low priority. It does nothing the second time, without a
// cache, and for what was not restored. An error does no harm but that the next restore
// takes longer. It may be called at any time, also after Close.
func (in *Instance) KeepPages(ctx context.Context) error {
	if in.cached == nil {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		// The thread is not given back, so it ends with this goroutine and its priority
		// with it.
		runtime.LockOSThread()
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), keepNice)
		done <- pagecache.New(in.parts.PageCache).Add(ctx, in.cached, in.snap.Dir())
	}()
	return <-done
}

// CachedFrames says how many frames of the snapshot came out of Parts.PageCache, and how many
// were not there.
func (in *Instance) CachedFrames() (hits, misses uint64) {
	if in.cached == nil {
		return 0, 0
	}
	s := in.cached.Stats()
	return s.Hits, s.Misses
}
