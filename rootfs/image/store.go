package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	imagesDir = "images"
	tmpDir    = "tmp"
	locksDir  = "locks"
	storeLock = "store"

	// RootName is the name of the EROFS image within the folder of an image.
	RootName   = "root.erofs"
	recordName = "image.json"

	// RecordVersion is the version of image.json that this package writes, and the newest it reads.
	RecordVersion = 1

	minPrefix      = 4  // hex digits of a shortened id
	shortID        = 12 // hex digits
	maxRecordBytes = 16 << 20
)

var idRE = lazyregexp.New(`^[0-9a-f]{64}$`)

// Package is an installed Debian package.
type Package struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture,omitempty"`
}

// Layer is a layer of the source that an image was made from.
type Layer struct {
	Digest    string `json:"digest,omitempty"` // of the layer as stored, compressed or not; "" if the source has none
	DiffID    string `json:"diff_id"`          // of its tar stream
	MediaType string `json:"media_type,omitempty"`
	Size      int64  `json:"size"` // as stored, in bytes; -1 if the source does not say before it is read
}

// Image is an image of a store, as its record image.json describes it.
type Image struct {
	Version      int            `json:"version"` // of the record: RecordVersion
	ID           string         `json:"id"`      // SHA-256 of root.erofs, 64 hex digits
	Tags         []string       `json:"tags"`    // NAME:VERSION, sorted
	Tagged       time.Time      `json:"tagged"`  // last change of the tags; of two images with a tag, the later has it
	Source       string         `json:"source"`  // as ParseSource reads it
	Spec         string         `json:"spec"`    // hash of all inputs; equal specs share an image (Options.MaxAge)
	Include      []string       `json:"include"` // packages asked for
	Packages     []Package      `json:"packages"`
	Size         int64          `json:"size"`    // of root.erofs, in bytes; blocks of zeros take no disk space
	Content      int64          `json:"content"` // sum of the sizes of the files in it, in bytes
	Inodes       int            `json:"inodes"`
	Created      time.Time      `json:"created"`
	Architecture string         `json:"architecture"` // as Debian and Go name it: amd64
	Skipped      fstree.Skipped `json:"skipped"`

	// RunConfig has the source's settings for commands. Sources without layers have none.
	RunConfig

	// Of sources of layers; empty for others.
	Platform string  `json:"platform,omitempty"` // OS/ARCH, as its configuration says
	Manifest string  `json:"manifest,omitempty"` // digest of the manifest; docker's archives have none
	Config   string  `json:"config,omitempty"`   // digest of the configuration
	Layers   []Layer `json:"layers,omitempty"`   // the lowest first; for images of steps, those over the base

	// Of images of steps; empty for others.
	Base  string   `json:"base,omitempty"`  // id of the image below
	Steps []string `json:"steps,omitempty"` // keys of their results in the store
	// Passing is set if the image was made for a build's VM, and is removed with it.
	Passing bool `json:"passing,omitempty"`

	// Cached is set if Build returned an existing image.
	Cached bool `json:"-"`

	dir string
}

// Path returns the path of the EROFS image file. It must be opened read-only.
func (i *Image) Path() string { return filepath.Join(i.dir, RootName) }

// ShortID returns the beginning of the id, for display.
func (i *Image) ShortID() string { return i.ID[:min(len(i.ID), shortID)] }

// Name returns the image's name for errors.
func (i *Image) Name() string {
	if len(i.Tags) > 0 {
		return i.Tags[0] + " (" + i.ShortID() + ")"
	}
	return i.ShortID()
}

// Store keeps images in a directory. Its methods may be called concurrently, also from several processes.
type Store struct{ dir string }

// OpenStore opens the store in a directory. It makes the directory if necessary.
func OpenStore(dir string) (*Store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	for d, perm := range map[string]os.FileMode{imagesDir: 0o755, tmpDir: 0o755, locksDir: 0o700} {
		if err := errors.Join(os.MkdirAll(abs, 0o755), os.MkdirAll(filepath.Join(abs, d), perm)); err != nil {
			return nil, fmt.Errorf("open the image store: %w; give a directory that you may write", err)
		}
	}
	return &Store{dir: abs}, nil
}

