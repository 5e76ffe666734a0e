package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// HasReader reports whether the pipe that this process writes to still has a reader. Of a pipe that this process has
// closed it reports true. It may be called while the pipe is being closed.
func HasReader(pipe *os.File) bool {
	reader := true
	conn, err := pipe.SyscallConn()
	if err != nil {
		return reader
	}
	_ = conn.Control(func(fd uintptr) { // fails if it is closed
		fds := []unix.PollFd{{Fd: int32(fd)}}
		for {
			_, err := unix.Poll(fds, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			reader = err != nil || fds[0].Revents&unix.POLLERR == 0
			return
		}
	})
	return reader
}

// NoPageCacheEnv, set to any value, makes wakes run without the cache of decompressed pages. Each wake then
// decompresses what it needs, and writes nothing below pages/ of the store.
const NoPageCacheEnv = "DROWSE_NO_PAGE_CACHE"

// NoTemplateEnv, if not empty, has every new VM boot, although there may be a template for it.
const NoTemplateEnv = "DROWSE_NO_TEMPLATE"

// NoJailEnv, set to any value, makes VMs run in a process that is not confined. It is for finding the cause of a
// failure: a guest that takes such a process over has all rights on the host.
const NoJailEnv = "DROWSE_NO_JAIL"

// RequireJailEnv, set to any value, makes VMs fail to start that cannot be confined. Without it they start unconfined
// on hosts that lack what that needs, and their log says so. It wins over NoJailEnv.
const RequireJailEnv = "DROWSE_REQUIRE_JAIL"

// SeccompEnv, set to SeccompLog, has the kernel log the system calls that confined processes may not make (type=1326),
// and do them. It is for developing the filter: such VMs do not count as confined. Any other value is an error, and so
// is SeccompLog with RequireJailEnv.
const (
	SeccompEnv = "DROWSE_SECCOMP"
	SeccompLog = "log"
)

// The words on the SOCK_SEQPACKET socket between a pool and one of its processes. The process sends PoolReady
// once. It gets an order, as JSON with files: its log, the pipe for its Report, and the image of a fork or the
// socket of a hold, if there is one. It sends PoolTaken before it acts on the order.
const (
	PoolReady = "ready"
	PoolTaken = "taken"
	// MaxOrder is the most bytes of an order.
	MaxOrder      = 64 << 10
	maxOrderFiles = 3
)

// FileConn returns the connection of a file that is a socket, and closes the file.
func FileConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("a socket of type %T, not a Unix socket", c)
	}
	return uc, nil
}

// SendOrder sends an order with its files.
func SendOrder(c *net.UnixConn, ord Order, files ...*os.File) error {
	text, err := json.Marshal(ord)
	if err != nil {
		return err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	_, _, err = c.WriteMsgUnix(text, unix.UnixRights(fds...), nil)
	return err
}

// ReceiveOrder returns the next order and its files, in the order that PoolReady names; io.EOF if no more can
// come.
func ReceiveOrder(c *net.UnixConn) (ord Order, files []*os.File, err error) {
	text := make([]byte, MaxOrder)
	n, files, err := ReadWithFiles(c, text, maxOrderFiles)
	if err != nil {
		return ord, nil, fmt.Errorf("an order: %w", err)
	}
	defer func() {
		if err != nil {
			CloseAll(files)
			files = nil
		}
	}()
	if n == 0 {
		return ord, files, io.EOF
	}
	if err := json.Unmarshal(text[:n], &ord); err != nil {
		return ord, files, fmt.Errorf("an order: %w", err)
	}
	want := 2
	if ord.Third() {
		want++
	}
	if len(files) != want {
		return ord, files, fmt.Errorf("an order with %d files, not %d", len(files), want)
	}
	return ord, files, nil
}

// ReadWithFiles reads a message with at most most files. The caller owns the files; an error returns none.
func ReadWithFiles(c *net.UnixConn, p []byte, most int) (n int, files []*os.File, err error) {
	defer func() {
		if err != nil {
			CloseAll(files)
			files = nil
		}
	}()
	oob := make([]byte, unix.CmsgSpace(4*most))
	n, oobn, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return n, nil, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return n, nil, fmt.Errorf("the files of a message: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return n, files, errors.New("a message or its files were cut off")
	}
	return n, files, nil
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Descriptors of the files that the process of a VM inherits: the pipe for its Report, and the image of RAM that a
// child of a fork is made of. A process in a pool has its end of a socket instead, see Pool.
const (
	ReportFD = 3
	ThirdFD  = 4
	PoolFD   = 3
)

// Order says what the process of a VM must do. It comes with files: the pipe for the Report and, with Fork, the
// image.
type Order struct {
	Name string `json:"name"`
	// Snapshot is the snapshot to restore. If empty, the VM boots.
	Snapshot string `json:"snapshot,omitempty"`
	// NewIdentity gives the guest a new identity, whatever its disk and memory had before.
	NewIdentity bool `json:"new_identity,omitempty"`
	// Template says that Snapshot is a template: the VM then gets what a VM gets after its boot.
	Template bool `json:"template,omitempty"`
	// Fork reports that the VM is made from an image.
	Fork bool `json:"fork,omitempty"`
	// WakeLock reports that the caller holds the VM awake through one end of a socket. Forks never have it.
	WakeLock bool `json:"wake_lock,omitempty"`
	// Shared reports that the VM exists already, so other callers may wait for it as well. It is not sent: only
	// the caller knows it.
	Shared bool `json:"-"`
	// Cause is on whose behalf the order is given, for the event.
	Cause events.Cause `json:"cause,omitempty"`
}

// Ahead reports whether a process that was started ahead helps. A boot takes so long that the start of its process
// does not matter.
func (o Order) Ahead() bool { return o.Snapshot != "" || o.Fork }

// Args returns the order as arguments of a process.
func (o Order) Args(dir string) []string {
	return arguments(dir, "--order", o)
}

func arguments(dir, flag string, v any) []string {
	text, _ := json.Marshal(v) // plain data
	return []string{"--state", dir, flag, string(text)}
}

// StandbyArgs returns the arguments of a process that waits for an order.
func StandbyArgs(dir string, s spec.Shape) []string {
	return arguments(dir, "--standby", s)
}

// GoMaxProcsEnv is a variable of the Go runtime.
const GoMaxProcsEnv = "GOMAXPROCS"

// Third reports whether an order has a third file, beside the log and the pipe for the report: the image of a fork
// or the socket of a hold.
func (o Order) Third() bool { return o.Fork || o.WakeLock }
