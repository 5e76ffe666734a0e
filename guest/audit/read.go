//go:build linux

package audit

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"
)

// since reports whether the action may have been under way at t or later.
func (e Entry) since(t time.Time) bool {
	if t.IsZero() || e.Status == Running || e.Status == Damaged {
		return true
	}
	return !e.Begin.Before(t) || !e.End.Before(t)
}

// ReadOptions says what to read of a trail.
type ReadOptions struct {
	// Since leaves out actions that ended before it, and those that began before it and have no known end.
	Since time.Time
	// Follow keeps reading new lines, until the context ends or the trail is gone. An action that was delivered
	// without an end is delivered again with it.
	Follow bool
	// Poll is how often to look at the files; 0 is 250 ms.
	Poll time.Duration
}

const (
	defaultPoll = 250 * time.Millisecond
	// maxLine bounds a line: all texts of an Action or an Outcome, which JSON may make six times as long.
	maxLine = 1 << 20
	// maxOpen bounds the actions without an end that Read remembers while it follows a trail.
	maxOpen = 1 << 16
)

// Read calls f for the actions of the trail at a path, in the order in which they began. With Follow it calls f
// again for each that ends later. An error of f ends the reading, and Read returns it. Its other errors are ErrNone
// or ErrDamaged, if there is no readable trail, and the context's.
func Read(ctx context.Context, path string, o ReadOptions, f func(Entry) error) (Trailer, error) {
	parts, err := openParts(path, 0)
	if err != nil {
		return Trailer{}, err
	}
	r := &reader{path: path, parts: parts}
	defer r.close()
	is := Trailer{Head: r.parts[len(r.parts)-1].head, First: r.parts[0].head.Part}
	j := &joiner{ends: map[string]line{}, used: map[string]bool{}, open: map[string]Entry{}, gone: map[string]bool{}}
	// Read all ends first, then the actions in their order, with their ends.
	begun := map[string]Process{}
	collect := func(l *line) error {
		if l != nil && l.Type == typeBegin {
			begun[l.ID] = *l.By
		}
		if l != nil && l.Type == typeEnd {
			j.ends[l.ID] = *l
			delete(begun, l.ID)
		}
		return ctx.Err()
	}
	if err := r.advance(collect); err != nil {
		return is, err
	}
	boot := bootID()
	for id, by := range begun {
		j.gone[id] = !by.lives(boot)
	}
	// A process that was gone by now has written all its lines.
	if err := r.advance(collect); err != nil {
		return is, err
	}
	give := func(e Entry, ok bool) error {
		if !ok || !e.since(o.Since) {
			return nil
		}
		return f(e)
	}
	next := func(l *line) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return give(j.join(l))
	}
	if err := r.again(next); err != nil || !o.Follow {
		return is, err
	}
	poll := o.Poll
	if poll <= 0 {
		poll = defaultPoll
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return is, ctx.Err()
		case <-tick.C:
		}
		dead := j.dead(n, boot)
		if err := r.advance(next); err != nil {
			if errors.Is(err, ErrNone) {
				err = nil // the VM has been removed
			}
			return is, err
		}
		for _, id := range dead {
			if e, ok := j.open[id]; ok {
				delete(j.open, id)
				e.Status = Unknown
				if err := give(e, true); err != nil {
					return is, err
				}
			}
		}
	}
}

// joiner matches the beginnings and ends of actions.
type joiner struct {
	ends map[string]line  // read ahead, and not yet matched
	used map[string]bool  // ids of matched ends whose lines are still to come
	gone map[string]bool  // ids of actions whose process is gone
	open map[string]Entry // delivered without an end
}

// join makes an entry of a line. ok is false for the end of an action that was already delivered whole.
func (j *joiner) join(l *line) (e Entry, ok bool) {
	switch {
	case l == nil:
		return Entry{Status: Damaged}, true
	case l.Type == typeBegin:
		e = Entry{ID: l.ID, Status: Running, Begin: l.Time, Action: *l.Action, By: l.By}
		if end, ok := j.ends[l.ID]; ok {
			delete(j.ends, l.ID)
			j.used[l.ID] = true
			end.end(&e)
		} else if j.gone[l.ID] {
			e.Status = Unknown
		} else if len(j.open) < maxOpen {
			j.open[l.ID] = e
		}
		return e, true
	case j.used[l.ID]:
		delete(j.used, l.ID)
		return e, false
	}
	// An end without a beginning here: the beginning was in a file that is gone.
	e = j.open[l.ID]
	delete(j.open, l.ID)
	delete(j.ends, l.ID)
	l.end(&e)
	return e, true
}

