package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// SystemFile is the name, in an export, of the disk with the agent that the guest has started from.
const SystemFile = "system.erofs"

// ExportSnapshot writes a snapshot to w as one stream for ImportSnapshot, on this host or another: its memory, the
// layers of its disk, and the disk with the agent that its guest runs from. It does not include the VM's image:
// the stream names that by the SHA-256 of its content.
func (s *Store) ExportSnapshot(ctx context.Context, prefix string, w io.Writer) error {
	id, files, err := s.extraFiles(ctx, prefix)
	if err != nil {
		return err
	}
	return snapshot.Export(ctx, w, s.SnapshotDir(id), files)
}

// SendSnapshot calls put with each file of what ExportSnapshot writes, for ReceiveSnapshot. See snapshot.Send.
func (s *Store) SendSnapshot(ctx context.Context, prefix string, put func(f snapshot.SentFile, r io.Reader) error) error {
	id, files, err := s.extraFiles(ctx, prefix)
	if err != nil {
		return err
	}
	return snapshot.Send(ctx, s.SnapshotDir(id), files, put)
}

// extraFiles returns what goes with a snapshot that is exported.
func (s *Store) extraFiles(ctx context.Context, prefix string) (id string, files []snapshot.ExtraFile, err error) {
	if id, err = s.FindSnapshot(prefix); err != nil {
		return "", nil, err
	}
	m, err := s.Manifest(id)
	if err != nil {
		return "", nil, err
	}
	st, err := s.Absolute(SnapshotStack(m))
	if err != nil {
		return "", nil, err
	}
	if err := disk.Verify(st); err != nil {
		return "", nil, fmt.Errorf("exporting snapshot %s: its disk: %w", id, err)
	}
	for _, path := range st.Layers {
		n, err := disk.PackedSize(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // joined with the one above, which says so; disk.Verify has the last word
		}
		if err != nil {
			return "", nil, fmt.Errorf("exporting snapshot %s: %w", id, err)
		}
		files = append(files, snapshot.ExtraFile{Name: filepath.Base(path), Size: n, Open: func() (io.ReadCloser, error) {
			r, w := io.Pipe()
			go func() { w.CloseWithError(disk.Pack(ctx, w, path)) }()
			return r, nil
		}})
	}
	system, err := s.systemDiskOf(m)
	if err != nil {
		return "", nil, fmt.Errorf("exporting snapshot %s: %w", id, err)
	}
	if system != "" {
		fi, err := os.Stat(system)
		if err != nil {
			return "", nil, fmt.Errorf("exporting snapshot %s: the disk that its guest has started from: %w", id, err)
		}
		files = append(files, snapshot.ExtraFile{Name: SystemFile, Size: fi.Size(), Open: func() (io.ReadCloser, error) { return os.Open(system) }})
	}
	return id, files, nil
}

// FileMarks tell the contents of a snapshot's files apart: two files of one store with equal marks and sizes have the
// same content.
type FileMarks map[string]string

// Of returns the mark of a file that SendSnapshot sends; "" for one that is like no other.
func (m FileMarks) Of(f snapshot.SentFile) string { return m[markKey(f.Extra, f.Name)] }

func markKey(extra bool, name string) string { return fmt.Sprint(extra, " ", name) }

// FileMarks returns the marks of a snapshot's files as they are now. Memory files never change; a layer of a disk may
// be joined with others under its name.
func (s *Store) FileMarks(id string) (FileMarks, error) {
	m, err := s.Manifest(id)
	if err != nil {
		return nil, err
	}
	out := FileMarks{}
	for _, f := range m.Memory.Files {
		out[markKey(false, f.Name)] = "memory " + f.ID
	}
	paths, err := s.ExtraPaths(m)
	if err != nil {
		return nil, err
	}
	for name, path := range paths {
		fi, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // joined with the one above
		}
		if err != nil {
			return nil, err
		}
		if sys, ok := fi.Sys().(*syscall.Stat_t); ok {
			out[markKey(true, name)] = fmt.Sprintf("file %d %d %d %d", sys.Dev, sys.Ino, fi.Size(), fi.ModTime().UnixNano())
		}
	}
	return out, nil
}

// ExtraPaths returns where the files are that SendSnapshot sends besides the snapshot's own, by their names there.
func (s *Store) ExtraPaths(m *snapshot.Manifest) (map[string]string, error) {
	st, err := s.Absolute(SnapshotStack(m))
	if err != nil {
		return nil, err
	}
	paths := map[string]string{}
	for _, path := range st.Layers {
		paths[filepath.Base(path)] = path
	}
	system, err := s.systemDiskOf(m)
	if err == nil && system != "" {
		paths[SystemFile] = system
	}
	return paths, err
}

// Admits returns why a snapshot of another host whose word counts could not run here, by its manifest; nil if nothing
// is known of that.
func (s *Store) Admits(m *snapshot.Manifest) error {
	return (&importing{store: s, trust: true, layers: map[string]string{}}).Admit(m)
}

