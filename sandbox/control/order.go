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

// HasReader says whether somebody has the other end of a pipe that is written to.
func HasReader(pipe *os.File) bool {
	fds := []unix.PollFd{{Fd: int32(pipe.Fd())}}
	for {
		_, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err != nil || fds[0].Revents&unix.POLLERR == 0
	}
}

// NoPageCacheEnv, set to anything, makes wakes do without a cache of decompressed pages: each
// then decompresses what it needs, and nothing is written below pages/ of the store.
const NoPageCacheEnv = "DROWSE_NO_PAGE_CACHE"

// The words on the socket between a pool and one of its processes, which is of type
// SOCK_SEQPACKET: the process sends poolReady once, gets an order, as JSON with
// files (its log, where its Report goes, and the image of a fork if it is one), and sends
// poolTaken before it does anything for it.
const (
	PoolReady = "ready"
	PoolTaken = "taken"
	// maxOrder bounds an order, in bytes.
	MaxOrder      = 64 << 10
	maxOrderFiles = 3
)

// FileConn makes a file that is a socket a connection, and closes the file.
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

// ReceiveOrder returns the order and its files, as poolReady says; io.EOF if there will be none.
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

// ReadWithFiles reads a message with at most so many files, which are the caller's; none after an error.
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

// Files that the process of a VM finds open when it is started: where it writes its
// Report, and the image of RAM that a child of a fork is made of. A process that stands
// by has its end of a socket instead, see Pool.
const (
	ReportFD = 3
	ThirdFD  = 4
	PoolFD   = 3
)

// Order is what the process of a VM is to do. It comes with files: for the Report and,
// with Fork, the image.
type Order struct {
	Name string `json:"name"`
	// Snapshot is what to restore; empty boots.
	Snapshot string `json:"snapshot,omitempty"`
	// NewIdentity makes the guest a machine of its own, whatever its disk and memory
	// were before.
	NewIdentity bool `json:"new_identity,omitempty"`
	// Fork says that it is made of an image.
	Fork bool `json:"fork,omitempty"`
	// WakeLock says that the one who gives the order holds the VM awake, by one end of a socket. No fork has it.
	WakeLock bool `json:"wake_lock,omitempty"`
	// Shared says that the VM is there already, so that others may wait for it as well; whoever gives the order alone
	// knows.
	Shared bool `json:"-"`
	// Cause is on whose behalf; for the event.
	Cause events.Cause `json:"cause,omitempty"`
}

// Ahead says whether a process that was made ahead is of use: a boot takes so long that
// its start does not count.
func (o Order) Ahead() bool { return o.Snapshot != "" || o.Fork }

// Args are the order as arguments of a process.
func (o Order) Args(dir string) []string {
	return arguments(dir, "--order", o)
}

func arguments(dir, flag string, v any) []string {
	text, _ := json.Marshal(v) // plain data
	return []string{"--state", dir, flag, string(text)}
}

// StandbyArgs are the arguments of a process that waits for an order.
func StandbyArgs(dir string, s spec.Shape) []string {
	return arguments(dir, "--standby", s)
}

// GoMaxProcsEnv is read by the Go runtime.
const GoMaxProcsEnv = "GOMAXPROCS"

// Third says whether an order has a file besides the log and that for the report: the image of a fork, or the socket of
// a hold.
func (o Order) Third() bool { return o.Fork || o.WakeLock }
