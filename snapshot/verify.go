package snapshot

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// MaxVerifiers bounds the goroutines that verify a snapshot. Each holds about
// 600 KiB.
const MaxVerifiers = 32

// Verify opens the snapshot in dir, and reads, checks and decompresses every leaf and frame, with a goroutine for
// each processor, at most MaxVerifiers. It fails like Open, with the first error that it finds (a *CorruptError
// says which file and where), or with the context's.
func Verify(ctx context.Context, dir string) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Verify(ctx)
}

// Verify is like the function Verify, for an open snapshot.
func (s *Snapshot) Verify(ctx context.Context) error {
	if err := s.verifyMemory(ctx); err != nil {
		return fmt.Errorf("verifying snapshot %s: %w", s.dir, err)
	}
	return nil
}

// verifier is the state that the goroutines of a verification share.
type verifier struct {
	m    *Memory
	next atomic.Int64

	mu    sync.Mutex // guards tally
	tally *tally
}

func (s *Snapshot) verifyMemory(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := &verifier{m: s.memory, tally: newTally()}
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), MaxVerifiers, s.memory.Chunks()) {
		wg.Go(func() {
			if err := v.run(ctx); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return v.tally.compare(s.manifest)
}

func (v *verifier) run(ctx context.Context) error {
	d, err := NewDecoder()
	if err != nil {
		return err
	}
	defer d.Release()
	var l Leaf
	buf := make([]byte, maxLeaf)
	for {
		c := int(v.next.Add(1) - 1)
		if c >= v.m.Chunks() {
			return nil
		}
		ok, err := v.m.readLeaf(c, &l, buf)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		for i := range l.frames {
			if ctx.Err() != nil {
				return nil // verifyMemory returns the cause
			}
			if _, err := v.m.ReadFrame(&l.frames[i], d); err != nil {
				return err
			}
		}
		r := v.m.ref(c)
		v.mu.Lock()
		v.tally.add(&l, r.file, r.length())
		v.mu.Unlock()
	}
}

// tally counts what an index refers to in each file.
type tally struct {
	frames uint64
	files  map[uint32]*use
}

type use struct {
	pages, frameBytes, leafBytes uint64
}

func newTally() *tally { return &tally{files: map[uint32]*use{}} }

func (t *tally) file(number uint32) *use {
	u := t.files[number]
	if u == nil {
		u = new(use)
		t.files[number] = u
	}
	return u
}

// add counts a leaf that is in a file.
func (t *tally) add(l *Leaf, file uint32, length int) { t.count(l, file, length, 1) }

// remove is the inverse of add. Numbers wrap around and back.
func (t *tally) remove(l *Leaf, file uint32, length int) { t.count(l, file, length, ^uint64(0)) }

// count counts a leaf sign times; in the arithmetic of uint64, ^0 is -1.
func (t *tally) count(l *Leaf, file uint32, length int, sign uint64) {
	if file != 0 {
		t.file(file).leafBytes += sign * uint64(length)
	}
	live := l.live()
	for i := range l.frames {
		f := &l.frames[i]
		u := t.file(f.file)
		u.frameBytes += sign * uint64(f.stored)
		u.pages += sign * uint64(live[i])
	}
	t.frames += sign * uint64(len(l.frames))
}

// compare returns an error if the manifest's counts differ.
func (t *tally) compare(m *Manifest) error {
	frames := t.frames
	for i := range m.Memory.Files {
		f := &m.Memory.Files[i]
		if u := *t.file(f.Number); u != (use{f.Pages, f.FrameBytes, f.LeafBytes}) {
			return corrupt(f.Name, 0, "the index has %d pages of it in %d bytes and leaves of %d bytes, the manifest says %d, %d, %d",
				u.pages, u.frameBytes, u.leafBytes, f.Pages, f.FrameBytes, f.LeafBytes)
		}
	}
	if frames != m.Stats.Frames {
		return corrupt(ManifestName, 0, "the index has %d frames, the manifest says %d", frames, m.Stats.Frames)
	}
	return nil
}
