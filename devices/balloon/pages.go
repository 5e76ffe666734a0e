package balloon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// pieceLen is how many page numbers are looked at together; Linux sends up to 256.
// A pause comes between them.
const pieceLen = 256

// reportPiece is how many bytes of a report go back to the host at once; a pause comes between them. Linux reports up
// to 128 MiB in one request.
const reportPiece = 32 << 20

// pageList is memory to be used again.
type pageList struct {
	raw     [4 * pieceLen]byte
	numbers [pieceLen]uint32
}

// inflate takes the pages that a request names. The numbers are sorted, so that
// neighbours go back to the host together. A pause may have it done anew: until
// the guest has the request back, the pages are the balloon's.
func (d *Device) inflate(q *devices.Queue, c *virtq.Chain) error {
	count := c.Reader.Remaining() / 4
	if count > MaxPages {
		d.stats.BadPages.Add(uint64(count - MaxPages))
		count = MaxPages
	}
	for count > 0 {
		if q.Yield() {
			return devices.ErrAgain
		}
		n := min(count, pieceLen)
		if err := c.Reader.ReadFull(d.pages.raw[:4*n]); err != nil {
			return fmt.Errorf("reading a list of pages: %w", err)
		}
		numbers := d.pages.numbers[:n]
		for i := range numbers {
			numbers[i] = binary.LittleEndian.Uint32(d.pages.raw[4*i:])
		}
		slices.Sort(numbers)
		for len(numbers) > 0 {
			run := 1
			for run < len(numbers) && numbers[run]-numbers[run-1] <= 1 {
				run++
			}
			first, last := uint64(numbers[0]), uint64(numbers[run-1])
			if d.discard(guestmem.GPA(first*PageSize), (last-first+1)*PageSize, run) {
				d.stats.Inflated.Add((last - first + 1) * PageSize)
			}
			numbers = numbers[run:]
		}
		count -= n
	}
	return nil
}

// deflate lets the guest have its pages again: they are there as soon as it
// touches them.
func (d *Device) deflate(*devices.Queue, *virtq.Chain) error { return nil }

// report takes the free pages that a request is made of: the buffers themselves,
// which the device could write but does not.
func (d *Device) report(q *devices.Queue, c *virtq.Chain) error {
	n := c.Writer.Remaining()
	ranges, err := c.Writer.Ranges(d.ranges[:0], n)
	d.ranges = ranges
	if err != nil {
		return fmt.Errorf("reading a report of free pages: %w", err)
	}
	for _, r := range ranges {
		for at, end := r.GPA, r.GPA+guestmem.GPA(r.Len); at < end; {
			if q.Yield() {
				return devices.ErrAgain
			}
			n := min(end-at, reportPiece-at%reportPiece)
			if d.discard(at, uint64(n), 1) {
				d.stats.Reported.Add(uint64(n))
			}
			at += n
		}
	}
	return nil
}

// discard gives a range of guest memory, which the guest has named as so many
// pages, back to the host.
func (d *Device) discard(gpa guestmem.GPA, n uint64, pages int) bool {
	err := d.memory.Discard(gpa, n)
	switch {
	case err == nil:
		return true
	case errors.Is(err, guestmem.ErrRange):
		d.stats.BadPages.Add(uint64(pages))
	default:
		if d.stats.HostErrors.Add(1) == 1 && d.onError != nil {
			d.onError(fmt.Errorf("giving %d bytes of guest memory at %#x back to the host: %w", n, gpa, err))
		}
	}
	return false
}
