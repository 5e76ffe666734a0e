package secrets

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/drowse-vm/drowse/devices"
)

// The device's I/O ports.
const (
	Port  = 0x640
	Ports = 16
)

// Offsets of the device's registers.
const (
	Select = 0
	Seek   = 4
	Data   = 8
	Wiped  = 12
)

// Device is the ports, with the secrets that the guest reads by them. Any goroutine may call its methods.
type Device struct {
	Store // its mutex guards what follows
	busy  bool

	// What the guest is reading: the table, a value, or nothing.
	chosen uint32
	data   []byte
	at     int
	sum    uint32
	broken bool // the value was replaced during the read
}

// New makes a device without secrets.
func New() *Device {
	d := &Device{}
	d.wiping = func(e *entry) {
		if d.chosen == e.id {
			d.data, d.at, d.broken = nil, 0, true
		}
	}
	return d
}

// AddTo puts the ports on a bus.
func (d *Device) AddTo(bus *devices.Bus) error {
	if err := bus.Add(Port, Ports, d); err != nil {
		return fmt.Errorf("adding the ports of secrets: %w", err)
	}
	return nil
}

// Remove is Store.Remove. After the last secret the guest counts as having wiped what it has read.
func (d *Device) Remove(name string) bool {
	there := d.Store.Remove(name)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.busy = d.busy && len(d.entries) > 0
	return there
}

// Busy reports whether the guest has a copy of a value, or of a part, that it has not yet wiped from the buffer by
// which its agent passes it on.
func (d *Device) Busy() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.busy
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ReadIO implements [devices.IO].
func (d *Device) ReadIO(off uint64, p []byte) {
	clear(p)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case off == Select && len(p) == 4:
		binary.LittleEndian.PutUint32(p, uint32(len(d.data)-d.at))
	case off == Seek && len(p) == 4:
		sum := d.sum
		if d.broken {
			sum = ^sum // the guest then reads the value again
		}
		binary.LittleEndian.PutUint32(p, sum)
	case off == Data && len(p) == 1:
		if d.at < len(d.data) {
			p[0] = d.data[d.at]
			d.at++
			d.busy = d.busy || d.chosen != 0
		}
		d.sum = crc32.Update(d.sum, castagnoli, p)
	}
}

// WriteIO implements [devices.IO].
func (d *Device) WriteIO(off uint64, p []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case off == Select && len(p) == 4:
		d.choose(binary.LittleEndian.Uint32(p))
	case off == Seek && len(p) == 4:
		d.at, d.sum = int(min(uint64(binary.LittleEndian.Uint32(p)), uint64(len(d.data)))), 0
	case off == Wiped && len(p) == 1 && p[0] == 1:
		d.busy = false
	}
}

// choose begins to read the table or a value. The caller holds mu.
func (d *Device) choose(id uint32) {
	d.chosen, d.data, d.at, d.sum, d.broken = id, nil, 0, 0, false
	if id == 0 {
		d.data = d.encodeTable()
		return
	}
	for _, e := range d.entries {
		if e.id == id {
			d.data = e.value
		}
	}
}
