package fs

import (
	"encoding/binary"
	"errors"
	"math"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
)

func (d *Device) open(r *request) error {
	flags := r.body.u32()
	access := flags & unix.O_ACCMODE
	switch {
	case access == unix.O_ACCMODE:
		return unix.EINVAL
	case access != unix.O_RDONLY && !d.dir.writable:
		return unix.EROFS
	case len(d.handles) >= MaxHandles:
		return errTooMany
	}
	n, f, err := d.find(r.node)
	if err != nil {
		return err
	}
	defer f.close()
	if f.kind() != unix.S_IFREG {
		return unix.EPERM // a FIFO, socket or device belongs to the host
	}
	fd, err := f.reopen(int(access))
	if err != nil {
		return err
	}
	r.out.open(d.tree.open(n, fd, access, false))
	return nil
}

func (d *Device) create(r *request) error {
	flags, mode, _, _ := r.body.u32(), r.body.u32(), r.body.u32(), r.body.u32()
	parent, dir, name, err := d.place(r)
	if err != nil {
		return err
	}
	defer dir.close()
	access := flags & unix.O_ACCMODE
	switch {
	case access == unix.O_ACCMODE:
		return unix.EINVAL
	case len(d.handles) >= MaxHandles:
		return errTooMany
	}
	n, f, fd, err := d.newFile(parent, dir, name, int(access), mode)
	if errors.Is(err, unix.EEXIST) && flags&unix.O_EXCL == 0 {
		n, f, fd, err = d.openExisting(parent, dir, name, flags)
	}
	if err != nil {
		return err
	}
	r.out.entry(n, &f.Statx_t)
	r.out.open(d.tree.open(n, fd, access, false))
	return nil
}

// openExisting opens a file that was made after the guest looked.
func (d *Device) openExisting(parent *node, dir *file, name string, flags uint32) (*node, *file, int, error) {
	f, err := lookFrom(dir.fd, name)
	if err != nil {
		return nil, nil, -1, err
	}
	defer f.close()
	if f.kind() != unix.S_IFREG {
		return nil, nil, -1, unix.EPERM
	}
	fd, err := f.reopen(int(flags & unix.O_ACCMODE))
	if err != nil {
		return nil, nil, -1, err
	}
	if flags&unix.O_TRUNC != 0 && flags&unix.O_ACCMODE != unix.O_RDONLY {
		if err = strip(fd); err == nil {
			err = retry(func() error { return unix.Ftruncate(fd, 0) })
		}
	}
	var n *node
	if err == nil {
		err = f.stat()
	}
	if err == nil {
		n, err = d.know(f.identity(), parent, name)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, nil, -1, err
	}
	return n, f, fd, nil
}

func (d *Device) read(r *request) error {
	fh, off, size := r.body.u64(), r.body.u64(), r.body.u32()
	if off > math.MaxInt64 {
		return unix.EINVAL
	}
	h, err := d.handleFD(fh, false)
	if err != nil {
		return err
	}
	if h.flags == unix.O_WRONLY {
		return unix.EBADF
	}
	n := min(int(size), r.room, MaxTransfer)
	if int64(off) > math.MaxInt64-int64(n) {
		return unix.EINVAL
	}
	if n == 0 {
		return nil
	}
	// The caller writes what comes before the data once the data are there.
	w := r.chain.Writer
	if err := w.Skip(outHeaderSize); err != nil {
		return err
	}
	if r.data, err = w.FillSome(h, int64(off), n); err != nil {
		r.data = 0
		return err
	}
	return nil
}

func (d *Device) write(r *request) error {
	fh, off, size, how := r.body.u64(), r.body.u64(), r.body.u32(), r.body.u32()
	_, flags, _ := r.body.u64(), r.body.u32(), r.body.u32()
	if off > math.MaxInt64-MaxTransfer || size > MaxTransfer || int(size) != r.chain.Reader.Remaining() {
		return unix.EINVAL
	}
	h, err := d.handleFD(fh, false)
	if err != nil {
		return err
	}
	if h.flags == unix.O_RDONLY {
		return unix.EBADF
	}
	n := 0
	if size > 0 {
		if err := strip(h.fd); err != nil {
			return err
		}
		data := r.chain.Reader
		if n, err = data.DrainSome(h, int64(off), int(size), writeFlags(how, flags)); err != nil {
			return err
		}
	}
	r.out.u32(uint32(n))
	r.out.u32(0)
	return nil
}

// writeFlags makes each write follow the flags with which the guest opened the file. The host appends, since only
// it knows where the end is. But the guest writes back cached pages through any handle, and those go to their own
// place.
func writeFlags(how, flags uint32) int {
	f := 0
	if flags&unix.O_APPEND != 0 && how&writeCached == 0 {
		f |= unix.RWF_APPEND
	}
	switch {
	case flags&unix.O_SYNC == unix.O_SYNC:
		f |= unix.RWF_SYNC
	case flags&unix.O_DSYNC != 0:
		f |= unix.RWF_DSYNC
	}
	return f
}

// flush is what close(2) sends. The host already has what was written.
func (d *Device) flush(r *request) error {
	if h := d.handles[r.body.u64()]; r.body.bad || h == nil || h.dir {
		return unix.EBADF
	}
	return nil
}

