package secrets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

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

// Secret describes a secret, without its value.
type Secret struct {
	// Name is 1 to MaxName bytes, without '/' and zero bytes, and not "." or "..".
	Name string
	// Mode has the permissions, 0 to 0777, of the file that the guest sees.
	Mode     uint16
	UID, GID uint32
	// Hidden is for the host alone: see Device.Use. The ports do not show the secret.
	Hidden bool
}

// Errors of Set and Await.
var (
	ErrSecret  = errors.New("not a possible secret")
	ErrTooMany = errors.New("too many secrets")
)

func (s *Secret) check() error {
	if s.Name == "" || s.Name == "." || s.Name == ".." || len(s.Name) > MaxName || strings.ContainsAny(s.Name, "/\x00") || s.Mode > 0o777 {
		return fmt.Errorf("%w: name %q, mode %#o", ErrSecret, s.Name, s.Mode)
	}
	return nil
}

type entry struct {
	Secret
	id      uint32
	present bool
	value   []byte // locked memory; nil if the value is absent or empty
}

// State is a secret as Device.List returns it.
type State struct {
	Secret
	// Present means that the value is here. Otherwise it is awaited.
	Present bool
	Size    int // bytes
}

// Device is the ports, and holds the values. Any goroutine may call its methods.
type Device struct {
	mu      sync.Mutex
	entries []*entry // in the order of names
	lastID  uint32
	busy    bool
	closed  bool
	changed chan struct{} // nil while no caller waits for a change

	// What the guest is reading: the table, a value, or nothing.
	chosen uint32
	data   []byte
	at     int
	sum    uint32
	broken bool // the value was replaced during the read
}

// New makes a device without secrets.
func New() *Device { return &Device{} }

// AddTo puts the ports on a bus.
func (d *Device) AddTo(bus *devices.Bus) error {
	if err := bus.Add(Port, Ports, d); err != nil {
		return fmt.Errorf("adding the ports of secrets: %w", err)
	}
	return nil
}

var errClosed = errors.New("the machine is gone")

// Set gives a secret a value of at most MaxValue bytes, which it copies.
func (d *Device) Set(s Secret, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("%w: %s has %d bytes, at most %d", ErrSecret, s.Name, len(value), MaxValue)
	}
	return d.put(s, value, true)
}

// Await names a secret whose value will come. The guest waits for it. If the secret has a value already, it stays.
func (d *Device) Await(s Secret) error { return d.put(s, nil, false) }

func (d *Device) put(s Secret, value []byte, present bool) error {
	if err := s.check(); err != nil {
		return err
	}
	mem, err := keep(value)
	if err != nil {
		return fmt.Errorf("secret %s: %w", s.Name, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := d.find(s.Name)
	switch {
	case d.closed:
		drop(mem)
		return errClosed
	case found && !present:
		return nil
	case found:
		d.forget(d.entries[i])
	case len(d.entries) >= MaxSecrets:
		drop(mem)
		return fmt.Errorf("%w: a VM has %d at most", ErrTooMany, MaxSecrets)
	default:
		d.entries = slices.Insert(d.entries, i, nil)
	}
	d.lastID++
	d.entries[i] = &entry{Secret: s, id: d.lastID, present: present, value: mem}
	d.tell()
	return nil
}

// tell wakes the callers that wait for a change. The caller holds mu.
func (d *Device) tell() {
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// Use calls f with the value of a hidden secret. The value cannot change during the call. f must not keep it, nor
// call the device. If there is no such value, Use returns false and a channel that closes when there may be one.
// The caller may drop the channel.
func (d *Device) Use(name string, f func(value []byte)) (there bool, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i, found := d.find(name); found && d.entries[i].Hidden && d.entries[i].present {
		f(d.entries[i].value)
		return true, nil
	}
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return false, d.changed
}

func (d *Device) find(name string) (int, bool) {
	return slices.BinarySearchFunc(d.entries, name, func(e *entry, name string) int { return strings.Compare(e.Name, name) })
}

// Remove removes a secret, and reports whether it existed. After the last one the guest counts as having wiped
// what it has read.
func (d *Device) Remove(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := d.find(name)
	if !found {
		return false
	}
	d.forget(d.entries[i])
	d.entries = slices.Delete(d.entries, i, i+1)
	d.busy = d.busy && slices.ContainsFunc(d.entries, func(e *entry) bool { return !e.Hidden })
	d.tell()
	return true
}

// forget wipes a value. The caller holds mu.
func (d *Device) forget(e *entry) {
	if d.chosen == e.id && !e.Hidden {
		d.data, d.at, d.broken = nil, 0, true
	}
	drop(e.value)
	e.value, e.present = nil, false
}

// List returns the secrets in the order of their names.
func (d *Device) List() []State {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]State, 0, len(d.entries))
	for _, e := range d.entries {
		out = append(out, State{Secret: e.Secret, Present: e.present, Size: len(e.value)})
	}
	return out
}

// Busy reports whether the guest has a copy of a value, or of a part, that it has not yet wiped from the buffer by
// which its agent passes it on.
func (d *Device) Busy() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.busy
}

// Close wipes all values. From then on the guest finds no secrets.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.entries {
		d.forget(e)
	}
	d.entries, d.closed = nil, true
	d.tell()
	return nil
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
		if e.id == id && !e.Hidden {
			d.data = e.value
		}
	}
}

// keep copies a value into memory of its own that the kernel neither swaps nor dumps.
func keep(value []byte) ([]byte, error) {
	if len(value) == 0 {
		return nil, nil
	}
	mem, err := unix.Mmap(-1, 0, len(value), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory for it: %w", err)
	}
	if err = unix.Mlock(mem); err != nil {
		err = fmt.Errorf("locking its memory: %w: allow more of it (RLIMIT_MEMLOCK)", err)
	} else if err = unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		err = fmt.Errorf("keeping its memory out of core dumps: %w", err)
	}
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	copy(mem, value)
	return mem, nil
}

// drop wipes memory from keep.
func drop(mem []byte) {
	if mem == nil {
		return
	}
	clear(mem)
	_ = unix.Munmap(mem) // our own mapping: this cannot fail
}