// Dir returns the directory of the store.
func (s *Store) Dir() string { return s.dir }

const lockFlags = os.O_RDWR | os.O_CREATE | unix.O_NOFOLLOW

// Lock waits for the store's lock of that name.
func (s *Store) Lock(ctx context.Context, name string, mode osfile.LockMode) (*os.File, error) {
	f, err := osfile.OpenLocked(ctx, filepath.Join(s.dir, locksDir, name), lockFlags, 0o600, mode)
	if err != nil {
		return nil, fmt.Errorf("take the lock %q of the image store %s: %w", name, s.dir, err)
	}
	return f, nil
}

// TryLock takes an exclusive lock of the store. It returns osfile.ErrLocked if it is taken.
func (s *Store) TryLock(name string) (*os.File, error) {
	return osfile.TryOpenLocked(filepath.Join(s.dir, locksDir, name), lockFlags, 0o600, osfile.Exclusive)
}

// lock takes the lock of the store, which guards all changes below images and the making of folders below tmp. It
// is held only briefly.
func (s *Store) lock(ctx context.Context) (*os.File, error) {
	return s.Lock(ctx, storeLock, osfile.Exclusive)
}

// List returns all images, newest first. When it cannot read some records, it returns the other images and an
// error that joins the causes (ErrCorrupt).
func (s *Store) List() ([]*Image, error) {
	dir := filepath.Join(s.dir, imagesDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the images of %s: %w", s.dir, err)
	}
	var out []*Image
	var errs []error
	for _, e := range entries {
		if !idRE.MatchString(e.Name()) {
			continue
		}
		img, err := readRecord(filepath.Join(dir, e.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist) && !exists(filepath.Join(dir, e.Name())):
			// removed since the folder was read
		case err != nil:
			errs = append(errs, err)
		default:
			out = append(out, img)
		}
	}
	// Moving a tag adds it to one record, then removes it from another. Between, or after a crash, both have it.
	owner := map[string]*Image{}
	for _, img := range out {
		for _, t := range img.Tags {
			if o := owner[t]; o == nil || img.Tagged.After(o.Tagged) {
				owner[t] = img
			}
		}
	}
	for _, img := range out {
		img.Tags = slices.DeleteFunc(img.Tags, func(t string) bool { return owner[t] != img })
	}
	slices.SortFunc(out, func(a, b *Image) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID))
	})
	return out, errors.Join(errs...)
}

func exists(p string) bool {
	_, err := os.Lstat(p)
	return err == nil
}

func readRecord(dir string) (*Image, error) {
	id := filepath.Base(dir)
	remedy := "remove the image and build it again"
	b, err := artifact.ReadFile(filepath.Join(dir, recordName), maxRecordBytes)
	if err != nil {
		return nil, fmt.Errorf("image %.12s: %w: read its record: %w; %s", id, ErrCorrupt, err, remedy)
	}
	var img Image
	if err := json.Unmarshal(b, &img); err != nil {
		return nil, fmt.Errorf("image %.12s: %w: its record %s: %w; %s", id, ErrCorrupt, recordName, err, remedy)
	}
	if img.Version < 1 || img.Version > RecordVersion {
		return nil, fmt.Errorf("image %.12s: %w: its record has version %d, known are 1 to %d; use a newer drowse",
			id, ErrCorrupt, img.Version, RecordVersion)
	}
	if img.ID != id {
		return nil, fmt.Errorf("image %.12s: %w: its record is of image %.12s; %s", id, ErrCorrupt, img.ID, remedy)
	}
	img.dir = dir
	return &img, nil
}

