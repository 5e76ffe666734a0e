package instance

import (
	"context"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// keepNice is the priority of adding to the cache.
const keepNice = 19

// MissedPages returns what Parts.PageCache lacked for the restore so far, for KeepPages: the number of a page of RAM
// for each group of pages, pagecache.MaxMissed at most. It returns nothing the second time, without a cache, or if the
// VM was not restored. It may be called at any time, also after Close.
func (in *Instance) MissedPages() []uint64 {
	if in.cached == nil {
		return nil
	}
	return in.cached.Missed()
}

// KeepPages adds missed pages of a snapshot to a cache, for the next restore of this snapshot or of a relative of it.
// It decompresses them at low priority. missed need not be trusted: what is written comes from the snapshot. After an
// error the next restore only takes longer. may is that of pagecache.Cache.Add.
func KeepPages(ctx context.Context, cacheDir, snapshotDir string, missed []uint64, may func(memoryFile string, bytes int64) bool) error {
	done := make(chan error, 1)
	go func() {
		// The goroutine does not unlock the thread, so the thread and its priority end with it.
		runtime.LockOSThread()
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), keepNice)
		done <- pagecache.New(cacheDir).Add(ctx, snapshotDir, missed, may)
	}()
	return <-done
}

// Caches reports whether decompressed pages are kept for other wakes.
func (in *Instance) Caches() bool { return in.cached != nil }
