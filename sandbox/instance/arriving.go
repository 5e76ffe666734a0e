package instance

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/snapshot"
)

// Arriving are memory and layers of a snapshot that are on their way to this host while a VM runs on it already.
type Arriving struct {
	// Dir is where the snapshot's files are meanwhile.
	Dir string
	// Layers are those of the VM's disk that are on their way, by the base of their names, with the sizes of their files
	// in bytes. The confined process gets them from its keeper.
	Layers map[string]int64
	// Ensure returns when bytes of a memory file or layer are there, or why they cannot be.
	Ensure func(ctx context.Context, file string, off, n int64) error
	// Whole returns when the snapshot is whole and has its name.
	Whole func(context.Context) error
}

// arrivingPiece is what a VM asks for at once: so many bytes are asked for once.
const arrivingPiece = 512 << 10

// arrivingHandlers is how many faults are handled at once while each may wait for the network.
const arrivingHandlers = 8

// errClosing is why what is not there cannot be had any more.
var errClosing = errors.New("the VM is being closed")

// awaited knows which pieces of files are there.
type awaited struct {
	ask   func(ctx context.Context, file string, off, n int64) error
	whole atomic.Bool
	ctx   context.Context
	end   context.CancelCauseFunc
	mu    sync.RWMutex // guards files, not what is in them
	files map[string]pieces
}

// pieces are those of a file, a bit for each. A layer's file has the size of the disk, however little is in it.
type pieces struct {
	size int64
	here []atomic.Uint64
}

func newPieces(size int64) pieces {
	return pieces{size, make([]atomic.Uint64, (size/arrivingPiece)/64+1)}
}

func newAwaited(a *Arriving) *awaited {
	w := &awaited{ask: a.Ensure, files: map[string]pieces{}}
	w.ctx, w.end = context.WithCancelCause(context.Background())
	for name, size := range a.Layers {
		w.files[name] = newPieces(size)
	}
	return w
}

// know takes over which memory files there are.
func (w *awaited) know(m *snapshot.Manifest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range m.Memory.Files {
		w.files[f.Name] = newPieces(f.Size)
	}
}

// ensure is a snapshot.Ensure. It allocates nothing for what is there.
func (w *awaited) ensure(file string, off, n int64) error {
	if w.whole.Load() || n == 0 {
		return nil
	}
	w.mu.RLock()
	p, known := w.files[file]
	w.mu.RUnlock()
	if !known { // the root of the index, before the manifest is known
		return w.ask(w.ctx, file, off, n)
	}
	for i := off / arrivingPiece; i*arrivingPiece < min(off+n, p.size); i++ {
		word, bit := &p.here[i/64], uint64(1)<<(i%64)
		if word.Load()&bit != 0 {
			continue
		}
		if err := w.ask(w.ctx, file, i*arrivingPiece, min(arrivingPiece, p.size-i*arrivingPiece)); err != nil {
			return err
		}
		word.Or(bit)
	}
	return nil
}

// coming is disk.Options.Coming. A VM that cannot have what its guest reads ends, and the guest gets no answer: it
// would take an error for a broken disk.
func (in *Instance) coming(path string) func(off, n int64) error {
	a, name := in.parts.Arriving, filepath.Base(path)
	if a == nil || a.Layers[name] == 0 {
		return nil
	}
	return func(off, n int64) error {
		err := in.awaited.ensure(name, off, n)
		if err != nil {
			in.fail(err)
			err = fmt.Errorf("%w: %w", devices.ErrLater, err)
		}
		return err
	}
}

// Arrived says that all that was on its way is there.
func (in *Instance) Arrived() {
	if in.awaited != nil {
		in.awaited.whole.Store(true)
	}
}
