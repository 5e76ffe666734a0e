package guestmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrImage says that RAM cannot be mapped from a file.
var ErrImage = errors.New("not a sealed image of guest RAM")

// ImageSeals are the seals that an image must have (fcntl(2), F_ADD_SEALS): with them no process can change it, not
// even the one that made it.
const ImageSeals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// Bounds on the number of mappings of RAM: the host allows 65,530 in one process (sysctl vm.max_map_count).
const (
	// maxImageRuns is the largest number of pieces of the file to map. mapImage joins neighbours, holes included,
	// until there are no more.
	maxImageRuns = 512
	// minHole is the size in pages of the smallest hole that is left out of the mapping. A mapped hole takes memory
	// of the file when it is first touched.
	minHole = 32
	// maxReplaced is the largest number of pieces of the mapping that Discard replaces by anonymous memory. Each
	// adds at most two mappings.
	maxReplaced = 16 << 10
)

// image describes the file that RAM is mapped from. Memory.mu guards it.
type image struct {
	// mapped has the pages that the kernel takes from the file if this process has no copy of its own. data has
	// those of mapped that are not holes.
	mapped, data *PageSet
	replaced     int
}

// NewPrivate is New for RAM with initial content: the first size bytes of f, in the linear numbering that skips the
// hole. Guests whose RAM is mapped from one file share its pages until they write to them. No guest sees another's
// writes. Holes of the file are zeros. The caller may close f afterwards.
//
// f must be a memfd that has ImageSeals, or NewPrivate fails with ErrImage: the kernel may read an untouched page
// from it at any time. NewPrivate also fails like New.
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

// findData fills data with the pages that are not holes of the file.
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

// join sets mapped to data plus the holes of less than gap pages, and returns the number of runs.
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

// discard makes [off, off+n) zeros and releases the memory. Where RAM is mapped from an image, MADV_DONTNEED would
// bring the image's content back, so discard replaces the mapping itself. After maxReplaced times it clears the
// pages instead, which then take memory like pages that the guest has written. The caller holds mu.
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

// replace zeroes pages that are mapped from the image.
func (m *Memory) replace(first, end uint64) error {
	if m.image.replaced >= maxReplaced {
		clear(m.mem[first*PageSize : end*PageSize])
		return nil
	}
	// If this fails, the pages keep the guest's own content.
	if err := mapFixed(m.mem, first*PageSize, (end-first)*PageSize, -1); err != nil {
		return err
	}
	m.image.replaced++
	m.image.mapped.Remove(first, end)
	m.image.data.Remove(first, end)
	m.keepOut(first*PageSize, (end-first)*PageSize)
	return nil
}

// Backed returns the pages that may differ from zeros although the host has committed nothing for them, since RAM
// is mapped from an image. Without an image it returns nil. The caller owns the set. Later sets do not contain
// pages that the guest has since given to the balloon.
func (m *Memory) Backed() *PageSet {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.image == nil {
		return nil
	}
	return m.image.data.Clone()
}

// Areas returns the pieces of RAM that are one kind of mapping each, in ascending order; see [Slot] for their
// fields. Before Linux 6.4 or so, some operations on mappings may not span two of them.
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
