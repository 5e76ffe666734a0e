package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/internal/osfile"
)

// Limits of a promotion.
const (
	// MaxPromoteBytes and MaxPromoteEntries bound what one call of Promote copies, for all paths together.
	MaxPromoteBytes   = 16 << 30
	MaxPromoteEntries = 1 << 18
	// promoteEntry is the most that an entry takes on disk besides its content: the rest of its last block, and a block of
	// its directory.
	promoteEntry = 8192
	// MaxPromoteCopies is the most copies in a directory NAME. Promote refuses to add one more.
	MaxPromoteCopies = 1000
	// maxPromoteTries bounds how often to retry with a name that is already taken or removed.
	maxPromoteTries = 16
	// partCopy is the prefix of the names of incomplete copies.
	partCopy = ".part-"
	// copyTime is the time format of a copy's name: names sort by time.
	copyTime = "20060102T150405.000000000Z"
)

var (
	// ErrPromoteDir says that Promote cannot copy to the host's directory.
	ErrPromoteDir = errors.New("the directory of the host cannot be promoted to")
	// ErrNotPromotable says that the path to promote is neither a file nor a directory.
	ErrNotPromotable = errors.New("only files and directories are promoted, and not by way of a symbolic link")
)

// Promotion names what to copy to the host: Path, a file or directory of the guest. It goes to Dir/NAME/TIME/Path,
// where Dir is an existing directory of the host.
type Promotion struct{ Path, Dir string }

// Promoted describes a copy that was made.
type Promoted = report.Promoted

// Promote copies files and directories of the guest to Dir/NAME/TIME on the host, NAME being name. seen is Look's
// result for the items, in the same order; Promote skips absent and empty ones. It syncs all copies before it names
// the first: each Dir/NAME/TIME is whole or not there, even after a crash or a power loss. The guest may be hostile,
// and decides only the content: no devices, no links out of the tree, no setuid bits, nothing that others may write
// to, no more than MaxPromoteBytes and MaxPromoteEntries. The copies take at most room bytes of the host's disk, or
// fail with ErrLimit.
func (c *Client) Promote(ctx context.Context, name string, items []Promotion, seen []Seen, room int64) (copies []Promoted, err error) {
	stages := map[string]*stage{}
	var order []*stage
	defer func() {
		for _, s := range order {
			err = errors.Join(err, s.close())
		}
	}()
	bytes, entries := int64(MaxPromoteBytes), int64(MaxPromoteEntries)
	room -= room / 128 // where a file system keeps the places of large files
	var of []*stage
	for i, item := range items {
		switch seen[i].State {
		case DropAbsent, DropEmpty:
			continue
		case DropDirectory, DropFile:
		default:
			return nil, fmt.Errorf("guest: promote %s: %w", item.Path, ErrNotPromotable)
		}
		s := stages[item.Dir]
		if s == nil {
			if s, err = openStage(item.Dir, name); err != nil {
				return nil, fmt.Errorf("guest: promote %s: %w", item.Path, err)
			}
			stages[item.Dir], order = s, append(order, s)
		}
		room -= int64(1+strings.Count(item.Path, "/")) * promoteEntry // the directories that lead to it
		if bytes <= 0 || entries <= 0 || room <= 0 {
			return nil, fmt.Errorf("guest: promote %s: %w: more than %d bytes or %d entries, or than there is room for", item.Path, ErrLimit,
				int64(MaxPromoteBytes), MaxPromoteEntries)
		}
		o := CopyOptions{MaxBytes: bytes, MaxEntries: entries, OwnerWrites: true}
		if room < bytes+entries*promoteEntry {
			o.MaxBytes, o.EntryBytes = min(bytes, room), promoteEntry
		}
		res, err := s.copy(ctx, c, item.Path, o)
		if err != nil {
			return nil, fmt.Errorf("guest: promote %s to %s: %w", item.Path, item.Dir, err)
		}
		bytes, entries = bytes-res.Bytes, entries-res.Entries
		room -= res.Bytes + res.Entries*promoteEntry
		of = append(of, s)
		copies = append(copies, Promoted{
			Path: item.Path, Entries: res.Entries, Bytes: res.Bytes, Skipped: res.Skipped, SkippedCount: res.SkippedCount,
		})
	}
	for _, s := range order {
		if err := s.sync(); err != nil {
			return nil, fmt.Errorf("guest: promote to %s: %w", s.dir, err)
		}
	}
	for _, s := range order {
		if err := s.commit(); err != nil {
			return nil, fmt.Errorf("guest: promote to %s: %w", s.dir, err)
		}
	}
	for i := range copies {
		copies[i].At = filepath.Join(of[i].at, copies[i].Path)
	}
	return copies, nil
}

// stage is a copy on its way into a directory of the host. Its lock tells others that it is in use.
type stage struct {
	dir  string   // of the host
	host *os.Root // dir/NAME
	own  *os.File // host as an open file
	name string
	part string // its name in host until it is whole; then empty
	root *os.Root
	lock *os.File
	at   string // path of the whole copy; empty until then
}

