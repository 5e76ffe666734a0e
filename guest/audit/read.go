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

// Status says what is known of an action.
type Status string

// The values of Status.
const (
	// Running: it has not ended, and who has begun it is there.
	Running Status = "running"
	Ended   Status = "ended"
	// Unknown: who has begun it is gone and has not said how it ended.
	Unknown Status = "unknown"
	// Damaged: there is a line that cannot be read. The entry has nothing else.
	Damaged Status = "damaged"
)

// Entry is one action of a trail.
type Entry struct {
	ID     string `json:"id,omitempty"`
	Status Status `json:"status"`
	// Begin and End are by the host's clock; zero where not known.
	Begin time.Time `json:"begin,omitzero"`
	End   time.Time `json:"end,omitzero"`
	// Elapsed is in milliseconds, by a clock that nobody sets.
	Elapsed float64 `json:"elapsed_ms,omitempty"`
	Action
	// By is who has asked for it.
	By      *Process `json:"by,omitempty"`
	Outcome *Outcome `json:"outcome,omitempty"`
}

// since says whether the action may have been under way at a time or after it.
func (e Entry) since(t time.Time) bool {
	if t.IsZero() || e.Status == Running || e.Status == Damaged {
		return true
	}
	return !e.Begin.Before(t) || !e.End.Before(t)
}

// ReadOptions say what is read of a trail.
type ReadOptions struct {
	// Since leaves out what was over before, and what began before and has no known end.
	Since time.Time
	// Follow goes on with what comes, until the context ends or the trail is gone. An
	// action that has been given without an end is given again with it.
	Follow bool
	// Poll is how often the files are looked at; 0 is 250 ms.
	Poll time.Duration
}

const (
	defaultPoll = 250 * time.Millisecond
	// maxLine bounds a line: all of an Action's texts, of which JSON may make six times as
	// much.
	maxLine = 1 << 20
	// maxOpen bounds the actions whose end is waited for while a trail is followed.
	maxOpen = 1 << 16
)

// Trailer says what a trail is.
type Trailer struct {
	Head
	// First is the number of the oldest file that is left. What was recorded in those
	// before it is gone.
	First int `json:"first_part"`
}

// Read calls f for the actions of the trail at a path, in the order in which they began, and
// where it follows once more for each that ends later. f's error ends it and is returned.
// Other errors are ErrNone or ErrDamaged, if there is no trail to read, and the context's.
func Read(ctx context.Context, path string, o ReadOptions, f func(Entry) error) (Trailer, error) {
	parts, err := openParts(path, 0)
	if err != nil {
		return Trailer{}, err
	}
	r := &reader{path: path, parts: parts}
	defer r.close()
	is := Trailer{Head: r.parts[len(r.parts)-1].head, First: r.parts[0].head.Part}
	j := &joiner{ends: map[string]line{}, used: map[string]bool{}, open: map[string]Entry{}, gone: map[string]bool{}}
	// First all ends, then the actions in their order, with their ends.
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
	// Whoever is gone has written all that it will.
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

// joiner puts the beginnings and ends of actions together.
type joiner struct {
	ends map[string]line  // found ahead, and not yet put to their beginnings
	used map[string]bool  // ids of ends that were, and whose lines are still to come
	gone map[string]bool  // ids whose process is gone
	open map[string]Entry // given without an end
}

// join makes an entry of a line. The end of one that has been given whole is none.
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
	// Without a beginning here, that is in a file that is gone.
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

// deadEvery is after how many looks at the trail whoever has begun something is looked for.
const deadEvery = 20

// dead are the ids whose process is gone, every now and then.
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
	read int64 // how far it has been read; always the end of a line
}

// reader reads the files of a trail, the oldest first, as they grow and are replaced.
type reader struct {
	path  string
	parts []*part // the last one is the one that is written to, or was
}

func (r *reader) close() {
	for _, p := range r.parts {
		p.f.Close()
	}
}

// openParts opens the files whose number is above the given one, the oldest first. They are
// looked for beginning with the newest, since files are renamed towards the older ones.
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

// advance reads what has come since, in all files. A line that cannot be read is nil.
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
		// Nothing is added any more to one that has been replaced.
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

// advance reads what has come since.
func (p *part) advance(f func(*line) error) error {
	n, err := p.lines(p.read, 1<<63-1, f)
	p.read += n
	return err
}

// again reads once more what has been read.
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

// lines calls f for the whole lines from an offset to another, or to the end of the file,
// and returns how many bytes they had.
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
			continue // what sets a line apart from one that has no end
		}
		if err := f(parseLine(text)); err != nil {
			return read, err
		}
	}
}

// readLine reads a line of n bytes; text is nil if it is too long.
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

// parseLine returns nil for what is no line of a trail.
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
