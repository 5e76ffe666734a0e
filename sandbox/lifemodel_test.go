package sandbox_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// lifeModel is what the clients know of a sandbox's counter. A client that works on the sandbox holds its lock.
// The file also has what the client is about to do, in case it is killed.
type lifeModel struct {
	// Now are the numbers that the counter may have, and Slept those that it may return to when its process is
	// killed. Without kills each has one.
	Now   []int `json:"now"`
	Slept []int `json:"slept"`
	// Kills counts the kills of the sandbox's process that Now accounts for.
	Kills int64 `json:"kills"`
	// Doing is the operation under way, or empty.
	Doing string `json:"doing,omitempty"`
}

// The operations of a client, except waking, which changes no counter.
const (
	lifeAdd    = "add"
	lifeSleep  = "sleep"
	lifeFork   = "fork"
	lifeDelete = "delete"
	lifeMake   = "make"
)

func union(a, b []int) []int {
	return slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(a), b...))))
}

// killed must be called before each conclusion: a killed process has returned to its last sleep.
func (m *lifeModel) killed(kills int64) {
	if kills != m.Kills {
		m.Now, m.Kills = union(m.Now, m.Slept), kills
	}
}

// unknown ends the operation under way when its outcome is unknown.
func (m *lifeModel) unknown() {
	switch m.Doing {
	case lifeAdd:
		m.Now = union(m.Now, plusOne(m.Now))
	case lifeSleep:
		m.Slept = union(m.Slept, m.Now)
	}
}

func plusOne(s []int) []int {
	out := slices.Clone(s)
	for i := range out {
		out[i]++
	}
	return out
}

// said concludes that the guest answered n. before and kills count the kills before and after the question.
func (m *lifeModel) said(n int, added bool, before, kills int64) error {
	m.killed(before)
	may := m.Now
	if added {
		may = plusOne(m.Now)
	}
	if kills != before {
		// The VM was killed and woken between the question and the answer.
		back := m.Slept
		if added {
			back = plusOne(back)
		}
		may = union(may, back)
	}
	if !slices.Contains(may, n) {
		return fmt.Errorf("the counter is %d, and may be %v: an update was lost, or made twice", n, may)
	}
	m.Now, m.Kills = []int{n}, before
	m.killed(kills)
	return nil
}

// slept concludes that a sleep was acknowledged.
func (m *lifeModel) slept(kills int64) {
	m.killed(kills)
	m.Slept = slices.Clone(m.Now)
}

func TestLifeModel_finds_what_is_lost_and_what_is_done_twice(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		do   func(m *lifeModel) error
		ok   bool
	}{
		{"an addition that was made", func(m *lifeModel) error { return m.said(6, true, 0, 0) }, true},
		{"one that was lost", func(m *lifeModel) error { return m.said(5, true, 0, 0) }, false},
		{"one that was made twice", func(m *lifeModel) error { return m.said(7, true, 0, 0) }, false},
		{"a number that was there", func(m *lifeModel) error { return m.said(5, false, 0, 0) }, true},
		{"a sleep that was lost without a kill", func(m *lifeModel) error { return m.said(3, false, 0, 0) }, false},
		{"going back to the last sleep after a kill", func(m *lifeModel) error { return m.said(3, false, 1, 1) }, true},
		{"going back between question and answer", func(m *lifeModel) error { return m.said(4, true, 0, 1) }, true},
		{"going back further than the last sleep", func(m *lifeModel) error { return m.said(2, false, 1, 1) }, false},
		{"going back behind an acknowledged sleep", func(m *lifeModel) error { m.slept(0); return m.said(3, false, 1, 1) }, false},
		{"an addition nobody knows of, made", func(m *lifeModel) error { m.Doing = lifeAdd; m.unknown(); return m.said(6, false, 0, 0) }, true},
		{"an addition nobody knows of, not made", func(m *lifeModel) error { m.Doing = lifeAdd; m.unknown(); return m.said(5, false, 0, 0) }, true},
		{"a sleep nobody knows of, and a kill", func(m *lifeModel) error { m.Doing = lifeSleep; m.unknown(); return m.said(5, false, 1, 1) }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.do(&lifeModel{Now: []int{5}, Slept: []int{3}}); (err == nil) != c.ok {
				t.Errorf("got %v", err)
			}
		})
	}
}

// lifeFiles is the directory through which clients, killer and test share their state.
type lifeFiles string

func (d lifeFiles) path(name, kind string) string { return filepath.Join(string(d), name+"."+kind) }

// lock takes the lock of a sandbox, which ends with the process. Without wait it returns nil if another process
// has the lock.
func (d lifeFiles) lock(name string, wait bool) (*os.File, error) {
	f, err := os.OpenFile(d.path(name, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	for {
		err = unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, f.Close()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (d lifeFiles) load(name string) (m lifeModel, err error) {
	b, err := os.ReadFile(d.path(name, "model"))
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(b, &m)
}

// save is atomic if this process is killed, but not if the host fails.
func (d lifeFiles) save(name string, m *lifeModel) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := os.WriteFile(d.path(name, "new"), b, 0o600); err != nil {
		return err
	}
	return os.Rename(d.path(name, "new"), d.path(name, "model"))
}

// note adds one to a counter, which is the size of a file: kills of a sandbox, or operations.
func (d lifeFiles) note(name, kind string) error {
	f, err := os.OpenFile(d.path(name, kind), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte{'.'})
	return errors.Join(err, f.Close())
}

func (d lifeFiles) count(name, kind string) (int64, error) {
	fi, err := os.Stat(d.path(name, kind))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}
