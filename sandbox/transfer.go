package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
)

// ExportSnapshot writes a snapshot, with the layers of its disk, to w as one stream that
// ImportSnapshot takes, on this host or another. The image that it was booted from is not
// in it.
func (s *Store) ExportSnapshot(ctx context.Context, prefix string, w io.Writer) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	st, err := s.SnapshotDisk(id)
	if err != nil {
		return err
	}
	if err := disk.Verify(st); err != nil {
		return fmt.Errorf("exporting snapshot %s: its disk: %w", id, err)
	}
	var files []snapshot.ExtraFile
	for _, path := range st.Layers {
		n, err := disk.PackedSize(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // joined with the one above, which says so; disk.Verify has the last word
		}
		if err != nil {
			return fmt.Errorf("exporting snapshot %s: %w", id, err)
		}
		files = append(files, snapshot.ExtraFile{Name: filepath.Base(path), Size: n, Open: func() (io.ReadCloser, error) {
			r, w := io.Pipe()
			go func() { w.CloseWithError(disk.Pack(ctx, w, path)) }()
			return r, nil
		}})
	}
	return snapshot.Export(ctx, w, s.snapshotDir(id), files)
}

// ImportSnapshot reads what ExportSnapshot has written and makes the snapshot in this
// store. It stays until it is removed, also if it was one of a sleep. The error wraps
// vmm.ErrForeign if this host cannot run it, and says why; nothing is left then, nor when
// the stream is damaged.
func (s *Store) ImportSnapshot(ctx context.Context, r io.Reader) (info SnapshotInfo, err error) {
	// What is being imported belongs to nobody until all is there.
	unlock, err := s.share(ctx)
	if err != nil {
		return info, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	p := &layerPlacer{ctx: ctx, dir: s.layerDir()}
	in, err := snapshot.Import(ctx, r, filepath.Join(s.dir, "snapshots"), p)
	if err != nil {
		return info, err
	}
	id := in.Manifest.ID
	if err := s.checkImported(in.Manifest); err != nil {
		// The next sweep takes the layers.
		return info, errors.Join(fmt.Errorf("importing snapshot %s: %w", id, err), snapshot.Remove(in.Dir), s.unkeep(id))
	}
	return s.snapshotInfo(in.Manifest), s.keep(id)
}

// checkImported refuses what could never run here.
func (s *Store) checkImported(m *snapshot.Manifest) error {
	// Before anything else, so that a sweep does not take it for one of a sleep
	// that nobody needs.
	if err := s.keep(m.ID); err != nil {
		return err
	}
	if !diskOnly(m) { // a disk fits every host
		var facts vmm.HostFacts
		if err := json.Unmarshal([]byte(m.Host[factsKey]), &facts); err != nil {
			return fmt.Errorf("%w: its host facts are unreadable: %w", snapshot.ErrForeign, err)
		}
		if err := vmm.CheckFacts(facts); err != nil {
			return err
		}
	}
	if err := checkImportedShares(m); err != nil {
		return err
	}
	st, err := s.absolute(snapshotDisk(m))
	if err != nil {
		return err
	}
	if err := disk.Verify(st); err != nil {
		return fmt.Errorf("its disk: %w", err)
	}
	return nil
}

// MissingFor says what else a snapshot needs before a VM can be made of it: empty if
// nothing.
func (s *Store) MissingFor(id string) (string, error) {
	m, err := s.manifest(id)
	if err != nil {
		return "", err
	}
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		return "", err
	}
	if _, err := images.Find(m.Image); err != nil {
		return fmt.Sprintf("image %.12s, whose disk its guest has in use: copy its folder from images/ of the store that the snapshot comes from", m.Image), nil
	}
	return "", nil
}

func (s *Store) keptPath(id string) string { return filepath.Join(s.dir, "kept", id) }

// kept says that a snapshot is not to be swept, whatever it says of itself.
func (s *Store) kept(id string) bool {
	_, err := os.Lstat(s.keptPath(id))
	return !errors.Is(err, fs.ErrNotExist)
}

func (s *Store) keep(id string) error {
	dir := filepath.Dir(s.keptPath(id))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(s.keptPath(id), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close(), syncDir(dir))
}

