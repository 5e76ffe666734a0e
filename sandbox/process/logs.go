package process

import (
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"

	clog "github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/state"
)

// Bounds on the log of a VM's process: a guest can make it log, and must fill neither the host's disk nor the
// process's time.
const (
	// maxProcessLog is how much of the log is kept, in bytes; there is one older file of the same size.
	maxProcessLog = 1 << 20
	// maxLogLine is the maximum length of a message, in bytes. The rest is cut.
	maxLogLine = 16 << 10
	// logBurst messages in a row are written, and then one per logEvery.
	logBurst = 512
	logEvery = 100 * time.Millisecond
)

// processLog bounds the log of a VM's process. The log file is also the process's standard output and error: the
// Go runtime writes there when it crashes.
type processLog struct {
	mu   sync.Mutex // guards what follows
	ring *ring
	now  func() time.Time
	// turned is called with the new file when the log starts anew.
	turned func(*os.File) error

	rate allowance
	lost uint64
}

func newProcessLog(path string, limit int64, turned func(*os.File) error) (*processLog, error) {
	r, err := newRing(path, limit)
	if err != nil {
		return nil, err
	}
	return &processLog{ring: r, now: time.Now, turned: turned}, nil
}

// Write writes one message, unless there have been too many. It fails only if a file operation fails. Any
// goroutine may call it.
func (l *processLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	if !l.rate.take(now, logBurst, logEvery) {
		l.lost++
		return len(p), nil
	}
	if l.lost > 0 {
		line := fmt.Sprintf("time=%s level=WARN msg=\"messages before this one were left out\" number=%d\n", now.Format(time.RFC3339), l.lost)
		if err := l.put([]byte(line)); err != nil {
			return 0, err
		}
		l.lost = 0
	}
	line := p
	if len(line) > maxLogLine {
		line = append(append([]byte(nil), line[:maxLogLine]...), "[cut]\n"...)
	}
	if err := l.put(line); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (l *processLog) put(p []byte) error {
	before := l.ring.f
	_, err := l.ring.Write(p)
	if l.ring.f != before && l.turned != nil {
		err = errors.Join(err, l.turned(l.ring.f))
	}
	return err
}

// boundLog returns where this VM's process logs from now on: its standard error, bounded if that is the VM's log.
// The standard logger and the logger of the agent's protocol write there too. The guest can trigger the latter.
func boundLog(s *state.Store, name string) (io.Writer, error) {
	path := s.ProcessLog(name)
	if there, err := os.Stat(path); err != nil {
		return os.Stderr, nil
	} else if own, err := os.Stderr.Stat(); err != nil || !os.SameFile(there, own) {
		return os.Stderr, nil // standard error goes elsewhere, such as to a terminal
	}
	l, err := newProcessLog(path, maxProcessLog, standardFiles)
	if err != nil {
		return nil, err
	}
	log.SetOutput(l)
	clog.L.Logger.SetOutput(l)
	return l, nil
}

// standardFiles makes a file the standard output and error of this process.
func standardFiles(f *os.File) error {
	for fd := 1; fd <= 2; fd++ {
		if err := unix.Dup2(int(f.Fd()), fd); err != nil {
			return fmt.Errorf("changing to a new log: %w", err)
		}
	}
	return nil
}

// maxConsoleLog is how much of a guest's console is kept, in bytes; there is one older file of the same size. So a
// guest cannot fill the host's disk with output.
const maxConsoleLog = 4 << 20

// ring is a log file that starts anew when it is full, and keeps one older file.
type ring struct {
	path string
	max  int64
	f    *os.File
	n    int64
}

func newRing(path string, limit int64) (*ring, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening a log: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening a log: %w", err), f.Close())
	}
	return &ring{path: path, max: limit, f: f, n: st.Size()}, nil
}

// Write appends p. Only one goroutine may call it.
func (r *ring) Write(p []byte) (int, error) {
	if r.n > 0 && r.n+int64(len(p)) > r.max {
		if err := r.turn(); err != nil {
			return 0, err
		}
	}
	n, err := r.f.Write(p)
	r.n += int64(n)
	return n, err
}

func (r *ring) turn() error {
	if err := os.Rename(r.path, r.path+".1"); err != nil {
		return err
	}
	f, err := os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	r.f.Close()
	r.f, r.n = f, 0
	return nil
}

func (r *ring) Close() error { return r.f.Close() }
