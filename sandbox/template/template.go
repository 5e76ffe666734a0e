// Package template keeps which snapshots stand for a boot. A template is the snapshot of a VM that has booted, and run
// a shell that does nothing. A VM of the same key is restored from it instead of booting.
//
// An entry is a file, DIR/templates/KEY.json. One without a snapshot is wanted. A snapshot that no entry names is no
// template: whoever makes one writes the entry last.
package template

import (
	"bufio"
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
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Bounds of a Dir.
const (
	// MaxReady is how many templates Trim leaves: callers choose sizes and command lines, and so the number of keys.
	MaxReady = 32
	// MaxWanted is how many may be wanted at once.
	MaxWanted = 16
	// RetryAfter is how long after a failure a template is wanted again.
	RetryAfter = 10 * time.Minute

	maxEntry = 64 << 10 // bytes
)

// Errors of a Dir.
var (
	ErrNotFound = errors.New("no such template")
	ErrEntry    = errors.New("the file of the template cannot be read")
)

// Entry is a template, or one that is wanted.
type Entry struct {
	Version int `json:"version"`
	// Key is 64 hex digits: see Key.
	Key string `json:"key"`
	// Spec is what its VM was: see Bare.
	Spec spec.VM `json:"spec"`
	// Snapshot is its snapshot; empty if it is wanted.
	Snapshot string    `json:"snapshot,omitempty"`
	Created  time.Time `json:"created,omitzero"`
	// Problem is why it could not be made at the time Tried.
	Problem string    `json:"problem,omitempty"`
	Tried   time.Time `json:"tried,omitzero"`
	// Used is when a VM was last made from it, or wanted it. It is the file's own time.
	Used time.Time `json:"-"`
}

// Ready reports whether VMs can be made from it.
func (e Entry) Ready() bool { return e.Snapshot != "" }

// Due reports whether it is to be made now.
func (e Entry) Due(now time.Time) bool { return !e.Ready() && now.Sub(e.Tried) >= RetryAfter }

// Hostname is the host name in the boot of a template. Its clones have their own.
const Hostname = "template"

// Bare returns the part of a VM that its boot depends on, with the image and the kernel by their ids. All else is
// applied to a VM that has booted, whether from a template or not.
func Bare(s spec.VM, imageID, kernelID string) spec.VM {
	return spec.VM{
		Image: imageID, Kernel: cmp.Or(kernelID, s.Kernel), VCPUs: s.VCPUs, MemoryMiB: s.MemoryMiB, DiskMiB: s.DiskMiB,
		Hostname: Hostname, Network: s.Network, IPv6: s.IPv6, Cmdline: s.Cmdline, NoACPI: s.NoACPI,
	}
}

// Unsuited says why a VM cannot be made from a template; empty if it can. Volumes and shares are devices, which the
// guest mounts at its boot.
func Unsuited(s spec.VM) string {
	switch {
	case len(s.Volumes) > 0:
		return "it has volumes"
	case len(s.Shares) > 0:
		return "it has shared directories"
	}
	return ""
}

// Key identifies all that the boot of a Bare VM depends on: the VM; boot, which becomes JSON; the files, by their
// identity, size and times; the host's kernel and CPU. An empty path is no file.
func Key(bare spec.VM, boot any, files ...string) (string, error) {
	h := sha256.New()
	e := json.NewEncoder(h)
	if err := errors.Join(e.Encode(bare), e.Encode(boot)); err != nil {
		return "", err
	}
	for _, path := range files {
		stamp, err := stampOf(path)
		if err != nil {
			return "", fmt.Errorf("identifying what a template would boot: %w", err)
		}
		fmt.Fprintf(h, "%q\n", stamp)
	}
	host, err := hostStamp()
	if err != nil {
		return "", fmt.Errorf("identifying the host that a template is for: %w", err)
	}
	fmt.Fprintf(h, "%q\n", host)
	return hex.EncodeToString(h.Sum(nil)), nil
}

func stampOf(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return fmt.Sprint(st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()), nil
}

// cpuWords are the lines of /proc/cpuinfo that say which CPU it is. A restore checks what the guest saw of it, see
// vmm.CheckFacts: this only keeps the templates of several hosts apart.
var cpuWords = []string{"vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"}

func hostStamp() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("uname(2): %w", err)
	}
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	cpu, err := firstCPU(f)
	return strings.Join([]string{runtime.GOARCH, unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:]), cpu}, "\n"), err
}

// firstCPU returns the lines of the first CPU that do not change while the host runs.
func firstCPU(r io.Reader) (string, error) {
	var out []string
	lines := bufio.NewScanner(r)
	for lines.Scan() && lines.Text() != "" {
		word, _, _ := strings.Cut(lines.Text(), ":")
		if slices.Contains(cpuWords, strings.TrimSpace(word)) {
			out = append(out, lines.Text())
		}
	}
	return strings.Join(out, "\n"), lines.Err()
}

// Dir is the directory of a store's templates. Any number of processes may use one at once.
type Dir struct{ path string }

// In returns the templates of the store in a directory.
func In(store string) Dir { return Dir{filepath.Join(store, "templates")} }

const suffix = ".json"

var keyPattern = lazyregexp.New(`^[0-9a-f]{64}$`)

