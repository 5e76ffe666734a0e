package kvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
)

const nrGetStatsFD = 0xce

// Layout of the file behind KVM_GET_STATS_FD (api.rst 4.133).
const (
	statsHeaderSize = 24
	statsDescSize   = 16 // and the name
	maxStatsName    = 256
	maxStats        = 1024
)

// Stats returns KVM's own counters of this vCPU that are one number each, by their names
// in the kernel: "exits", "insn_emulation" and so on. Which there are is the host's matter.
// It may be called while the vCPU runs, from any goroutine. Hosts before Linux 5.14 have
// none: the error wraps errors.ErrUnsupported.
func (c *VCPU) Stats() (map[string]uint64, error) {
	fd, err := ioctl(c.fd, gokvm.IIO(nrGetStatsFD), 0)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("KVM_GET_STATS_FD: %w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("KVM_GET_STATS_FD: %w", err)
	}
	f := os.NewFile(uintptr(fd), "KVM statistics")
	defer f.Close()
	return readStats(f)
}

type readerAt interface {
	ReadAt(p []byte, off int64) (int, error)
}

func readStats(f readerAt) (map[string]uint64, error) {
	read := func(off int64, n int) ([]byte, error) {
		p := make([]byte, n)
		if _, err := f.ReadAt(p, off); err != nil {
			return nil, fmt.Errorf("reading KVM's statistics: %w", err)
		}
		return p, nil
	}
	h, err := read(0, statsHeaderSize)
	if err != nil {
		return nil, err
	}
	field := func(i int) uint32 { return binary.NativeEndian.Uint32(h[4*i:]) }
	nameSize, count, descs, data := field(1), field(2), field(4), field(5)
	if nameSize == 0 || nameSize > maxStatsName || count > maxStats {
		return nil, fmt.Errorf("%w: %d statistics with names of %d bytes", ErrState, count, nameSize)
	}
	out := make(map[string]uint64, count)
	for i := range int64(count) {
		size := int(statsDescSize + nameSize)
		d, err := read(int64(descs)+i*int64(size), size)
		if err != nil {
			return nil, err
		}
		if values := binary.NativeEndian.Uint16(d[6:]); values != 1 {
			continue // a histogram
		}
		v, err := read(int64(data)+int64(binary.NativeEndian.Uint32(d[8:])), 8)
		if err != nil {
			return nil, err
		}
		out[unix.ByteSliceToString(d[statsDescSize:])] = binary.NativeEndian.Uint64(v)
	}
	return out, nil
}
