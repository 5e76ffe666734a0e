package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/snapshot"
)

const (
	manifestVersion = 1
	// aheadVersion is that of a manifest whose files have numbers of their own, and keptVersion of one that has small
	// files and indexes in it, and names files that earlier heads have put.
	aheadVersion = 2
	keptVersion  = 3
	maxManifest  = 4 << 20 // bytes
	// A file of at most maxPlain bytes is in the manifest of a head, and an index of at most maxInline, as long as these
	// have at most maxInlined bytes together: each object that a wake needs is a request, and most wait for others.
	maxPlain   = 16 << 10
	maxInline  = 32 << 10
	maxInlined = 512 << 10
	dataPrefix = "data/"
	// maxPut is how long a put may take. Sweep leaves alone what has changed within the last minSweep.
	maxPut   = 12 * time.Hour
	minSweep = 2 * maxPut
	// indexesAtOnce is how many indexes are read at once.
	indexesAtOnce = 16
	// cleanTime is how long a failed put spends on removing what it has put.
	cleanTime = 30 * time.Second
)

var (
	// ErrNotFound means that the archive does not have it.
	ErrNotFound = errors.New("the archive does not have it")
	// ErrExists means that the archive has it already.
	ErrExists = errors.New("the archive has it already")
	// ErrSlow means that a put took longer than 12 hours: Sweep might remove it before it is whole.
	ErrSlow = errors.New("it took too long")
)

// Kind is what an archive keeps.
type Kind string

// Snapshots and images have ids of their own, which are the same in all stores: an image's is its SHA-256.
const (
	Snapshots Kind = "snapshots"
	Images    Kind = "images"
)

// Info is what a list says of an entry of an archive.
type Info struct {
	ID string `json:"id"`
	// Name is the sandbox of a snapshot.
	Name string `json:"name"`
	// Image is the image that a snapshot needs, which is an entry of its own.
	Image string `json:"image,omitempty"`
	// Created is when the snapshot or image was made, Put when it was put here, by the clocks of the hosts that did so.
	Created time.Time `json:"created"`
	Put     time.Time `json:"put"`
	Size    int64     `json:"size"`   // bytes of its files
	Stored  int64     `json:"stored"` // bytes in the store that were put for it
}

// manifest is the object that makes an entry.
type manifest struct {
	Version int `json:"version"`
	Info
	// Data begins the keys of its files. No other entry has it.
	Data  string      `json:"data"`
	Files []entryFile `json:"files"`

	// seal is that of the object.
	seal blob.Seal
}

type entryFile struct {
	snapshot.SentFile
	// Index is the SHA-256 of its index, unless Inline is the index or Plain the file.
	Index  string `json:"index,omitempty"`
	Inline []byte `json:"inline,omitempty"`
	Plain  []byte `json:"plain,omitempty"`
	// At is its number in Data; 0 is its place among the files.
	At int `json:"at,omitempty"`
	// In is Data of the earlier head of the sandbox that has put it; empty for this one.
	In string `json:"in,omitempty"`
	// Of is how many bytes that head has put into the store.
	Of int64 `json:"of,omitempty"`
}

// Archive is an archive in a store of objects. Its methods may be called from several goroutines and hosts.
type Archive struct {
	store blob.Store
	// own is where entries are put that are not images: those are everybody's.
	own blob.Store
}

// Open returns the archive in a store. It reads nothing.
func Open(store blob.Store) *Archive { return &Archive{store, store} }

// SealFor returns the same archive. What is put into it, but for images, is sealed for an owner: see blob.SealFor.
func (a *Archive) SealFor(owner string) *Archive {
	return &Archive{a.store, blob.SealFor(a.store, owner)}
}

func (a *Archive) storeOf(kind Kind) blob.Store {
	if kind == Images {
		return a.store
	}
	return a.own
}

var idRE = lazyregexp.New(`^[0-9a-f]{32}([0-9a-f]{32})?$`)

func (k Kind) key(id string) (string, error) {
	if !idRE.MatchString(id) {
		return "", fmt.Errorf("%w: %.80q is no id", ErrNotFound, id)
	}
	return string(k) + "/" + id, nil
}