// Find returns the image with a tag ("name" means "name:latest"), an id, or the beginning of an id (4 hex digits
// at least, optionally after "sha256:"). Errors are ErrNotFound, ErrAmbiguous, or ErrCorrupt when the record of
// that image, or of one that may be meant, cannot be read.
func (s *Store) Find(ref string) (*Image, error) {
	all, listErr := s.List()
	if tag, err := NormalizeTag(ref); err == nil {
		for _, img := range all {
			if slices.Contains(img.Tags, tag) {
				return img, nil
			}
		}
	}
	prefix := strings.TrimPrefix(ref, "sha256:")
	var got []*Image
	if len(prefix) >= minPrefix {
		for _, img := range all {
			if strings.HasPrefix(img.ID, prefix) {
				got = append(got, img)
			}
		}
	}
	switch {
	case len(got) == 1:
		return got[0], nil
	case len(got) > 1:
		ids := make([]string, 0, len(got))
		for _, img := range got {
			ids = append(ids, img.ID[:min(len(img.ID), max(shortID, len(prefix)+4))])
		}
		return nil, fmt.Errorf("find image %q: %w: it may be %s; give more digits", ref, ErrAmbiguous, strings.Join(ids, ", "))
	case listErr != nil:
		return nil, fmt.Errorf("find image %q: %w", ref, listErr)
	}
	return nil, fmt.Errorf("find image %q in %s: %w; list the images to see what there is, or build it", ref, s.dir, ErrNotFound)
}

// ByID returns the image with a full id, and reads only its record. Errors are ErrNotFound and ErrCorrupt.
func (s *Store) ByID(id string) (*Image, error) {
	dir := filepath.Join(s.dir, imagesDir, id)
	if !idRE.MatchString(id) || !exists(dir) {
		return nil, fmt.Errorf("find image %.64q in %s: %w", id, s.dir, ErrNotFound)
	}
	return readRecord(dir)
}

// Tag gives a tag to an image. If another image has the tag, it moves.
func (s *Store) Tag(ctx context.Context, ref, tag string) error {
	tag, err := NormalizeTag(tag)
	if err != nil {
		return err
	}
	l, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	img, err := s.Find(ref)
	if err != nil {
		return err
	}
	return s.tag(img, tag)
}

// tag moves a tag to an image. The store's lock must be held.
func (s *Store) tag(img *Image, tag string) error {
	if !slices.Contains(img.Tags, tag) {
		img.Tags = append(img.Tags, tag)
		slices.Sort(img.Tags)
		img.Tagged = time.Now().UTC()
		if err := writeRecord(img); err != nil {
			return err
		}
	}
	return s.untagOthers(img, tag)
}

func (s *Store) untagOthers(keep *Image, tag string) error {
	if tag == "" {
		return nil
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, imagesDir))
	if err != nil {
		return fmt.Errorf("move tag %s: %w", tag, err)
	}
	for _, e := range entries {
		if e.Name() == keep.ID || !idRE.MatchString(e.Name()) {
			continue
		}
		// Not List: it hides tags that another image holds by now, but records still have.
		other, err := readRecord(filepath.Join(s.dir, imagesDir, e.Name()))
		if err != nil || !slices.Contains(other.Tags, tag) {
			continue // a damaged record has no tags
		}
		other.Tags = slices.DeleteFunc(other.Tags, func(t string) bool { return t == tag })
		if err := writeRecord(other); err != nil {
			return err
		}
	}
	return nil
}

// writeRecord replaces the record of an image atomically.
func writeRecord(img *Image) error {
	for _, l := range []*[]string{&img.Tags, &img.Include, &img.Entrypoint, &img.Cmd, &img.Env} {
		if *l == nil {
			*l = []string{} // JSON readers get a list, even an empty one
		}
	}
	if img.Packages == nil {
		img.Packages = []Package{}
	}
	b, err := json.MarshalIndent(img, "", "  ")
	if err != nil {
		return fmt.Errorf("write the record of image %s: %w", img.ShortID(), err)
	}
	if len(b) >= maxRecordBytes {
		return fmt.Errorf("write the record of image %s: %w: it would have %d bytes", img.ShortID(), ErrTooLarge, len(b))
	}
	if err := osfile.WriteFile(filepath.Join(img.dir, recordName), append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write the record of image %s: %w", img.ShortID(), err)
	}
	return nil
}

