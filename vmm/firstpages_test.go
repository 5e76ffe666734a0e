package vmm

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// asDisk is a device that claims to be a disk.
type asDisk struct{ *rng.Device }

func (asDisk) ID() devices.ID { return devices.IDBlock }

func TestFirst_pages_are_those_of_disks(t *testing.T) {
	const beyond = guestmem.GPA(1) << 40
	for name, tc := range map[string]struct {
		avail, used guestmem.GPA
		want        []uint64
	}{
		"a disk":                 {0x1000000, 0x1001000, []uint64{0x1000, 0x1001}},
		"neither is in the RAM":  {beyond, beyond, nil},
		"one of them is outside": {0x1000000, beyond, []uint64{0x1000}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, testConfig{Devices: []Device{
				{Name: "disk", Device: asDisk{rng.New(rng.Options{})}},
				{Name: "rng", Device: rng.New(rng.Options{})},
			}})
			start(t, m, loop...)
			if m.FirstPages() != nil {
				t.Error("there are first pages of a machine that runs")
			}
			if err := m.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			for i := range m.virtio {
				setQueue(m.virtio[i], tc.avail+guestmem.GPA(i)<<16, tc.used+guestmem.GPA(i)<<16)
			}
			if got := m.FirstPages(); !slices.Equal(got, tc.want) {
				t.Errorf("got %#x, want %#x", got, tc.want)
			}
		})
	}
}

// setQueue sets up a device's first queue as a driver does (virtio 1.2, 4.2.2).
func setQueue(t *transport, avail, used guestmem.GPA) {
	for _, r := range []struct {
		at    uint64
		value uint32
	}{
		{0x70, 1}, {0x70, 3}, // status: acknowledge, driver
		{0x24, 1}, {0x20, 1}, // driver features: VERSION_1
		{0x70, 11},           // status: features ok
		{0x30, 0}, {0x38, 4}, // queue 0 of size 4
		{0x90, uint32(avail)}, {0x94, uint32(avail >> 32)},
		{0xa0, uint32(used)}, {0xa4, uint32(used >> 32)},
		{0x44, 1}, // ready
	} {
		t.WriteIO(r.at, binary.LittleEndian.AppendUint32(nil, r.value))
	}
}
