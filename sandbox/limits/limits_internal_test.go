package limits

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/vmm"
)

// memoryOf makes a store whose awake VMs may have a tenth of the host's memory, and says how many MiB boots and wakes
// may have.
func memoryOf(t *testing.T, waitSeconds int) (dir string, boots, wakes int) {
	t.Helper()
	dir = t.TempDir()
	if err := (Limits{MemoryOvercommit: MinOvercommit, WakeReservePercent: 25, MemoryWaitSeconds: waitSeconds}).Write(dir); err != nil {
		t.Fatal(err)
	}
	total, err := vmm.HostMemory()
	if err != nil {
		t.Fatal(err)
	}
	wakes = int(float64(total>>20) * MinOvercommit)
	return dir, wakes * 75 / 100, wakes
}

func admitted(t *testing.T, dir string, mib int, wake bool) (release func()) {
	t.Helper()
	f, err := AdmitMemory(t.Context(), dir, mib, wake)
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		if err := f(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(release)
	return release
}

func refused(t *testing.T, dir string, mib int, wake bool) error {
	t.Helper()
	f, err := AdmitMemory(t.Context(), dir, mib, wake)
	if !errors.Is(err, vmm.ErrHostMemory) {
		if err == nil {
			err = f()
		}
		t.Fatalf("%d MiB, wake %t: got %v, want ErrHostMemory", mib, wake, err)
	}
	return err
}

func TestAdmitMemory_boots_leave_the_reserve_and_wakes_take_it(t *testing.T) {
	dir, boots, wakes := memoryOf(t, 0)
	refused(t, dir, boots+1, false)
	refused(t, dir, wakes+1, true)
	first := admitted(t, dir, boots/2, false)
	admitted(t, dir, boots-boots/2, false)
	if err := refused(t, dir, 1, false); !strings.Contains(err.Error(), "Limits.Write") {
		t.Errorf("no remedy in %q", err)
	}
	admitted(t, dir, wakes-boots, true)
	refused(t, dir, 1, true)
	if used, capacity, err := AwakeMemory(dir); err != nil || used != int64(wakes) || capacity != int64(wakes) {
		t.Errorf("%d of %d MiB (%v), want all %d", used, capacity, err, wakes)
	}
	// What ends in the midst of others leaves room, of which two can have pieces.
	first()
	admitted(t, dir, boots/4, true)
	admitted(t, dir, boots/2-boots/4, false)
	refused(t, dir, 1, false)
}

func TestAdmitMemory_one_finds_room_in_pieces(t *testing.T) {
	dir, boots, _ := memoryOf(t, 0)
	var ends []func()
	for range 8 {
		ends = append(ends, admitted(t, dir, boots/8, false))
	}
	for i := 0; i < len(ends); i += 2 {
		ends[i]()
	}
	admitted(t, dir, boots/8*4, false)
	refused(t, dir, boots-boots/8*8+1, false)
}

func TestAdmitMemory_waits_until_there_is_room_or_nobody_wants_it(t *testing.T) {
	dir, boots, _ := memoryOf(t, MaxMemoryWaitSeconds)
	release := admitted(t, dir, boots, false)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	ended := make(chan error, 1)
	go func() {
		_, err := AdmitMemory(ctx, dir, 1, false)
		ended <- err
	}()
	cancel(gone)
	if err := <-ended; !errors.Is(err, gone) {
		t.Errorf("called off: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		f, err := AdmitMemory(t.Context(), dir, boots, false)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	// A wake does not wait behind a boot.
	admitted(t, dir, 1, true)()
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Whatever is asked for at once, no more is given than there is, and all of it comes back.
func TestAdmitMemory_many_at_once_never_have_more_than_there_is(t *testing.T) {
	dir, boots, wakes := memoryOf(t, MaxMemoryWaitSeconds)
	var mu sync.Mutex
	var have, most int
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for range 20 {
				n, wake := 1+r.IntN(boots/4), r.IntN(2) == 0
				f, err := AdmitMemory(t.Context(), dir, n, wake)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				have += n
				most = max(most, have)
				mu.Unlock()
				mu.Lock()
				have -= n
				mu.Unlock()
				if err := f(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if most > wakes {
		t.Errorf("%d MiB were given at once of %d", most, wakes)
	}
	admitted(t, dir, boots, false)
}

func TestLimits_that_cannot_be_are_refused_and_those_of_a_file_said(t *testing.T) {
	dir := t.TempDir()
	if l, err := Read(dir); err != nil || !reflect.DeepEqual(l, Default) {
		t.Errorf("a new store has %+v, %v", l, err)
	}
	for _, l := range []Limits{
		{MemoryOvercommit: 0}, {MemoryOvercommit: -1}, {MemoryOvercommit: MaxOvercommit + 1},
		{MemoryOvercommit: 1, WakeReservePercent: -1}, {MemoryOvercommit: 1, WakeReservePercent: MaxWakeReservePercent + 1},
		{MemoryOvercommit: 1, MemoryWaitSeconds: -1}, {MemoryOvercommit: 1, MemoryWaitSeconds: MaxMemoryWaitSeconds + 1},
	} {
		if err := l.Write(dir); !errors.Is(err, ErrLimits) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	path := filepath.Join(dir, limitsFile)
	for _, text := range []string{"", "{", `{"memory_overcommit": 0}`, `{"memory_overcommit": "4"}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", text, err)
		}
		if _, err := AdmitMemory(t.Context(), dir, 1, true); err == nil {
			t.Errorf("%q: a VM starts without limits", text)
		}
	}
	if err := os.WriteFile(path, []byte(`{"memory_overcommit": 2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := Read(dir); err != nil || l.MemoryOvercommit != 2 || l.WakeReservePercent != Default.WakeReservePercent {
		t.Errorf("%+v, %v", l, err)
	}
}
