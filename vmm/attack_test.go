package vmm

import (
	"context"
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// busy is a device whose Pause returns only when Pause of two devices has been called.
type busy struct {
	*rng.Device
	asked *atomic.Int32
}

func (b busy) Pause(ctx context.Context) error {
	b.asked.Add(1)
	for b.asked.Load() < 2 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Microsecond):
		}
	}
	return b.Device.Pause(ctx)
}

// A guest gives each device as much work to finish before a pause as it can. The devices finish at the same time.
func TestAttack_pause_waits_for_one_busy_device_after_another(t *testing.T) {
	var asked atomic.Int32
	m := newMachine(t, testConfig{Devices: []Device{
		{Name: "a", Device: busy{rng.New(rng.Options{}), &asked}}, {Name: "b", Device: busy{rng.New(rng.Options{}), &asked}},
	}})
	start(t, m, loop...)
	for i := range m.virtio {
		setQueue(m.virtio[i], 0x1000000+guestmem.GPA(i)<<16, 0x1001000+guestmem.GPA(i)<<16)
		m.virtio[i].WriteIO(0x70, binary.LittleEndian.AppendUint32(nil, 15)) // status: driver ok
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
}
