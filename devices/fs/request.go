package fs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// request is one request, with the fields that all kinds share already parsed.
type request struct {
	op     uint32
	unique uint64
	node   uint64
	body   parser
	out    builder
	queue  *devices.Queue
	chain  *virtq.Chain
	room   int // bytes that the reply may have after its header
	data   int // bytes of data already in the chain, after the header
}

// operation describes one kind of request.
type operation struct {
	do func(*Device, *request) error
	// in is the least bytes that the request has after its header, without names. out is how many bytes the reply
	// has. The device refuses a request without them, or without room for the reply, before it does anything.
	in, out int
	// changes means that a read-only share refuses it.
	changes bool
}

// operations lists the supported requests. The device answers others with ENOSYS, and Linux then does without
// them.
var operations = map[uint32]operation{
	opLookup:     {(*Device).lookup, 0, entrySize, false},
	opGetattr:    {(*Device).getattr, 16, attrOutSize, false},
	opSetattr:    {(*Device).setattr, 88, attrOutSize, true},
	opReadlink:   {(*Device).readlink, 0, 1, false},
	opSymlink:    {(*Device).symlink, 0, entrySize, true},
	opMknod:      {(*Device).mknod, 0, entrySize, true},
	opMkdir:      {(*Device).mkdir, 0, entrySize, true},
	opUnlink:     {(*Device).unlink, 0, 0, true},
	opRmdir:      {(*Device).rmdir, 0, 0, true},
	opRename:     {(*Device).rename, 0, 0, true},
	opRename2:    {(*Device).rename, 0, 0, true},
	opLink:       {(*Device).link, 0, entrySize, true},
	opOpen:       {(*Device).open, 4, openOutSize, false},
	opCreate:     {(*Device).create, 0, entrySize + openOutSize, true},
	opRead:       {(*Device).read, 20, 0, false},
	opWrite:      {(*Device).write, writeInSize, 8, true},
	opFlush:      {(*Device).flush, 0, 0, false},
	opRelease:    {(*Device).release, 0, 0, false},
	opFsync:      {(*Device).fsync, 12, 0, false},
	opStatfs:     {(*Device).statfs, 0, statfsOutSize, false},
	opOpendir:    {(*Device).opendir, 0, openOutSize, false},
	opReaddir:    {(*Device).readdir, 20, 0, false},
	opReleasedir: {(*Device).releasedir, 0, 0, false},
	opFsyncdir:   {(*Device).fsyncdir, 12, 0, false},
	opInit:       {(*Device).init, 16, initOutSize, false},
	opDestroy:    {(*Device).destroy, 0, 0, false},
	opLseek:      {(*Device).lseek, 20, 8, false},
	opFallocate:  {(*Device).fallocate, 28, 0, true},
}

// handle does one request. The guest gets an error number for every failure, unless it left no room for one. A bad
// request is never an error of the queue.
func (d *Device) handle(q *devices.Queue, c *virtq.Chain) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var header [inHeaderSize]byte
	size := c.Reader.Remaining()
	if size < inHeaderSize {
		return nil
	}
	if err := c.Reader.ReadFull(header[:]); err != nil {
		return err
	}
	le := binary.LittleEndian
	r := request{op: le.Uint32(header[4:]), unique: le.Uint64(header[8:]), node: le.Uint64(header[16:]), queue: q, chain: c}
	r.room = c.Writer.Remaining() - outHeaderSize
	r.out.b = d.reply[:0]
	switch r.op {
	case opForget, opBatchForget:
		return d.forgetAll(&r)
	case opInterrupt:
		// No request waits for long, and this one has no reply.
		return nil
	}
	if r.room < 0 {
		return nil
	}
	head := c.Writer
	err := unix.EINVAL
	var done error
	if uint64(le.Uint32(header[:])) == uint64(size) {
		done = d.do(&r)
		if errors.Is(done, devices.ErrAgain) {
			return done // the reply is still unwritten
		}
		err = 0
		if done != nil {
			err = d.errno(&r, done)
		}
	}
	if err != 0 {
		r.out.b, r.data = r.out.b[:0], 0
	}
	var reply [outHeaderSize]byte
	le.PutUint32(reply[:], uint32(outHeaderSize+len(r.out.b)+r.data))
	le.PutUint32(reply[4:], -uint32(err))
	le.PutUint64(reply[8:], r.unique)
	if _, err := head.Write(reply[:]); err != nil {
		return err
	}
	if len(r.out.b) > 0 {
		if _, err := head.Write(r.out.b); err != nil {
			return err
		}
	}
	// head has the header, which was written through the copy. Count also the data that read has put behind it.
	c.Writer = head
	c.Writer.Wrote(r.data)
	return nil
}