// systemDiskOf returns the path of the disk with the agent that the guest of a snapshot uses; empty if it has none.
func (s *Store) systemDiskOf(m *snapshot.Manifest) (string, error) {
	if DiskOnly(m) {
		return "", nil
	}
	var r Record
	if err := json.Unmarshal([]byte(m.Labels[LabelRecord]), &r); err != nil {
		return "", fmt.Errorf("%w: %w", spec.ErrRecord, err)
	}
	return s.BootPath(r.Boot.SystemDisk), nil
}

// ErrImport means that an exported snapshot cannot be added to this store.
var ErrImport = errors.New("the snapshot cannot be imported")

// ImportOptions change an import. The zero value trusts no stream.
type ImportOptions struct {
	// Trust accepts all that the stream says of its VM: network policy, tags, what its guest may ask the host for,
	// the path of its kernel, host directories that it shares, volumes by name, and whose snapshot it is.
	Trust bool
}

// ImportResult is an imported snapshot.
type ImportResult struct {
	spec.SnapshotInfo
	// Dropped names what the stream said of its VM and this store does not accept from a stranger.
	Dropped []string `json:"dropped"`
}

// ImportSnapshot reads what ExportSnapshot has written and makes the snapshot in this store. It stays until it is
// removed, even if it was one of a sleep.
//
// The stream's author is a stranger. ImportSnapshot takes the memory with the state of the machine, the disk, the
// list of devices, and the image by its content. A network device then has no policy, so nothing passes. It drops
// all else that the stream says, and ImportResult lists it: see docs/guides/snapshots.md. Layers of the disk come
// only from the stream, and are named by their content unless the store has the same layer under the same name.
//
// ImportSnapshot refuses at once if this host or this store lacks what the snapshot needs: the error wraps
// vmm.ErrForeign, image.ErrNotFound, kernel.ErrNotFound or ErrImport, and says what to do. Then, or if the stream
// is damaged, no snapshot is left.
func (s *Store) ImportSnapshot(ctx context.Context, r io.Reader, o ImportOptions) (res ImportResult, err error) {
	return s.takeIn(ctx, o, func(dir string, im *importing) (*snapshot.Imported, error) { return snapshot.Import(ctx, r, dir, im) })
}

// ReceiveSnapshot is ImportSnapshot from another source than a stream.
func (s *Store) ReceiveSnapshot(ctx context.Context, src snapshot.Source, o ImportOptions) (res ImportResult, err error) {
	return s.takeIn(ctx, o, func(dir string, im *importing) (*snapshot.Imported, error) {
		return snapshot.Receive(ctx, src, dir, im)
	})
}

func (s *Store) takeIn(ctx context.Context, o ImportOptions, take func(dir string, im *importing) (*snapshot.Imported, error)) (res ImportResult, err error) {
	// The lock keeps the imported files, which nothing names until all are there.
	unlock, err := s.Share(ctx)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	im := &importing{ctx: ctx, store: s, trust: o.Trust, layers: map[string]string{}}
	in, err := take(filepath.Join(s.dir, "snapshots"), im)
	if err != nil {
		// The next sweep deletes the layers.
		if im.kept {
			err = errors.Join(err, s.unkeep(im.id))
		}
		return res, err
	}
	res = ImportResult{SnapshotInfo: s.snapshotInfo(in.Manifest), Dropped: im.dropped}
	if res.Dropped == nil {
		res.Dropped = []string{}
	}
	s.Tell(events.Event{
		Type: events.Imported, Cause: events.CauseOf(ctx),
		Details: events.Details{Snapshot: res.ID, Bytes: res.Stored, Dropped: res.Dropped},
	})
	return res, nil
}

func (s *Store) keptPath(id string) string { return filepath.Join(s.dir, "kept", id) }

// kept reports whether sweeps must keep a snapshot, whatever its own labels say.
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
	return errors.Join(f.Sync(), f.Close(), osfile.SyncDir(dir))
}

func (s *Store) unkeep(id string) error {
	if err := os.Remove(s.keptPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ErrStoreBusy means that others work on the records of a store for longer than the caller waits.
var ErrStoreBusy = errors.New("others make or remove VMs and snapshots at this moment: try again")

// storePatience is how long Share waits for processes that take names away, which takes moments.
const storePatience = time.Minute

// LockStore takes the store's lock, by flock(2). A process that makes a record, metadata or a snapshot name what
// another one names takes osfile.Shared, from the first look at it until it is named. A process that takes names
// away takes osfile.Exclusive. LockStore waits until ctx ends, or for patience: then it returns ErrStoreBusy. Its
// holder may take a VM's lock; the holder of a VM's lock must not wait for it.
func (s *Store) LockStore(ctx context.Context, mode osfile.LockMode, patience time.Duration) (unlock func() error, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, ErrStoreBusy)
	defer cancel()
	f, err := osfile.OpenLocked(ctx, filepath.Join(s.dir, "import.lock"), os.O_CREATE|os.O_RDWR, 0o600, mode)
	if errors.Is(err, ErrStoreBusy) {
		return nil, ErrStoreBusy
	}
	if err != nil {
		return nil, fmt.Errorf("locking the store: %w", err)
	}
	return f.Close, nil
}

// Share is LockStore for making names of what something else names.
func (s *Store) Share(ctx context.Context) (unlock func() error, err error) {
	return s.LockStore(ctx, osfile.Shared, storePatience)
}
