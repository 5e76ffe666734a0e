package devices

import (
	"fmt"
	"sort"
)

// IO is a block of registers. Offsets are relative to the start of its window, and p never reaches beyond the
// window's end. Several vCPUs may call the methods at once.
type IO interface {
	// ReadIO fills p from the registers at off. Missing registers read as zero.
	ReadIO(off uint64, p []byte)
	// WriteIO writes p, which is valid only during the call.
	WriteIO(off uint64, p []byte)
}

type window struct {
	base, size uint64
	io         IO
}

// Bus finds the registers behind an address. The machine adds windows while it is built. After that the bus does
// not change, and all vCPUs may call Read and Write at once.
type Bus struct {
	windows []window
}

// Add puts io at [base, base+size). It fails when the window is empty, wraps, or
// overlaps another.
func (b *Bus) Add(base, size uint64, io IO) error {
	if size == 0 || base+size < base {
		return fmt.Errorf("adding a window of %#x bytes at %#x to a bus: empty or beyond the address space", size, base)
	}
	i := sort.Search(len(b.windows), func(i int) bool { return b.windows[i].base >= base })
	if i > 0 && b.windows[i-1].base+b.windows[i-1].size > base || i < len(b.windows) && base+size > b.windows[i].base {
		return fmt.Errorf("adding a window of %#x bytes at %#x to a bus: it overlaps another", size, base)
	}
	b.windows = append(b.windows, window{})
	copy(b.windows[i+1:], b.windows[i:])
	b.windows[i] = window{base, size, io}
	return nil
}

func (b *Bus) find(addr uint64, n int) *window {
	i := sort.Search(len(b.windows), func(i int) bool { return b.windows[i].base > addr }) - 1
	if i < 0 {
		return nil
	}
	w := &b.windows[i]
	if addr-w.base >= w.size || uint64(n) > w.size-(addr-w.base) {
		return nil
	}
	return w
}

// Read fills p from addr. If no window is there, it sets all bits to ones, as on a real bus, and returns false.
func (b *Bus) Read(addr uint64, p []byte) bool {
	w := b.find(addr, len(p))
	if w == nil {
		for i := range p {
			p[i] = 0xff
		}
		return false
	}
	w.io.ReadIO(addr-w.base, p)
	return true
}

// Write writes p to addr, and reports whether a window is there.
func (b *Bus) Write(addr uint64, p []byte) bool {
	w := b.find(addr, len(p))
	if w == nil {
		return false
	}
	w.io.WriteIO(addr-w.base, p)
	return true
}
