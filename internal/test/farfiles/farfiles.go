// Package farfiles is a file system for a process that sees none: another process opens its files and passes the
// descriptors. With it a test shows that code opens nothing but through osfile.FS.
package farfiles

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// maxMessage is the most bytes of a call or an answer.
const maxMessage = 128 << 10

type call struct {
	Op   string          `json:"op"`
	A    string          `json:"a,omitempty"`
	B    string          `json:"b,omitempty"`
	Flag int             `json:"flag,omitempty"`
	Perm fs.FileMode     `json:"perm,omitempty"`
	More json.RawMessage `json:"more,omitempty"`
}

type answer struct {
	Error string          `json:"error,omitempty"`
	Errno unix.Errno      `json:"errno,omitempty"`
	Free  uint64          `json:"free,omitempty"`
	More  json.RawMessage `json:"more,omitempty"`
}

// Pair returns two ends of a connection: c for Serve, and f for the other process, where Files takes it.
func Pair() (c *net.UnixConn, f *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	f = os.NewFile(uintptr(fds[1]), "files")
	if c, err = conn(os.NewFile(uintptr(fds[0]), "files")); err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return c, f, nil
}

func conn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(os.ErrInvalid, c.Close())
	}
	return u, nil
}

// Serve opens files until the other end is closed. It returns how often it was asked for what. What is no call of
// osfile.FS is for more.
func Serve(c *net.UnixConn, more func(op string, in json.RawMessage) (out any, err error)) (map[string]int, error) {
	calls := map[string]int{}
	buf := make([]byte, maxMessage)
	for {
		n, _, _, _, err := c.ReadMsgUnix(buf, nil)
		if errors.Is(err, io.EOF) || err == nil && n == 0 {
			return calls, nil
		}
		var q call
		if err == nil {
			err = json.Unmarshal(buf[:n], &q)
		}
		if err != nil {
			return calls, err
		}
		calls[q.Op]++
		if err := reply(c, q, more); err != nil {
			return calls, err
		}
	}
}

func reply(c *net.UnixConn, q call, more func(string, json.RawMessage) (any, error)) error {
	var a answer
	f, err := do(q, &a)
	if errors.Is(err, errOther) {
		var out any
		if out, err = more(q.Op, q.More); err == nil {
			a.More, err = json.Marshal(out)
		}
	}
	if err != nil {
		a.Error = err.Error()
		_ = errors.As(err, &a.Errno)
	}
	var rights []byte
	if f != nil {
		defer f.Close()
		rights = unix.UnixRights(int(f.Fd()))
	}
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	_, _, err = c.WriteMsgUnix(text, rights, nil)
	return err
}

func do(q call, a *answer) (f *os.File, err error) {
	switch q.Op {
	case "open":
		return os.OpenFile(q.A, q.Flag, q.Perm)
	case "stat":
		return os.OpenFile(q.A, unix.O_PATH, 0)
	case "lock":
		return osfile.TryOpenLocked(q.A, os.O_RDONLY, 0, osfile.Exclusive)
	case "rename":
		err = osfile.OS.Rename(q.A, q.B)
	case "rename new":
		err = osfile.OS.RenameNew(q.A, q.B)
	case "exchange":
		err = osfile.OS.Exchange(q.A, q.B)
	case "link":
		err = osfile.OS.Link(q.A, q.B)
	case "remove":
		err = osfile.OS.Remove(q.A)
	case "remove all":
		err = osfile.OS.RemoveAll(q.A)
	case "mkdir":
		err = osfile.OS.Mkdir(q.A, q.Perm)
	case "sync":
		err = osfile.OS.SyncDir(q.A)
	case "free":
		a.Free, err = osfile.OS.Free(q.A)
	default:
		err = errOther
	}
	return nil, err
}

// errOther: it is no call of osfile.FS.
var errOther = errors.New("unknown call")

// Files is the osfile.FS of the process that sees no files. It has no ReadDir.
type Files struct {
	mu  sync.Mutex // one call at a time
	c   *net.UnixConn
	buf []byte
}