// openStage begins a copy in a directory of the host.
func openStage(dir, name string) (_ *stage, err error) {
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return nil, fmt.Errorf("%w: %q cannot be the name of a directory in it", ErrPromoteDir, name)
	}
	d, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w: make it, or name another one", ErrPromoteDir, err)
	}
	defer d.Close()
	s := &stage{dir: dir, name: name}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := s.openHost(d); err != nil {
		return nil, err
	}
	if err := s.tidy(); err != nil {
		return nil, err
	}
	for range maxPromoteTries {
		done, err := s.begin()
		if err != nil {
			return nil, err
		}
		if done {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w: %s: others remove what is begun in it", ErrPromoteDir, filepath.Join(dir, name))
}

// openHost opens dir/NAME, which only this user may change, and makes it if need be.
func (s *stage) openHost(d *os.Root) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrPromoteDir, err)
		}
	}()
	whole := filepath.Join(s.dir, s.name)
	err = d.Mkdir(s.name, 0o755)
	if err == nil {
		err = syncDir(d)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	fi, err := d.Lstat(s.name)
	if err == nil && !fi.IsDir() {
		err = fmt.Errorf("%s is no directory", whole)
	}
	if err != nil {
		return err
	}
	if s.host, err = d.OpenRoot(s.name); err != nil {
		return err
	}
	if s.own, err = s.host.Open("."); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(s.own.Fd()), &st); err != nil {
		return fmt.Errorf("%s: %w", whole, err)
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s belongs to user %d and has mode %#o, so others could change what is in it: it has to belong to user %d, who alone may write to it",
			whole, st.Uid, st.Mode&0o7777, os.Geteuid())
	}
	return nil
}

// tidy removes incomplete copies of killed processes. It refuses a directory with too many copies.
func (s *stage) tidy() error {
	names, err := s.own.Readdirnames(2 * MaxPromoteCopies)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	copies := 0
	for _, n := range names {
		if !strings.HasPrefix(n, partCopy) {
			copies++
			continue
		}
		if err := s.removeLeft(n); err != nil {
			return err
		}
	}
	if copies >= MaxPromoteCopies {
		return fmt.Errorf("%w: %s has %d entries: take some away", ErrPromoteDir, filepath.Join(s.dir, s.name), copies)
	}
	return nil
}

// removeLeft removes an incomplete copy that no process has locked.
func (s *stage) removeLeft(part string) error {
	f, err := s.take(part)
	if f == nil || err != nil {
		return err
	}
	return errors.Join(s.host.RemoveAll(part), f.Close())
}

// take opens and locks an incomplete copy's directory. It returns nil if that is gone or another process has it.
func (s *stage) take(part string) (*os.File, error) {
	f, err := s.host.Open(part)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = osfile.TryLock(f, osfile.Exclusive)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, osfile.ErrLocked) {
		err = nil
	}
	return nil, err
}

// begin makes and locks the directory of an incomplete copy. done is false if another process has removed it before
// it was locked.
func (s *stage) begin() (done bool, err error) {
	part := partCopy + rand.Text()
	if err := s.host.Mkdir(part, 0o700); err != nil {
		return false, err
	}
	f, err := s.take(part)
	if f == nil || err != nil {
		return false, err
	}
	at, aerr := s.host.Lstat(part)
	is, ierr := f.Stat()
	if aerr != nil || ierr != nil || !os.SameFile(at, is) {
		f.Close()
		return false, nil
	}
	s.part, s.lock = part, f
	s.root, err = s.host.OpenRoot(part)
	return true, err
}

// copy copies a path of the guest to the same path in the stage.
func (s *stage) copy(ctx context.Context, c *Client, from string, o CopyOptions) (CopyResult, error) {
	dir, base := path.Split(strings.TrimPrefix(from, "/"))
	to := s.root
	if dir = strings.TrimSuffix(dir, "/"); dir != "" {
		if err := s.mkdirAll(dir); err != nil {
			return CopyResult{}, err
		}
		below, err := s.root.OpenRoot(dir)
		if err != nil {
			return CopyResult{}, err
		}
		defer below.Close()
		to = below
	}
	// The final name is not known until the copy is whole.
	res, err := c.CopyOutTo(ctx, from, to, base, filepath.Join(s.dir, s.name), o)
	if err != nil {
		return res, err
	}
	if _, err := to.Lstat(base); err != nil {
		return res, fmt.Errorf("%w: the guest has sent nothing of it", ErrProtocol)
	}
	return res, nil
}

// mkdirAll makes the missing directories of a path. A link on the way, which an earlier copy may have made, is an
// error.
func (s *stage) mkdirAll(dir string) error {
	at := ""
	for elem := range strings.SplitSeq(dir, "/") {
		at = path.Join(at, elem)
		err := s.root.Mkdir(at, 0o755)
		if err == nil {
			continue
		}
		fi, lerr := s.root.Lstat(at)
		if lerr != nil {
			return errors.Join(err, lerr)
		}
		if !fi.IsDir() {
			return fmt.Errorf("%w: %s is no directory in what was promoted before it", ErrNotPromotable, at)
		}
	}
	return nil
}

// sync writes the copy to disk.
func (s *stage) sync() error {
	if err := s.lock.Chmod(0o755); err != nil {
		return err
	}
	if err := unix.Syncfs(int(s.lock.Fd())); err != nil {
		return fmt.Errorf("writing it to disk: %w", err)
	}
	return nil
}

// commit gives the copy its final name.
func (s *stage) commit() error {
	host := int(s.own.Fd())
	for range maxPromoteTries {
		name := time.Now().UTC().Format(copyTime)
		err := unix.Renameat2(host, s.part, host, name, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			return fmt.Errorf("naming it %s: %w", name, err)
		}
		s.at, s.part = filepath.Join(s.dir, s.name, name), ""
		return s.own.Sync()
	}
	return fmt.Errorf("naming it: %w", fs.ErrExist)
}

// close removes an incomplete copy and closes the stage.
func (s *stage) close() (err error) {
	if s.root != nil {
		err = s.root.Close()
	}
	if s.part != "" {
		err = errors.Join(err, s.host.RemoveAll(s.part))
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	if s.own != nil {
		err = errors.Join(err, s.own.Close())
	}
	if s.host != nil {
		err = errors.Join(err, s.host.Close())
	}
	return err
}

// syncDir is osfile.SyncDir for an open directory, whatever its path now leads to.
func syncDir(root *os.Root) error {
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
