package sandbox_test

import (
	"errors"
	"os"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestPrebuiltVMs_of_an_impossible_shape_are_refused(t *testing.T) {
	t.Parallel()
	for _, shape := range []spec.Shape{{}, {MemoryMiB: 256}, {VCPUs: 1}, {MemoryMiB: 1 << 30, VCPUs: 1}} {
		if _, err := instance.NewPrebuilt(shape, instance.PrebuiltOptions{}); !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("%+v: got %v, want ErrSpec", shape, err)
		}
	}
}

func TestPrebuiltVMs_that_nobody_takes_are_given_back(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skipf("this host cannot run VMs: %v", err)
	}
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := open()
	s, err := instance.NewPrebuilt(spec.Shape{MemoryMiB: 128, VCPUs: 2}, instance.PrebuiltOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The prebuilt VM has descriptors of KVM, the VM and each vCPU, and the lines and doorbells of seven devices.
	if got, want := open()-before, 2+2+7+13; got != want {
		t.Errorf("there are %d more descriptors, want %d", got, want)
	}
	for range 2 { // the second Close does nothing
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if left := open() - before; left != 0 {
		t.Errorf("%d descriptors are left", left)
	}
}
