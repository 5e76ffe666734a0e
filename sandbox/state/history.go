package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Bounds on what is kept of removed VMs: see Store.ForgetRemoved.
const (
	HistoryTime     = 30 * 24 * time.Hour
	MaxHistories    = 10_000
	MaxHistoryBytes = 1 << 30
	// MaxRuns is how many runs of one VM are kept, the newest ones.
	MaxRuns = 10_000
)

// historyPatience is how long a removal may read the audit trail.
const historyPatience = 10 * time.Second

// removedVersion goes up with each incompatible change of Removed.
const removedVersion = 1

// Removed is the history that is kept of a VM that was removed.
type Removed struct {
	Version int       `json:"version"`
	Time    time.Time `json:"removed"`
	// Record is its last record, without its services, which may have secrets in their environment.
	Record   *Record       `json:"record"`
	Metadata spec.Metadata `json:"metadata"`
	// Runs are the commands and login shells of its audit trail, in the order in which they began.
	Runs []audit.Entry `json:"runs"`
}

// IsRun reports whether an entry of an audit trail is a command or a login shell.
func IsRun(e audit.Entry) bool {
	return (e.Kind == audit.KindExec || e.Kind == audit.KindShell) && e.ID != ""
}

// history is the file of a Removed. Its name, TIME-ID-NAME.json, has all that a search or a sweep needs.
type history struct {
	path     string
	at       time.Time
	id, name string
}

const historyLayout = "20060102T150405.000000000Z"

func (s *Store) removedDir() string { return filepath.Join(s.dir, "removed") }

func (s *Store) historyPath(at time.Time, r *Record) string {
	return filepath.Join(s.removedDir(), fmt.Sprintf("%s-%s-%s.json", at.Format(historyLayout), r.ID, r.Spec.Name))
}

// histories returns all histories, the newest first. It leaves out files with other names.
func (s *Store) histories() (out []history, err error) {
	entries, err := os.ReadDir(s.removedDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("looking for histories of removed VMs: %w", err)
	}
	for _, e := range slices.Backward(entries) {
		base, ok := strings.CutSuffix(e.Name(), ".json")
		part := strings.SplitN(base, "-", 3)
		if !ok || len(part) != 3 {
			continue
		}
		if at, err := time.Parse(historyLayout, part[0]); err == nil {
			out = append(out, history{filepath.Join(s.removedDir(), e.Name()), at, part[1], part[2]})
		}
	}
	return out, nil
}

// Removed returns the history of the VM of this name or id that was removed last. If there is none, the error is
// spec.ErrNotFound.
func (s *Store) Removed(nameOrID string) (*Removed, error) {
	all, err := s.histories()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(h history) bool { return h.name == nameOrID || h.id == nameOrID })
	if i < 0 {
		return nil, fmt.Errorf("%w: %.64q, and no history of a removed one", spec.ErrNotFound, nameOrID)
	}
	return all[i].read()
}

func (h history) read() (*Removed, error) {
	data, err := os.ReadFile(h.path)
	if err != nil {
		return nil, fmt.Errorf("reading the history of %s, which was removed: %w", h.name, err)
	}
	gone := &Removed{}
	if err = json.Unmarshal(data, gone); err == nil && (gone.Version != removedVersion || gone.Record == nil) {
		err = fmt.Errorf("version %d, this build reads %d", gone.Version, removedVersion)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the history %s: %w: %w: it was written by another version, or is damaged", h.path, spec.ErrRecord, err)
	}
	return gone, nil
}

