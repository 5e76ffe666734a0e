package pager

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// serve answers faults until Close. It touches no guest memory and, except for the first fault in each chunk,
// allocates nothing. So the garbage collector can never wait for a page.
func (p *Pager) serve() {
	w, err := p.getWorker()
	if err != nil {
		_ = p.fail(err) // Err has it
		// Keep taking faults, so that the waiting threads are woken.
		w = &worker{fill: filler{fd: p.uffd}}
	}
	defer p.putWorker(w)
	if err := readFaults(p.uffd, p.stopFD, func(b []byte) { p.fault(b, w) }); err != nil {
		_ = p.fail(err) // Err has it
	}
}

// readFaults calls each with every page fault message until stopFD becomes readable.
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

// resolve fills a page that a thread waits for.
func (p *Pager) resolve(page uint64, w *worker) error {
	c := p.chunk(page / chunkPages)
	i := int(page % chunkPages)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.await(i)
	switch {
	case c.isPresent(i):
		// Another fill was faster, and has woken all waiting threads.
		return nil
	case c.isZeroed(i):
		return w.fill.zero(p.hva(page), pageSize)
	}
	if err := p.Err(); err != nil {
		return err
	}
	return p.fill(c, page, p.comesAlone(page), w)
}

// refuse makes the threads that wait for an unavailable page get EFAULT.
//
// Every fill checks Err under the chunk's mutex, and refuse sets it before it takes the mutex. So a page is either
// filled by then and stays accessible, or it is never filled and Go code never learns that it is present.
func (p *Pager) refuse(page uint64, w *worker, err error) {
	_ = p.fail(err) // Err has it
	hva := p.hva(page)
	c := p.chunk(page / chunkPages)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.isPresent(int(page % chunkPages)) {
		if err := revoke(hva, pageSize); err != nil {
			// The waiting threads keep waiting until Close, which is safe.
			return
		}
	}
	w.fill.wake(hva, pageSize)
}
