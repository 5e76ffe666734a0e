package confine

import (
	"bufio"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// The user and group ids of children: systemd leaves this range to others (systemd, UIDS-GIDS.md).
const (
	FirstID = 0x71000000
	NumIDs  = 1 << 16
)

// idDir has a lock file for each id in use. It must belong to this host and this boot.
var idDir = "/run/drowse/uids"

// firstID is FirstID. Tests have ids of their own.
var firstID = FirstID

// ErrNoID means that all ids are taken.
var ErrNoID = errors.New("all user ids of confined processes are taken")

// An id is a user and group id that a child has until release or the end of the keeper.
type id struct {
	n    int
	file *os.File
	// before are the cgroups of a keeper that had the id and did not release it.
	before []string
}

// takeID takes an id that no other keeper on this host has: the one that the child of this name had the last time, if
// it is free, so that what a killed keeper has left is found.
func takeID(name string) (*id, error) {
	if err := os.MkdirAll(idDir, 0o700); err != nil {
		return nil, fmt.Errorf("taking a user id: %w", err)
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	for i := range uint32(NumIDs) {
		d, err := lockID(firstID+int((h.Sum32()+i)%NumIDs), os.O_CREATE)
		if errors.Is(err, osfile.ErrLocked) {
			continue
		}
		return d, err
	}
	return nil, fmt.Errorf("taking a user id: %w: end some of the %d", ErrNoID, NumIDs)
}

func lockID(n, flag int) (*id, error) {
	path := filepath.Join(idDir, strconv.Itoa(n))
	f, err := osfile.TryOpenLocked(path, os.O_RDWR|flag|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if err != nil {
		return nil, fmt.Errorf("taking the user id %d: %w", n, err)
	}
	d := &id{n: n, file: f}
	for s := bufio.NewScanner(f); s.Scan(); {
		d.before = append(d.before, s.Text())
	}
	return d, nil
}

// tidy ends what a killed keeper has left of the id's last child.
func (d *id) tidy() error {
	var errs []error
	for _, dir := range d.before {
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}

// Sweep removes what killed keepers have left: ids and cgroups. A Start that takes the same id does it too. For another
// user than root, it removes cgroups of that user's keepers.
func Sweep() error {
	if os.Geteuid() != 0 {
		return sweepUser()
	}
	entries, err := os.ReadDir(idDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("tidying up user ids: %w", err)
	}
	var errs []error
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n < firstID || n >= firstID+NumIDs {
			continue // not of this package
		}
		switch d, err := lockID(n, 0); {
		case errors.Is(err, osfile.ErrLocked), errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		default:
			if err := d.tidy(); err != nil {
				errs = append(errs, err, d.file.Close()) // the file goes on naming the cgroups
				continue
			}
			errs = append(errs, d.release())
		}
	}
	return errors.Join(errs...)
}

// note writes down the id's cgroups, for the next owner if this one is killed.
func (d *id) note(cgroups []string) error {
	var text []byte
	for _, c := range cgroups {
		text = append(append(text, c...), '\n')
	}
	if err := d.file.Truncate(0); err != nil {
		return err
	}
	_, err := d.file.WriteAt(text, 0)
	return err
}

func (d *id) release() error {
	// Remove the file while the lock is held, so that no other process has this file open afterwards.
	return errors.Join(os.Remove(d.file.Name()), d.file.Close())
}
