package virtq

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Used is a chain to give back to the driver, as in [Queue.Push].
type Used struct {
	Head    uint16
	Written uint32
}

// PushAll gives several chains back at once: the driver sees either all of them or none. A network packet in
// several chains needs that (virtio 1.2, 5.1.6.4.1).
func (q *Queue) PushAll(used []Used) error {
	if q.broken != nil {
		return q.broken
	}
	var e [8]byte
	for i, u := range used {
		binary.LittleEndian.PutUint32(e[:], uint32(u.Head))
		binary.LittleEndian.PutUint32(e[4:], u.Written)
		slot := q.layout.Used + 4 + 8*guestmem.GPA((q.nextUsed+uint16(i))%q.layout.Size)
		if err := q.mem.Write(slot, e[:]); err != nil {
			return fmt.Errorf("writing the used ring: %w", err)
		}
	}
	q.nextUsed += uint16(len(used))
	if err := q.mem.StoreUint16(q.layout.Used+2, q.nextUsed); err != nil {
		return fmt.Errorf("writing the used index: %w", err)
	}
	return nil
}
