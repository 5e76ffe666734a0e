package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func TestBuild_shares_what_it_made_with_other_caches(t *testing.T) {
	dir := fake(t)
	shared := filepath.Join(dir, "shared")
	in := func(name string) BuildOptions {
		o := testOptions(dir)
		o.CacheDir, o.SharedDir = filepath.Join(dir, name), shared
		return o
	}
	build := func(name string, runs int) *Kernel {
		t.Helper()
		k, err := Build(t.Context(), in(name))
		if err != nil {
			t.Fatal(err)
		}
		if n := count(t, dir, "vmlinux\n"); n != runs {
			t.Errorf("%s: compiled %d times, want %d", name, n, runs)
		}
		if filepath.Dir(filepath.Dir(filepath.Dir(k.Image))) != filepath.Join(dir, name) {
			t.Errorf("%s: the kernel is at %s", name, k.Image)
		}
		noRemains(t, filepath.Join(dir, name))
		noRemains(t, shared)
		return k
	}
	first := build("first", 1)
	second := build("second", 1)
	if second.ID != first.ID || second.InputsHash != first.InputsHash || second.ImageSHA256 != first.ImageSHA256 || len(second.Inputs) != len(first.Inputs) {
		t.Errorf("the copy is %+v, the kernel %+v", second, first)
	}
	for _, pair := range [][2]string{{first.Image, second.Image}, {first.Config, second.Config}, {first.SymbolMap, second.SymbolMap}} {
		a, errA := os.ReadFile(pair[0])
		b, errB := os.ReadFile(pair[1])
		if errA != nil || errB != nil || string(a) != string(b) {
			t.Errorf("%v: %q and %q, %v, %v", pair, a, b, errA, errB)
		}
	}

	// A damaged kernel is built again and replaced.
	kept, err := Open(shared, first.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(kept.Image, []byte("imagE\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	build("third", 2)
	if kept, err = Open(shared, first.ID); err != nil || kept.Verify(t.Context()) != nil {
		t.Errorf("the damaged kernel is still there (%v)", err)
	}
	build("fourth", 2)

	// A kernel that was built before the folder existed is shared as well.
	if err := os.RemoveAll(shared); err != nil {
		t.Fatal(err)
	}
	build("first", 2)
	build("fifth", 2)

	// A folder that cannot be used counts as absent.
	o := in("sixth")
	o.SharedDir = filepath.Join(first.Image, "no folder")
	if _, err := Build(t.Context(), o); err != nil {
		t.Error(err)
	}
}

func TestBuild_shares_the_newest_kernels_only(t *testing.T) {
	dir := fake(t)
	o := testOptions(dir)
	o.SharedDir = filepath.Join(dir, "shared")
	for i := range sharedKernels + 2 {
		o.Config = fmt.Sprintf("CONFIG_TEST_%d=y\n", i)
		if _, err := Build(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	all, err := List(o.SharedDir)
	if err != nil || len(all) != sharedKernels {
		t.Errorf("%d kernels are shared (%v)", len(all), err)
	}
	if own, err := List(o.CacheDir); err != nil || len(own) != sharedKernels+2 {
		t.Errorf("the cache has %d (%v)", len(own), err)
	}
}
