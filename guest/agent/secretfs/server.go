package secretfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

const (
	// waitTicks is how long requests wait for a secret, in ticks. The server counts ticks, since the guest's clock
	// may jump when it wakes, just when there is a secret to wait for.
	waitTicks = 60
	tick      = time.Second
	// maxParked bounds the requests that wait. Further ones fail at once, with EAGAIN.
	maxParked = 256
	// maxNodes bounds the files that the kernel knows at the same time.
	maxNodes = 4096
)

// server answers the kernel. One goroutine uses it.
type server struct {
	fuse  int
	store store
	// Values pass through buf: locked memory that is in no core dump. It has room for a header and the largest
	// value, and is all zeros between two requests.
	buf []byte
	out []byte // for everything else

	ids     map[string]uint64 // nodes by name, other than the root
	nodes   map[uint64]*node
	lastID  uint64
	waiting []*parked
	ticked  time.Time
	// patience is how many ticks a request waits for a secret.
	patience int
}

type node struct {
	name    string
	lookups uint64
}

// parked is an open or a read that waits for its secret.
type parked struct {
	request
	left int // ticks
}

// Serve mounts the secrets at a directory, which it makes if necessary, calls ready, and serves them until they
// are unmounted or control ends. On each byte from control, and every second, it looks for the secrets that
// requests wait for. It locks the calling goroutine to its thread, which must have opened the ports.
func Serve(dir string, ports Ports, control *os.File, ready func()) error {
	return serve(dir, ports, control, waitTicks, ready)
}

func serve(dir string, ports Ports, control *os.File, patience int, ready func()) error {
	st := store{ports}
	if _, err := st.table(); err != nil {
		return err
	}
	buf, err := unix.Mmap(-1, 0, outHeader+agentpb.MaxSecret, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_LOCKED|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("lock memory for secrets: %w", err)
	}
	defer unix.Munmap(buf) //nolint:errcheck // of a mapping of ours
	if err := unix.Madvise(buf, unix.MADV_DONTDUMP); err != nil {
		return fmt.Errorf("keep secrets out of core dumps: %w", err)
	}
	fd, err := mount(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	defer unix.Unmount(dir, unix.MNT_DETACH) //nolint:errcheck // it may be gone already
	s := &server{fuse: fd, store: st, buf: buf, ids: map[string]uint64{}, nodes: map[uint64]*node{}, lastID: rootNode, patience: patience}
	ready()
	return s.run(control)
}

// mount mounts a file system at dir, and returns the descriptor of its FUSE connection.
func mount(dir string) (int, error) {
	var st unix.Stat_t
	if errors.Is(unix.Stat(dir, &st), unix.ENOTCONN) {
		// It is mounted, and its server was killed.
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return -1, fmt.Errorf("unmount the secrets of a server that is gone: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return -1, fmt.Errorf("mount secrets: %w", err)
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("mount secrets: open /dev/fuse: %w: the guest's kernel needs FUSE (CONFIG_FUSE_FS, or the module fuse)", err)
	}
	// The kernel checks permissions by the attributes of GETATTR.
	options := fmt.Sprintf("fd=%d,rootmode=40555,user_id=0,group_id=0,allow_other,default_permissions", fd)
	err = unix.Mount("drowse-secrets", dir, "fuse", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOATIME, options)
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("mount secrets at %s: %w", dir, err)
	}
	return fd, nil
}

// run answers requests until the end.
func (s *server) run(control *os.File) error {
	in := make([]byte, minReadBuffer+maxWrite)
	fds := []unix.PollFd{{Fd: int32(s.fuse), Events: unix.POLLIN}, {Fd: int32(control.Fd()), Events: unix.POLLIN}}
	for {
		timeout := -1
		if len(s.waiting) > 0 {
			timeout = int(tick.Milliseconds())
		}
		if _, err := unix.Poll(fds, timeout); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for requests: %w", err)
		}
		if fds[1].Revents != 0 {
			var b [64]byte
			n, err := unix.Read(int(control.Fd()), b[:])
			if n == 0 && err == nil {
				return nil
			}
			s.retry(false)
		}
		if len(s.waiting) > 0 && time.Since(s.ticked).Abs() >= tick {
			s.ticked = time.Now()
			s.retry(true)
		}
		if fds[0].Revents == 0 {
			continue
		}
		n, err := unix.Read(s.fuse, in)
		switch {
		case errors.Is(err, unix.ENODEV): // unmounted
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		}
		if r, ok := parse(in[:n]); ok {
			s.handle(r)
		}
	}
}

