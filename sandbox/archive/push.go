package archive

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// The files of an image.
const (
	recordFile = "image.json"
	rootFile   = image.RootName
	maxRecord  = 64 << 20 // bytes; image.Store has the real limit
)

// Progress is called while bytes are read or written, with their number since the last call; it may be nil.
type Progress func(bytes int64)

// Push puts a snapshot of a store, and the image that it needs if that is not there yet. The snapshot is named by its
// id or the beginning of it. If it is there already, the error is ErrExists.
func (a *Archive) Push(ctx context.Context, s *state.Store, prefix string, p Progress) (Info, error) {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return Info{}, err
	}
	m, err := s.Manifest(id)
	if err != nil {
		return Info{}, err
	}
	if err := a.pushImage(ctx, s, m.Image, p); err != nil {
		return Info{}, err
	}
	i := Info{ID: id, Name: m.Sandbox, Image: m.Image, Created: time.Unix(0, m.CreatedUnixNano).UTC()}
	return a.Put(ctx, Snapshots, i, func(put func(snapshot.SentFile, io.Reader) error) error {
		return s.SendSnapshot(ctx, id, func(f snapshot.SentFile, r io.Reader) error { return put(f, p.reader(r)) })
	})
}

func (a *Archive) pushImage(ctx context.Context, s *state.Store, id string, p Progress) error {
	if _, err := a.manifest(ctx, Images, id); !errors.Is(err, ErrNotFound) {
		return err
	}
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		return err
	}
	img, err := images.ByID(id)
	if err == nil {
		err = images.Check(img)
	}
	if err != nil {
		return fmt.Errorf("the image of the snapshot: %w", err)
	}
	record, err := json.Marshal(img)
	if err != nil {
		return err
	}
	f, err := os.Open(img.Path())
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = a.Put(ctx, Images, Info{ID: id, Name: img.Name(), Created: img.Created}, func(put func(snapshot.SentFile, io.Reader) error) error {
		if err := put(snapshot.SentFile{Name: recordFile, Size: int64(len(record))}, bytes.NewReader(record)); err != nil {
			return err
		}
		return put(snapshot.SentFile{Name: rootFile, Size: img.Size}, p.reader(sparse.NewReader(f, img.Size)))
	})
	if errors.Is(err, ErrExists) { // another host was faster
		return nil
	}
	return err
}

// Pull makes a snapshot of the archive in a store, and its image if the store lacks that. o says what is believed of
// what the snapshot says of its sandbox: see state.Store.ImportSnapshot.
func (a *Archive) Pull(ctx context.Context, s *state.Store, prefix string, o state.ImportOptions, p Progress) (res state.ImportResult, err error) {
	id, err := a.Find(ctx, Snapshots, prefix)
	if err != nil {
		return res, err
	}
	e, err := a.Get(ctx, Snapshots, id)
	if err != nil {
		return res, err
	}
	if err := a.pullImage(ctx, s, e.Image, p); err != nil {
		return res, err
	}
	return s.ReceiveSnapshot(ctx, counted{e, p}, o)
}

func (a *Archive) pullImage(ctx context.Context, s *state.Store, id string, p Progress) error {
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		return err
	}
	if img, err := images.ByID(id); err == nil && images.Check(img) == nil {
		return nil
	}
	e, err := a.Get(ctx, Images, id)
	if err != nil {
		return fmt.Errorf("the image of the snapshot: %w", err)
	}
	files := e.Files()
	record, root := slices.IndexFunc(files, named(recordFile)), slices.IndexFunc(files, named(rootFile))
	if record < 0 || root < 0 || files[record].Size > maxRecord {
		return fmt.Errorf("%w: image %.12s has no %s or no %s", ErrCorrupt, id, recordFile, rootFile)
	}
	var doc bytes.Buffer
	if err := e.Copy(ctx, record, &doc); err != nil {
		return err
	}
	img, err := images.Receive(ctx, doc.Bytes(), func(w io.Writer) error { return e.Copy(ctx, root, p.writer(w)) })
	if err == nil && img.ID != id {
		err = fmt.Errorf("%w: image %.12s is image %.12s", ErrCorrupt, id, img.ID)
	}
	return err
}

func named(name string) func(snapshot.SentFile) bool {
	return func(f snapshot.SentFile) bool { return f.Name == name }
}

// Find returns the id of the entry that begins with prefix. A whole id is not looked for.
func (a *Archive) Find(ctx context.Context, kind Kind, prefix string) (id string, err error) {
	if idRE.MatchString(prefix) {
		return prefix, nil
	}
	list, err := a.List(ctx, kind)
	if err != nil {
		return "", err
	}
	for _, i := range list {
		switch {
		case prefix == "" || !strings.HasPrefix(i.ID, prefix):
		case id != "":
			return "", fmt.Errorf("%w: %.80q begins %s and %s: write more of it", ErrNotFound, prefix, id, i.ID)
		default:
			id = i.ID
		}
	}
	if id == "" {
		return "", fmt.Errorf("%w: %.80q", ErrNotFound, prefix)
	}
	return id, nil
}

// counted tells progress.
type counted struct {
	*Entry
	p Progress
}

func (c counted) Copy(ctx context.Context, i int, w io.Writer) error {
	return c.Entry.Copy(ctx, i, c.p.writer(w))
}

type progressReader struct {
	io.Reader
	p Progress
}

func (r progressReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	r.p(int64(n))
	return n, err
}

type progressWriter struct {
	io.Writer
	p Progress
}

func (w progressWriter) Write(b []byte) (int, error) {
	n, err := w.Writer.Write(b)
	w.p(int64(n))
	return n, err
}

func (p Progress) reader(r io.Reader) io.Reader {
	if p == nil {
		return r
	}
	return progressReader{r, p}
}

func (p Progress) writer(w io.Writer) io.Writer {
	if p == nil {
		return w
	}
	return progressWriter{w, p}
}