func (s *Store) unkeep(id string) error {
	if err := os.Remove(s.keptPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// errStoreBusy says that others work on the records of a store for longer than was waited.
var errStoreBusy = errors.New("others make or remove VMs and snapshots at this moment: try again")

// storePatience is how long is waited for whoever takes names away, which takes moments.
const storePatience = time.Minute

// lockStore takes the store's lock, by flock(2): unix.LOCK_SH for what makes a record, a label or a snapshot name what another one
// names, from the first look at it until it is named; unix.LOCK_EX for what takes names away. It waits until ctx ends, or for a time:
// errStoreBusy. A VM's lock may be asked for with it held; who holds one does not wait for it.
func (s *Store) lockStore(ctx context.Context, how int, patience time.Duration) (unlock func() error, err error) {
	f, err := os.OpenFile(filepath.Join(s.dir, "import.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the store: %w", err)
	}
	for deadline := time.Now().Add(patience); ; {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case err == nil:
			return f.Close, nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			return nil, errors.Join(fmt.Errorf("locking the store: %w", err), f.Close())
		case time.Now().After(deadline):
			return nil, errors.Join(errStoreBusy, f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("waiting for the store's lock: %w", ctx.Err()), f.Close())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// share is lockStore for what names what another one names.
func (s *Store) share(ctx context.Context) (unlock func() error, err error) {
	return s.lockStore(ctx, unix.LOCK_SH, storePatience)
}

// layerName is what the stores of all hosts call the layers of disks. There is a random
// part in it, so that equal names mean equal layers.
var layerName = regexp.MustCompile(`^([0-9a-f]{32}-[0-9]{1,9}|ext4-[0-9]{1,3}-[0-9]{1,16}-[0-9a-f]{16}\.layer)$`)

// layerPlacer takes the layers of an imported snapshot.
type layerPlacer struct {
	ctx context.Context
	dir string
}

// Place implements snapshot.Placer.
func (p *layerPlacer) Place(name string, _ int64) (snapshot.Placement, error) {
	if !layerName.MatchString(name) {
		return nil, fmt.Errorf("layer %q: %w: no store calls a layer so", name, snapshot.ErrForeign)
	}
	f, err := os.CreateTemp(p.dir, importPrefix+"*")
	if err != nil {
		return nil, err
	}
	return &placedLayer{File: f, p: p, path: filepath.Join(p.dir, name)}, nil
}

// importPrefix begins the names of files in the layers' directory that belong to no
// layer yet. A sweep takes those that an import has left.
const importPrefix = "import-"

type placedLayer struct {
	*os.File // the packed layer
	p        *layerPlacer
	path     string
	made     bool
}

// Commit implements snapshot.Placement.
func (l *placedLayer) Commit() (err error) {
	defer func() { err = errors.Join(err, l.discard()) }()
	if _, err := l.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := os.Stat(l.path); err == nil {
		return l.compare()
	}
	tmp := l.Name() + ".layer"
	if err := disk.Unpack(l.p.ctx, l, tmp); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, l.path, unix.RENAME_NOREPLACE); err != nil {
		return errors.Join(fmt.Errorf("placing layer %s: %w", filepath.Base(l.path), err), os.Remove(tmp))
	}
	l.made = true
	return syncDir(l.p.dir)
}

// compare makes sure that the layer that is there is the one that was sent.
func (l *placedLayer) compare() error {
	r, w := io.Pipe()
	go func() { w.CloseWithError(disk.Pack(l.p.ctx, w, l.path)) }()
	defer r.Close()
	same, err := sameContent(r, l)
	if err == nil && !same {
		err = fmt.Errorf("layer %s: %w: this store has another one of that name", filepath.Base(l.path), snapshot.ErrExists)
	}
	return err
}

func sameContent(a, b io.Reader) (bool, error) {
	p, q := make([]byte, 256<<10), make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(a, p)
		m, err2 := io.ReadFull(b, q)
		end, end2 := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err2, io.EOF) || errors.Is(err2, io.ErrUnexpectedEOF)
		switch {
		case err != nil && !end:
			return false, err
		case err2 != nil && !end2:
			return false, err2
		case n != m || end != end2 || !bytes.Equal(p[:n], q[:m]):
			return false, nil
		case end:
			return true, nil
		}
	}
}

// Abort implements snapshot.Placement.
func (l *placedLayer) Abort() error {
	err := l.discard()
	if l.made {
		err = errors.Join(err, os.Remove(l.path))
	}
	return err
}

// discard forgets the packed layer.
func (l *placedLayer) discard() error {
	if l.File == nil {
		return nil
	}
	name := l.Name()
	err := l.Close()
	l.File = nil
	return errors.Join(err, os.Remove(name))
}
