package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/instance"
)

// passed returns the descriptors that the process of a VM gets, by the names that it knows them by.
func (s *store) passed(t *testing.T, p instance.Parts) map[string]*os.File {
	t.Helper()
	order, files, err := s.v.order(p, "", instance.RestoreOptions{})
	t.Cleanup(func() { _ = errors.Join(closeAll(files), s.v.release()) })
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*os.File{}
	for i, f := range files {
		out[order.Passed[i]] = f
	}
	return out
}

// lockedFor tries to lock a file as another VM does.
func lockedFor(t *testing.T, name string, mode osfile.LockMode) error {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return osfile.TryLock(f, mode)
}

// Images and layers are used by many VMs, each with a lock that allows the others. A process that a guest has taken
// over takes one that allows none, and no other VM with that image could start.
func TestAttack_process_locks_other_VMs_out_of_what_they_share(t *testing.T) {
	s := newStore(t)
	passed := s.passed(t, s.parts())
	for _, name := range []string{s.image, s.lower} {
		f := passed[passName(name, os.O_RDONLY)]
		if f == nil {
			t.Fatalf("%s was not passed", name)
		}
		if err := osfile.TryLock(f, osfile.Exclusive); !errors.Is(err, osfile.ErrLocked) {
			t.Errorf("%s: %v", filepath.Base(name), err)
		}
		if err := lockedFor(t, name, osfile.Shared); err != nil {
			t.Errorf("another VM and %s: %v", filepath.Base(name), err)
		}
	}
	if err := s.v.release(); err != nil {
		t.Fatal(err)
	}
	if err := lockedFor(t, s.lower, osfile.Exclusive); err != nil {
		t.Errorf("removing a layer that no VM has any more: %v", err)
	}
}

// A volume is locked for as long as the VM has it. A process that a guest has taken over gives the lock up, and the
// guest of the next VM mounts a file system that this one goes on changing.
func TestAttack_process_gives_up_the_lock_of_its_volume(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		t.Run(fmt.Sprintf("read-only %t", readOnly), func(t *testing.T) {
			s := newStore(t)
			name := s.in("volume")
			if err := os.WriteFile(name, make([]byte, 4096), 0o600); err != nil {
				t.Fatal(err)
			}
			flags, mode := os.O_RDWR, osfile.Exclusive
			if readOnly {
				flags, mode = os.O_RDONLY, osfile.Shared
			}
			data, err := os.OpenFile(name, flags, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer data.Close()
			if err := osfile.TryLock(data, mode); err != nil {
				t.Fatal(err)
			}
			p := s.parts()
			p.Volumes = []*volume.Volume{volume.Of(volume.Record{Name: "v"}, data, readOnly, nil)}
			f := s.passed(t, p)[passVolume+"0"]
			if f == nil {
				t.Fatal("the volume was not passed")
			}
			if err := osfile.TryLock(f, osfile.Exclusive); !errors.Is(err, osfile.ErrLocked) {
				t.Errorf("locking others out: %v", err)
			}
			if err := osfile.Unlock(f); err != nil {
				t.Fatal(err)
			}
			if err := lockedFor(t, name, osfile.Exclusive); !errors.Is(err, osfile.ErrLocked) {
				t.Errorf("after it has given the lock up, another VM writes to the volume: %v", err)
			}
			if _, err := unix.Pread(int(f.Fd()), make([]byte, 1), 0); err != nil {
				t.Errorf("reading: %v", err)
			}
		})
	}
}
