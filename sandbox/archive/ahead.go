package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// Ahead is a head that is put: at once, or first files of snapshots of a sandbox that still runs. What is the same in
// the last one is not put again. Until PushHead it is what Sweep finds, and no head. One goroutine at a time may use
// it.
type Ahead struct {
	a     *Archive
	begin time.Time
	id    string
	data  string
	next  int // number of the next file; 0 is the document's
	files []Kept
	// inlined is how many bytes its manifest has of files and indexes.
	inlined int
}

// Kept is a file of a head that is in the store, and may be a file of the sandbox's next heads as well.
type Kept struct {
	entryFile
	// Mark is the file's on this host: see state.FileMarks.
	Mark string `json:"mark"`
	// Stored is how many bytes it has in the store.
	Stored int64 `json:"stored"`
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

// Seal says how the files are sealed that are put. Those of another seal are no files of this head.
func (h *Ahead) Seal() blob.Seal { return blob.SealOf(h.a.storeOf(Heads)) }

// Keep has the head name files that earlier heads have put, if the snapshot has them. It returns those heads: they must
// stay as long as this one. It leaves out a head of whose bytes less than half are in use, so that the store keeps at
// most twice what is needed.
func (h *Ahead) Keep(s *state.Store, snap string, kept []Kept) (heads []string, err error) {
	marks, err := s.FileMarks(snap)
	if err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for _, mark := range marks {
		has[mark] = true
	}
	used := map[string]int64{}
	for _, k := range kept {
		if has[k.Mark] {
			used[k.In] += k.Stored
		}
	}
	for _, k := range kept {
		if has[k.Mark] && used[k.In] >= k.Of/2 && h.inlined+len(k.Inline) <= maxInlined {
			h.inlined += len(k.Inline)
			h.files = append(h.files, k)
			heads = append(heads, headOf(k.In))
		}
	}
	slices.Sort(heads)
	return slices.Compact(heads), nil
}

// Forget has the head name no file that these heads have put.
func (h *Ahead) Forget(heads []string) {
	h.files = slices.DeleteFunc(h.files, func(k Kept) bool { return slices.Contains(heads, headOf(k.In)) })
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
func (h *Ahead) send(ctx context.Context, s *state.Store, snap string) (files []Kept, stored int64, err error) {
	// Before any file is read: one that changes meanwhile has another mark the next time.
	marks, err := s.FileMarks(snap)
	if err != nil {
		return nil, 0, err
	}
	err = s.SendSnapshot(ctx, snap, func(f snapshot.SentFile, r io.Reader) error {
		mark := marks.Of(f)
		for _, have := range h.files {
			if mark != "" && have.Mark == mark && have.Size == f.Size {
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
		is, err := h.put(ctx, f, n, r)
		if err != nil {
			return err
		}
		if is.Mark = mark; !is.isPlain() {
			h.files = append(h.files, is)
		}
		files, stored = append(files, is), stored+is.Stored
		return nil
	})
	return files, stored, err
}

// put puts a file, unless it goes into the manifest. Memory does not: it is read in parts.
func (h *Ahead) put(ctx context.Context, f snapshot.SentFile, n int, r io.Reader) (Kept, error) {
	k := Kept{entryFile: entryFile{SentFile: f, At: n}}
	if f.Size > 0 && f.Size <= maxPlain && h.inlined+int(f.Size) <= maxInlined && (f.Extra || f.Name == snapshot.ManifestName || n == 0) {
		b, err := io.ReadAll(io.LimitReader(r, f.Size+1))
		if err == nil && int64(len(b)) != f.Size {
			err = fmt.Errorf("%.80q has not its %d bytes: it has changed: %w", f.Name, f.Size, ErrCorrupt)
		}
		h.inlined += len(b)
		k.Plain = b
		return k, err
	}
	key := fmt.Sprintf("%s/%d", h.data, n)
	x, err := putPacks(ctx, h.a.storeOf(Heads), key, r, f.Size)
	if err != nil {
		return k, err
	}
	if doc := x.encode(); len(doc) <= maxInline && h.inlined+len(doc) <= maxInlined {
		h.inlined += len(doc)
		k.Inline, k.Stored = doc, x.stored()
		return k, nil
	}
	k.Index, k.Stored, err = putIndex(ctx, h.a.storeOf(Heads), key, x)
	return k, err
}

// Objects returns what the store has of it.
func (h *Ahead) Objects(ctx context.Context) (out []Object, err error) {
	for _, f := range h.files {
		key := fmt.Sprintf("%s/%d", cmp.Or(f.In, h.data), f.At)
		var x *index
		if len(f.Inline) > 0 {
			x, err = decodeIndex(f.Inline, f.Size)
		} else if x, err = open(ctx, h.a.store, fileRef{Key: key, Size: f.Size, Index: f.Index}); err == nil {
			out = append(out, Object{key + "/index", int64(len(x.encode()))})
		}
		if err != nil {
			return nil, err
		}
		for i, n := range x.packs {
			out = append(out, Object{fmt.Sprintf("%s/%d", key, i), int64(n)})
		}
	}
	return out, nil
}

// PushHead puts the rest of the head: of the snapshot, the image i.Image, if that is missing, and a document about the
// sandbox. It also returns the bytes that the store has got by it, and what later heads may keep. No other method may
// follow.
func (h *Ahead) PushHead(ctx context.Context, s *state.Store, i Info, snap string, doc []byte) (out Info, stored int64, kept []Kept, err error) {
	fail := func(err error) (Info, int64, []Kept, error) {
		return Info{}, stored, nil, fmt.Errorf("putting %.12s into the archive: %w", h.id, err)
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
	m := manifest{Version: keptVersion, Info: i, Data: h.data}
	m.Put, m.Size, m.Stored = h.begin.UTC().Truncate(time.Second), int64(len(doc)), 0
	first, err := h.put(ctx, snapshot.SentFile{Name: docFile, Size: m.Size}, 0, bytes.NewReader(doc))
	if err == nil {
		m.Files = append(m.Files, first.entryFile)
		kept, stored, err = h.send(ctx, s, snap)
	}
	stored, m.Stored = stored+first.Stored, first.Stored
	for _, f := range kept {
		if err == nil && f.Size > maxEntry-m.Size {
			err = errTooMuch
		}
		m.Files = append(m.Files, f.entryFile)
		if m.Size += f.Size; f.In == "" {
			m.Stored += f.Stored
		}
	}
	if out, err = h.a.finish(ctx, h.a.storeOf(Heads), key, &m, h.begin, err); err != nil {
		return fail(err)
	}
	for i := range kept {
		if kept[i].In == "" {
			kept[i].In, kept[i].Of = h.data, m.Stored
		}
	}
	return out, stored, slices.DeleteFunc(kept, func(k Kept) bool { return k.Mark == "" || k.isPlain() }), nil
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
