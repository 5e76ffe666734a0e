package blk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// Request types (virtio 1.2, 5.2.6).
const (
	typeIn          = 0
	typeOut         = 1
	typeFlush       = 4
	typeGetID       = 8
	typeDiscard     = 11
	typeWriteZeroes = 13
)

// Statuses (virtio 1.2, 5.2.6).
const (
	statusOK          = 0
	statusIOError     = 1
	statusUnsupported = 2
)

const (
	headerSize = 16 // type u32, reserved u32, sector u64
	statusSize = 1
	rangeSize  = 16 // sector u64, sectors u32, flags u32
	flagUnmap  = 1
)

// The device does requests in pieces of this many bytes and can pause between them. It starts an interrupted
// request anew after the pause, which is harmless: until it reports the request as done, it owns both the guest's
// buffers and the sectors.
const (
	transferPiece = 1 << 20
	discardPiece  = 64 << 20
	zeroPiece     = 4 << 20
)

// Failures of a request that are not the host's fault.
var (
	errRefused     = errors.New("the request breaks a rule of the protocol")
	errUnsupported = errors.New("the request is not supported")
)

// handle does one request. The guest gets a status byte for every failure, unless it left no room for one. A bad
// request is never an error of the queue. A request for which the host has no space waits: see Options.OnFull.
func (d *Device) handle(c *virtq.Chain) error {
	data := c.Writer.Remaining() - statusSize
	if data < 0 {
		d.stats.Refused.Add(1)
		return nil
	}
	err := d.request(c, data)
	if d.onFull != nil && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)) {
		d.onFull(err)
		return devices.ErrLater
	}
	status := [statusSize]byte{statusOK}
	switch {
	case err == nil:
	case errors.Is(err, devices.ErrAgain), errors.Is(err, devices.ErrLater):
		return err
	case errors.Is(err, errUnsupported):
		d.stats.Refused.Add(1)
		status[0] = statusUnsupported
	case errors.Is(err, errRefused), errors.Is(err, virtq.ErrDriver):
		d.stats.Refused.Add(1)
		status[0] = statusIOError
	default:
		d.hostError(err)
		status[0] = statusIOError
	}
	// The status is the last byte that the device may write.
	if err := c.Writer.Skip(c.Writer.Remaining() - statusSize); err != nil {
		return err
	}
	_, err = c.Writer.Write(status[:])
	return err
}

// request does what the header says. data is the number of bytes that the device may write before the status.
func (d *Device) request(c *virtq.Chain, data int) error {
	header := d.scratch[:headerSize]
	if c.Reader.Remaining() < headerSize {
		return errRefused
	}
	if err := c.Reader.ReadFull(header); err != nil {
		return err
	}
	kind := binary.LittleEndian.Uint32(header)
	sector := binary.LittleEndian.Uint64(header[8:])
	// Data goes one way: a request has bytes to read or bytes to write, never both.
	reads, writes := c.Reader.Remaining() > 0, data > 0
	switch kind {
	case typeIn:
		if reads {
			return errRefused
		}
		return d.read(c, sector, data)
	case typeOut:
		if writes || d.readOnly {
			return errRefused
		}
		return d.write(c, sector, c.Reader.Remaining())
	case typeFlush:
		if reads || writes {
			return errRefused
		}
		if err := d.flush.Do(d.queue, d.backend.Flush); err != nil {
			return err
		}
		d.stats.Flushes.Add(1)
		return nil
	case typeGetID:
		if reads {
			return errRefused
		}
		_, err := c.Writer.Write(d.serial[:min(data, SerialSize)])
		return err
	case typeDiscard:
		return d.ranges(c, featureDiscard, writes, MaxDiscardSectors, 0, discardPiece, d.discard)
	case typeWriteZeroes:
		return d.ranges(c, featureWriteZeroes, writes, MaxZeroSectors, flagUnmap, zeroPiece, d.zero)
	}
	return errUnsupported
}

// span checks a range of sectors against the disk and returns the range in bytes.
func (d *Device) span(sector, sectors uint64) (off, n int64, ok bool) {
	if sectors > d.sectors || sector > d.sectors-sectors {
		return 0, 0, false
	}
	return int64(sector * SectorSize), int64(sectors * SectorSize), true
}

// transferSpan is span for a transfer of n bytes, which must be whole sectors, and MaxRequest at most.
func (d *Device) transferSpan(sector uint64, n int) (off, length int64, err error) {
	off, length, ok := d.span(sector, uint64(n)/SectorSize)
	if !ok || n%SectorSize != 0 || n > MaxRequest {
		return 0, 0, errRefused
	}
	return off, length, nil
}

// takeSpace asks the owner whether n bytes may be written.
func (d *Device) takeSpace(n int64) error {
	if d.space == nil {
		return nil
	}
	return d.space(n)
}

