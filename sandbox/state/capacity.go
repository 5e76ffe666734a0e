package state

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// Capacity measures what the host has for its VMs.
func (s *Store) Capacity() (c spec.Capacity, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("measuring the host: %w", err)
		}
	}()
	total, err := vmm.HostMemory()
	if err != nil {
		return c, err
	}
	c.MemoryTotal = int64(total)
	if c.MemoryAvailable, err = limits.AvailableMemory(); err != nil {
		return c, err
	}
	if c.MemoryAvailable == math.MaxInt64 {
		c.MemoryAvailable = 0
	}
	used, most, err := limits.AwakeMemory(s.dir)
	if err != nil {
		return c, err
	}
	c.AwakeMemory, c.AwakeMemoryMost = used<<20, most<<20
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return c, fmt.Errorf("statfs %s: %w", s.dir, err)
	}
	c.DiskTotal, c.DiskFree = int64(st.Blocks)*int64(st.Bsize), int64(st.Bavail)*int64(st.Bsize)
	return c, nil
}
