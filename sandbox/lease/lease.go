// Package lease keeps in the directory of a host which sandboxes it shares with other hosts, and until when it may run
// those that it has claimed. The host's node (sandbox/cluster) writes it. The process of each VM reads it, and ends in
// time although the node has died, hangs or cannot reach the others.
package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ErrFile means that a file of this package is damaged, or of another version.
var ErrFile = errors.New("not valid")

const (
	version = 1
	maxFile = 16 << 10 // bytes
)

// Dir is the directory "cluster" of a host.
//
//	node.json         the name and the session of the host, which outlive its processes
//	lease.json        until when the session lasts
//	claims/NAME.json  a shared sandbox
//	kept/NAME.json    its files that the store has: only a node uses it, and can do without
//	ahead/ID          a snapshot that was taken for a move to another host, and is removed after it
//	near/             objects of the store for sandboxes that move here
//	lock              held by the node, by flock(2)
type Dir string

// In returns the directory in that of a host.
func In(host string) Dir { return Dir(filepath.Join(host, "cluster")) }

// Lease is until when a session lasts, unless it is renewed.
type Lease struct {
	Version int    `json:"version"`
	Session string `json:"session"`
	// Boot is the boot of the host in which Until counts: /proc/sys/kernel/random/boot_id.
	Boot string `json:"boot"`
	// Until is a time of CLOCK_BOOTTIME. TTL is how long others wait for a sign of life.
	Until time.Duration `json:"until_ns"`
	TTL   time.Duration `json:"ttl_ns"`
}