func (d *Device) release(r *request) error    { return d.releaseHandle(r, false) }
func (d *Device) releasedir(r *request) error { return d.releaseHandle(r, true) }

func (d *Device) releaseHandle(r *request, dir bool) error {
	h := d.handles[r.body.u64()]
	if r.body.bad || h == nil || h.dir != dir {
		return unix.EBADF
	}
	d.tree.release(h)
	return nil
}

func (d *Device) fsync(r *request) error    { return d.sync(r, false) }
func (d *Device) fsyncdir(r *request) error { return d.sync(r, true) }

func (d *Device) sync(r *request, dir bool) error {
	fh, flags := r.body.u64(), r.body.u32()
	h, err := d.handleFD(fh, dir)
	if err != nil || !d.dir.writable {
		return err
	}
	call := unix.Fsync
	if flags&fsyncData != 0 {
		call = unix.Fdatasync
	}
	if err := d.syncing.Settle(r.queue); err != nil {
		return err
	}
	// The handle may be closed while the sync runs.
	fd, err := unix.FcntlInt(uintptr(h.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return d.syncing.Do(r.queue, func() error {
		defer unix.Close(fd)
		return retry(func() error { return call(fd) })
	})
}

func (d *Device) lseek(r *request) error {
	fh, off, whence := r.body.u64(), r.body.u64(), r.body.u32()
	if off > math.MaxInt64 || whence != unix.SEEK_DATA && whence != unix.SEEK_HOLE {
		return unix.EINVAL
	}
	h, err := d.handleFD(fh, false)
	if err != nil {
		return err
	}
	at, err := unix.Seek(h.fd, int64(off), int(whence))
	if err != nil {
		return err
	}
	r.out.u64(uint64(at))
	return nil
}

func (d *Device) fallocate(r *request) error {
	fh, off, n, mode := r.body.u64(), r.body.u64(), r.body.u64(), r.body.u32()
	if off > math.MaxInt64 || n > math.MaxInt64-off || n == 0 {
		return unix.EINVAL
	}
	if off+n > allocateEnd {
		return unix.EFBIG
	}
	switch mode {
	case 0, unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		unix.FALLOC_FL_ZERO_RANGE, unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE:
	default:
		return unix.EOPNOTSUPP
	}
	h, err := d.handleFD(fh, false)
	if err != nil {
		return err
	}
	if h.flags == unix.O_RDONLY {
		return unix.EBADF
	}
	if err := strip(h.fd); err != nil {
		return err
	}
	for n > 0 {
		if r.queue.Yield() {
			return devices.ErrAgain // what is done stays done, and is fast the next time
		}
		piece := min(n, allocatePiece-off%allocatePiece)
		if err := retry(func() error { return unix.Fallocate(h.fd, mode, int64(off), int64(piece)) }); err != nil {
			return err
		}
		off, n = off+piece, n-piece
	}
	return nil
}

// allocateEnd bounds how far into a file an allocation may reach: a range without blocks also costs a system call
// for each piece. It is the largest size of a file on ext4.
const allocateEnd = 16 << 40

// allocatePiece is how many bytes of a file the device allocates, frees or zeroes at once. It can pause between calls.
const allocatePiece = 64 << 20

func (d *Device) opendir(r *request) error {
	if len(d.handles) >= MaxHandles {
		return errTooMany
	}
	n, f, err := d.findDir(r.node)
	if err != nil {
		return err
	}
	defer f.close()
	fd, err := f.reopen(unix.O_RDONLY | unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	r.out.open(d.tree.open(n, fd, unix.O_RDONLY, true))
	return nil
}

// Layout of a directory entry of getdents64(2).
const (
	dentOff  = 8
	dentLen  = 16
	dentType = 18
	dentName = 19
)

// readdir returns entries from a position of the host's file system on, as many as one call returns and as fit.
func (d *Device) readdir(r *request) error {
	fh, off, size := r.body.u64(), r.body.u64(), r.body.u32()
	if off > math.MaxInt64 {
		return unix.EINVAL
	}
	h, err := d.handleFD(fh, true)
	if err != nil {
		return err
	}
	room := min(int(size), r.room, maxReply)
	if _, err := unix.Seek(h.fd, int64(off), unix.SEEK_SET); err != nil {
		return err
	}
	n, err := unix.Getdents(h.fd, d.listing[:])
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	for b := d.listing[:n]; len(b) >= dentName; {
		length := int(le.Uint16(b[dentLen:]))
		if length <= dentName || length > len(b) {
			return unix.EIO
		}
		e := b[:length]
		b = b[length:]
		p := parser{b: e[dentName:]}
		name := p.text()
		padded := (direntSize + len(name) + 7) &^ 7
		if p.bad || name == "" || len(name) > MaxName {
			continue
		}
		if len(r.out.b)+padded > room {
			if len(r.out.b) == 0 {
				return unix.EINVAL
			}
			break
		}
		ino := le.Uint64(e)
		if name == ".." {
			ino = h.node.identity.ino // the parent of the share must stay hidden from the guest
		}
		r.out.u64(ino)
		r.out.u64(le.Uint64(e[dentOff:]))
		r.out.u32(uint32(len(name)))
		r.out.u32(uint32(e[dentType]))
		r.out.b = append(r.out.b, name...)
		r.out.zeros(padded - direntSize - len(name))
	}
	return nil
}