// Put puts an entry: send calls put for each of its files. It is there, whole and durable, when Put returns nil, and
// not there in part otherwise: after an error of the store, ask whether it is. Put sets i.Put, i.Size and i.Stored.
func (a *Archive) Put(ctx context.Context, kind Kind, i Info, send func(put func(f snapshot.SentFile, r io.Reader) error) error) (Info, error) {
	fail := func(err error) (Info, error) {
		return Info{}, fmt.Errorf("putting %.12s into the archive: %w", i.ID, err)
	}
	key, err := kind.key(i.ID)
	if err != nil {
		return fail(err)
	}
	if _, err := a.manifest(ctx, kind, i.ID); !errors.Is(err, ErrNotFound) {
		if err == nil {
			err = ErrExists
		}
		return fail(err)
	}
	begin := time.Now()
	m := manifest{Version: manifestVersion, Info: i, Data: dataOf(kind, i.ID) + rand.Text()}
	m.Put, m.Size, m.Stored = begin.UTC().Truncate(time.Second), 0, 0
	err = send(func(f snapshot.SentFile, r io.Reader) error {
		if f.Size > maxEntry-m.Size {
			return errTooMuch
		}
		ref, stored, err := put(ctx, a.storeOf(kind), m.file(len(m.Files)), r, f.Size)
		if err != nil {
			return err
		}
		m.Files = append(m.Files, entryFile{SentFile: f, Index: ref.Index})
		m.Size, m.Stored = m.Size+f.Size, m.Stored+stored
		return nil
	})
	out, err := a.finish(ctx, a.storeOf(kind), key, &m, begin, err)
	if err != nil {
		return fail(err)
	}
	return out, nil
}

// finish makes the entry whose files were put, unless that has failed.
func (a *Archive) finish(ctx context.Context, store blob.Store, key string, m *manifest, begin time.Time, err error) (Info, error) {
	if err == nil && time.Since(begin) > maxPut {
		err = ErrSlow
	}
	began := err == nil
	if began {
		err = commit(ctx, store, key, m)
	}
	switch {
	case err == nil && time.Since(begin) > maxPut: // the process, or the network, stood still
		err = errors.Join(ErrSlow, store.Delete(ctx, key))
	case err == nil:
		return m.Info, nil
	case !began, errors.Is(err, ErrExists):
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		_ = a.removeData(clean, m.Data) // what it does not get to is the next Sweep's
	}
	// After another error of commit the manifest may be there, or may still come: Sweep decides.
	return Info{}, err
}

// dataOf begins the keys of the files of an entry, of all attempts to put it.
func dataOf(kind Kind, id string) string { return dataPrefix + string(kind) + "-" + id + "-" }

// file returns the key of a file by its place.
func (m *manifest) file(n int) string {
	data, n := m.place(n)
	return fmt.Sprintf("%s/%d", data, n)
}

// place returns what begins the key of a file, and its number in that.
func (m *manifest) place(n int) (data string, at int) {
	data, at = m.Data, n
	if n < len(m.Files) {
		f := &m.Files[n]
		data, at = cmp.Or(f.In, data), cmp.Or(f.At, at)
	}
	return data, at
}

// headOf returns the id of the head whose Data that is.
func headOf(data string) string {
	id, _, _ := strings.Cut(strings.TrimPrefix(data, dataPrefix+string(Heads)+"-"), "-")
	return id
}

// commit puts the manifest.
func commit(ctx context.Context, store blob.Store, key string, m *manifest) error {
	doc, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(doc) > maxManifest {
		return fmt.Errorf("its manifest would have %d bytes, and %d are allowed", len(doc), maxManifest)
	}
	err = store.Put(ctx, key, doc)
	if errors.Is(err, blob.ErrExists) {
		// A store may refuse what it has itself put.
		have, _, lerr := store.Load(ctx, key, maxManifest)
		switch {
		case lerr != nil:
			return fmt.Errorf("looking whose manifest is there: %w", lerr)
		case !bytes.Equal(have, doc):
			return ErrExists
		}
		return nil
	}
	return err
}

