package instance

import (
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/drowse-vm/drowse/snapshot/pager"
)

// ReleaseHeap gives the host the memory that only the start of a VM needed: heap that is free, and decoders. It waits
// until the VM has what it needs first, and then up to as long again, so that VMs that were woken together do not
// collect their garbage together. It returns at once when done is closed.
func ReleaseHeap(done <-chan struct{}) {
	select {
	case <-done:
		return
	case <-time.After(pager.DefaultRecordTime + rand.N(pager.DefaultRecordTime)):
	}
	// The first collection only marks what is in a sync.Pool.
	runtime.GC()
	debug.FreeOSMemory()
}
