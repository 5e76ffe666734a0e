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
	// QueueSize is the size of the device's only queue.
	QueueSize = 256
	// MaxSegments is the most pieces of memory of one read or write: a full queue less header and status.
	MaxSegments = QueueSize - 2
	// SegmentSize is the most bytes of one such piece (size_max). A driver that keeps to both limits stays below
	// MaxRequest. A Linux driver that does not know them sends 1280 KiB at most.
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

// Options are the optional settings of New.
type Options struct {
	// Serial is the disk's serial number as the guest reads it. The device cuts it off after SerialSize bytes.
	Serial string
	// OnError receives the host's I/O errors, which the guest sees as failed requests: the first one of each kind
	// (errno). It must not block. Nil ignores them.
	OnError func(error)
	// Space, if not nil, is called before the device writes n bytes. It returns an error that is ENOSPC if they
	// would leave too little space on the host's file system. It must be quick.
	Space func(n int64) error
	// OnFull is called when a request meets ENOSPC or EDQUOT, from the disk or from Space. The request does not
	// fail: it and all later ones wait, and the device tries them again on Resume or when the driver kicks. A
	// snapshot saves them as not begun. OnFull must not block. Without it the guest gets an I/O error.
	OnFull func(error)
}

// Stats counts the requests that succeeded and those that failed.
type Stats struct {
	Reads, Writes, Flushes  atomic.Uint64
	ReadBytes, WrittenBytes atomic.Uint64
	// Refused requests broke a rule of the protocol. HostErrors are requests that failed on the host.
	Refused, HostErrors atomic.Uint64
}

// Device is a virtio block device. It does its requests one after the other, on a goroutine of its own.
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

	// Set between Activate and Reset. Only the worker uses the fields after workers.
	workers devices.Workers
	queue   *devices.Queue
	// accepted are the features that the driver has accepted.
	accepted uint64
	flush    devices.Slow
	scratch  [MaxRanges * rangeSize]byte

	mu       sync.Mutex // guards reported
	reported map[syscall.Errno]struct{}
}

// New makes a device on a disk. The caller keeps the disk and closes it after Reset.
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

// WriteConfig implements [devices.Device]. The guest can write nothing here.
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

// Pause implements [devices.Pauser]. It waits for one piece of the current request, and Resume starts that request
// anew. A flush continues during the pause.
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }

// Stats returns the live counters.
func (d *Device) Stats() *Stats { return &d.stats }