// manifest reads the manifest of an entry. What is in it was checked.
func (a *Archive) manifest(ctx context.Context, kind Kind, id string) (*manifest, error) {
	key, err := kind.key(id)
	if err != nil {
		return nil, err
	}
	doc, _, seal, err := blob.LoadOf(ctx, a.store, key, maxManifest)
	if errors.Is(err, blob.ErrNotFound) {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if err != nil {
		return nil, err
	}
	m, err := decodeManifest(doc)
	if err == nil && (m.ID != id || !strings.HasPrefix(m.Data, dataOf(kind, id))) {
		err = fmt.Errorf("it is of %.80q in %.200q", m.ID, m.Data)
	}
	if err == nil && kind == Images && seal.Owner != "" {
		err = errors.New("it is sealed under the key of an owner, and images are everybody's")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: the manifest of %s: %w", ErrCorrupt, id, err)
	}
	if kind != Heads && m.Version == keptVersion {
		return nil, fmt.Errorf("%w: the manifest of %s: only heads have files of others", ErrCorrupt, id)
	}
	m.seal = seal
	return m, nil
}

const (
	// maxFiles is more than a snapshot has.
	maxFiles = 1 + snapshot.MaxFiles + snapshot.MaxExtraFiles
	// maxEntry is the most bytes of all files of an entry. It bounds the memory for their indexes, to 400 MiB.
	maxEntry = 2 << 40
	// maxNumber bounds the numbers of files that were put ahead.
	maxNumber = 16 * maxFiles
)

var errTooMuch = fmt.Errorf("its files have more than %d bytes together", int64(maxEntry))

func decodeManifest(doc []byte) (*manifest, error) {
	var m manifest
	d := json.NewDecoder(bytes.NewReader(doc))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		var v struct{ Version int }
		if json.Unmarshal(doc, &v) == nil && v.Version > keptVersion {
			err = fmt.Errorf("it has version %d, this program reads %d: use the one that wrote it", v.Version, keptVersion)
		}
		return nil, err
	}
	switch {
	case m.Version < manifestVersion || m.Version > keptVersion:
		return nil, fmt.Errorf("it has version %d, this program reads %d: use the one that wrote it", m.Version, keptVersion)
	case d.More():
		return nil, errors.New("there is more after it")
	case !isData(m.Data, dataPrefix):
		return nil, fmt.Errorf("its files are in %.80q", m.Data)
	case len(m.Files) > maxFiles:
		return nil, fmt.Errorf("it has %d files", len(m.Files))
	}
	keys, plain := map[string]bool{}, int64(0)
	for i, f := range m.Files {
		if f.Size < 0 || f.Size > maxFile || !f.isDescribed(m.Version) {
			return nil, fmt.Errorf("its file %.80q has no hash or an impossible size", f.Name)
		}
		if plain += f.Size; plain > maxEntry {
			return nil, errTooMuch
		}
		if f.In != "" && (m.Version < keptVersion || f.At == 0 || !isData(f.In, dataPrefix+string(Heads)+"-") || !idRE.MatchString(headOf(f.In))) {
			return nil, fmt.Errorf("its file %.80q is in %.80q", f.Name, f.In)
		}
		if key := m.file(i); f.At < 0 || f.At > maxNumber || f.At != 0 && m.Version < aheadVersion || keys[key] {
			return nil, fmt.Errorf("its file %.80q has the impossible number %d", f.Name, f.At)
		} else {
			keys[key] = true
		}
	}
	return &m, nil
}

// isDescribed reports whether it is known what the file has, in one way.
func (f *entryFile) isDescribed(version int) bool {
	switch {
	case f.Index != "":
		sum, err := hex.DecodeString(f.Index)
		return err == nil && len(sum) == sha256.Size && len(f.Inline)+len(f.Plain) == 0
	case version < keptVersion:
		return false
	case len(f.Inline) > 0:
		return len(f.Plain) == 0
	}
	return int64(len(f.Plain)) == f.Size && f.Size <= maxPlain && f.In == ""
}

