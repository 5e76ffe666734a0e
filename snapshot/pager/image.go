package pager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Bounds of an Image.
const (
	// maxNote bounds what SetNote takes, in bytes.
	maxNote = 64 << 20
	// maxImageWriters bounds the goroutines that fill an image.
	maxImageWriters = 4
	// imagePiece is the most pages read at once.
	imagePiece = 64
)

// ErrImage: the file is not an image of this RAM.
var ErrImage = guestmem.ErrImage

// Image is the RAM of a guest at one instant, in memory of its own (memfd_create(2)), for guests that will share
// it: see guestmem.NewPrivate. Pages of zeros take no memory. In order:
//
//	NewImage
//	CopyRunning  once or several times, while the guest runs, or never
//	CopySet      the pages that may have changed since, from a Frozen, or
//	CopyAll      all of it, if nothing has been copied before
//	SetNote, Seal
//	File, and the methods of snapshot.MemorySource
//	Close        in every case
//
// Only one goroutine may copy and seal.
type Image struct {
	mem   *guestmem.Memory
	f     *os.File
	slots []snapshot.Slot
	size  uint64

	mu     sync.Mutex
	data   *guestmem.PageSet // pages that are not zeros
	sealed bool
}

// NewImage makes an empty image for the RAM of mem.
func NewImage(mem *guestmem.Memory) (*Image, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("drowse-fork", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // Linux before 6.3
		fd, err = unix.MemfdCreate("drowse-fork", flags)
	}
	if err != nil {
		return nil, fmt.Errorf("making an image of guest RAM: %w", os.NewSyscallError("memfd_create", err))
	}
	i := &Image{mem: mem, f: os.NewFile(uintptr(fd), "drowse-fork"), slots: snapshot.LayoutOf(mem), size: mem.Size()}
	i.data = guestmem.NewPageSet(i.size / pageSize)
	if err := i.f.Truncate(int64(i.size)); err != nil {
		return nil, errors.Join(fmt.Errorf("making an image of guest RAM: %w", err), i.f.Close())
	}
	return i, nil
}

// Close closes this process's descriptor of the image. Guests made from the image keep it alive.
func (i *Image) Close() error { return i.f.Close() }

// File returns the image's file. It is sealed once Seal has returned nil.
func (i *Image) File() *os.File { return i.f }

// CopyRunning copies all of RAM while the guest and its devices may run. A page that changes meanwhile may be
// copied before, in the middle of or after the change. p is the pager of mem, or nil. For pages that the pager has
// not loaded, CopyRunning reads the snapshot.
func (i *Image) CopyRunning(ctx context.Context, p *Pager) error {
	return i.copyFrom(p, func(src snapshot.MemorySource) error { return i.CopyAll(ctx, src) })
}

// CopyLoaded is like CopyRunning, for the pages of set only.
func (i *Image) CopyLoaded(ctx context.Context, set *guestmem.PageSet, p *Pager) error {
	return i.copyFrom(p, func(src snapshot.MemorySource) error { return i.CopySet(ctx, set, src) })
}

func (i *Image) copyFrom(p *Pager, do func(snapshot.MemorySource) error) error {
	if p != nil {
		src, err := p.Source()
		if err != nil {
			return fmt.Errorf("copying guest RAM: %w", err)
		}
		return errors.Join(do(src), src.Close())
	}
	src, err := snapshot.NewGuestSource(i.mem)
	if err != nil {
		return fmt.Errorf("copying guest RAM: %w", err)
	}
	return errors.Join(do(src), src.Close())
}

// CopyAll copies all pages that src has data for to an image that is still empty.
func (i *Image) CopyAll(ctx context.Context, src snapshot.MemorySource) error {
	all := guestmem.NewPageSet(i.size / pageSize)
	for page := uint64(0); ; {
		first, end, err := src.NextData(page)
		if err != nil {
			return fmt.Errorf("copying guest RAM: %w", err)
		}
		if first == end {
			break
		}
		all.Add(first, end)
		page = end
	}
	return i.CopySet(ctx, all, src)
}

// CopySet copies the pages of set from src, which may be a Frozen. Pages that src has no data for become zeros.
// CopySet releases pages once it has copied them.
func (i *Image) CopySet(ctx context.Context, set *guestmem.PageSet, src snapshot.MemorySource) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	release, _ := src.(snapshot.PageReleaser)
	type run struct{ first, end uint64 }
	runs := make(chan run)
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), maxImageWriters) {
		wg.Go(func() {
			buf := make([]byte, imagePiece*pageSize)
			for r := range runs {
				b := buf[:(r.end-r.first)*pageSize]
				err := src.ReadPages(r.first, b)
				if err == nil {
					err = i.write(r.first, b)
				}
				if err != nil {
					cancel(err)
					continue
				}
				if release != nil {
					release.Release(r.first, r.end)
				}
			}
		})
	}
