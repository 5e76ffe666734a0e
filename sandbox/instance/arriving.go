package instance

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/snapshot"
)

// Arriving is the memory of a snapshot that is on its way to this host while a VM runs on it already.
type Arriving struct {
	// Dir is where the snapshot's files are meanwhile.
	Dir string
	// Ensure returns when bytes of a memory file are there, or why they cannot be.
	Ensure func(ctx context.Context, file string, off, n int64) error
	// Whole returns when the snapshot is whole and has its name.
	Whole func(context.Context) error
}

// arrivingPiece is what a VM asks for at once: so many bytes are asked for once.
const arrivingPiece = 512 << 10

// arrivingHandlers is how many faults are handled at once while each may wait for the network.
const arrivingHandlers = 8

// errClosing is why memory that is not there cannot be had any more.
var errClosing = errors.New("the VM is being closed")

// awaited knows which pieces of memory files are there.
type awaited struct {
	ask   func(ctx context.Context, file string, off, n int64) error
	whole atomic.Bool
	ctx   context.Context
	end   context.CancelCauseFunc
	mu    sync.RWMutex // guards files, not what is in them
	files map[string][]atomic.Bool
	sizes map[string]int64
}

func newAwaited(a *Arriving) *awaited {
	w := &awaited{ask: a.Ensure, files: map[string][]atomic.Bool{}, sizes: map[string]int64{}}
	w.ctx, w.end = context.WithCancelCause(context.Background())
	return w
}

// know takes over which files there are.
func (w *awaited) know(m *snapshot.Manifest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range m.Memory.Files {
		w.files[f.Name], w.sizes[f.Name] = make([]atomic.Bool, (f.Size+arrivingPiece-1)/arrivingPiece), f.Size
	}
}

// ensure is a snapshot.Ensure. It allocates nothing for what is there.
func (w *awaited) ensure(file string, off, n int64) error {
	if w.whole.Load() || n == 0 {
		return nil
	}
	w.mu.RLock()
	pieces, size := w.files[file], w.sizes[file]
	w.mu.RUnlock()
	if pieces == nil { // the root of the index, before the manifest is known
		return w.ask(w.ctx, file, off, n)
	}
	for i := off / arrivingPiece; i*arrivingPiece < off+n && i < int64(len(pieces)); i++ {
		if pieces[i].Load() {
			continue
		}
		if err := w.ask(w.ctx, file, i*arrivingPiece, min(arrivingPiece, size-i*arrivingPiece)); err != nil {
			return err
		}
		pieces[i].Store(true)
	}
	return nil
}

// Arrived says that all of the memory that was on its way is there.
func (in *Instance) Arrived() {
	if in.awaited != nil {
		in.awaited.whole.Store(true)
	}
}