// isPlain reports whether all of it is in the manifest.
func (f *entryFile) isPlain() bool { return f.Index == "" && len(f.Inline) == 0 }

func isData(data, prefix string) bool {
	return strings.HasPrefix(data, prefix) && strings.Count(data, "/") == 1 && blob.CheckKey(data) == nil
}

// Entry is an entry that is read. It implements snapshot.Source.
type Entry struct {
	Info
	a *Archive
	m *manifest
	// indexes are those of its files, as far as readIndexes has read them.
	indexes []*index
}

// Get opens an entry. The error is ErrNotFound if there is none.
func (a *Archive) Get(ctx context.Context, kind Kind, id string) (*Entry, error) {
	m, err := a.manifest(ctx, kind, id)
	if err != nil {
		return nil, err
	}
	return &Entry{Info: m.Info, a: a, m: m}, nil
}

// SealedFor returns the owner under whose key the entry is sealed; it is empty for a key of the hosts, or none. Whoever
// has put the entry had that key, and all that is read of it is what he has put.
func (e *Entry) SealedFor() string { return e.m.seal.Owner }

// Files implements snapshot.Source.
func (e *Entry) Files() (out []snapshot.SentFile) {
	for _, f := range e.m.Files {
		out = append(out, f.SentFile)
	}
	return out
}

// Copy implements snapshot.Source.
func (e *Entry) Copy(ctx context.Context, i int, w io.Writer) error {
	return e.copyFrom(ctx, e.a.store, i, w)
}

func (e *Entry) copyFrom(ctx context.Context, store blob.Store, i int, w io.Writer) error {
	f, ref := e.m.Files[i], e.ref(i)
	if f.isPlain() {
		_, err := w.Write(f.Plain)
		return err
	}
	x, err := e.index(ctx, i)
	if err == nil {
		err = x.get(ctx, store, ref.Key, w)
	}
	if errors.Is(err, blob.ErrNotFound) {
		err = fmt.Errorf("%w: it has been removed meanwhile, or a part of it is lost (%w)", ErrNotFound, err)
	}
	if err != nil {
		return fmt.Errorf("getting %.80q of %.12s from the archive: %w", f.Name, e.ID, err)
	}
	return nil
}

func (e *Entry) ref(i int) fileRef {
	return fileRef{Key: e.m.file(i), Size: e.m.Files[i].Size, Index: e.m.Files[i].Index}
}

// index returns the index of a file, which readIndexes may have read.
func (e *Entry) index(ctx context.Context, i int) (*index, error) {
	if e.indexes != nil {
		return e.indexes[i], nil
	}
	return e.openIndex(ctx, i)
}

// openIndex reads the index of a file; nil for one that needs none.
func (e *Entry) openIndex(ctx context.Context, i int) (*index, error) {
	f := &e.m.Files[i]
	switch {
	case f.isPlain():
		return nil, nil
	case len(f.Inline) > 0:
		return decodeIndex(f.Inline, f.Size)
	}
	return open(ctx, e.a.store, e.ref(i))
}

