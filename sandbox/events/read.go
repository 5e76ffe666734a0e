//go:build linux

package events

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// pollTime is how often a follower looks for events.
const pollTime = 100 * time.Millisecond

// ReadOptions say which events to read.
type ReadOptions struct {
	// Since is the cursor of the last event that the reader has; 0 begins with the oldest kept event.
	Since  uint64
	Filter Filter
	// Idle, if not nil, is called by Follow with the cursor to continue from, each time Follow has given all
	// events. If it fails, Follow ends and returns the error.
	Idle func(cursor uint64) error
}

// reader goes through a journal.
type reader struct {
	j    *Journal
	o    ReadOptions
	last uint64 // cursor of the last event passed, given or not

	f      *os.File // the current segment; nil before the first
	seg    segment
	offset int64 // where the next line begins
	begun  bool
	// checked reports that the cursor was compared with the newest event.
	checked bool
}

func (r *reader) close() {
	if r.f != nil {
		r.f.Close()
	}
}

// Read passes the events after a cursor to f, in order, until there are no more. It returns the cursor to continue
// from: that of the last event it looked at, whether f got it or not. If events after the cursor were deleted, f
// gets a Lost in their place. An error of f ends Read, which returns it with the cursor before that event.
func (j *Journal) Read(ctx context.Context, o ReadOptions, f func(Event) error) (next uint64, err error) {
	if err := o.Filter.Check(); err != nil {
		return o.Since, err
	}
	r := &reader{j: j, o: o, last: o.Since}
	defer r.close()
	err = r.read(ctx, f)
	return r.last, wrap(err)
}

func wrap(err error) error {
	var own *giveError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &own):
		return own.error
	}
	return fmt.Errorf("reading events: %w", err)
}

// giveError is an error of the reader's caller.
type giveError struct{ error }

func (e *giveError) Unwrap() error { return e.error }

// Follow is Read that waits for more, until ctx ends, and then returns its error. A slow f misses no kept event.
func (j *Journal) Follow(ctx context.Context, o ReadOptions, f func(Event) error) error {
	if err := o.Filter.Check(); err != nil {
		return err
	}
	r := &reader{j: j, o: o, last: o.Since}
	defer r.close()
	tick := time.NewTicker(pollTime)
	defer tick.Stop()
	for {
		if err := r.read(ctx, f); err != nil {
			return wrap(err)
		}
		if o.Idle != nil {
			if err := o.Idle(r.last); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// Subscription is a Follow with a channel.
type Subscription struct {
	// C gets the events. It is closed when ctx has ended or reading fails. At most one event is read ahead of the
	// receiver.
	C   <-chan Event
	err error
}

// Err returns why C was closed, once it is closed.
func (s *Subscription) Err() error { return s.err }

// Subscribe follows the journal until ctx ends.
func (j *Journal) Subscribe(ctx context.Context, o ReadOptions) *Subscription {
	c := make(chan Event)
	s := &Subscription{C: c}
	go func() {
		defer close(c)
		s.err = j.Follow(ctx, o, func(e Event) error {
			select {
			case c <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	return s
}

// Newest returns the cursor of the newest event, to follow from now on; 0 if there is none.
func (j *Journal) Newest() (uint64, error) {
	for {
		segs, err := j.segments()
		if err != nil || len(segs) == 0 {
			return 0, wrap(err)
		}
		r := &reader{j: j, last: segs[len(segs)-1].first - 1, checked: true, o: ReadOptions{Filter: Filter{Sandbox: "\x00"}}}
		err = r.read(context.Background(), func(Event) error { return nil })
		r.close()
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile: a newer one exists
		}
		return r.last, wrap(err)
	}
}

// read gives all events that exist now.
func (r *reader) read(ctx context.Context, f func(Event) error) error {
	for {
		if r.f != nil {
			if err := r.lines(ctx, f); err != nil {
				return err
			}
		}
		segs, err := r.j.segments()
		if err != nil {
			return err
		}
		next, ok := r.next(segs)
		if !ok {
			return r.checkReset(f)
		}
		if r.f != nil {
			// A writer may have appended to it until it began the next one.
			if err := r.lines(ctx, f); err != nil {
				return err
			}
		}
		file, err := os.Open(filepath.Join(r.j.dir, next.name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted since it was listed
		}
		if err != nil {
			return err
		}
		r.close()
		r.f, r.seg, r.offset = file, next, 0
		h, err := readHeader(file)
		if err == nil && h.Prev > r.last && (r.o.Since > 0 || r.begun) {
			if err := r.lost(Details{After: r.last, Before: next.first}, h.Prev, f); err != nil {
				return err
			}
		}
		r.begun = true
	}
}

// next returns the segment to continue with.
func (r *reader) next(segs []segment) (segment, bool) {
	if r.f == nil {
		// Find the last segment that can have the events after the cursor.
		for i := len(segs) - 1; i >= 0; i-- {
			if i == 0 || segs[i].first <= r.last {
				return segs[i], true
			}
		}
		return segment{}, false
	}
	for _, s := range segs {
		if s.first > r.seg.first {
			return s, true
		}
	}
	return segment{}, false
}

func (r *reader) lost(d Details, to uint64, f func(Event) error) error {
	if err := f(Event{Version: Version, Cursor: to, Time: r.j.o.now().UTC(), Type: Lost, Details: d}); err != nil {
		return &giveError{err}
	}
	r.last = to
	return nil
}

// checkReset gives a Lost, once, to a reader whose cursor the journal never reached.
func (r *reader) checkReset(f func(Event) error) error {
	if r.checked {
		return nil
	}
	r.checked = true
	if r.last == 0 || r.last != r.o.Since {
		return nil
	}
	newest, err := r.j.Newest()
	if err != nil || newest == 0 || r.last <= newest {
		return err
	}
	return r.lost(Details{After: r.last, Before: newest, Reset: true}, newest, f)
}

// lines gives the events of the segment from the offset on. It leaves an unfinished line for the next time.
func (r *reader) lines(ctx context.Context, f func(Event) error) error {
	in := bufio.NewReaderSize(io.NewSectionReader(r.f, r.offset, 1<<62), MaxLine)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		line, err := in.ReadSlice('\n')
		n := int64(len(line))
		damaged := false
		for errors.Is(err, bufio.ErrBufferFull) {
			damaged = true
			line, err = in.ReadSlice('\n')
			n += int64(len(line))
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var e Event
		if !damaged && json.Unmarshal(line, &e) == nil && e.Version > 0 && e.Cursor > r.last {
			if r.o.Filter.Match(e) {
				if err := f(e); err != nil {
					return &giveError{err}
				}
			}
			r.last = e.Cursor
		}
		r.offset += n
	}
}
