package rng

import (
	"fmt"
	"io"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// handle fills one buffer. What the guest may have put into a readable part does
// not matter.
func (d *Device) handle(c *virtq.Chain) error {
	for left := min(c.Writer.Remaining(), MaxRequest); left > 0; {
		p := d.piece[:min(left, pieceSize)]
		if _, err := io.ReadFull(d.source, p); err != nil {
			return fmt.Errorf("reading random bytes: %w", err)
		}
		if _, err := c.Writer.Write(p); err != nil {
			return fmt.Errorf("giving the guest random bytes: %w", err)
		}
		left -= len(p)
	}
	// No random byte is used twice, nor left to be found.
	clear(d.piece[:])
	return nil
}