// readIndexes reads the indexes of all files, several at once.
func (e *Entry) readIndexes(ctx context.Context) error {
	out := make([]*index, len(e.m.Files))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(indexesAtOnce)
	for i := range out {
		g.Go(func() (err error) {
			out[i], err = e.openIndex(ctx, i)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("getting %.12s from the archive: %w", e.ID, err)
	}
	e.indexes = out
	return nil
}

// End implements snapshot.Source.
func (*Entry) End() error { return nil }

// List returns the entries of a kind, the newest first, and an error for each that cannot be read. The newest may be
// missing for a while in a store whose lists are late.
func (a *Archive) List(ctx context.Context, kind Kind) (out []Info, err error) {
	var ids []string
	if err := a.store.List(ctx, string(kind)+"/", func(i blob.Info) error {
		if id := strings.TrimPrefix(i.Key, string(kind)+"/"); idRE.MatchString(id) {
			ids = append(ids, id)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	var errs []error
	for _, id := range ids {
		switch m, err := a.manifest(ctx, kind, id); {
		case err == nil:
			out = append(out, m.Info)
		case !errors.Is(err, ErrNotFound):
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	slices.SortFunc(out, func(a, b Info) int {
		if c := b.Created.Compare(a.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, errors.Join(errs...)
}

// Remove removes an entry. It is gone when its manifest is; an error after that leaves objects to Sweep.
func (a *Archive) Remove(ctx context.Context, kind Kind, id string) error {
	m, err := a.manifest(ctx, kind, id)
	if err != nil {
		return err
	}
	if err := a.store.Delete(ctx, string(kind)+"/"+id); err != nil {
		return err
	}
	return a.removeData(ctx, m.Data)
}

// removeData removes the objects of an attempt to put an entry.
func (a *Archive) removeData(ctx context.Context, data string) error {
	var keys []string
	if err := a.store.List(ctx, data+"/", func(i blob.Info) error {
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

// Swept is what Sweep has removed.
type Swept struct {
	Objects int   `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

// Sweep removes the objects of puts that were cut. It trusts no list: it removes what it finds only after it has read
// that no manifest names it, and nothing that has changed in the last 24 hours, since a put ends before that. It counts
// these by the store's clock alone. What it cannot read keeps nothing else, and neither does what it has no key for,
// which is left to hosts that have one.
func (a *Archive) Sweep(ctx context.Context) (out Swept, err error) {
	now, err := a.Now(ctx)
	if err != nil {
		return out, err
	}
	return a.sweep(ctx, now)
}

// Now returns the time by the clock of the store.
func (a *Archive) Now(ctx context.Context) (now time.Time, err error) {
	key := dataPrefix + "clock-" + strings.Repeat("0", 32) + "-" + rand.Text() + "/0" // what stays of it is swept
	if err := a.store.Put(ctx, key, []byte("x")); err != nil {
		return now, fmt.Errorf("asking the store for the time: %w", err)
	}
	defer func() { err = errors.Join(err, a.store.Delete(ctx, key)) }()
	err = a.store.List(ctx, key, func(i blob.Info) error {
		if i.Key == key {
			now = i.Changed
		}
		return nil
	})
	if err == nil && now.IsZero() {
		err = errors.New("its list lacks what was just put")
	}
	if err != nil {
		return now, fmt.Errorf("asking the store for the time: %w", err)
	}
	return now, nil
}

// maxFailures is how many entries that cannot be read are told of.
const maxFailures = 8

func (a *Archive) sweep(ctx context.Context, now time.Time) (out Swept, err error) {
	type attempt struct {
		objects []blob.Info
		changed time.Time
	}
	found := map[string]*attempt{}
	if err := a.store.List(ctx, dataPrefix, func(i blob.Info) error {
		name, _, _ := strings.Cut(strings.TrimPrefix(i.Key, dataPrefix), "/")
		at := found[name]
		if at == nil {
			at = &attempt{}
			found[name] = at
		}
		at.objects = append(at.objects, i)
		if i.Changed.After(at.changed) {
			at.changed = i.Changed
		}
		return nil
	}); err != nil {
		return out, err
	}
	var failures []error
	for name, at := range found {
		parts := strings.Split(name, "-") // kind, id, random
		if len(parts) != 3 || now.Sub(at.changed) < minSweep {
			continue
		}
		m, err := a.manifest(ctx, Kind(parts[0]), parts[1])
		if err == nil && m.Data == dataPrefix+name {
			continue
		}
		if err != nil && !errors.Is(err, ErrNotFound) { // it may name them
			if ctx.Err() != nil {
				return out, err
			}
			if len(failures) < maxFailures && !errors.Is(err, blob.ErrNoKey) {
				failures = append(failures, err)
			}
			continue
		}
		for _, o := range at.objects {
			if err := a.store.Delete(ctx, o.Key); err != nil {
				return out, err
			}
			out.Objects, out.Bytes = out.Objects+1, out.Bytes+o.Size
		}
	}
	return out, errors.Join(failures...)
}
