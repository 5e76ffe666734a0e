package fs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// Limits of the device.
const (
	// QueueSize is the size of each of the device's two queues.
	QueueSize = 256
	// TagSize is the most bytes of a tag (virtio 1.2, 5.11.4).
	TagSize = 36
	// MaxTransfer is the most bytes of one read or write. Linux makes one descriptor of each page, so it must be
	// smaller than a queue's worth of pages.
	MaxTransfer = 256 << 10
	// MaxNodes is how many files and directories the guest may know at once. The next lookup fails with ENFILE.
	MaxNodes = 65536
	// MaxNames bounds the total length of their names in bytes, to bound the saved state.
	MaxNames = 8 << 20
	// MaxHandles is how many files and directories the guest may have open at once.
	MaxHandles = 4096
	// MaxName is the longest name of a file, in bytes.
	MaxName = 255
	// MaxPath is the longest path below the shared directory, and the longest target of a
	// symbolic link, in bytes.
	MaxPath = 4095
)

// The queues (virtio 1.2, 5.11.2).
const (
	queueHiprio = iota
	queueRequest
)

// Layout of the configuration space (virtio 1.2, 5.11.4).
const (
	configQueues = TagSize
	configSize   = TagSize + 4
)

// Dir is a shared directory of the host.
type Dir struct {
	f        *os.File
	fd       int // that of f
	uid, gid uint32
	writable bool
}

// foreign lists file systems whose files are controls of the host, such as proc.
var foreign = map[int64]string{
	unix.PROC_SUPER_MAGIC: "proc", unix.SYSFS_MAGIC: "sysfs", unix.CGROUP_SUPER_MAGIC: "cgroup", unix.CGROUP2_SUPER_MAGIC: "cgroup2",
	unix.DEBUGFS_MAGIC: "debugfs", unix.TRACEFS_MAGIC: "tracefs", unix.SECURITYFS_MAGIC: "securityfs", unix.BPF_FS_MAGIC: "bpf",
	unix.DEVPTS_SUPER_MAGIC: "devpts",
}

// OpenFlags are the flags of open(2) for the directory of NewDir.
const OpenFlags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC

// NewDir makes a directory for New of one that was opened with OpenFlags. What the device makes in it will belong to
// the directory's present owner and group. NewDir takes f over, and closes it if it fails: for file systems such as
// proc and sysfs.
func NewDir(f *os.File, writable bool) (*Dir, error) {
	fd, path := int(f.Fd()), f.Name()
	d := &Dir{f: f, fd: fd, writable: writable}
	var st unix.Stat_t
	var sf unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &st), unix.Fstatfs(fd, &sf)); err != nil {
		return nil, errors.Join(fmt.Errorf("opening the shared directory %s: %w", path, err), d.Close())
	}
	if name, ok := foreign[sf.Type]; ok {
		return nil, errors.Join(fmt.Errorf("opening the shared directory %s: it is of a %s file system, whose files act on the host: %w", path, name, os.ErrPermission), d.Close())
	}
	d.uid, d.gid = st.Uid, st.Gid
	return d, nil
}

// Close closes the directory. The device that uses it must have been reset.
func (d *Dir) Close() error { return d.f.Close() }

// Options are the optional settings of New.
type Options struct {
	// OnError receives failures of the host's storage (EIO, ENOSPC and the like), which the guest sees as the
	// error of its request: the first one of each kind. It must not block. Nil ignores them.
	OnError func(error)
}

// Device is a virtio file system device. Each of its queues has a goroutine that does the requests one after the
// other.
type Device struct {
	dir     *Dir
	tag     string
	onError func(error)
	config  [configSize]byte

	// Between Activate and Reset.
	workers devices.Workers

	mu sync.Mutex // guards what follows: both workers use it
	tree
	syncing  devices.Slow
	reported map[syscall.Errno]struct{}
	body     [maxBody]byte
	reply    [maxReply]byte
	listing  [listingSize]byte
}

// New makes a device that shares dir. The caller keeps dir and closes it after Reset. The guest mounts it by its
// tag, of 1 to TagSize bytes. New cuts off a longer tag.
func New(dir *Dir, tag string, o Options) *Device {
	d := &Device{dir: dir, tag: tag[:min(len(tag), TagSize)], onError: o.OnError, reported: map[syscall.Errno]struct{}{}}
	copy(d.config[:TagSize], d.tag)
	binary.LittleEndian.PutUint32(d.config[configQueues:], 1)
	d.tree.clear()
	return d
}

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDFS }

// Features implements [devices.Device]. There are none: the device has no notification queue.
func (d *Device) Features() uint64 { return 0 }

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 {
	return []uint16{queueHiprio: QueueSize, queueRequest: QueueSize}
}

// ReadConfig implements [devices.Device].
func (d *Device) ReadConfig(off uint32, p []byte) { devices.ReadConfig(d.config[:], off, p) }

// WriteConfig implements [devices.Device]. The guest can write nothing here.
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	for _, q := range a.Queues {
		d.workers.Serve(q, a.Interrupt, func(c *virtq.Chain) error { return d.handle(q, c) })
	}
	return nil
}

// Settled waits for an fsync that a pause has cut, and returns its error. The device must be paused. A machine that is
// restored does the fsync anew: the kernel would not report the error again.
func (d *Device) Settled() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.syncing.Failed()
}

// Reset implements [devices.Device]. The guest begins anew: the device forgets all nodes and closes all handles.
func (d *Device) Reset() error {
	d.workers.Stop()
	d.workers = nil
	d.syncing.End()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tree.clear()
	return nil
}

// Pause implements [devices.Pauser]. It waits for the current requests.
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }
