package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// fcHandler serves the memory of a restored Firecracker guest from a file, one page for each fault, like Firecracker's
// example of a handler (docs/snapshotting/handling-page-faults-on-snapshot-resume.md).
type fcHandler struct {
	listener *net.UnixListener
	memory   []byte // a mapping of the file
	stop     [2]int // a pipe: closing the second end stops the handler
	closing  context.Context
	cancel   context.CancelFunc // ends the wait for Firecracker
	done     sync.WaitGroup

	mu  sync.Mutex
	err error // guarded by mu
}

// fcRegion is a piece of the guest's memory in Firecracker's process.
type fcRegion struct {
	Base     uint64 `json:"base_host_virt_addr"`
	Size     uint64 `json:"size"`
	Offset   uint64 `json:"offset"` // in the file
	PageSize uint64 `json:"page_size"`
	// PageKiB is in bytes too, whatever its name says. Versions before 1.10 have only this field.
	PageKiB uint64 `json:"page_size_kib"`
}

// Bounds of what Firecracker sends.
const (
	maxFCRegions = 64
	maxFCMessage = 64 << 10
	maxFCPage    = 2 << 20
)

// serveFaults listens at a socket for the one Firecracker whose guest gets the memory.
func serveFaults(socket, memory string) (_ *fcHandler, err error) {
	h := &fcHandler{stop: [2]int{-1, -1}}
	h.closing, h.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("serving page faults: %w", err), h.close())
		}
	}()
	f, err := os.Open(memory)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if h.memory, err = unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE); err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	if err = unix.Pipe2(h.stop[:], unix.O_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	if h.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}); err != nil {
		return nil, err
	}
	h.done.Go(func() {
		if err := h.serve(); err != nil {
			h.mu.Lock()
			h.err = err
			h.mu.Unlock()
		}
	})
	return h, nil
}

// failed returns why the handler ended early.
func (h *fcHandler) failed() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// close stops the handler and releases its resources.
func (h *fcHandler) close() (err error) {
	h.cancel()
	if h.listener != nil {
		err = h.listener.Close()
	}
	if h.stop[1] >= 0 {
		err = errors.Join(err, unix.Close(h.stop[1]))
	}
	h.done.Wait()
	if h.stop[0] >= 0 {
		err = errors.Join(err, unix.Close(h.stop[0]))
	}
	if h.memory != nil {
		err = errors.Join(err, unix.Munmap(h.memory))
	}
	h.listener, h.memory, h.stop = nil, nil, [2]int{-1, -1}
	return err
}

func (h *fcHandler) serve() error {
	c, err := h.listener.AcceptUnix()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.Close()
	// close must not wait for a message of Firecracker.
	defer context.AfterFunc(h.closing, func() { c.Close() })()
	uffd, regions, err := readRegions(c)
	if err != nil {
		return err
	}
	defer unix.Close(uffd)
	return h.faults(uffd, regions)
}

// readRegions reads where the guest's memory is, and receives the descriptor of its faults.
func readRegions(c *net.UnixConn) (uffd int, regions []fcRegion, err error) {
	body, oob := make([]byte, maxFCMessage), make([]byte, unix.CmsgSpace(4*16))
	n, oobn, _, _, err := c.ReadMsgUnix(body, oob)
	if err != nil {
		return -1, nil, fmt.Errorf("waiting for Firecracker's memory: %w", err)
	}
	var fds []int
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for i := range msgs {
			if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	err = json.Unmarshal(body[:n], &regions)
	if err == nil && (len(fds) != 1 || len(regions) == 0 || len(regions) > maxFCRegions) {
		err = fmt.Errorf("%d descriptors and %d regions", len(fds), len(regions))
	}
	for i := range regions {
		r := &regions[i]
		if r.PageSize == 0 {
			r.PageSize = r.PageKiB
		}
		if err == nil && (r.PageSize < 4096 || r.PageSize > maxFCPage || r.PageSize&(r.PageSize-1) != 0 || r.Base+r.Size < r.Base) {
			err = fmt.Errorf("region %+v", *r)
		}
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return -1, nil, fmt.Errorf("what Firecracker says of its memory is not known here, %.200q: %w", body[:n], err)
	}
	return fds[0], regions, nil
}

// From linux/userfaultfd.h.
const (
	uffdMessage   = 32
	uffdPagefault = 0x12
	uffdAddress   = 16 // offset of arg.pagefault.address
)

// faults answers page faults until close, or until the memory is gone.
func (h *fcHandler) faults(uffd int, regions []fcRegion) error {
	if err := unix.SetNonblock(uffd, true); err != nil {
		return err
	}
	fds := []unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}, {Fd: int32(h.stop[0])}}
	var buf [64 * uffdMessage]byte
	for {
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
		if fds[1].Revents != 0 {
			return nil
		}
		n, err := unix.Read(uffd, buf[:])
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			if fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
				return nil // its process has ended
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("reading from userfaultfd: %w", err)
		}
		for m := buf[:n]; len(m) >= uffdMessage; m = m[uffdMessage:] {
			if m[0] != uffdPagefault {
				continue
			}
			addr := binary.LittleEndian.Uint64(m[uffdAddress:])
			if err := h.fill(uffd, regions, addr); err != nil {
				return fmt.Errorf("giving the guest the page at %#x: %w", addr, err)
			}
		}
	}
}

// fill copies the page of an address into the guest.
func (h *fcHandler) fill(uffd int, regions []fcRegion, addr uint64) error {
	for _, r := range regions {
		if addr < r.Base || addr >= r.Base+r.Size {
			continue
		}
		page := addr &^ (r.PageSize - 1)
		at := r.Offset + page - r.Base
		if page < r.Base || at+r.PageSize < at || at+r.PageSize > uint64(len(h.memory)) {
			return errors.New("it is not in the file")
		}
		for {
			err := copyPage(uffd, page, h.memory[at:at+r.PageSize])
			switch {
			case errors.Is(err, unix.EAGAIN):
				continue // the mapping is changing
			case errors.Is(err, unix.EEXIST), errors.Is(err, unix.ESRCH):
				return nil // another fault got the page, or the process has ended
			}
			return err
		}
	}
	return errors.New("it is in no region")
}
