package state

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestCreate_of_a_name_whose_directory_is_just_being_deleted_makes_the_VM_and_keeps_it(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s.Grace = 0
	stop := make(chan struct{})
	var others sync.WaitGroup
	for range 2 {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := s.removeUnrecorded("a"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 100 {
		r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: Asleep}
		l, err := s.Create(r)
		if err != nil {
			t.Errorf("%d: %v", i, err)
			break
		}
		l.Release()
		if got, err := s.Load("a"); err != nil || got.ID != r.ID {
			t.Errorf("%d: after it was made: %v, %v", i, got, err)
			break
		}
		if err := s.remove(t.Context(), "a", false); err != nil {
			t.Errorf("%d: the removal: %v", i, err)
			break
		}
	}
	close(stop)
	others.Wait()
}

func TestSweep_deletes_what_an_interrupted_removal_has_left_beside_the_VMs(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	left := func(age time.Duration) string {
		dir := osfile.TempPath(s.VMDir("a"))
		at := time.Now().Add(-age)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "vm.json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	old, young := left(2*s.Grace), left(0)
	if vms, err := s.List(); err != nil || len(vms) != 0 {
		t.Errorf("it is listed as a VM: %v, %v", vms, err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(old); !os.IsNotExist(err) {
		t.Errorf("the old one: %v", err)
	}
	if _, err := os.Lstat(young); err != nil {
		t.Errorf("the one that may still be used: %v", err)
	}
}