// end completes an entry.
func (l *line) end(e *Entry) {
	e.ID, e.Status, e.End, e.Elapsed, e.Outcome = l.ID, Ended, l.Time, l.Elapsed, l.Outcome
}

// deadEvery is after how many looks at the trail joiner checks which processes are gone.
const deadEvery = 20

// dead returns, at every deadEvery-th look, the ids of open actions whose process is gone.
func (j *joiner) dead(look int, boot string) (ids []string) {
	if look%deadEvery != 0 {
		return nil
	}
	for id, e := range j.open {
		if e.By == nil || !e.By.lives(boot) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// part is one file of a trail.
type part struct {
	f    *os.File
	head Head
	read int64 // offset up to which it was read; always the end of a line
}

// reader reads the files of a trail, the oldest first, while they grow and are replaced.
type reader struct {
	path  string
	parts []*part // oldest first; writers append to the last, or did
}

func (r *reader) close() {
	for _, p := range r.parts {
		p.f.Close()
	}
}

// openParts opens the files whose number is above after, and returns them oldest first. It looks for the newest
// first, since files are renamed towards older names.
func openParts(path string, after int) (parts []*part, err error) {
	seen := map[int]bool{}
	for n := 0; n <= KeptFiles; n++ {
		name := path
		if n > 0 {
			name = older(path, n)
		}
		p, err := openPart(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && n == 0:
			return nil, ErrNone
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, ErrDamaged) && n > 0:
			continue
		case err != nil:
			for _, p := range parts {
				p.f.Close()
			}
			return nil, err
		}
		// After a crash, one file may have two names.
		if p.head.Part <= after || seen[p.head.Part] || len(parts) > 0 && p.head.VM != parts[0].head.VM {
			p.f.Close()
			continue
		}
		seen[p.head.Part] = true
		parts = append(parts, p)
	}
	slices.SortFunc(parts, func(a, b *part) int { return a.head.Part - b.head.Part })
	return parts, nil
}

func openPart(path string) (*part, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	h, raw, err := readHead(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &part{f: f, head: h, read: int64(len(raw))}, nil
}

// advance reads new lines in all files. It passes nil for a line that it cannot read.
func (r *reader) advance(f func(*line) error) error {
	for {
		for _, p := range r.parts {
			if err := p.advance(f); err != nil {
				return err
			}
		}
		last := r.parts[len(r.parts)-1]
		if isAt(last.f, r.path) {
			return nil
		}
		// No process appends to a file any more once it has been replaced.
		more, err := openParts(r.path, last.head.Part)
		if err == nil && len(more) > 0 && more[0].head.VM != last.head.VM {
			err = ErrNone
		}
		if err != nil {
			for _, p := range more {
				p.f.Close()
			}
			return err
		}
		err = last.advance(f)
		r.parts = append(r.parts, more...)
		if err != nil || len(more) == 0 {
			return err
		}
	}
}

// advance reads new lines of the file.
func (p *part) advance(f func(*line) error) error {
	n, err := p.lines(p.read, 1<<63-1, f)
	p.read += n
	return err
}

// again rereads the lines that were already read.
func (r *reader) again(f func(*line) error) error {
	for _, p := range r.parts {
		_, raw, err := readHead(p.f)
		if err != nil {
			return err
		}
		if _, err := p.lines(int64(len(raw)), p.read, f); err != nil {
			return err
		}
	}
	return nil
}

// lines calls f for the whole lines between two offsets, or up to the end of the file, and returns their length in
// bytes.
func (p *part) lines(from, to int64, f func(*line) error) (read int64, err error) {
	b := bufio.NewReaderSize(io.NewSectionReader(p.f, from, to-from), 64<<10)
	for {
		text, n, err := readLine(b)
		if errors.Is(err, io.EOF) {
			return read, nil // part of a line is still being written
		}
		if err != nil {
			return read, err
		}
		read += int64(n)
		if n == 1 {
			continue // separates a line from an incomplete one before it
		}
		if err := f(parseLine(text)); err != nil {
			return read, err
		}
	}
}

// readLine reads a line and returns its length n; text is nil if it is too long.
func readLine(b *bufio.Reader) (text []byte, n int, err error) {
	for {
		piece, err := b.ReadSlice('\n')
		n += len(piece)
		if n <= maxLine {
			text = append(text, piece...)
		} else {
			text = nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return text, n, err
		}
	}
}

// parseLine returns nil if the text is not a line of a trail.
func parseLine(text []byte) *line {
	var l line
	if json.Unmarshal(text, &l) != nil || l.ID == "" || len(l.ID) > 64 {
		return nil
	}
	switch {
	case l.Type == typeBegin && l.Action != nil && l.By != nil:
		return &l
	case l.Type == typeEnd && l.Outcome != nil:
		return &l
	}
	return nil
}
