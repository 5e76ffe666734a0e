package mmio

import (
	"encoding/binary"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// WindowSize is the size of a device's register window, in bytes. Only the first 0x200 bytes answer.
const WindowSize = 0x1000

// QueueNotify is the offset of the register through which the driver kicks queues: a 32-bit write of the queue's
// index. It needs an ioeventfd for each of Options.Kicks, with the index as datamatch.
const QueueNotify = 0x050

// Registers (virtio 1.2, 4.2.2, table 4.1). All are 32 bits wide.
const (
	regMagic             = 0x000
	regVersion           = 0x004
	regDeviceID          = 0x008
	regVendorID          = 0x00c
	regDeviceFeatures    = 0x010
	regDeviceFeaturesSel = 0x014
	regDriverFeatures    = 0x020
	regDriverFeaturesSel = 0x024
	regQueueSel          = 0x030
	regQueueNumMax       = 0x034
	regQueueNum          = 0x038
	regQueueReady        = 0x044
	regInterruptStatus   = 0x060
	regInterruptACK      = 0x064
	regStatus            = 0x070
	regQueueDescLow      = 0x080
	regQueueDescHigh     = 0x084
	regQueueDriverLow    = 0x090
	regQueueDriverHigh   = 0x094
	regQueueDeviceLow    = 0x0a0
	regQueueDeviceHigh   = 0x0a4
	regSHMLenLow         = 0x0b0
	regSHMBaseHigh       = 0x0bc
	regConfigGeneration  = 0x0fc
	regConfig            = 0x100
	regEnd               = 0x200
)

const (
	magic    = 0x74726976 // "virt"
	version  = 2
	vendorID = 0x53575244 // "DRWS"
)

// Bits of the status register (virtio 1.2, 2.1).
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
	statusNeedsReset  = 64
	statusFailed      = 128

	statusKnown = statusAcknowledge | statusDriver | statusDriverOK | statusFeaturesOK | statusNeedsReset | statusFailed
)

// Bits of the interrupt status register.
const (
	interruptQueue  = 1
	interruptConfig = 2
)

// ReadIO reads registers. 32-bit registers answer only to aligned 32-bit reads; the configuration space answers to
// any read inside it. Everything else reads as zero.
func (t *Transport) ReadIO(off uint64, p []byte) {
	clear(p)
	if off >= regConfig {
		if off < regEnd && uint64(len(p)) <= regEnd-off {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.dev.ReadConfig(uint32(off-regConfig), p)
		}
		return
	}
	if len(p) == 4 && off%4 == 0 {
		binary.LittleEndian.PutUint32(p, t.read(off))
	}
}

func (t *Transport) read(off uint64) uint32 {
	// Registers that an interrupt handler reads do not need the lock.
	switch off {
	case regInterruptStatus:
		return t.interrupts.Load()
	case regStatus:
		return t.status.Load()
	case regConfigGeneration:
		return t.generation.Load()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch off {
	case regMagic:
		return magic
	case regVersion:
		return version
	case regDeviceID:
		return uint32(t.dev.ID())
	case regVendorID:
		return vendorID
	case regDeviceFeatures:
		return half(t.offered, t.deviceFeaturesSel)
	case regQueueNumMax:
		if q := t.selected(); q != nil {
			return uint32(q.max)
		}
	case regQueueReady:
		if q := t.selected(); q != nil && q.ready {
			return 1
		}
	case regSHMLenLow, regSHMLenLow + 4, regSHMLenLow + 8, regSHMBaseHigh:
		// Length and base of a shared memory region that does not exist.
		return ^uint32(0)
	}
	return 0
}

// WriteIO writes registers. It ignores everything but aligned 32-bit writes to a register and writes inside the
// configuration space.
func (t *Transport) WriteIO(off uint64, p []byte) {
	if off >= regConfig {
		if off < regEnd && uint64(len(p)) <= regEnd-off {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.dev.WriteConfig(uint32(off-regConfig), p)
		}
		return
	}
	if len(p) == 4 && off%4 == 0 {
		t.write(off, binary.LittleEndian.Uint32(p))
	}
}

func (t *Transport) write(off uint64, v uint32) {
	switch off {
	case QueueNotify:
		// The ioeventfd does the same.
		if uint64(v) < uint64(len(t.kicks)) {
			t.kicks[v].Signal()
		}
		return
	case regInterruptACK:
		t.interrupts.And(^v)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch off {
	case regStatus:
		t.setStatus(v)
	case regDeviceFeaturesSel:
		t.deviceFeaturesSel = v
	case regDriverFeaturesSel:
		t.driverFeaturesSel = v
	case regDriverFeatures:
		if s := t.status.Load(); s&statusDriver != 0 && s&(statusFeaturesOK|statusFailed) == 0 {
			setHalf(&t.accepted, t.driverFeaturesSel, v, &t.acceptedBeyond)
		}
	case regQueueSel:
		t.queueSel = v
	default:
		t.writeQueue(off, v)
	}
}

// writeQueue writes a register of the selected queue. The driver can lay out queues between FEATURES_OK and
// DRIVER_OK (virtio 1.2, 3.1.1), and must make a ready queue not ready first. After that, writes have no effect
// until a reset: a device must never see its queue move or grow.
func (t *Transport) writeQueue(off uint64, v uint32) {
	q := t.selected()
	s := t.status.Load()
	if q == nil || s&statusFeaturesOK == 0 || s&(statusDriverOK|statusFailed|statusNeedsReset) != 0 {
		return
	}
	if off == regQueueReady {
		q.ready = v&1 != 0
		return
	}
	if q.ready {
		return
	}
	switch off {
	case regQueueNum:
		// Keep an impossible size as zero, which no activation accepts.
		q.layout.Size = 0
		if v <= uint32(q.max) && v&(v-1) == 0 {
			q.layout.Size = uint16(v)
		}
	case regQueueDescLow:
		setLow(&q.layout.Desc, v)
	case regQueueDescHigh:
		setHigh(&q.layout.Desc, v)
	case regQueueDriverLow:
		setLow(&q.layout.Avail, v)
	case regQueueDriverHigh:
		setHigh(&q.layout.Avail, v)
	case regQueueDeviceLow:
		setLow(&q.layout.Used, v)
	case regQueueDeviceHigh:
		setHigh(&q.layout.Used, v)
	}
}

func (t *Transport) selected() *queue {
	if uint64(t.queueSel) < uint64(len(t.queues)) {
		return &t.queues[t.queueSel]
	}
	return nil
}

// half returns one 32-bit word of a 64-bit feature set; words beyond are zero.
func half(v uint64, sel uint32) uint32 {
	if sel > 1 {
		return 0
	}
	return uint32(v >> (32 * sel))
}

// setHalf sets one word of a feature set. A bit in a word that does not exist
// makes the set unacceptable.
func setHalf(v *uint64, sel, word uint32, beyond *bool) {
	if sel > 1 {
		*beyond = *beyond || word != 0
		return
	}
	shift := 32 * sel
	*v = *v&^(0xffffffff<<shift) | uint64(word)<<shift
}

func setLow(a *guestmem.GPA, v uint32)  { *a = *a&^0xffffffff | guestmem.GPA(v) }
func setHigh(a *guestmem.GPA, v uint32) { *a = *a&0xffffffff | guestmem.GPA(v)<<32 }
