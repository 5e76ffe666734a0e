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

func TestShellThatNobodyTakesIsGivenBack(t *testing.T) {
	needKVM(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	before := openFiles(t)
	for _, wait := range []bool{false, true} {
		s, err := NewShell(ShellConfig{VCPUs: 2, Memory: mem})
		if err != nil {
			t.Fatal(err)
		}
		if wait {
			if err := s.Wait(); err != nil {
				t.Error(err)
			}
			if len(s.vcpus) != 2 {
				t.Errorf("a complete shell has %d vCPUs, want 2", len(s.vcpus))
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

func TestShellOfAMachineThatCannotBeIsGivenBack(t *testing.T) {
	needKVM(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	before := openFiles(t)
	s, err := NewShell(ShellConfig{VCPUs: 1, Memory: mem})
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
