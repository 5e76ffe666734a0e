package instance

import (
	"context"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// keepNice is the priority of adding to the cache.
const keepNice = 19

// KeepPages adds the pages that the restore has had to decompress so far to Parts.PageCache, for the next restore
// of this snapshot or of a relative of it. It decompresses them once more, at low priority. It does nothing the
// second time, without a cache, or if the VM was not restored. After an error the next restore only takes longer.
// It may be called at any time, also after Close.
func (in *Instance) KeepPages(ctx context.Context) error {
	if in.cached == nil {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		// The goroutine does not unlock the thread, so the thread and its priority end with it.
		runtime.LockOSThread()
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), keepNice)
		done <- pagecache.New(in.parts.PageCache).Add(ctx, in.cached, in.snap.Dir())
	}()
	return <-done
}

// Caches reports whether decompressed pages are kept for other wakes.
func (in *Instance) Caches() bool { return in.cached != nil }