// keepHistory stores the history of a VM that is about to be removed, durably; none for an ephemeral VM. The file
// is whole or does not exist, and replaces one that an interrupted removal has left. After an error the history
// may be incomplete. The VM's lock must be held.
func (s *Store) keepHistory(ctx context.Context, r *Record) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("keeping the history of %s: %w", r.Spec.Name, err)
		}
	}()
	if !IDPattern.MatchString(r.ID) {
		return fmt.Errorf("%w: its id is %.64q", spec.ErrRecord, r.ID)
	}
	before, err := s.histories()
	if err != nil {
		return err
	}
	m, merr := s.Metadata(r.Spec.Name)
	errs := []error{merr}
	if m.EffectiveClass() != lifetime.Ephemeral {
		errs = append(errs, s.writeHistory(ctx, r, m))
	}
	for _, h := range before {
		if h.id != r.ID {
			continue
		}
		if err := s.FS.Remove(h.path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (s *Store) writeHistory(ctx context.Context, r *Record, m spec.Metadata) error {
	left := *r
	left.Spec.Services = nil
	gone := Removed{Version: removedVersion, Time: time.Now().UTC(), Record: &left, Metadata: m, Runs: []audit.Entry{}}
	ctx, cancel := context.WithTimeout(ctx, historyPatience)
	defer cancel()
	is, aerr := s.Audit(ctx, r.Spec.Name, audit.ReadOptions{}, func(e audit.Entry) error {
		if !IsRun(e) {
			return nil
		}
		if e.Status == audit.Running {
			e.Status = audit.Unknown // its client cannot record its end any more
		}
		if e.Outcome != nil {
			o := *e.Outcome
			o.Changes, e.Outcome = nil, &o
		}
		if gone.Runs = append(gone.Runs, e); len(gone.Runs) >= 2*MaxRuns {
			gone.Runs = slices.Delete(gone.Runs, 0, MaxRuns)
		}
		return nil
	})
	gone.Runs = gone.Runs[max(0, len(gone.Runs)-MaxRuns):]
	if is.VM != r.ID {
		gone.Runs = []audit.Entry{} // another VM's trail
	}
	data, err := json.Marshal(gone)
	if err != nil {
		return errors.Join(aerr, err)
	}
	switch err := s.FS.Mkdir(s.removedDir(), 0o700); {
	case err == nil:
		if err := s.FS.SyncDir(s.dir); err != nil {
			return errors.Join(aerr, err)
		}
	case !errors.Is(err, fs.ErrExist):
		return errors.Join(aerr, err)
	}
	return errors.Join(aerr, osfile.WriteFileIn(s.FS, s.historyPath(gone.Time, r), data, 0o600))
}

// ForgetRemoved deletes the histories of VMs that were removed before a time, and the oldest of those beyond
// MaxHistories and MaxHistoryBytes. It returns how many.
func (s *Store) ForgetRemoved(before time.Time) (n int64, err error) {
	all, err := s.histories()
	errs := []error{err}
	var bytes int64
	for i, h := range all {
		if st, err := os.Lstat(h.path); err == nil {
			bytes += st.Size()
		}
		if !h.at.Before(before) && i < MaxHistories && bytes <= MaxHistoryBytes {
			continue
		}
		switch err := os.Remove(h.path); {
		case err == nil:
			n++
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}
	return n, errors.Join(errs...)
}

// sweepRemoved deletes leftovers of interrupted removals, old histories, and the database that had the histories
// in earlier versions.
func (s *Store) sweepRemoved() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("deleting what removals have left: %w", err)
		}
	}()
	_, err = s.ForgetRemoved(time.Now().Add(-HistoryTime))
	errs := []error{err}
	in := func(dir string, do func(name, path string) error) {
		entries, err := os.ReadDir(dir)
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			errs = append(errs, do(e.Name(), filepath.Join(dir, e.Name())))
		}
	}
	in(s.removedDir(), s.removeTemp)
	in(s.dir, func(name, path string) error {
		if name != "records.lock" && name != "records.db" && !strings.HasPrefix(name, "records.db-") && !strings.HasPrefix(name, "records.db.") {
			return nil
		}
		return os.RemoveAll(path)
	})
	in(filepath.Join(s.dir, "vms"), s.removeTemp)
	in(filepath.Join(s.dir, "vms"), func(name, _ string) error { return s.removeUnrecorded(name) })
	return errors.Join(errs...)
}

func (s *Store) removeTemp(name, path string) error {
	if !strings.HasPrefix(name, osfile.TempPrefix) || s.young(path) {
		return nil
	}
	return os.RemoveAll(path)
}

// removeUnrecorded deletes the directory of a VM that has no record: its removal, or the command that made it, was
// killed.
func (s *Store) removeUnrecorded(name string) error {
	gone := func() bool {
		_, err := os.Lstat(s.RecordPath(name))
		return errors.Is(err, fs.ErrNotExist)
	}
	if !spec.ValidName(name) || !gone() || s.young(s.VMDir(name)) {
		return nil
	}
	l, err := s.Lock(name)
	if err != nil {
		return nil //nolint:nilerr // somebody makes or removes it
	}
	defer l.Release()
	if !gone() {
		return nil
	}
	return s.removeVMDir(name)
}