// do does what the request's header says.
func (d *Device) do(r *request) error {
	o, ok := operations[r.op]
	switch {
	case !ok:
		return unix.ENOSYS
	case r.room < o.out:
		return unix.EINVAL
	case !d.started && r.op != opInit:
		return unix.EIO // the protocol begins with FUSE_INIT
	case o.changes && !d.dir.writable:
		return unix.EROFS
	}
	n := r.chain.Reader.Remaining()
	if r.op == opWrite {
		n = min(n, writeInSize) // the data stay in the chain
	}
	if n < o.in || n > maxBody {
		return unix.EINVAL
	}
	if err := r.chain.Reader.ReadFull(d.body[:n]); err != nil {
		return err
	}
	r.body.b = d.body[:n]
	return o.do(d, r)
}

// errTooMany means that the guest has reached a limit of the device. That is no failure of the host.
var errTooMany = fmt.Errorf("the guest knows or has open as much as it may: %w", unix.ENFILE)

// errno returns the error number for the guest. It reports errors that the host should see.
func (d *Device) errno(r *request, err error) syscall.Errno {
	var no syscall.Errno
	if !errors.As(err, &no) || no == 0 {
		no = unix.EIO
	}
	switch no {
	case unix.EIO, unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENODEV, unix.ENXIO:
		// lseek beyond the end of a file also returns ENXIO.
		ofGuest := errors.Is(err, errTooMany) || r.op == opLseek && no == unix.ENXIO
		if _, known := d.reported[no]; !known && d.onError != nil && d.started && !ofGuest {
			d.reported[no] = struct{}{}
			d.onError(fmt.Errorf("share %s: request %d failed: %w", d.tag, r.op, err))
		}
	}
	return no
}

// forgetAll does FUSE_FORGET and FUSE_BATCH_FORGET, which have no reply.
func (d *Device) forgetAll(r *request) error {
	var b [forgetOneSize]byte
	in := &r.chain.Reader
	if in.Remaining() < 8 || r.op == opForget && in.Remaining() != 8 {
		return nil
	}
	if err := in.ReadFull(b[:8]); err != nil {
		return err
	}
	le := binary.LittleEndian
	if r.op == opForget {
		d.forget(r.node, le.Uint64(b[:]))
		return nil
	}
	// The guest's count is not trusted: only the entries in the chain count, at most MaxNodes, since the guest
	// cannot know more.
	for n := min(le.Uint32(b[:]), MaxNodes); n > 0 && in.Remaining() >= forgetOneSize; n-- {
		if err := in.ReadFull(b[:]); err != nil {
			return err
		}
		d.forget(le.Uint64(b[:]), le.Uint64(b[8:]))
	}
	return nil
}