feed:
	for first, end := set.Next(0); first < end; first, end = set.Next(end) {
		end = min(end, first+imagePiece)
		select {
		case runs <- run{first, end}:
		case <-ctx.Done():
			break feed
		}
	}
	close(runs)
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("copying guest RAM to its image: %w", err)
	}
	return nil
}

var zeroPage = make([]byte, pageSize)

// write stores pages from first on in the image.
func (i *Image) write(first uint64, b []byte) error {
	n := uint64(len(b)) / pageSize
	isZero := func(k uint64) bool { return bytes.Equal(b[k*pageSize:][:pageSize], zeroPage) }
	for k := uint64(0); k < n; {
		zero, from := isZero(k), k
		for k++; k < n && isZero(k) == zero; k++ {
		}
		if zero {
			if err := i.punch(first+from, first+k); err != nil {
				return err
			}
			continue
		}
		if _, err := i.f.WriteAt(b[from*pageSize:k*pageSize], int64((first+from)*pageSize)); err != nil {
			return err
		}
		i.mu.Lock()
		i.data.Add(first+from, first+k)
		i.mu.Unlock()
	}
	return nil
}

// punch makes the pages [first, end) zeros.
func (i *Image) punch(first, end uint64) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if lo, hi := i.data.NextBefore(first, end); lo == hi {
		return nil
	}
	i.data.Remove(first, end)
	return os.NewSyscallError("fallocate(FALLOC_FL_PUNCH_HOLE)", unix.Fallocate(int(i.f.Fd()),
		unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(first*pageSize), int64((end-first)*pageSize)))
}

// SetNote stores p after the RAM, for the receiver of the image. ImageNote reads it.
func (i *Image) SetNote(p []byte) error {
	if len(p) > maxNote {
		return fmt.Errorf("%w: a note of %d bytes, at most %d", ErrImage, len(p), maxNote)
	}
	_, err := i.f.WriteAt(p, int64(i.size))
	return err
}

// The kernel refuses to seal a file against writes while any of its pages has extra references. It returns EBUSY
// after some tenths of a second (memfd_wait_for_pins in mm/memfd.c). A page that is being moved or reclaimed also
// has extra references for a moment.
const (
	sealTries = 20
	sealPause = 50 * time.Millisecond
)

// Seal makes the image immutable, for this process too. It may take a second or more on a host that is short of
// memory.
func (i *Image) Seal() error {
	var err error
	for try := 1; ; try++ {
		_, err = unix.FcntlInt(i.f.Fd(), unix.F_ADD_SEALS, guestmem.ImageSeals)
		if err == nil {
			i.sealed = true
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || try == sealTries {
			break
		}
		time.Sleep(sealPause)
	}
	return fmt.Errorf("sealing the image of guest RAM: %w", os.NewSyscallError("fcntl(F_ADD_SEALS)", err))
}

// Pages returns how many pages of the image are not zeros.
func (i *Image) Pages() uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.data.Len()
}

// Slots implements snapshot.MemorySource.
func (i *Image) Slots() []snapshot.Slot { return i.slots }

// NextData implements snapshot.MemorySource.
func (i *Image) NextData(page uint64) (first, end uint64, err error) {
	if !i.sealed {
		return 0, 0, fmt.Errorf("reading an image: %w: it is not sealed", ErrImage)
	}
	first, end = i.data.Next(page)
	return first, end, nil
}

// ReadPages implements snapshot.MemorySource.
func (i *Image) ReadPages(page uint64, b []byte) error {
	if page > i.size/pageSize || uint64(len(b)) > i.size-page*pageSize {
		return fmt.Errorf("reading an image: %w: page %d is not in it", ErrImage, page)
	}
	_, err := i.f.ReadAt(b, int64(page*pageSize))
	return err
}

// ImageNote returns the note that SetNote stored in an image of RAM of the given size.
func ImageNote(f *os.File, ram uint64) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading an image of guest RAM: %w", err)
	}
	n := st.Size() - int64(ram)
	if ram > guestmem.MaxSize || n < 0 || n > maxNote {
		return nil, fmt.Errorf("reading an image of guest RAM: %w: it has %d bytes, RAM %d", ErrImage, st.Size(), ram)
	}
	p := make([]byte, n)
	if _, err := f.ReadAt(p, int64(ram)); err != nil {
		return nil, fmt.Errorf("reading an image of guest RAM: %w", err)
	}
	return p, nil
}