// handle answers one request, or parks it.
func (s *server) handle(r request) {
	switch r.op {
	case opForget:
		s.forget(r.node, r.u64(0))
	case opBatchForget:
		for i, n := 8, int(r.u32(0)); n > 0 && i+16 <= len(r.body); i, n = i+16, n-1 {
			s.forget(r.u64(i), r.u64(i+8))
		}
	case opInterrupt:
		s.interrupt(r.u64(0))
	case opDestroy:
		s.reply(r, nil, 0)
	default:
		if !s.answer(r) {
			s.park(r)
		}
	}
}

// park keeps a request until its secret is available.
func (s *server) park(r request) {
	if len(s.waiting) >= maxParked {
		s.reply(r, nil, unix.EAGAIN)
		return
	}
	r.body = bytes.Clone(r.body)
	if len(s.waiting) == 0 {
		s.ticked = time.Now()
	}
	s.waiting = append(s.waiting, &parked{request: r, left: s.patience})
}

// retry retries the parked requests. With ticked set, those that have waited too long fail.
func (s *server) retry(ticked bool) {
	s.waiting = slices.DeleteFunc(s.waiting, func(p *parked) bool {
		if s.answer(p.request) {
			return true
		}
		if ticked {
			p.left--
		}
		if p.left <= 0 {
			s.reply(p.request, nil, unix.ETIMEDOUT)
		}
		return p.left <= 0
	})
}

// interrupt ends a parked request whose program has got a signal.
func (s *server) interrupt(unique uint64) {
	s.waiting = slices.DeleteFunc(s.waiting, func(p *parked) bool {
		if p.unique != unique {
			return false
		}
		s.reply(p.request, nil, unix.EINTR)
		return true
	})
}

// answer answers a request; false means that its secret is not available yet.
func (s *server) answer(r request) bool {
	s.out = s.out[:0]
	switch r.op {
	case opInit:
		if r.u32(0) != versionMajor || r.u32(4) < minMinor {
			s.reply(r, nil, unix.EPROTO)
			return true
		}
		s.reply(r, appendInit(s.out), 0)
		return true
	case opRelease, opReleasedir:
		s.reply(r, nil, 0)
		return true
	case opOpendir:
		s.reply(r, appendOpen(s.out, 0), 0)
		return true
	case opLookup, opGetattr, opOpen, opRead, opReaddir, opStatfs:
	default:
		s.reply(r, nil, unix.ENOSYS)
		return true
	}
	table, err := s.store.table()
	if err != nil {
		s.reply(r, nil, unix.EIO)
		return true
	}
	n := s.nodes[r.node]
	switch {
	case r.op == opStatfs:
		s.reply(r, appendStatfs(s.out, len(table)), 0)
	case r.op == opReaddir:
		s.readdir(r, table)
	case r.op == opLookup:
		s.lookup(r, table)
	case r.node == rootNode && r.op == opGetattr:
		s.reply(r, appendAttrOut(s.out, rootNode, nil), 0)
	case r.node == rootNode:
		s.reply(r, nil, unix.EISDIR)
	case n == nil:
		s.reply(r, nil, unix.ESTALE)
	default:
		return s.answerFile(r, find(table, n.name))
	}
	return true
}