// New returns the file system behind a connection of Pair.
func New(f *os.File) (*Files, error) {
	c, err := conn(f)
	if err != nil {
		return nil, err
	}
	return &Files{c: c, buf: make([]byte, maxMessage)}, nil
}

// Close ends the connection.
func (s *Files) Close() error { return s.c.Close() }

// Ask has the other process do something else than calls of osfile.FS.
func (s *Files) Ask(op string, in, out any) error {
	text, err := json.Marshal(in)
	if err != nil {
		return err
	}
	a, _, err := s.call(call{Op: op, More: text})
	if err != nil || out == nil {
		return err
	}
	return json.Unmarshal(a.More, out)
}

func (s *Files) call(q call) (a answer, f *os.File, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := json.Marshal(q)
	if err != nil {
		return a, nil, err
	}
	if _, err := s.c.Write(text); err != nil {
		return a, nil, err
	}
	oob := make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := s.c.ReadMsgUnix(s.buf, oob)
	if err != nil {
		return a, nil, err
	}
	if err := json.Unmarshal(s.buf[:n], &a); err != nil {
		return a, nil, err
	}
	switch {
	case a.Errno != 0:
		return a, nil, &fs.PathError{Op: q.Op, Path: q.A, Err: a.Errno}
	case a.Error != "":
		return a, nil, errors.New(a.Error)
	case on == 0:
		return a, nil, nil
	}
	ms, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil {
		return a, nil, err
	}
	fds, err := unix.ParseUnixRights(&ms[0])
	if err != nil {
		return a, nil, err
	}
	return a, os.NewFile(uintptr(fds[0]), q.A), nil
}

func (s *Files) do(op, a, b string) error { _, _, err := s.call(call{Op: op, A: a, B: b}); return err }

// OpenFile implements [osfile.FS].
func (s *Files) OpenFile(name string, flag int, perm fs.FileMode) (osfile.File, error) {
	_, f, err := s.call(call{Op: "open", A: name, Flag: flag, Perm: perm})
	if err != nil {
		return nil, err
	}
	return osfile.NewFile(f), nil
}

// Stat implements [osfile.FS].
func (s *Files) Stat(name string) (fs.FileInfo, error) {
	_, f, err := s.call(call{Op: "stat", A: name})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Stat()
}

// Lock implements [osfile.FS].
func (s *Files) Lock(name string) (io.Closer, error) {
	_, f, err := s.call(call{Op: "lock", A: name})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Free implements [osfile.FS].
func (s *Files) Free(name string) (uint64, error) {
	a, _, err := s.call(call{Op: "free", A: name})
	return a.Free, err
}

// Mkdir implements [osfile.FS].
func (s *Files) Mkdir(name string, perm fs.FileMode) error {
	_, _, err := s.call(call{Op: "mkdir", A: name, Perm: perm})
	return err
}

// Rename implements [osfile.FS].
func (s *Files) Rename(a, b string) error { return s.do("rename", a, b) }

// RenameNew implements [osfile.FS].
func (s *Files) RenameNew(a, b string) error { return s.do("rename new", a, b) }

// Exchange implements [osfile.FS].
func (s *Files) Exchange(a, b string) error { return s.do("exchange", a, b) }

// Link implements [osfile.FS].
func (s *Files) Link(a, b string) error { return s.do("link", a, b) }

// Remove implements [osfile.FS].
func (s *Files) Remove(name string) error { return s.do("remove", name, "") }

// RemoveAll implements [osfile.FS].
func (s *Files) RemoveAll(name string) error { return s.do("remove all", name, "") }

// SyncDir implements [osfile.FS].
func (s *Files) SyncDir(name string) error { return s.do("sync", name, "") }

// ReadDir implements [osfile.FS]. It always fails.
func (s *Files) ReadDir(string) ([]fs.DirEntry, error) { return nil, errors.ErrUnsupported }