// Claim is what this host knows of a shared sandbox.
type Claim struct {
	Version int `json:"version"`
	// Claiming means that the others may hold a claim of this host that it does not know.
	Claiming bool `json:"claiming,omitempty"`
	// Held means that Session has claimed it: the host may run it.
	Held    bool   `json:"held,omitempty"`
	Session string `json:"session,omitempty"`
	// Fence is the number of the claim that made what is here of the sandbox the newest there was. 0 is none.
	Fence uint64 `json:"fence,omitempty"`
	// Head is what was last published or pulled: the snapshot, and the SHA-256 of all else.
	Head     string `json:"head,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Sum      string `json:"sum,omitempty"`
}

func (d Dir) path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

func (d Dir) claimPath(name string) string { return d.path("claims", name+".json") }

// Make makes the directory.
func (d Dir) Make() error {
	err := errors.Join(os.MkdirAll(d.path("claims"), 0o700), os.MkdirAll(d.path("kept"), 0o700))
	if err == nil {
		err = errors.Join(osfile.SyncDir(string(d)), osfile.SyncDir(filepath.Dir(string(d))))
	}
	return err
}

// read reads a file. There may be none.
func read(path string, v any, of func() int) (there bool, err error) {
	data, err := osfile.ReadPrivate(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		if derr := dec.Decode(v); derr != nil {
			err = fmt.Errorf("%w: %w", ErrFile, derr)
		} else if of() != version {
			err = fmt.Errorf("%w: version %d, this program reads %d", ErrFile, of(), version)
		}
	}
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", path, err)
	}
	return true, nil
}

func write(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return osfile.WriteFile(path, append(data, '\n'), 0o600)
}

// Lease returns the lease; the zero value if there is none.
func (d Dir) Lease() (l Lease, err error) {
	_, err = read(d.path("lease.json"), &l, func() int { return l.Version })
	return l, err
}

// SetLease replaces the lease. It does not wait for the disk: after a loss of power no lease counts.
func (d Dir) SetLease(l Lease) error {
	l.Version = version
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	temp := osfile.TempPath(d.path("lease.json"))
	if err = os.WriteFile(temp, data, 0o600); err == nil {
		err = os.Rename(temp, d.path("lease.json"))
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}

// Claim returns what is known of a sandbox; nil if it is not shared.
func (d Dir) Claim(name string) (*Claim, error) {
	var c Claim
	there, err := read(d.claimPath(name), &c, func() int { return c.Version })
	if err != nil || !there {
		return nil, err
	}
	return &c, nil
}

// SetClaim replaces what is known of a sandbox, durably; nil says that it is not shared. Held becomes true or false
// only while the VM's lock is held, or there is no VM of that name.
func (d Dir) SetClaim(name string, c *Claim) error {
	if c == nil {
		_ = os.Remove(d.KeptPath(name))
		err := os.Remove(d.claimPath(name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return errors.Join(err, osfile.SyncDir(d.path("claims")))
	}
	c.Version = version
	return write(d.claimPath(name), c)
}

// Names returns the shared sandboxes that are known here.
func (d Dir) Names() (names []string, err error) {
	entries, err := os.ReadDir(d.path("claims"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok && !strings.HasPrefix(name, ".") {
			names = append(names, name)
		}
	}
	return names, err
}

// KeptPath is the file that says which of a sandbox's files the store has.
func (d Dir) KeptPath(name string) string { return d.path("kept", name+".json") }

// Near is the directory of copies of objects.
func (d Dir) Near() string { return d.path("near") }

// NoteAhead notes a snapshot that was taken for a move, so that it does not stay if the node dies; ForgetAhead that it
// is gone. Ahead returns those that are noted.
func (d Dir) NoteAhead(id string) error {
	if err := os.MkdirAll(d.path("ahead"), 0o700); err != nil {
		return err
	}
	return osfile.WriteFile(d.path("ahead", id), nil, 0o600)
}

// ForgetAhead is described at NoteAhead.
func (d Dir) ForgetAhead(id string) error {
	err := os.Remove(d.path("ahead", id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Ahead is described at NoteAhead.
func (d Dir) Ahead() (ids []string, err error) {
	entries, err := os.ReadDir(d.path("ahead"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}

// Shared reports whether a sandbox is shared. One of which that cannot be known is.
func (d Dir) Shared(name string) bool {
	_, err := os.Lstat(d.claimPath(name))
	return !errors.Is(err, fs.ErrNotExist)
}

// Left returns for how long this host may run a sandbox from now on, and its lease's TTL, or spec.ErrUnclaimed. What is
// not shared may run for ever: shared is false. A caller that runs it looks again in that time.
func (d Dir) Left(name string) (left, ttl time.Duration, shared bool, err error) {
	c, err := d.Claim(name)
	if err != nil || c == nil {
		return 0, 0, err != nil, err
	}
	l, err := d.Lease()
	if err != nil {
		return 0, 0, true, err
	}
	left = l.Until - Now()
	if !c.Held || c.Session != l.Session || l.Boot == "" || l.Boot != Boot() || left <= 0 {
		return 0, l.TTL, true, fmt.Errorf("%w: %s", spec.ErrUnclaimed, name)
	}
	return left, l.TTL, true, nil
}

// Now is CLOCK_BOOTTIME.
func Now() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 1<<63 - 1 // no lease lasts so long
	}
	return time.Duration(ts.Nano())
}

// Boot names this boot of the host; it is empty if that cannot be known.
func Boot() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Node is a host's name among the others, and its session, which a later process goes on with.
type Node struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	Session string `json:"session"`
	// Place is Dir.Place of whoever had the session: a copy of the directory does not go on with it.
	Place string `json:"place"`
	// Cluster is the id of the store where the host has shared its sandboxes.
	Cluster string `json:"cluster"`
}

// Place names the directory on this boot of its host. It is empty if that cannot be known.
func (d Dir) Place() string {
	var st unix.Stat_t
	boot := Boot()
	if err := unix.Stat(string(d), &st); err != nil || boot == "" {
		return ""
	}
	return fmt.Sprintf("%s %d %d", boot, st.Dev, st.Ino)
}

// Node returns who the host was; the zero value if it has never been one of a cluster.
func (d Dir) Node() (n Node, err error) {
	_, err = read(d.path("node.json"), &n, func() int { return n.Version })
	return n, err
}

// SetNode says who the host is.
func (d Dir) SetNode(n Node) error {
	n.Version = version
	return write(d.path("node.json"), n)
}

// Lock takes the lock that one node of the host holds. The error is osfile.ErrLocked if another process has it.
func (d Dir) Lock() (*os.File, error) {
	return osfile.TryOpenLocked(d.path("lock"), os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
}
