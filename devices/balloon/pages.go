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

// pieceLen is how many page numbers inflate takes at a time. Linux sends up to 256. The device can pause between
// pieces.
const pieceLen = 256

// reportPiece is how many bytes of a report go back to the host in one call. The device can pause between calls.
// Linux reports up to 128 MiB in one request.
const reportPiece = 32 << 20

// pageList is scratch memory that inflate reuses.
type pageList struct {
	raw     [4 * pieceLen]byte
	numbers [pieceLen]uint32
}

// inflate takes the pages that a request names. It sorts the numbers, so that neighbours go back to the host
// together. After a pause it may start the request anew: until the guest has the request back, the balloon owns
// the pages.
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

// deflate lets the guest have its pages again: the host provides them when the guest touches them.
func (d *Device) deflate(*devices.Queue, *virtq.Chain) error { return nil }

// report takes the free pages of a request. The buffers themselves are the pages, and the device writes nothing to
// them.
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

// discard gives a range of guest memory back to the host. pages is how many pages the guest named for it.
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
