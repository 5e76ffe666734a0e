package rng

import (
	"fmt"
	"io"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// handle fills one buffer. It ignores any readable part.
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
	// Use no random byte twice, and leave none in memory.
	clear(d.piece[:])
	return nil
}