// File returns the file of an entry.
func (d Dir) File(key string) string { return filepath.Join(d.path, key+suffix) }

// Get returns an entry. The errors are ErrNotFound and ErrEntry.
func (d Dir) Get(key string) (Entry, error) {
	e := Entry{}
	f, err := os.Open(d.File(key))
	if errors.Is(err, fs.ErrNotExist) {
		return e, fmt.Errorf("%w: %.12s", ErrNotFound, key)
	}
	if err != nil {
		return e, fmt.Errorf("%w: %w", ErrEntry, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil {
		err = json.NewDecoder(io.LimitReader(f, maxEntry)).Decode(&e)
	}
	if err == nil && (e.Version != 1 || e.Key != key) {
		err = fmt.Errorf("it is of version %d and key %.12q", e.Version, e.Key)
	}
	if err != nil {
		return Entry{}, fmt.Errorf("%w: %s: %w: remove it", ErrEntry, d.File(key), err)
	}
	e.Used = info.ModTime()
	return e, nil
}

// List returns the entries, the last used first. Those that cannot be read are in the error, and in bad by their keys.
func (d Dir) List() (list []Entry, bad []string, err error) {
	names, err := os.ReadDir(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("listing templates: %w", err)
	}
	var errs []error
	for _, n := range names {
		key, ok := strings.CutSuffix(n.Name(), suffix)
		if !ok || !keyPattern.MatchString(key) {
			continue
		}
		switch e, err := d.Get(key); {
		case errors.Is(err, ErrNotFound): // removed just now
		case err != nil:
			bad, errs = append(bad, key), append(errs, err)
		default:
			list = append(list, e)
		}
	}
	slices.SortFunc(list, func(a, b Entry) int { return b.Used.Compare(a.Used) })
	return list, bad, errors.Join(errs...)
}

// AnyDue reports whether a template is to be made now.
func (d Dir) AnyDue(now time.Time) bool {
	list, _, _ := d.List()
	return slices.ContainsFunc(list, func(e Entry) bool { return e.Due(now) })
}

// Changed returns when entries were last added, replaced or removed.
func (d Dir) Changed() time.Time {
	st, err := os.Stat(d.path)
	if err != nil {
		return time.Time{}
	}
	return st.ModTime()
}

// Use notes that a VM is made from a template.
func (d Dir) Use(key string) {
	now := time.Now()
	_ = os.Chtimes(d.File(key), now, now) // only Trim and people want to know
}

// Want adds a wanted entry unless there is one of that key, or there are too many.
func (d Dir) Want(key string, bare spec.VM) error {
	list, _, err := d.List()
	if err != nil {
		return err
	}
	wanted := 0
	for _, e := range list {
		if !e.Ready() {
			wanted++
		}
	}
	if wanted >= MaxWanted {
		return nil
	}
	data, err := json.Marshal(Entry{Version: 1, Key: key, Spec: bare})
	if err == nil {
		err = os.MkdirAll(d.path, 0o700)
	}
	if err == nil {
		err = osfile.WriteNew(d.File(key), data, 0o600)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("asking for a template: %w", err)
	}
	return nil
}

// Put writes an entry durably, in place of one of that key. Hold the lock.
func (d Dir) Put(e Entry) error {
	e.Version = 1
	data, err := json.Marshal(e)
	if err == nil {
		err = osfile.WriteFile(d.File(e.Key), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("saving template %.12s: %w", e.Key, err)
	}
	return nil
}

// Remove removes an entry. Its snapshot goes with the next sweep.
func (d Dir) Remove(key string) error {
	if err := os.Remove(d.File(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing template %.12s: %w", key, err)
	}
	return nil
}

// Find completes the first digits of a key.
func (d Dir) Find(prefix string) (Entry, error) {
	list, _, err := d.List()
	var found []Entry
	for _, e := range list {
		if prefix != "" && strings.HasPrefix(e.Key, prefix) {
			found = append(found, e)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return Entry{}, fmt.Errorf("%w: %d begin with %q: give more digits", ErrNotFound, len(found), prefix)
	}
	return Entry{}, errors.Join(fmt.Errorf("%w: %q", ErrNotFound, prefix), err)
}

// Trim removes the templates that were used least recently, until MaxReady are left. It returns their snapshots.
func (d Dir) Trim() (snapshots []string, err error) {
	list, _, err := d.List()
	ready := slices.DeleteFunc(list, func(e Entry) bool { return !e.Ready() })
	for len(ready) > MaxReady {
		last := ready[len(ready)-1]
		if err := d.Remove(last.Key); err != nil {
			return snapshots, err
		}
		snapshots = append(snapshots, last.Snapshot)
		ready = ready[:len(ready)-1]
	}
	return snapshots, err
}

// Lock takes the right to make templates: one process of a store makes one at a time. It waits until ctx ends.
func (d Dir) Lock(ctx context.Context) (unlock func() error, err error) {
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return nil, fmt.Errorf("making templates: %w", err)
	}
	f, err := osfile.OpenLocked(ctx, filepath.Join(d.path, "lock"), os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
	if err != nil {
		return nil, fmt.Errorf("waiting for another process that makes templates: %w", err)
	}
	return f.Close, nil
}
