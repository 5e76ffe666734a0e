package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// Heads are snapshots in which sandboxes sleep that several hosts share. A ledger says which they are. Each has an id
// of its own, besides the snapshot's: what was put twice is there twice.
const Heads Kind = "heads"

const (
	// docFile is a file of a head: what else is to be known of its sandbox.
	docFile = "sandbox.json"
	maxDoc  = 1 << 20
)

func checkDoc(name string, doc []byte) error {
	if len(doc) > maxDoc {
		return fmt.Errorf("what is known of %s has %d bytes, and %d are allowed", name, len(doc), maxDoc)
	}
	return nil
}

// Head is a head that is read.
type Head struct {
	e   *Entry
	Doc []byte
}

// Head opens a head. The error is ErrNotFound if there is none.
func (a *Archive) Head(ctx context.Context, id string) (*Head, error) {
	e, err := a.Get(ctx, Heads, id)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(e.Files(), named(docFile))
	if i != 0 || e.Files()[0].Size > maxDoc {
		return nil, fmt.Errorf("%w: head %.12s has no %s", ErrCorrupt, id, docFile)
	}
	var doc bytes.Buffer
	if err := e.Copy(ctx, 0, &doc); err != nil {
		return nil, err
	}
	return &Head{e, doc.Bytes()}, nil
}

// SealedFor is Entry.SealedFor.
func (h *Head) SealedFor() string { return h.e.SealedFor() }

// behindDoc is a head without its document and the layers that come later. Its indexes were read.
type behindDoc struct {
	*Entry
	store blob.Store // to read from
	// local are files that may have the content of the disk with the agent, which most hosts have.
	local []string
}

// numbers are those of its files in the head.
func (b behindDoc) numbers() (out []int) {
	for i := range b.m.Files {
		if i > 0 && !b.m.Files[i].isLater() {
			out = append(out, i)
		}
	}
	return out
}

func (b behindDoc) Files() (out []snapshot.SentFile) {
	for _, i := range b.numbers() {
		out = append(out, b.m.Files[i].SentFile)
	}
	return out
}

func (b behindDoc) Copy(ctx context.Context, i int, w io.Writer) error {
	i = b.numbers()[i]
	if f := b.m.Files[i]; f.Extra && f.Name == state.SystemFile && !f.isPlain() {
		for _, path := range b.local {
			if b.indexes[i].sameFile(path, io.Discard) == nil {
				return b.indexes[i].sameFile(path, w)
			}
		}
	}
	return b.copyFrom(ctx, b.store, i, w)
}

// sameFile writes a local file to w, as far as it is the one that the index describes.
func (x *index) sameFile(path string, w io.Writer) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() != x.size {
		return errors.Join(err, errFrame)
	}
	return x.same(f, w)
}

// same copies what the index describes from r to w, and fails where r has something else.
func (x *index) same(r io.Reader, w io.Writer) error {
	b := make([]byte, frameSize)
	for i := range x.frames {
		b := b[:x.plain(i)]
		if _, err := io.ReadFull(r, b); err != nil {
			return err
		}
		if !x.frames[i].is(b) {
			return errFrame
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// is reports whether these are the plain bytes of a frame.
func (f *frame) is(plain []byte) bool {
	if f.stored == 0 {
		return bytes.Equal(plain, zeroFrame[:len(plain)])
	}
	return sha256.Sum256(plain) == f.sum
}

// RemoveHead removes a head, also one that is not or only partly there. Sweep removes what still comes.
func (a *Archive) RemoveHead(ctx context.Context, id string) error {
	err := a.Remove(ctx, Heads, id)
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	if _, err := Heads.key(id); err != nil {
		return err
	}
	var keys []string
	if err := a.store.List(ctx, dataOf(Heads, id), func(i blob.Info) error {
		keys = append(keys, i.Key)
		return nil
	}); err != nil {
		return err
	}
	for _, key := range keys {
		if err := a.store.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