func (d *Device) init(r *request) error {
	major, minor, readahead, flags := r.body.u32(), r.body.u32(), r.body.u32(), r.body.u32()
	if major < protoMajor || major == protoMajor && minor < protoMinor {
		return unix.EPROTO
	}
	d.tree.clear()
	d.started = major == protoMajor // a newer driver begins again with our version
	r.out.u32(protoMajor)
	r.out.u32(protoMinor)
	r.out.u32(min(readahead, MaxTransfer))
	r.out.u32(flags & initFlags)
	r.out.u16(16) // requests in the background; Linux's default is 12
	r.out.u16(12) // the congestion threshold
	r.out.u32(MaxTransfer)
	r.out.u32(1) // times are in nanoseconds
	r.out.u16(MaxTransfer / 4096)
	r.out.zeros(initOutSize - len(r.out.b))
	return nil
}

func (d *Device) destroy(*request) error {
	d.tree.clear()
	return nil
}

// name takes a file name from the body.
func (r *request) name() (string, error) {
	s := r.body.text()
	if r.body.bad {
		return "", unix.EINVAL
	}
	return s, checkName(s)
}

// place takes a name from the body, and finds the directory that holds it: the request's node.
func (d *Device) place(r *request) (parent *node, dir *file, name string, err error) {
	if name, err = r.name(); err == nil {
		parent, dir, err = d.findDir(r.node)
	}
	return parent, dir, name, err
}

func (d *Device) lookup(r *request) error {
	parent, dir, name, err := d.place(r)
	if err != nil {
		return err
	}
	defer dir.close()
	f, err := lookFrom(dir.fd, name)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			if old := d.places[place{parent, name}]; old != nil {
				d.detach(old)
			}
		}
		return err
	}
	defer f.close()
	return d.found(r, parent, f, name)
}

// found replies with the file that was found at a place.
func (d *Device) found(r *request, parent *node, f *file, name string) error {
	n, err := d.know(f.identity(), parent, name)
	if err == nil {
		r.out.entry(n, &f.Statx_t)
	}
	return err
}

func (d *Device) getattr(r *request) error {
	flags, _, fh := r.body.u32(), r.body.u32(), r.body.u64()
	if h := d.handles[fh]; flags&getattrFH != 0 && h != nil && h.fd >= 0 && h.node.id == r.node {
		return r.attr(&file{fd: h.fd})
	}
	_, f, err := d.find(r.node)
	if err != nil {
		return err
	}
	defer f.close()
	r.out.attrOut(&f.Statx_t)
	return nil
}