// answerFile answers a request about a file; sec is nil if the secret is gone.
func (s *server) answerFile(r request, sec *agentpb.Secret) bool {
	switch {
	case sec == nil:
		s.reply(r, nil, unix.ENOENT)
	case r.op == opGetattr:
		s.reply(r, appendAttrOut(s.out, r.node, sec), 0)
	case sec.Awaited:
		return false
	case r.op == opOpen:
		s.reply(r, appendOpen(s.out, openDirectIO), 0)
	default:
		s.read(r, *sec)
	}
	return true
}

func find(table []agentpb.Secret, name string) *agentpb.Secret {
	if i := slices.IndexFunc(table, func(s agentpb.Secret) bool { return s.Name == name }); i >= 0 {
		return &table[i]
	}
	return nil
}

func (s *server) lookup(r request, table []agentpb.Secret) {
	name, _, _ := bytes.Cut(r.body, []byte{0})
	sec := find(table, string(name))
	if r.node != rootNode || sec == nil {
		s.reply(r, nil, unix.ENOENT)
		return
	}
	id, known := s.ids[sec.Name]
	if !known {
		if len(s.nodes) >= maxNodes {
			s.reply(r, nil, unix.ENFILE)
			return
		}
		s.lastID++
		id = s.lastID
		s.ids[sec.Name], s.nodes[id] = id, &node{name: sec.Name}
	}
	s.nodes[id].lookups++
	s.reply(r, appendEntry(s.out, id, sec), 0)
}

// forget drops the kernel's references to a node.
func (s *server) forget(id, count uint64) {
	n := s.nodes[id]
	if n == nil {
		return
	}
	if n.lookups -= min(count, n.lookups); n.lookups == 0 {
		delete(s.nodes, id)
		delete(s.ids, n.name)
	}
}

func (s *server) readdir(r request, table []agentpb.Secret) {
	if r.node != rootNode {
		s.reply(r, nil, unix.ENOTDIR)
		return
	}
	off, room := r.u64(8), int(r.u32(16))
	names := []string{".", ".."}
	for _, sec := range table {
		names = append(names, sec.Name)
	}
	for i := off; i < uint64(len(names)) && len(s.out)+direntSize(names[i]) <= room; i++ {
		kind, id := uint32(unix.DT_REG), s.ids[names[i]]
		if i < 2 {
			kind, id = unix.DT_DIR, rootNode
		}
		if id == 0 {
			id = ^uint64(0) // the kernel has not looked it up yet; any number but 0
		}
		s.out = appendDirent(s.out, id, i+1, names[i], kind)
	}
	s.reply(r, s.out, 0)
}

// read copies bytes of a value to the reader, and leaves none behind.
func (s *server) read(r request, sec agentpb.Secret) {
	if r.u32(20)&readLockOwner == 0 {
		// A read for the page cache, where the bytes would stay: a mapped file.
		s.reply(r, nil, unix.EIO)
		return
	}
	size := min(int(r.u32(16)), agentpb.MaxSecret)
	n, err := s.store.read(sec, r.u64(8), s.buf[outHeader:outHeader+size])
	if err != nil {
		clear(s.buf)
		s.store.ports.Wiped()
		s.reply(r, nil, unix.EIO)
		return
	}
	putHeader(s.buf, outHeader+n, r.unique, 0)
	s.write(s.buf[:outHeader+n])
	clear(s.buf[:outHeader+n])
	if n > 0 {
		s.store.ports.Wiped()
	}
}

// reply answers with a body, or an error.
func (s *server) reply(r request, body []byte, errno unix.Errno) {
	msg := make([]byte, outHeader, outHeader+len(body))
	putHeader(msg, outHeader+len(body), r.unique, errno)
	s.write(append(msg, body...))
}

// write hands a message to the kernel. The kernel refuses one for an interrupted request, which does no harm.
func (s *server) write(msg []byte) {
	for {
		if _, err := unix.Write(s.fuse, msg); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