func (d *Device) read(c *virtq.Chain, sector uint64, n int) error {
	off, left, err := d.transferSpan(sector, n)
	if err != nil {
		return err
	}
	for left > 0 {
		if d.queue.Yield() {
			return devices.ErrAgain
		}
		piece := min(left, transferPiece)
		f, fileOff, length, err := d.backend.ReadExtent(off, piece)
		switch {
		case err != nil:
		case length <= 0 || length > piece:
			err = fmt.Errorf("the disk gave an extent of %d bytes for %d", length, piece)
		case f == nil:
			err = c.Writer.Zero(int(length))
		default:
			err = c.Writer.FillFrom(f, fileOff, int(length))
		}
		if err != nil {
			return fmt.Errorf("reading %d bytes at %d of a disk: %w", left, off, err)
		}
		off, left = off+length, left-length
	}
	d.stats.Reads.Add(1)
	d.stats.ReadBytes.Add(uint64(n))
	return nil
}

func (d *Device) write(c *virtq.Chain, sector uint64, n int) error {
	off, left, err := d.transferSpan(sector, n)
	if err == nil {
		err = d.takeSpace(left)
	}
	if err != nil {
		return err
	}
	for left > 0 {
		if d.queue.Yield() {
			return devices.ErrAgain
		}
		piece := min(left, transferPiece)
		f, fileOff, length, err := d.backend.WriteExtent(off, piece)
		if err == nil {
			if length <= 0 || length > piece {
				err = fmt.Errorf("the disk gave an extent of %d bytes for %d", length, piece)
			} else {
				err = c.Reader.DrainTo(f, fileOff, int(length))
			}
			err = d.backend.Wrote(off, length, err)
		}
		if err != nil {
			return fmt.Errorf("writing %d bytes at %d of a disk: %w", left, off, err)
		}
		off, left = off+length, left-length
	}
	d.stats.Writes.Add(1)
	d.stats.WrittenBytes.Add(uint64(n))
	if d.accepted&featureFlush == 0 {
		// A driver that cannot flush relies on a write being durable when
		// it is done (virtio 1.2, 5.2.6.2).
		return d.flush.Do(d.queue, d.backend.Flush)
	}
	return nil
}

// ranges does a request that carries a list of ranges instead of data.
func (d *Device) ranges(c *virtq.Chain, feature uint64, writes bool, limit, flags uint32, piece int64, do func(off, n int64, flags uint32) error) error {
	if d.accepted&feature == 0 {
		return errUnsupported
	}
	n := c.Reader.Remaining()
	if writes || d.readOnly || n == 0 || n%rangeSize != 0 || n > MaxRanges*rangeSize {
		return errRefused
	}
	list := d.scratch[:n]
	if err := c.Reader.ReadFull(list); err != nil {
		return err
	}
	// Check all ranges before doing the first one.
	for e := list; len(e) > 0; e = e[rangeSize:] {
		sector, sectors, f := decodeRange(e)
		if f&^flags != 0 {
			return errUnsupported
		}
		if _, _, ok := d.span(sector, uint64(sectors)); !ok || sectors > limit {
			return errRefused
		}
	}
	for e := list; len(e) > 0; e = e[rangeSize:] {
		sector, sectors, f := decodeRange(e)
		off, left, _ := d.span(sector, uint64(sectors))
		for left > 0 {
			if d.queue.Yield() {
				return devices.ErrAgain
			}
			n := min(left, piece)
			if err := do(off, n, f); err != nil {
				return err
			}
			off, left = off+n, left-n
		}
	}
	return nil
}

func decodeRange(e []byte) (sector uint64, sectors, flags uint32) {
	le := binary.LittleEndian
	return le.Uint64(e), le.Uint32(e[8:]), le.Uint32(e[12:])
}

func (d *Device) discard(off, n int64, _ uint32) error {
	if err := d.backend.Discard(off, n); err != nil {
		return fmt.Errorf("discarding %d bytes at %d of a disk: %w", n, off, err)
	}
	return nil
}

func (d *Device) zero(off, n int64, flags uint32) error {
	if flags&flagUnmap == 0 {
		if err := d.takeSpace(n); err != nil {
			return err
		}
	}
	if err := d.backend.WriteZeroes(off, n, flags&flagUnmap != 0); err != nil {
		return fmt.Errorf("zeroing %d bytes at %d of a disk: %w", n, off, err)
	}
	return nil
}

// hostError counts an error of the host and reports the first one of each kind. Kinds are error numbers, so the
// map is bounded.
func (d *Device) hostError(err error) {
	d.stats.HostErrors.Add(1)
	var kind syscall.Errno // zero for all errors without a number
	errors.As(err, &kind)
	d.mu.Lock()
	_, known := d.reported[kind]
	d.reported[kind] = struct{}{}
	d.mu.Unlock()
	if !known && d.onError != nil {
		d.onError(err)
	}
}