// Write makes the file of an image in the new folder dir, and fills in its record. Publish puts both into the
// store. Write reports StageWrite and StageHash to progress.
func (s *Store) Write(ctx context.Context, t *fstree.Tree, img *Image, dir string, progress Progress) error {
	img.dir = dir
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(img.Path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // synced already, so Close hides no error
	if err := erofs.Write(ctx, t, f, func(done, total int64) { progress(StageWrite, done, total) }); err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if img.ID, err = hashFile(ctx, f, func(done, total int64) { progress(StageHash, done, total) }); err != nil {
		return fmt.Errorf("hash the image: %w", err)
	}
	img.Version, img.Created, img.Size = RecordVersion, time.Now().UTC(), st.Size()
	img.Skipped, img.Inodes, img.Content = t.Skipped, t.Inodes, t.Bytes
	return nil
}

// Reuse returns the newest image of the spec that is at most maxAge old (0: any age) and passes the cheap check,
// and gives it the tag. It returns nil if there is none.
func (s *Store) Reuse(ctx context.Context, spec string, maxAge time.Duration, tag string) (*Image, error) {
	l, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	all, _ := s.List() // damaged records are no candidates
	for _, img := range all {
		age := time.Since(img.Created)
		if img.Spec != spec || maxAge > 0 && (age > maxAge || age < 0) || checkFile(img) != nil {
			continue
		}
		if err := s.tag(img, tag); err != nil {
			return nil, err
		}
		img.Cached = true
		return img, nil
	}
	return nil, nil
}

// Publish moves an image that Write has made into the store. If the store has an image of the same content, that
// image stays, with the new record and all tags. With tag "", Publish adds no tag.
func (s *Store) Publish(ctx context.Context, img *Image, tag string) error {
	l, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	if img.Tags, img.Tagged = nil, time.Now().UTC(); tag != "" {
		img.Tags = []string{tag}
	}
	images := filepath.Join(s.dir, imagesDir)
	final := filepath.Join(images, img.ID)
	if old, err := readRecord(final); err == nil {
		img.Tags = append(img.Tags, old.Tags...)
		slices.Sort(img.Tags)
		img.Tags = slices.Compact(img.Tags)
	}
	if exists(final) {
		// The same content. The existing file may be in use, so it stays unless it is damaged.
		there := *img
		there.dir = final
		if err := checkFile(&there); err == nil {
			img.dir = final
			if err := writeRecord(img); err != nil {
				return err
			}
			return s.untagOthers(img, tag)
		}
		if err := os.Rename(final, filepath.Join(filepath.Dir(img.dir), "replaced")); err != nil {
			return fmt.Errorf("replace the damaged image %s: %w", img.ShortID(), err)
		}
	}
	if err := writeRecord(img); err != nil {
		return err
	}
	if err := os.Rename(img.dir, final); err != nil {
		return fmt.Errorf("publish image %s: %w", img.ShortID(), err)
	}
	img.dir = final
	if err := osfile.SyncDir(images); err != nil {
		return err
	}
	return s.untagOthers(img, tag)
}

// Receive takes in an image of another store: its record, of which it keeps no tags, and its file, which content
// writes to w. It fails with ErrCorrupt unless the file has the SHA-256 that is its id. An image that is there stays.
func (s *Store) Receive(ctx context.Context, record []byte, content func(w io.Writer) error) (img *Image, err error) {
	img = new(Image)
	if len(record) >= maxRecordBytes {
		return nil, fmt.Errorf("receive an image: %w: a record of %d bytes", ErrCorrupt, len(record))
	}
	if err := json.Unmarshal(record, img); err != nil {
		return nil, fmt.Errorf("receive an image: %w: its record: %w", ErrCorrupt, err)
	}
	if img.Version < 1 || img.Version > RecordVersion {
		return nil, fmt.Errorf("receive an image: %w: its record has version %d, known are 1 to %d", ErrCorrupt, img.Version, RecordVersion)
	}
	if have, err := s.ByID(img.ID); err == nil && checkFile(have) == nil {
		return have, nil
	}
	temp, err := s.NewTemp(ctx, "receive-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, temp.Remove()) }()
	img.dir, img.Passing = filepath.Join(temp.Dir, "image"), false
	if err := os.Mkdir(img.dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(img.Path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // synced already, so Close hides no error
	h := sha256.New()
	w := sparse.NewWriter(f)
	err = content(io.MultiWriter(h, w))
	if err = errors.Join(err, w.Finish()); err == nil {
		err = f.Sync()
	}
	if err != nil {
		return nil, fmt.Errorf("receive image %.12s: %w", img.ID, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != img.ID {
		return nil, fmt.Errorf("receive image %.12s: %w: the SHA-256 of its file is %.12s", img.ID, ErrCorrupt, got)
	}
	if err := checkFile(img); err != nil {
		return nil, fmt.Errorf("receive image %s: %w", img.ShortID(), err)
	}
	return img, s.Publish(ctx, img, "")
}

// Removal is the result of Remove.
type Removal struct {
	ID       string
	Untagged []string // removed tags
	Deleted  bool     // the image itself was removed
}

// Remove removes what ref names. If ref is a tag and the image has other tags, Remove only removes the tag;
// otherwise it deletes the image with all its tags. It refuses with ErrInUse if inUse (which may be nil) returns
// true for the id. An image with a damaged record can be removed by its full id.
//
// The image disappears by one rename, so a crash leaves it whole or gone. Open files of it stay readable.
func (s *Store) Remove(ctx context.Context, ref string, inUse func(id string) bool) (Removal, error) {
	l, err := s.lock(ctx)
	if err != nil {
		return Removal{}, err
	}
	defer l.Close()
	img, err := s.Find(ref)
	if err != nil {
		id := strings.TrimPrefix(ref, "sha256:")
		if !idRE.MatchString(id) || !exists(filepath.Join(s.dir, imagesDir, id)) {
			return Removal{}, err
		}
		img = &Image{ID: id, dir: filepath.Join(s.dir, imagesDir, id)}
	}
	if tag, err := NormalizeTag(ref); err == nil && slices.Contains(img.Tags, tag) && len(img.Tags) > 1 {
		img.Tags = slices.DeleteFunc(img.Tags, func(t string) bool { return t == tag })
		return Removal{ID: img.ID, Untagged: []string{tag}}, writeRecord(img)
	}
	if inUse != nil && inUse(img.ID) {
		return Removal{}, fmt.Errorf("remove image %s: %w; remove the VMs that use it first", img.Name(), ErrInUse)
	}
	trash, err := s.newTemp("del-")
	if err != nil {
		return Removal{}, err
	}
	defer func() { _ = trash.Remove() }() // Prune removes what remains
	if err := os.Rename(img.dir, filepath.Join(trash.Dir, "image")); err != nil {
		return Removal{}, fmt.Errorf("remove image %s: %w", img.Name(), err)
	}
	if err := osfile.SyncDir(filepath.Join(s.dir, imagesDir)); err != nil {
		return Removal{}, err
	}
	return Removal{ID: img.ID, Untagged: img.Tags, Deleted: true}, nil
}

// Temp is a temporary folder of the store. Its lock marks it as in use.
type Temp struct {
	Dir  string
	lock *os.File
}

const tempLock = "lock"

// NewTemp makes a temporary folder. Prune removes it if this process dies before Remove.
func (s *Store) NewTemp(ctx context.Context, prefix string) (*Temp, error) {
	l, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return s.newTemp(prefix)
}

// newTemp makes a folder below tmp. The store's lock must be held, so that Prune does not remove the folder.
func (s *Store) newTemp(prefix string) (*Temp, error) {
	dir, err := os.MkdirTemp(filepath.Join(s.dir, tmpDir), prefix)
	if err != nil {
		return nil, fmt.Errorf("make a temporary folder in the image store: %w", err)
	}
	l, err := lockTemp(dir)
	if err != nil {
		return nil, fmt.Errorf("make a temporary folder in the image store: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	// The build tool's apt downloads as an unprivileged user, who needs access to the folder.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a temporary folder in the image store: %w", errors.Join(err, l.Close(), os.RemoveAll(dir)))
	}
	return &Temp{Dir: dir, lock: l}, nil
}

// removePause is the time between two attempts to remove a folder.
const removePause = 50 * time.Millisecond

func lockTemp(dir string) (*os.File, error) {
	return osfile.TryOpenLocked(filepath.Join(dir, tempLock), lockFlags, 0o600, osfile.Exclusive)
}

// Remove deletes the folder. It retries, since just killed processes of the build tool may still add files.
func (t *Temp) Remove() error {
	var err error
	for range 20 {
		if err = os.RemoveAll(t.Dir); err == nil {
			break
		}
		time.Sleep(removePause)
	}
	return errors.Join(err, t.lock.Close())
}

// Prune removes what dead builds left below tmp, and returns the number of such folders. Builds call it themselves.
func (s *Store) Prune(ctx context.Context) (int, error) {
	l, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	entries, err := os.ReadDir(filepath.Join(s.dir, tmpDir))
	if err != nil {
		return 0, fmt.Errorf("prune the image store: %w", err)
	}
	n := 0
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(s.dir, tmpDir, e.Name())
		var l *os.File
		if e.IsDir() {
			if l, err = lockTemp(dir); errors.Is(err, osfile.ErrLocked) {
				continue // a build under way
			}
		}
		err := os.RemoveAll(dir)
		if l != nil {
			_ = l.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("prune the image store: %w", err))
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}

// Freed is the result of PruneFolder.
type Freed struct {
	Names []string // of the files
	Bytes int64
	Busy  bool // a build that may need them is under way, so nothing was removed
}

// PruneFolder calls keep with all images, and removes those files of a folder of the store for which the returned
// function returns false. It removes nothing while the lock of the folder's name is held, or when the record of an
// image cannot be read (ErrCorrupt).
func (s *Store) PruneFolder(folder string, keep func(images []*Image) (func(name string) bool, error)) (out Freed, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("prune the %s of the image store: %w", folder, err)
		}
	}()
	mine, err := s.TryLock(folder)
	if errors.Is(err, osfile.ErrLocked) {
		return Freed{Busy: true}, nil
	}
	if err != nil {
		return out, err
	}
	defer mine.Close()
	images, err := s.List()
	if err != nil {
		return out, err
	}
	stays, err := keep(images)
	entries, rerr := os.ReadDir(filepath.Join(s.dir, folder))
	if rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	for _, e := range entries {
		if stays(e.Name()) {
			continue
		}
		var size int64
		if st, err := e.Info(); err == nil {
			size = st.Size()
		}
		if rerr := os.Remove(filepath.Join(s.dir, folder, e.Name())); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		out.Names = append(out.Names, e.Name())
		out.Bytes += size
	}
	return out, err
}

// Check is the cheap check for every start of a VM: the file has its recorded size, and a valid superblock that
// fits the size. It takes one read of 4 KiB. Errors are ErrTruncated or ErrCorrupt, with cause and remedy.
func (s *Store) Check(img *Image) error {
	if err := checkFile(img); err != nil {
		return fmt.Errorf("check image %s: %w; remove it and build it again", img.Name(), err)
	}
	return nil
}

func checkFile(img *Image) error {
	f, err := os.Open(img.Path())
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: its file %s is missing", ErrCorrupt, RootName)
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	if err != nil {
		return err
	}
	switch {
	case !st.Mode().IsRegular():
		return fmt.Errorf("%w: %s is not a regular file", ErrCorrupt, RootName)
	case st.Size() < img.Size:
		return fmt.Errorf("%w: it has %d bytes of %d", ErrTruncated, st.Size(), img.Size)
	case st.Size() > img.Size:
		return fmt.Errorf("%w: it has %d bytes where %d were written", ErrCorrupt, st.Size(), img.Size)
	}
	sb, err := erofs.ReadSuper(f)
	if err != nil {
		return err
	}
	if want := sb.Blocks * sparse.BlockSize; want != st.Size() {
		return fmt.Errorf("%w: its superblock tells of %d bytes, the file has %d", ErrCorrupt, want, st.Size())
	}
	return nil
}

// hashFile returns the SHA-256 of a file in hex.
func hashFile(ctx context.Context, f *os.File, onRead func(done, total int64)) (string, error) {
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	told := artifact.CountingWriter(func(n int64) { onRead(n, st.Size()) })
	src := artifact.NewReader(ctx, sparse.NewReader(f, st.Size()))
	done, err := io.CopyBuffer(io.MultiWriter(h, told), src, make([]byte, sparse.BufBytes))
	if err != nil {
		return "", err
	}
	if done != st.Size() {
		return "", fmt.Errorf("%w: read %d bytes of %d", ErrTruncated, done, st.Size())
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
