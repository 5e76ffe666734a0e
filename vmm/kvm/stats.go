package kvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
)

const nrGetStatsFD = 0xce

// Layout of the file behind KVM_GET_STATS_FD (api.rst 4.133).
const (
	statsHeaderSize = 24
	statsDescSize   = 16 // without the name
	maxStatsName    = 256
	maxStats        = 1024
)

// statistics is the file of a vCPU's counters. The first use opens it.
type statistics struct {
	mu   sync.Mutex
	file *os.File
	// at is the offset in the file of each counter.
	at map[string]int64
}

// Stats returns KVM's own counters of this vCPU that are single numbers, by their names in the kernel: "exits",
// "insn_emulation" and so on. The host's kernel determines which exist. Hosts before Linux 5.14 have none: the
// error wraps errors.ErrUnsupported.
//
// Any goroutine may call Stats. The first call of Stats or Counter waits while the vCPU is in KVM_RUN, which may be
// forever; later ones do not.
func (c *VCPU) Stats() (map[string]uint64, error) {
	s := &c.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.openStats(); err != nil {
		return nil, err
	}
	out := make(map[string]uint64, len(s.at))
	for name, at := range s.at {
		v, err := readCounter(s.file, at)
		if err != nil {
			return nil, err
		}
		out[name] = v
	}
	return out, nil
}

// Counter returns one of Stats. If the host does not have it, the error wraps errors.ErrUnsupported.
func (c *VCPU) Counter(name string) (uint64, error) {
	s := &c.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.openStats(); err != nil {
		return 0, err
	}
	at, ok := s.at[name]
	if !ok {
		return 0, fmt.Errorf("KVM's statistics: %w: there is no %s", errors.ErrUnsupported, name)
	}
	return readCounter(s.file, at)
}

func (c *VCPU) openStats() error {
	if c.stats.file != nil {
		return nil
	}
	fd, err := ioctl(c.fd, gokvm.IIO(nrGetStatsFD), 0)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("KVM_GET_STATS_FD: %w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("KVM_GET_STATS_FD: %w", err)
	}
	f := os.NewFile(uintptr(fd), "KVM statistics")
	at, err := findCounters(f)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	c.stats.file, c.stats.at = f, at
	return nil
}

func (s *statistics) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

func readStats(f io.ReaderAt, off int64, p []byte) error {
	if _, err := f.ReadAt(p, off); err != nil {
		return fmt.Errorf("reading KVM's statistics: %w", err)
	}
	return nil
}

func readCounter(f io.ReaderAt, at int64) (uint64, error) {
	var p [8]byte
	if err := readStats(f, at, p[:]); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint64(p[:]), nil
}

// findCounters returns the offsets of the counters.
func findCounters(f io.ReaderAt) (map[string]int64, error) {
	var h [statsHeaderSize]byte
	if err := readStats(f, 0, h[:]); err != nil {
		return nil, err
	}
	field := func(i int) uint32 { return binary.NativeEndian.Uint32(h[4*i:]) }
	nameSize, count, descs, data := field(1), field(2), field(4), field(5)
	if nameSize == 0 || nameSize > maxStatsName || count > maxStats {
		return nil, fmt.Errorf("%w: %d statistics with names of %d bytes", ErrState, count, nameSize)
	}
	size := int(statsDescSize + nameSize)
	all := make([]byte, int(count)*size)
	if err := readStats(f, int64(descs), all); err != nil {
		return nil, err
	}
	at := make(map[string]int64, count)
	for ; len(all) > 0; all = all[size:] {
		if values := binary.NativeEndian.Uint16(all[6:]); values != 1 {
			continue // a histogram
		}
		at[unix.ByteSliceToString(all[statsDescSize:size])] = int64(data) + int64(binary.NativeEndian.Uint32(all[8:]))
	}
	return at, nil
}
