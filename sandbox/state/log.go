package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
)

// logPoll is how often FollowLog looks at a log.
const logPoll = 200 * time.Millisecond

// ReadLog reads a log of a VM, such as ConsoleLog, with the part that was put away before it. at is how many bytes of
// the file itself it has read.
func ReadLog(path string) (text []byte, at int64, err error) {
	for _, p := range []string{path + ".1", path} {
		data, err := os.ReadFile(p)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, 0, fmt.Errorf("reading the log: %w", err)
		}
		text, at = append(text, data...), int64(len(data))
	}
	return text, at, nil
}

// FollowLog writes what is added to the log of a VM after a number of bytes of the file, until ctx ends, or the VM has
// ended and nothing more comes. It waits while the VM sleeps.
func (s *Store) FollowLog(ctx context.Context, name, path string, at int64, w io.Writer) error {
	return followLog(ctx, path, at, w, func() bool {
		r, err := s.Get(name)
		return err != nil || r.Phase == Stopped || r.Phase == Crashed
	})
}

// followLog writes what is added to a log after a number of bytes, until it ends and nothing more comes.
func followLog(ctx context.Context, path string, at int64, w io.Writer, ended func() bool) error {
	var is os.FileInfo
	for {
		last := ended() // before the read: what it wrote before its end is read
		f, err := os.Open(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("reading the log: %w", err)
		}
		if err == nil {
			now, err := f.Stat()
			if err == nil {
				if is != nil && !os.SameFile(is, now) || now.Size() < at {
					at = 0 // it was put away, and this is a new one
				}
				is = now
				var n int64
				n, err = io.Copy(w, io.NewSectionReader(f, at, now.Size()-at))
				at += n
			}
			f.Close()
			if err != nil {
				return fmt.Errorf("reading the log: %w", err)
			}
		}
		if last {
			return nil
		}
		if wait.For(ctx, logPoll) != nil {
			return ctx.Err()
		}
	}
}
