package guestmem

import (
	"errors"
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxRanges is the largest number of ranges of one vectored call: IOV_MAX.
const MaxRanges = 1024

var iovecs = sync.Pool{New: func() any { return new([MaxRanges]unix.Iovec) }}

// transferOnce passes head and the ranges to one system call. The call may touch missing pages: it blocks in the
// kernel until the pager has filled them, and does not hold up the garbage collector there.
//
// transferOnce does not hold m.mu, since Discard must not wait for a read from a quiet socket. The mapping stays in
// place until Close. A page that is discarded under the call reads as zeros: the guest gave it away while it was a
// buffer.
func (m *Memory) transferOnce(head []byte, rs []Range, call func([]unix.Iovec) (int, error), into bool) (int, error) {
	k := 0
	if len(head) > 0 {
		k = 1
	}
	if len(rs) > MaxRanges-k {
		return 0, ErrRange
	}
	iov := iovecs.Get().(*[MaxRanges]unix.Iovec)
	defer iovecs.Put(iov)
	if k > 0 {
		setIovec(&iov[0], head, 0, uint64(len(head)))
	}
	for _, r := range rs {
		off, err := m.offset(r.GPA, uint64(r.Len))
		if err != nil {
			return 0, err
		}
		if r.Len == 0 {
			continue
		}
		setIovec(&iov[k], m.mem, off, uint64(r.Len))
		k++
	}
	if k == 0 {
		return 0, nil
	}
	n, err := call(iov[:k])
	// A pooled array must not keep addresses of a mapping that may go away.
	clear(iov[:k])
	if into && (n > 0 || err != nil && !errors.Is(err, unix.EAGAIN)) {
		left := uint64(n)
		if err != nil {
			// A failed call may already have written.
			left = ^uint64(0)
		}
		for _, r := range rs {
			if left == 0 {
				break
			}
			part := min(left, uint64(r.Len))
			off, err := m.offset(r.GPA, part)
			if err != nil {
				return n, err
			}
			m.markDirty(off, part)
			left -= part
		}
	}
	return n, err
}

// transferAll repeats a system call until all ranges are done.
func (m *Memory) transferAll(rs []Range, call func(iov []unix.Iovec, done int) (int, error), into bool) error {
	total := 0
	for _, r := range rs {
		total += int(r.Len)
	}
	rest := rs
	for done := 0; done < total; {
		n, err := m.transferOnce(nil, rest, func(iov []unix.Iovec) (int, error) { return call(iov, done) }, into)
		switch {
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		done += n
		if done < total {
			rest = advance(rest, n)
		}
	}
	return nil
}

// advance returns rs without its first n bytes. A short transfer is rare (end
// of file, a signal, a full disk), so it may allocate.
func advance(rs []Range, n int) []Range {
	for len(rs) > 0 && n >= int(rs[0].Len) {
		n -= int(rs[0].Len)
		rs = rs[1:]
	}
	if n == 0 {
		return rs
	}
	rest := append([]Range(nil), rs...)
	rest[0].GPA += GPA(n)
	rest[0].Len -= uint32(n)
	return rest
}
