package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Compact rewrites the snapshot in dir so that it has one memory file with only what the snapshot needs. It copies
// full frames, and compresses the live pages of the others again. The snapshot's content and its ID stay the same,
// but ManifestSHA256 changes. The new directory replaces the old one in one step. A Snapshot opened before can
// still be read, and files that other snapshots link to stay. So Compact frees space only if no other snapshot
// needs the old files: see Usage.
//
// The result has SizeBytes 0 if there was nothing to do. Compact fails like Open and like Create, and then leaves
// the snapshot unchanged. But if it fails after the exchange, which the message says, either version may be there
// after a power loss. If another Compact is at work on the directory, Compact fails with EWOULDBLOCK.
func Compact(ctx context.Context, dir string) (*Info, error) {
	info, err := compact(ctx, filepath.Clean(dir), osfile.OS)
	if err != nil {
		return nil, writeError(fmt.Sprintf("compacting snapshot %s", dir), err)
	}
	return info, nil
}

func compact(ctx context.Context, dir string, fs osfile.FS) (info *Info, err error) {
	w := &writer{fs: fs, start: time.Now(), dense: true}
	// The lock keeps another Compact from replacing the directory meanwhile.
	lock, err := fs.Lock(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	s, err := OpenIn(fs, dir)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if ok, err := s.dense(ctx); err != nil {
		return nil, err
	} else if ok {
		return &Info{Dir: dir, Manifest: s.manifest, ManifestSHA256: s.ManifestSHA256()}, nil
	}
	w.base = s
	if w.number() == 0 {
		return nil, fmt.Errorf("there are no more numbers for files: %w", ErrBase)
	}
	m := *s.manifest
	m.Memory.Files = nil
	parent := filepath.Dir(dir)
	if err := w.checkFree(parent, &m, s.payloads); err != nil {
		return nil, err
	}
	var old string
	info, err = w.build(ctx, parent, &m, s.payloads, func(temp string) (string, error) {
		if err := fs.Exchange(temp, dir); err != nil {
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
				err = fmt.Errorf("this file system cannot exchange two directories in one step: %w", err)
			}
			return temp, err
		}
		old = temp
		return "", nil
	})
	if err != nil {
		return nil, err
	}
	info.Dir = dir
	if err := fs.RemoveAll(old); err != nil {
		return nil, fmt.Errorf("it is done, but the old files are still in %s: %w", old, err)
	}
	return info, nil
}

// dense reports whether Compact has nothing to do.
func (s *Snapshot) dense(ctx context.Context) (bool, error) {
	if len(s.files) > 1 {
		return false, nil
	}
	var l Leaf
	buf := make([]byte, maxLeaf)
	for c := range s.memory.Chunks() {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		ok, err := s.memory.readLeaf(c, &l, buf)
		if err != nil {
			return false, err
		}
		if !ok {
			continue
		}
		live, small := l.live(), 0
		for i := range l.frames {
			if int(live[i]) < l.frames[i].Pages() {
				return false, nil
			}
			if live[i] < FramePages && l.frames[i].codec != codecRaw {
				small++
			}
		}
		if small > 1 {
			return false, nil
		}
	}
	return true, nil
}
