package pager

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// serve answers faults until Close. It touches no guest memory and, but for the
// first fault in each chunk, allocates nothing, so nothing that the garbage
// collector does can wait for a page.
func (p *Pager) serve() {
	w, err := p.getWorker()
	if err != nil {
		_ = p.fail(err) // Err has it
		// Faults are still taken, so that those who wait for pages come free.
		w = &worker{fill: filler{fd: p.uffd}}
	}
	defer p.putWorker(w)
	if err := readFaults(p.uffd, p.stopFD, func(b []byte) { p.fault(b, w) }); err != nil {
		_ = p.fail(err) // Err has it
	}
}

// readFaults hands on the messages of page faults until something can be read from
// stopFD.
func readFaults(uffd, stopFD int, each func(message []byte)) error {
	fds := []unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}, {Fd: int32(stopFD), Events: unix.POLLIN}}
	var buf [messages * messageSize]byte
	for {
		n, err := unix.Read(uffd, buf[:])
		switch {
		case err == nil:
			for b := buf[:n]; len(b) >= messageSize; b = b[messageSize:] {
				if b[0] == eventPagefault {
					each(b)
				}
			}
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("reading from userfaultfd: %w", err)
		}
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for page faults: %w", err)
		}
		if fds[1].Revents != 0 {
			return nil
		}
	}
}

// fault answers one message of the kernel.
func (p *Pager) fault(b []byte, w *worker) {
	flags := binary.LittleEndian.Uint64(b[messageFlags:])
	page, ok := p.pageAt(uintptr(binary.LittleEndian.Uint64(b[messageAddress:])))
	if !ok {
		return // only RAM is registered
	}
	if flags&flagProtected != 0 {
		if f := p.frozen.Load(); f == nil || !f.written(page) {
			w.fill.wake(p.hva(page), pageSize)
		}
		return
	}
	if flags&flagWrite != 0 {
		p.stats.WriteFaults.Add(1)
	} else {
		p.stats.ReadFaults.Add(1)
	}
	if err := p.resolve(page, w); err != nil {
		p.refuse(page, w, err)
	}
}

// resolve makes a page that somebody waits for appear.
func (p *Pager) resolve(page uint64, w *worker) error {
	c := p.chunk(page / chunkPages)
	i := int(page % chunkPages)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.isPresent(i):
		// Somebody was faster. Filling it has woken all who waited.
		return nil
	case c.isZeroed(i):
		return w.fill.zero(p.hva(page), pageSize)
	}
	if err := p.Err(); err != nil {
		return err
	}
	p.record.add(page)
	return p.fill(c, page, w)
}

// refuse lets those who wait for a page that cannot be had run into EFAULT.
//
// Everybody who fills pages looks at Err under the chunk's mutex, and refuse
// sets it before it takes the mutex. So a page is either filled by then, and
// stays accessible, or is never filled, and Go code never told that it is there.
func (p *Pager) refuse(page uint64, w *worker, err error) {
	_ = p.fail(err) // Err has it
	hva := p.hva(page)
	c := p.chunk(page / chunkPages)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.isPresent(int(page % chunkPages)) {
		if err := revoke(hva, pageSize); err != nil {
			// The waiters stay where they are, which is safe, until Close.
			return
		}
	}
	w.fill.wake(hva, pageSize)
}
