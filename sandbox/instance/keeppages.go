package instance

import (
	"context"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// keepNice is the priority of adding to the cache.
const keepNice = 19

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

// Caches says whether pages that were decompressed are kept for other wakes.
func (in *Instance) Caches() bool { return in.cached != nil }
