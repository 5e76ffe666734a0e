package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// The conversation of a supervised Launcher with a process that serves a pool, on a SOCK_SEQPACKET socket. Each
// message is a JSON object. A poolReply answers each poolRequest. A reply with a PID has two files: the socket of
// the waiting process and its pidfd. The connection stays open until the VM's start has ended. Until then the pool
// makes no process.
type (
	poolRequest struct {
		Version int        `json:"version"`
		Shape   spec.Shape `json:"shape"`
		Program program    `json:"program"`
	}
	poolReply struct {
		Version int `json:"version"`
		// PID is 0 if there is no process for the VM.
		PID int `json:"pid,omitempty"`
	}
)

const (
	poolVersion = 1
	// maxPoolMessage is the most bytes of a message.
	maxPoolMessage = 64 << 10
	// poolAnswer is how long a Launcher waits for a process: starting one takes some 5 ms.
	poolAnswer = 250 * time.Millisecond
	// poolHold is how long the start of a VM can keep the pool from making processes.
	poolHold = 30 * time.Second
	// maxPoolClients bounds the VMs that are started at once with processes of a pool that is served.
	maxPoolClients = 4 * MaxSize
)

// Serve gives processes of the pool to supervised Launchers in other processes of this user or of root, and
// returns when ctx has ended. A store serves one pool: ErrServed means that another process does it. Launchers of
// another program than the pool's, or in other namespaces, get none.
func (p *Pool) Serve(ctx context.Context) error {
	lock, err := osfile.TryOpenLocked(filepath.Join(p.store.Dir(), "pool.lock"), os.O_RDWR|os.O_CREATE, 0o600, osfile.Exclusive)
	switch {
	case errors.Is(err, osfile.ErrLocked):
		return fmt.Errorf("serving a pool for %s: %w", p.store.Dir(), spec.ErrServed)
	case err != nil:
		return fmt.Errorf("serving a pool: %w", err)
	}
	defer lock.Close()
	path := p.store.PoolSocket()
	if len(path) > state.MaxSocketPath {
		return fmt.Errorf("%w: the path of the pool's socket has %d bytes, and %d are possible: use a shorter state directory", spec.ErrInvalid, len(path), state.MaxSocketPath)
	}
	// A server that was killed leaves its socket.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("serving a pool: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("serving a pool: %w", err)
	}
	defer l.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		return fmt.Errorf("serving a pool: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	room := make(chan struct{}, maxPoolClients)
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("serving a pool: %w", err)
		}
		select {
		case room <- struct{}{}:
		default:
			c.Close() // the client starts a process itself
			continue
		}
		all.Go(func() {
			defer func() { <-room }()
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			if err := p.serve(c); err != nil && ctx.Err() == nil {
				p.log.Warn("serving a process of the pool failed", "error", err)
			}
		})
	}
}

// serve answers one Launcher.
func (p *Pool) serve(c *net.UnixConn) error {
	if err := checkPeer(c); err != nil {
		return err
	}
	p.starts()
	release := sync.OnceFunc(p.started)
	defer release()
	defer time.AfterFunc(poolHold, release).Stop()
	buf := make([]byte, maxPoolMessage)
	for {
		n, err := c.Read(buf)
		if errors.Is(err, io.EOF) || err == nil && n == 0 || errors.Is(err, unix.ECONNRESET) {
			return nil // its VM has started, or never will
		}
		if err != nil {
			return err
		}
		var req poolRequest
		if err := json.Unmarshal(buf[:n], &req); err != nil {
			return fmt.Errorf("a request: %w", err)
		}
		if err := p.answer(c, req); err != nil {
			return err
		}
	}
}

func (p *Pool) answer(c *net.UnixConn, req poolRequest) error {
	reply := poolReply{Version: poolVersion}
	var ready *standby
	if req.Version == poolVersion {
		if ready = p.popIf(req.Shape, &req.Program); ready == nil {
			p.dropOld()
		}
	}
	var files []byte
	if ready != nil {
		// The client has the process now. Closing the last copy of its socket ends the process.
		defer ready.conn.Close()
		pidfd, err := unix.PidfdOpen(ready.pid, 0)
		if err != nil {
			return fmt.Errorf("process %d: %w", ready.pid, err)
		}
		defer unix.Close(pidfd)
		sock, err := ready.conn.File()
		if err != nil {
			return err
		}
		defer sock.Close()
		reply.PID, files = ready.pid, unix.UnixRights(int(sock.Fd()), pidfd)
	}
	text, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	_, _, err = c.WriteMsgUnix(text, files, nil)
	return err
}

// dropOld ends the processes whose program was replaced since they were started.
func (p *Pool) dropOld() {
	now, err := programOf(p.launcher)
	if err != nil {
		return // make will report it
	}
	p.mu.Lock()
	var old []*standby
	p.ready = slices.DeleteFunc(p.ready, func(s *standby) bool {
		if s.what == now {
			return false
		}
		old = append(old, s)
		return true
	})
	p.mu.Unlock()
	for _, s := range old {
		s.end()
	}
	if len(old) > 0 {
		p.wake()
	}
}

// checkPeer refuses users other than this one and root.
func checkPeer(c *net.UnixConn) error {
	user, err := osfile.PeerUser(c)
	if err == nil && user != 0 && int(user) != os.Geteuid() {
		err = fmt.Errorf("user %d is not to have processes of this pool", user)
	}
	return err
}

// standbys returns the source of processes that were started ahead, for the start of one VM. The start lasts until
// done is called. from returns nil when no process is ready.
func standbys(s *state.Store, l Launcher) (from func(spec.Shape) *standby, done func()) {
	if l.ahead != nil {
		return l.ahead.standbys(s, l)
	}
	if l.Pool != nil {
		l.Pool.starts()
		return l.Pool.pop, l.Pool.started
	}
	none := func(spec.Shape) *standby { return nil }
	if !l.Supervised {
		return none, func() {}
	}
	what, err := programOf(l)
	if err != nil {
		return none, func() {} // the start of the process reports it
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: s.PoolSocket(), Net: "unixpacket"})
	if err != nil {
		return none, func() {}
	}
	return func(shape spec.Shape) *standby {
		// Any error of the pool has a fallback: starting a process.
		ready, err := askPool(c, poolRequest{Version: poolVersion, Shape: shape, Program: what})
		if err != nil {
			return nil
		}
		return ready
	}, func() { c.Close() }
}

// askPool asks a process that serves a pool for a waiting process; it returns nil if the pool has none.
func askPool(c *net.UnixConn, req poolRequest) (*standby, error) {
	text, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Now().Add(poolAnswer)); err != nil {
		return nil, err
	}
	if _, err := c.Write(text); err != nil {
		return nil, err
	}
	buf := make([]byte, maxPoolMessage)
	n, files, err := control.ReadWithFiles(c, buf, 2)
	if err != nil {
		return nil, err
	}
	var reply poolReply
	err = json.Unmarshal(buf[:n], &reply)
	if err == nil && (len(files) != 2) != (reply.PID == 0) {
		err = fmt.Errorf("a process with %d files", len(files))
	}
	if err != nil || reply.PID == 0 {
		control.CloseAll(files)
		return nil, err
	}
	conn, err := control.FileConn(files[0])
	if err != nil {
		files[1].Close()
		return nil, err
	}
	return &standby{Process: foreign{files[1]}, conn: conn, said: &control.Tail{}, pid: reply.PID, shape: req.Shape, what: req.Program}, nil
}
