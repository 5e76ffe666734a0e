package archive

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// Ahead is a head of which files are put before all of it is known: from snapshots of a sandbox that still runs. What
// is the same in the last one is not put again. Until then it is what Sweep finds, and no head. One goroutine at a time
// may use it.
type Ahead struct {
	a     *Archive
	begin time.Time
	id    string
	data  string
	next  int // number of the next file; 0 is the document's
	files []aheadFile
}

type aheadFile struct {
	entryFile
	mark   string // state.FileMarks
	stored int64
}

// Object is an object of an Ahead.
type Object struct {
	Key  string `json:"key"`
	Size int64  `json:"size"` // bytes
}

// Ahead begins a head. Nothing has its id.
func (a *Archive) Ahead(id string) (*Ahead, error) {
	if _, err := Heads.key(id); err != nil {
		return nil, err
	}
	return &Ahead{a: a, begin: time.Now(), id: id, data: dataOf(Heads, id) + rand.Text(), next: 1}, nil
}

// Send puts what was not put yet of a snapshot, and the image, if that is missing. It returns the bytes that the store
// has got.
func (h *Ahead) Send(ctx context.Context, s *state.Store, image, snap string) (stored int64, err error) {
	if err := h.a.pushImage(ctx, s, image, nil); err != nil {
		return 0, err
	}
	_, stored, err = h.send(ctx, s, snap)
	if err != nil {
		err = fmt.Errorf("putting %.12s into the archive ahead: %w", h.id, err)
	}
	return stored, err
}

// send returns the files of a snapshot, after it has put those that are missing.
func (h *Ahead) send(ctx context.Context, s *state.Store, snap string) (files []aheadFile, stored int64, err error) {
	// Before any file is read: one that changes meanwhile has another mark the next time.
	marks, err := s.FileMarks(snap)
	if err != nil {
		return nil, 0, err
	}
	err = s.SendSnapshot(ctx, snap, func(f snapshot.SentFile, r io.Reader) error {
		mark := marks.Of(f)
		for _, have := range h.files {
			if mark != "" && have.mark == mark && have.Size == f.Size {
				have.SentFile = f // a memory file has another name in a later snapshot
				files = append(files, have)
				return nil
			}
		}
		if h.next > maxNumber {
			return fmt.Errorf("more than %d files", maxNumber)
		}
		n := h.next
		h.next++ // also if it fails: no key is used twice
		ref, size, err := put(ctx, h.a.storeOf(Heads), fmt.Sprintf("%s/%d", h.data, n), r, f.Size)
		if err != nil {
			return err
		}
		is := aheadFile{entryFile{SentFile: f, Index: ref.Index, At: n}, mark, size}
		h.files, files, stored = append(h.files, is), append(files, is), stored+size
		return nil
	})
	return files, stored, err
}

// Objects returns what the store has of it.
func (h *Ahead) Objects(ctx context.Context) (out []Object, err error) {
	for _, f := range h.files {
		ref := fileRef{Key: fmt.Sprintf("%s/%d", h.data, f.At), Size: f.Size, Index: f.Index}
		x, err := open(ctx, h.a.store, ref)
		if err != nil {
			return nil, err
		}
		out = append(out, Object{ref.Key + "/index", int64(len(x.encode()))})
		for i, n := range x.packs {
			out = append(out, Object{fmt.Sprintf("%s/%d", ref.Key, i), int64(n)})
		}
	}
	return out, nil
}

// PushHead is Archive.PushHead of the head. It also returns the bytes that the store has got by it. No other method may
// follow.
func (h *Ahead) PushHead(ctx context.Context, s *state.Store, i Info, snap string, doc []byte) (out Info, stored int64, err error) {
	fail := func(err error) (Info, int64, error) {
		return Info{}, stored, fmt.Errorf("putting %.12s into the archive: %w", h.id, err)
	}
	if err := checkDoc(i.Name, doc); err != nil {
		return fail(err)
	}
	key, err := Heads.key(h.id)
	if err != nil {
		return fail(err)
	}
	if err := h.a.pushImage(ctx, s, i.Image, nil); err != nil {
		return fail(err)
	}
	i.ID = h.id
	m := manifest{Version: aheadVersion, Info: i, Data: h.data}
	m.Put, m.Size, m.Stored = h.begin.UTC().Truncate(time.Second), int64(len(doc)), 0
	ref, size, err := put(ctx, h.a.storeOf(Heads), m.file(0), bytes.NewReader(doc), m.Size)
	var files []aheadFile
	if err == nil {
		m.Files = append(m.Files, entryFile{SentFile: snapshot.SentFile{Name: docFile, Size: m.Size}, Index: ref.Index})
		files, stored, err = h.send(ctx, s, snap)
	}
	stored, m.Stored = stored+size, size
	for _, f := range files {
		if err == nil && f.Size > maxEntry-m.Size {
			err = errTooMuch
		}
		m.Files = append(m.Files, f.entryFile)
		m.Size, m.Stored = m.Size+f.Size, m.Stored+f.stored
	}
	if out, err = h.a.finish(ctx, h.a.storeOf(Heads), key, &m, h.begin, err); err != nil {
		return fail(err)
	}
	return out, stored, nil
}

// PullImage gets an image if the store lacks it.
func (a *Archive) PullImage(ctx context.Context, s *state.Store, id string) error {
	return a.pullImage(ctx, s, id, nil)
}

// AheadPrefix begins the keys of all objects of a head but its manifest.
func AheadPrefix(id string) string { return dataOf(Heads, id) }

// IsAhead reports whether a key can be that of an Object of a head.
func IsAhead(key, id string) bool {
	return idRE.MatchString(id) && blob.CheckKey(key) == nil && strings.HasPrefix(key, AheadPrefix(id))
}

// ID returns the head's.
func (h *Ahead) ID() string { return h.id }
