package guestmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrImage says that a file cannot be what RAM is mapped from.
var ErrImage = errors.New("not a sealed image of guest RAM")

// ImageSeals are what an image must be sealed with (fcntl(2), F_ADD_SEALS): nobody,
// whoever made it, can change it afterwards.
const ImageSeals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// Bounds on the mappings that RAM consists of, for the host allows 65,530 in one process
// (sysctl vm.max_map_count).
const (
	// maxImageRuns is how many pieces of the file are mapped; neighbours are
	// mapped together, holes included, until there are no more.
	maxImageRuns = 512
	// minHole is the smallest hole, in pages, that is left out of the mapping. A
	// hole that is mapped takes memory of the file when it is first touched.
	minHole = 32
	// maxReplaced is how many pieces of the mapping Discard replaces by anonymous
	// memory. Each adds two mappings at most.
	maxReplaced = 16 << 10
)

// image is what RAM is mapped from. Memory.mu guards it.
type image struct {
	// mapped has the pages that the kernel takes from the file when this process
	// has none of its own; data those of them that are not holes.
	mapped, data *PageSet
	replaced     int
}

// NewPrivate is New for RAM that has content from the beginning: the first size bytes of
// f, in the linear numbering that skips the hole. Guests whose RAM is mapped from one
// file share its pages until they write to them; what one writes no other sees. Holes
// of the file are zeros. f may be closed afterwards.
//
// f must be a memfd that has ImageSeals, or NewPrivate fails with ErrImage: a page that
// has not been touched is read from it at any time. It fails like New as well.
func NewPrivate(size uint64, f *os.File) (*Memory, error) {
	m, err := New(size)
	if err != nil {
		return nil, err
	}
	if err := m.mapImage(f); err != nil {
		return nil, errors.Join(fmt.Errorf("mapping guest RAM from its image: %w", err), m.Close())
	}
	return m, nil
}

func (m *Memory) mapImage(f *os.File) error {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("%w: it cannot be sealed: %w", ErrImage, os.NewSyscallError("fcntl(F_GET_SEALS)", err))
	}
	if seals&ImageSeals != ImageSeals {
		return fmt.Errorf("%w: its seals are %#x, %#x are needed", ErrImage, seals, ImageSeals)
	}
	if st, err := f.Stat(); err != nil || uint64(st.Size()) < m.size {
		return errors.Join(fmt.Errorf("%w: it is shorter than the %d bytes of RAM", ErrImage, m.size), err)
	}
	im := &image{mapped: NewPageSet(m.size / PageSize), data: NewPageSet(m.size / PageSize)}
	if err := im.findData(f, m.size); err != nil {
		return err
	}
	for gap := uint64(minHole); ; gap *= 2 {
		if runs := im.join(gap); runs <= maxImageRuns {
			break
		}
	}
	for first, end := im.mapped.Next(0); first < end; first, end = im.mapped.Next(end) {
		if err := mapFixed(m.mem, first*PageSize, (end-first)*PageSize, int(f.Fd())); err != nil {
			return err
		}
	}
	m.keepOut(0, m.size)
	m.image = im
	return nil
}

// findData fills data with the pages that the file has.
func (im *image) findData(f *os.File, size uint64) error {
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && uint64(from) >= size {
			return nil
		}
		if err != nil {
			return os.NewSyscallError("lseek(SEEK_DATA)", err)
		}
		if at, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE); err != nil {
			return os.NewSyscallError("lseek(SEEK_HOLE)", err)
		}
		im.data.Add(uint64(from)/PageSize, (uint64(at)+PageSize-1)/PageSize)
	}
}

// join makes mapped what data is, with holes of less than gap pages, and returns the
// number of runs.
func (im *image) join(gap uint64) (runs int) {
	im.mapped.Remove(0, im.mapped.Pages())
	last := uint64(0)
	for first, end := im.data.Next(0); first < end; first, end = im.data.Next(end) {
		if runs > 0 && first-last < gap {
			first = last
		} else {
			runs++
		}
		im.mapped.Add(first, end)
		last = end
	}
	return runs
}

// keepOut keeps guest RAM out of child processes and core dumps.
func (m *Memory) keepOut(off, n uint64) {
	_ = unix.Madvise(m.mem[off:off+n], unix.MADV_DONTFORK)
	_ = unix.Madvise(m.mem[off:off+n], unix.MADV_DONTDUMP)
}

// discard makes [off, off+n) zeros and gives back what was there. Where RAM is mapped
// from an image, MADV_DONTNEED would bring the image's content back, so the mapping
// itself is replaced; when that has been done too often, pages are cleared, and take
// memory like any page that the guest has written. mu is held.
func (m *Memory) discard(off, n uint64) error {
	drop := func(first, end uint64) error {
		return os.NewSyscallError("madvise(MADV_DONTNEED) on guest RAM",
			unix.Madvise(m.mem[first*PageSize:end*PageSize], unix.MADV_DONTNEED))
	}
	at, last := off/PageSize, (off+n)/PageSize
	if m.image == nil {
		return drop(at, last)
	}
	for at < last {
		first, end := m.image.mapped.NextBefore(at, last)
		if at < first {
			if err := drop(at, first); err != nil {
				return err
			}
		}
		if first < end {
			if err := m.replace(first, end); err != nil {
				return err
			}
		}
		at = max(first, end)
	}
	return nil
}

// replace makes pages that are mapped from the image zeros.
func (m *Memory) replace(first, end uint64) error {
	if m.image.replaced >= maxReplaced {
		clear(m.mem[first*PageSize : end*PageSize])
		return nil
	}
	// If this fails the pages keep their content, which is the guest's own.
	if err := mapFixed(m.mem, first*PageSize, (end-first)*PageSize, -1); err != nil {
		return err
	}
	m.image.replaced++
	m.image.mapped.Remove(first, end)
	m.image.data.Remove(first, end)
	m.keepOut(first*PageSize, (end-first)*PageSize)
	return nil
}

// Backed returns the pages that may be something else than zeros although the host has
// committed nothing for them, since RAM is mapped from an image; nil if it is not. The
// set is the caller's. A page that is given to the balloon is not in later sets.
func (m *Memory) Backed() *PageSet {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.image == nil {
		return nil
	}
	return m.image.data.Clone()
}

// Areas returns the pieces of RAM that are one kind of mapping each, in ascending order;
// see [Slot] for their fields. Before Linux 6.4 or so some operations on mappings may
// not reach beyond one.
func (m *Memory) Areas() []Slot {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.image == nil {
		return append([]Slot(nil), m.slots...)
	}
	var out []Slot
	for _, s := range m.slots {
		for at, last := s.Offset/PageSize, (s.Offset+s.Size)/PageSize; at < last; {
			first, end := m.image.mapped.NextBefore(at, last)
			if first > at || first == end {
				end = first
			}
			out = append(out, Slot{
				GPA: s.GPA + GPA(at*PageSize-s.Offset), HVA: s.HVA + uintptr(at*PageSize-s.Offset),
				Offset: at * PageSize, Size: (end - at) * PageSize,
			})
			at = end
		}
	}
	return out
}
