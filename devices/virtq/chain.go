package virtq

import (
	"io"
	"math"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Chain is one request of the driver: memory for the device to read, then memory for it to write. It holds copies
// of the descriptors, not of the data. The zero value is ready for [Queue.Pop].
type Chain struct {
	Reader Reader
	Writer Writer

	head     uint16
	segments []guestmem.Range
	ranges   []guestmem.Range // scratch memory for the vectored calls
	readable int              // the number of segments, from the first, for the device to read
	total    uint64
}

// Head identifies the chain to [Queue.Push].
func (c *Chain) Head() uint16 { return c.head }

func (c *Chain) reset(mem *guestmem.Memory, head uint16) {
	if c.segments == nil {
		c.segments = make([]guestmem.Range, 0, 16)
	}
	c.head = head
	c.segments = c.segments[:0]
	c.readable = 0
	c.total = 0
	c.Reader = Reader{cursor{mem: mem, chain: c}}
	c.Writer = Writer{cursor: cursor{mem: mem, chain: c, writable: true}}
}

func (c *Chain) add(addr guestmem.GPA, n uint32, writable bool) error {
	switch {
	case n == 0:
		return ErrZeroLength
	case len(c.segments) >= MaxSegments:
		return ErrLoop
	case !writable && c.readable != len(c.segments):
		return ErrDirection
	case !c.Reader.mem.Contains(addr, uint64(n)):
		return ErrAddress
	case c.total+uint64(n) > math.MaxUint32:
		return ErrTotal
	}
	c.total += uint64(n)
	c.segments = append(c.segments, guestmem.Range{GPA: addr, Len: n})
	if !writable {
		c.readable = len(c.segments)
		c.Reader.left += uint64(n)
	} else {
		c.Writer.left += uint64(n)
	}
	return nil
}

// cursor walks over one half of a chain.
type cursor struct {
	mem      *guestmem.Memory
	chain    *Chain
	writable bool
	seg      int    // index within the half
	off      uint32 // within the segment
	left     uint64
}

func (c *cursor) half() []guestmem.Range {
	if c.writable {
		return c.chain.segments[c.chain.readable:]
	}
	return c.chain.segments[:c.chain.readable]
}

// Remaining returns how many bytes are left.
func (c *cursor) Remaining() int { return int(c.left) }

// each calls f for the pieces of the next n bytes and moves past them. If f fails the cursor remains at the piece
// that failed.
func (c *cursor) each(n int, f func(gpa guestmem.GPA, n int) error) error {
	if n < 0 || uint64(n) > c.left {
		return ErrShort
	}
	half := c.half()
	for n > 0 {
		s := half[c.seg]
		k := min(n, int(s.Len-c.off))
		if err := f(s.GPA+guestmem.GPA(c.off), k); err != nil {
			return err
		}
		n -= k
		c.left -= uint64(k)
		c.off += uint32(k)
		if c.off == s.Len {
			c.seg, c.off = c.seg+1, 0
		}
	}
	return nil
}

// Ranges appends the next n bytes of guest memory to rs as ranges and moves past them, for vectored I/O. It fails
// with ErrShort when fewer are left.
func (c *cursor) Ranges(rs []guestmem.Range, n int) ([]guestmem.Range, error) {
	err := c.each(n, func(gpa guestmem.GPA, n int) error {
		rs = append(rs, guestmem.Range{GPA: gpa, Len: uint32(n)})
		return nil
	})
	return rs, err
}

// Skip moves past n bytes.
func (c *cursor) Skip(n int) error {
	return c.each(n, func(guestmem.GPA, int) error { return nil })
}

// Reader reads the device-readable part of a chain.
type Reader struct{ cursor }

// Read copies from the guest, at most what is left. At the end it returns io.EOF.
func (r *Reader) Read(p []byte) (int, error) {
	if r.left == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	n := min(len(p), r.Remaining())
	return n, r.ReadFull(p[:n])
}

// ReadFull copies exactly len(p) bytes, or fails with ErrShort.
func (r *Reader) ReadFull(p []byte) error {
	at := 0
	return r.each(len(p), func(gpa guestmem.GPA, n int) error {
		err := r.mem.Read(gpa, p[at:at+n])
		at += n
		return err
	})
}

// DrainTo writes the next n bytes to f at off, without a copy in this process and with one system call if the
// kernel takes them all. It fails with ErrShort, and writes nothing, when fewer are left. After another failure the
// reader has still moved past them, and any part may have been written.
func (r *Reader) DrainTo(f guestmem.File, off int64, n int) error {
	rs, err := r.Ranges(r.chain.ranges[:0], n)
	r.chain.ranges = rs
	if err != nil {
		return err
	}
	return r.mem.PwriteFull(rs, f, off)
}

// DrainSome does one pwritev2(2) of the next n bytes to f at off with its flags. It returns how many bytes were
// written, but always moves past n. It fails with ErrShort, and writes nothing, when fewer than n are left.
func (r *Reader) DrainSome(f guestmem.File, off int64, n, flags int) (int, error) {
	rs, err := r.Ranges(r.chain.ranges[:0], n)
	r.chain.ranges = rs
	if err != nil {
		return 0, err
	}
	return r.mem.Pwritev(rs, f, off, flags)
}

// Writer writes the device-writable part of a chain.
type Writer struct {
	cursor
	written uint32
}

// Written returns how many bytes have been put into the chain, for [Queue.Push].
func (w *Writer) Written() uint32 { return w.written }

// Write copies p to the guest. It fails with ErrShort, and writes nothing, when p does not fit.
func (w *Writer) Write(p []byte) (int, error) {
	at := 0
	err := w.each(len(p), func(gpa guestmem.GPA, n int) error {
		err := w.mem.Write(gpa, p[at:at+n])
		if err == nil {
			at += n
			w.written += uint32(n)
		}
		return err
	})
	return at, err
}

// Zero clears the next n bytes.
func (w *Writer) Zero(n int) error {
	return w.each(n, func(gpa guestmem.GPA, n int) error {
		if err := w.mem.Zero(gpa, uint64(n)); err != nil {
			return err
		}
		w.written += uint32(n)
		return nil
	})
}

// FillFrom reads the next n bytes from f at off, without a copy in this process and with one system call if the
// kernel gives them all. It fails with ErrShort, and reads nothing, when fewer are left. After another failure the
// writer has still moved past them, nothing counts as written, and the content of the range is undefined.
func (w *Writer) FillFrom(f guestmem.File, off int64, n int) error {
	rs, err := w.Ranges(w.chain.ranges[:0], n)
	w.chain.ranges = rs
	if err != nil {
		return err
	}
	if err := w.mem.PreadFull(rs, f, off); err != nil {
		return err
	}
	w.written += uint32(n)
	return nil
}

// FillSome does one preadv(2) of at most n bytes from f at off: fewer at the end of a file. It returns how many
// were read, but always moves past n. It fails with ErrShort, and reads nothing, when there is no room for n.
func (w *Writer) FillSome(f guestmem.File, off int64, n int) (int, error) {
	rs, err := w.Ranges(w.chain.ranges[:0], n)
	w.chain.ranges = rs
	if err != nil {
		return 0, err
	}
	k, err := w.mem.Preadv(rs, f, off)
	if err == nil {
		w.written += uint32(k)
	}
	return k, err
}

// Wrote counts n bytes that the kernel has put into ranges from Ranges.
func (w *Writer) Wrote(n int) { w.written += uint32(n) }
