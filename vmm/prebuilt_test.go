package vmm

import (
	"errors"
	"os"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// openFiles counts the descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestPrebuilt_VM_that_nobody_takes_is_given_back(t *testing.T) {
	needKVM(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	before := openFiles(t)
	for _, wait := range []bool{false, true} {
		s, err := NewPrebuilt(PrebuiltConfig{VCPUs: 2, Memory: mem})
		if err != nil {
			t.Fatal(err)
		}
		if wait {
			if err := s.Wait(); err != nil {
				t.Error(err)
			}
			if len(s.vcpus) != 2 {
				t.Errorf("a complete prebuilt VM has %d vCPUs, want 2", len(s.vcpus))
			}
		}
		if err := errors.Join(s.Close(), s.Close()); err != nil {
			t.Error(err)
		}
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d open files before, %d after", before, after)
	}
}

func TestWires_of_a_place_fit_its_device(t *testing.T) {
	needKVM(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	before := openFiles(t)
	s, err := NewPrebuilt(PrebuiltConfig{VCPUs: 1, Memory: mem, Queues: []int{2, 2, 2}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	ahead := openFiles(t)
	for place, queues := range []int{1, 2, 3, 1} {
		w, err := s.takeWires(place, queues)
		if err != nil {
			t.Fatal(err)
		}
		if w.irq == nil || len(w.kicks) != queues {
			t.Errorf("place %d has %d doorbells, want a line and %d", place, len(w.kicks), queues)
		}
		if err := w.close(); err != nil {
			t.Error(err)
		}
	}
	// One line and one doorbell of each of the first two slots were closed, and all three of the last slot. The
	// first slot has one doorbell left.
	if now := openFiles(t); now != ahead-8 {
		t.Errorf("%d open files, want %d", now, ahead-8)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d open files before, %d after", before, after)
	}
	for _, wrong := range [][]int{make([]int, MaxDevices+1), {-1}, {65}} {
		if _, err := NewPrebuilt(PrebuiltConfig{VCPUs: 1, Memory: mem, Queues: wrong}); !errors.Is(err, ErrConfig) {
			t.Errorf("%v: got %v, want ErrConfig", wrong, err)
		}
	}
}

func TestPrebuilt_VM_of_a_machine_that_cannot_be_is_given_back(t *testing.T) {
	needKVM(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	before := openFiles(t)
	s, err := NewPrebuilt(PrebuiltConfig{VCPUs: 1, Memory: mem})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(s, Config{Devices: make([]Device, MaxDevices+1)}); !errors.Is(err, ErrConfig) {
		t.Errorf("got %v, want ErrConfig", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d open files before, %d after", before, after)
	}
}
