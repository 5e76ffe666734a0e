package capture

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// Each step is followed by settle, which must know of it: no event is waited for.
func TestHookWatch_tells_the_host_before_the_change_is_answered(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "etc", "drowse", "hooks.d")
	var (
		told []bool
		fail error
	)
	w, err := watchHooks(dir, func(present bool) error {
		told = append(told, present)
		return fail
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	hook := filepath.Join(dir, "10-a")
	for _, step := range []struct {
		what string
		do   func()
		tell []bool
	}{
		{"nothing", func() {}, nil},
		{"the directory above", func() { do(os.Mkdir(filepath.Join(root, "etc"), 0o755)) }, nil},
		{"a neighbour", func() { do(os.WriteFile(filepath.Join(root, "etc", "passwd"), nil, 0o644)) }, nil},
		{"an empty directory", func() { do(os.MkdirAll(dir, 0o755)) }, nil},
		{"a hook", func() { do(os.WriteFile(hook, nil, 0o755)) }, []bool{true}},
		{"another hook", func() { do(os.WriteFile(hook+"2", nil, 0o755)) }, nil},
		{"one hook less", func() { do(os.Remove(hook + "2")) }, nil},
		{"no hook", func() { do(os.Remove(hook)) }, []bool{false}},
		{"all at once", func() {
			do(os.RemoveAll(filepath.Join(root, "etc")))
			do(os.MkdirAll(dir, 0o755))
			do(os.WriteFile(hook, nil, 0o755))
		}, []bool{true}},
		{"the directory moved away", func() { do(os.Rename(dir, dir+".off")) }, []bool{false}},
		{"and back, to a host that does not answer", func() {
			fail = errors.New("no answer")
			do(os.Rename(dir+".off", dir))
		}, []bool{true}},
		{"which then does", func() { fail = nil }, []bool{true}},
	} {
		w.mu.Lock() // what the goroutine sees of it counts as well
		told = told[:0]
		step.do()
		w.mu.Unlock()
		w.settle()
		w.mu.Lock()
		got := append([]bool(nil), told...)
		w.mu.Unlock()
		// The goroutine and settle may both have tried where the host has not answered.
		if fail != nil && len(got) > 1 {
			got = got[:1]
		}
		if len(got) != len(step.tell) || len(got) == 1 && got[0] != step.tell[0] {
			t.Errorf("%s: the host was told %v, want %v", step.what, got, step.tell)
		}
		if len(step.tell) > 0 && w.present.Load() != step.tell[0] {
			t.Errorf("%s: present is %v", step.what, w.present.Load())
		}
	}
}
