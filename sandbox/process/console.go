package process

import (
	"errors"
	"fmt"
	"os"
)

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
