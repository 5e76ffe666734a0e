package blk

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/drowse-vm/drowse/devices"
)

// SectorSize is the unit of the protocol's addresses and lengths, in bytes
// (virtio 1.2, 5.2.4).
const SectorSize = 512

// Limits of the device.
const (
	// QueueSize is the size of its only queue.
	QueueSize = 256
	// MaxSegments is the most pieces of memory of one read or write: a queue's
	// worth, less header and status.
	MaxSegments = QueueSize - 2
	// SegmentSize is the most bytes of one such piece (size_max). Both together are what a driver keeps to, and no more
	// than MaxRequest; one that knows of no such limit sends 1280 KiB at most if it is Linux.
	SegmentSize = 64 << 10
	// MaxRequest is the most bytes of one read or write. A longer one fails.
	MaxRequest = 16 << 20
	// MaxRanges is the most ranges of one discard or write-zeroes request.
	MaxRanges = 32
	// MaxDiscardSectors and MaxZeroSectors bound one such range, in sectors.
	MaxDiscardSectors = 1 << 21
	MaxZeroSectors    = 1 << 16
	// SerialSize is the most bytes of the disk's serial number.
	SerialSize = 20
)

// Feature bits (virtio 1.2, 5.2.3).
const (
	featureSizeMax     uint64 = 1 << 1
	featureSegMax      uint64 = 1 << 2
	featureRO          uint64 = 1 << 5
	featureBlkSize     uint64 = 1 << 6
	featureFlush       uint64 = 1 << 9
	featureTopology    uint64 = 1 << 10
	featureDiscard     uint64 = 1 << 13
	featureWriteZeroes uint64 = 1 << 14
)

// physicalBlockExp is the alignment at which writes are cheapest: 2^3 sectors,
// the block of every file system and of layered disks.
const physicalBlockExp = 3

// Options are what New can do without.
type Options struct {
	// Serial is what the guest reads as the disk's serial number; what is
	// beyond SerialSize bytes is cut off.
	Serial string
	// OnError is told of the host's I/O errors, which the guest sees as a
	// failed request: once for each kind (errno), however often it happens.
	// It must not block. Nil ignores them.
	OnError func(error)
	// Space, if not nil, is asked before n bytes are written. It returns an error that is ENOSPC when that many would
	// leave too little on the host's file system. It must be quick.
	Space func(n int64) error
	// OnFull is told when a request meets ENOSPC or EDQUOT, of the disk or of Space. The request is not failed: it and
	// all after it wait until the device is resumed, or the driver kicks, and are then tried again; a snapshot has them
	// as not begun. It must not block. Without it the guest gets an I/O error.
	OnFull func(error)
}

// Stats counts the requests that were done, and those that were not.
type Stats struct {
	Reads, Writes, Flushes  atomic.Uint64
	ReadBytes, WrittenBytes atomic.Uint64
	// Refused requests broke a rule of the protocol; HostErrors failed on the
	// host.
	Refused, HostErrors atomic.Uint64
}

// Device is a virtio block device. Its requests are done one after the other on
// a goroutine of its own.
type Device struct {
	backend  Backend
	sectors  uint64
	readOnly bool
	serial   [SerialSize]byte
	onError  func(error)
	space    func(int64) error
	onFull   func(error)
	config   [configSize]byte
	stats    Stats

	// Between Activate and Reset; the worker alone uses what follows it.
	workers devices.Workers
	queue   *devices.Queue
	// accepted are the features that the driver has accepted.
	accepted uint64
	flush    devices.Slow
	scratch  [MaxRanges * rangeSize]byte

	mu       sync.Mutex // guards reported
	reported map[syscall.Errno]struct{}
}

// New makes a device on a disk, which stays the caller's to close, after Reset.
func New(b Backend, o Options) *Device {
	d := &Device{
		backend:  b,
		sectors:  uint64(b.Size()) / SectorSize,
		readOnly: b.ReadOnly(),
		onError:  o.OnError,
		space:    o.Space,
		onFull:   o.OnFull,
		reported: make(map[syscall.Errno]struct{}),
	}
	copy(d.serial[:], o.Serial)
	d.makeConfig()
	return d
}

// Offsets in the configuration space (virtio 1.2, 5.2.4).
const (
	configCapacity         = 0
	configSizeMax          = 8
	configSegMax           = 12
	configBlkSize          = 20
	configPhysicalBlockExp = 24
	configMinIOSize        = 26
	configDiscardSectors   = 36
	configDiscardSegments  = 40
	configDiscardAlign     = 44
	configZeroSectors      = 48
	configZeroSegments     = 52
	configZeroMayUnmap     = 56
	configSize             = 60
)

func (d *Device) makeConfig() {
	le := binary.LittleEndian
	c := d.config[:]
	le.PutUint64(c[configCapacity:], d.sectors)
	le.PutUint32(c[configSizeMax:], SegmentSize)
	le.PutUint32(c[configSegMax:], MaxSegments)
	le.PutUint32(c[configBlkSize:], SectorSize)
	c[configPhysicalBlockExp] = physicalBlockExp
	le.PutUint16(c[configMinIOSize:], 1<<physicalBlockExp)
	if d.readOnly {
		return
	}
	le.PutUint32(c[configDiscardSectors:], MaxDiscardSectors)
	le.PutUint32(c[configDiscardSegments:], MaxRanges)
	le.PutUint32(c[configDiscardAlign:], 1<<physicalBlockExp)
	le.PutUint32(c[configZeroSectors:], MaxZeroSectors)
	le.PutUint32(c[configZeroSegments:], MaxRanges)
	c[configZeroMayUnmap] = 1
}

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDBlock }

// Features implements [devices.Device].
func (d *Device) Features() uint64 {
	f := featureSizeMax | featureSegMax | featureBlkSize | featureFlush | featureTopology
	if d.readOnly {
		return f | featureRO
	}
	return f | featureDiscard | featureWriteZeroes
}

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 { return []uint16{QueueSize} }

// ReadConfig implements [devices.Device].
func (d *Device) ReadConfig(off uint32, p []byte) { devices.ReadConfig(d.config[:], off, p) }

// WriteConfig implements [devices.Device]; nothing here can be written.
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	d.accepted, d.queue = a.Features, a.Queues[0]
	d.workers.Serve(d.queue, a.Interrupt, d.handle)
	return nil
}

// Reset implements [devices.Device].
func (d *Device) Reset() error {
	d.workers.Stop()
	d.flush.End()
	d.workers, d.queue, d.accepted = nil, nil, 0
	return nil
}

// Pause implements [devices.Pauser]: it waits for a piece of the request under way, which is done anew after Resume. A
// flush goes on meanwhile.
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }

// Stats are the counts, which go on.
func (d *Device) Stats() *Stats { return &d.stats }