func (d *Device) setattr(r *request) error {
	b := &r.body
	valid, _, fh, size, _ := b.u32(), b.u32(), b.u64(), b.u64(), b.u64()
	atime, mtime, _ := b.u64(), b.u64(), b.u64()
	atimeNano, mtimeNano, _, mode := b.u32(), b.u32(), b.u32(), b.u32()
	_, uid, gid, _ := b.u32(), b.u32(), b.u32(), b.u32()
	if size > math.MaxInt64 {
		return unix.EINVAL
	}
	_, f, err := d.find(r.node)
	if err != nil {
		return err
	}
	defer f.close()
	// Refuse everything that can be refused before changing anything. Owners do not change.
	if valid&setUID != 0 && uid != f.Uid || valid&setGID != 0 && gid != f.Gid {
		return unix.EPERM
	}
	kind := f.kind()
	if valid&setSize != 0 && kind != unix.S_IFREG || valid&setMode != 0 && kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return unix.EPERM
	}
	if valid&setSize != 0 {
		if err := d.truncate(r.node, f, valid, fh, int64(size)); err != nil {
			return err
		}
	}
	if valid&setMode != 0 {
		mode &= 0o1777
		if kind == unix.S_IFREG {
			mode &= 0o777
		}
		if err := f.chmod(mode); err != nil {
			return err
		}
	}
	if valid&(setAtime|setMtime) != 0 {
		ts := []unix.Timespec{
			when(valid, setAtime, setAtimeNow, atime, atimeNano),
			when(valid, setMtime, setMtimeNow, mtime, mtimeNano),
		}
		if err := unix.UtimesNanoAt(f.fd, "", ts, unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	return r.attr(f)
}

// attr reads a file's attributes and replies with them.
func (r *request) attr(f *file) error {
	err := f.stat()
	if err == nil {
		r.out.attrOut(&f.Statx_t)
	}
	return err
}

func when(valid, bit, now uint32, sec uint64, nano uint32) unix.Timespec {
	switch {
	case valid&bit == 0:
		return unix.Timespec{Nsec: unix.UTIME_OMIT}
	case valid&now != 0:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	}
	return unix.Timespec{Sec: int64(sec), Nsec: int64(nano)}
}

// truncate uses the guest's handle if it belongs to that file and is open for writing.
func (d *Device) truncate(id uint64, f *file, valid uint32, fh uint64, size int64) error {
	fd := -1
	if h := d.handles[fh]; valid&setFH != 0 && h != nil && !h.dir && h.fd >= 0 && h.node.id == id && h.flags != unix.O_RDONLY {
		fd = h.fd
	} else {
		var err error
		if fd, err = f.reopen(unix.O_WRONLY); err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	if err := strip(fd); err != nil {
		return err
	}
	return retry(func() error { return unix.Ftruncate(fd, size) })
}

func (d *Device) readlink(r *request) error {
	_, f, err := d.find(r.node)
	if err != nil {
		return err
	}
	defer f.close()
	if f.kind() != unix.S_IFLNK {
		return unix.EINVAL
	}
	buf := d.listing[:min(r.room, MaxPath+1)]
	n, err := unix.Readlinkat(f.fd, "", buf)
	if err != nil {
		return err
	}
	if n > min(r.room, maxReply) || n == r.room && n < MaxPath {
		return unix.ENAMETOOLONG
	}
	r.out.b = append(r.out.b, buf[:n]...)
	return nil
}

// made replies with the file that a request has made.
func (d *Device) made(r *request, parent *node, dir *file, name string, kind, mode uint32) error {
	f, err := lookFrom(dir.fd, name)
	if err != nil {
		return err
	}
	defer f.close()
	n, err := d.own(parent, f, name, kind, mode)
	if err == nil {
		r.out.entry(n, &f.Statx_t)
	}
	return err
}

func (d *Device) symlink(r *request) error {
	name, err := r.name()
	if err != nil {
		return err
	}
	target := r.body.text()
	if r.body.bad || target == "" {
		return unix.EINVAL
	}
	if len(target) > MaxPath {
		return unix.ENAMETOOLONG
	}
	parent, dir, err := d.findDir(r.node)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := unix.Symlinkat(target, dir.fd, name); err != nil {
		return err
	}
	return d.made(r, parent, dir, name, unix.S_IFLNK, 0)
}

// privateMode is the mode of a new file until it has its owner.
const privateMode = 0o600

func (d *Device) mknod(r *request) error {
	mode, _, _, _ := r.body.u32(), r.body.u32(), r.body.u32(), r.body.u32()
	parent, dir, name, err := d.place(r)
	if err != nil {
		return err
	}
	defer dir.close()
	if kind := mode & unix.S_IFMT; kind != unix.S_IFREG && kind != 0 {
		return unix.EPERM
	}
	n, f, fd, err := d.newFile(parent, dir, name, unix.O_WRONLY, mode)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r.out.entry(n, &f.Statx_t)
	return nil
}

// newFile makes and opens a regular file that did not exist. The caller must not close f: it shares fd.
func (d *Device) newFile(parent *node, dir *file, name string, access int, mode uint32) (*node, *file, int, error) {
	if len(d.nodes) >= MaxNodes || d.names+len(name) > MaxNames {
		return nil, nil, -1, errTooMany
	}
	f := &file{}
	err := retry(func() (err error) {
		f.fd, err = unix.Openat(dir.fd, name, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOCTTY|access&unix.O_ACCMODE, privateMode)
		return err
	})
	if err != nil {
		return nil, nil, -1, err
	}
	var n *node
	if err = f.stat(); err == nil {
		n, err = d.own(parent, f, name, unix.S_IFREG, mode&0o777)
	}
	if err != nil {
		_ = unix.Close(f.fd)
		return nil, nil, -1, err
	}
	return n, f, f.fd, nil
}

func (d *Device) mkdir(r *request) error {
	mode, _ := r.body.u32(), r.body.u32()
	parent, dir, name, err := d.place(r)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := unix.Mkdirat(dir.fd, name, privateMode|0o100); err != nil {
		return err
	}
	return d.made(r, parent, dir, name, unix.S_IFDIR, mode&0o1777)
}

func (d *Device) unlink(r *request) error { return d.remove(r, 0) }
func (d *Device) rmdir(r *request) error  { return d.remove(r, unix.AT_REMOVEDIR) }

func (d *Device) remove(r *request, flags int) error {
	parent, dir, name, err := d.place(r)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := unix.Unlinkat(dir.fd, name, flags); err != nil {
		return err
	}
	if n := d.places[place{parent, name}]; n != nil {
		d.detach(n)
	}
	return nil
}

func (d *Device) rename(r *request) error {
	target, flags := r.body.u64(), uint32(0)
	if r.op == opRename2 {
		flags, _ = r.body.u32(), r.body.u32()
	}
	from, err := r.name()
	if err != nil {
		return err
	}
	to, err := r.name()
	if err != nil {
		return err
	}
	if flags != 0 && flags != unix.RENAME_NOREPLACE && flags != unix.RENAME_EXCHANGE {
		return unix.EINVAL
	}
	fromParent, fromDir, err := d.findDir(r.node)
	if err != nil {
		return err
	}
	defer fromDir.close()
	toParent, toDir, err := d.findDir(target)
	if err != nil {
		return err
	}
	defer toDir.close()
	if known := d.places[place{fromParent, from}]; known != nil && flags&unix.RENAME_EXCHANGE == 0 && d.names+len(to)-len(from) > MaxNames {
		return errTooMany // its state could not be restored
	}
	if err := unix.Renameat2(fromDir.fd, from, toDir.fd, to, uint(flags)); err != nil {
		return err
	}
	// The guest may have forgotten the directory that it takes the last known file out of.
	fromParent.children++
	defer func() {
		fromParent.children--
		d.drop(fromParent)
	}()
	moved, replaced := d.places[place{fromParent, from}], d.places[place{toParent, to}]
	if replaced != nil && replaced != moved {
		replaced.lookups++ // keep it while the other moves
		defer func() {
			replaced.lookups--
			d.drop(replaced)
		}()
		d.detach(replaced)
	}
	if moved != nil {
		d.attach(moved, toParent, to)
	}
	if flags == unix.RENAME_EXCHANGE && replaced != nil && replaced != moved {
		d.attach(replaced, fromParent, from)
	}
	return nil
}

func (d *Device) link(r *request) error {
	id := r.body.u64()
	name, err := r.name()
	if err != nil {
		return err
	}
	_, f, err := d.find(id)
	if err != nil {
		return err
	}
	defer f.close()
	if kind := f.kind(); kind != unix.S_IFREG && kind != unix.S_IFLNK {
		return unix.EPERM
	}
	parent, dir, err := d.findDir(r.node)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := unix.Linkat(f.fd, "", dir.fd, name, unix.AT_EMPTY_PATH); err != nil {
		return err
	}
	if err := f.stat(); err != nil {
		return err
	}
	return d.found(r, parent, f, name)
}

func (d *Device) statfs(r *request) error {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(d.dir.fd, &st) }); err != nil {
		return err
	}
	for _, v := range []uint64{st.Blocks, st.Bfree, st.Bavail, st.Files, st.Ffree} {
		r.out.u64(v)
	}
	r.out.u32(uint32(st.Bsize))
	r.out.u32(MaxName)
	r.out.u32(uint32(st.Frsize))
	r.out.zeros(statfsOutSize - len(r.out.b))
	return nil
}
