package sandbox_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/vmm"
)

// waitInfo waits until the info of a running VM satisfies want.
func waitInfo(e *guesttest.Env, name, what string, want func(control.Info) bool) {
	e.T.Helper()
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		info, err := e.Store.Sandbox(name).Info(e.T.Context())
		if err != nil {
			e.T.Fatal(err)
		}
		if want(info) {
			return
		}
		if time.Now().After(deadline) {
			e.T.Fatalf("%s is not %s: %+v", name, what, info)
		}
	}
}

func TestAttack_full_host_disk_pauses_the_VM_which_sleeps_wakes_and_goes_on(t *testing.T) {
	if vmm.SoftKVM() {
		t.Skip("a guest whose kernel is interpreted writes too little in minutes: `make test-hard` runs this")
	}
	small, err := os.MkdirTemp("", "df") // short, since Unix socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(small) })
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=1g"); err != nil {
		t.Skipf("mounting a tmpfs needs root: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	t.Setenv("TMPDIR", small)
	e := guesttest.New(t)
	e.Run(sandbox.Spec{Name: "full", MemoryMiB: 256})

	// Another file takes all space but a little more than the reserve.
	var st unix.Statfs_t
	if err := unix.Statfs(small, &st); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(small, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	take := int64(st.Bavail)*st.Bsize - int64(st.Blocks)*st.Bsize/20 - 20<<20
	if err := unix.Fallocate(int(f.Fd()), 0, 0, take); err != nil {
		t.Fatal(err)
	}
	f.Close()

	// The guest writes more than is left. Its program must never see an error.
	wrote := make(chan string, 1)
	go func() {
		wrote <- e.Sh("full", "dd if=/dev/urandom of=/root/big bs=64k count=512 2>/tmp/dd; sync; echo $?; sha256sum </root/big")
	}()
	waitInfo(e, "full", "paused", func(i control.Info) bool { return i.NoSpace && strings.Contains(i.Problem, "full") })

	// With space again the VM continues by itself.
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	said := strings.Fields(<-wrote)
	if len(said) < 2 || said[0] != "0" {
		t.Fatalf("the guest's program says %q", said)
	}
	waitInfo(e, "full", "at work again", func(i control.Info) bool { return !i.NoSpace })

	// The disk is full again. Now the VM falls asleep, using the reserve, and wakes while the disk is still full.
	if err := unix.Statfs(small, &st); err != nil {
		t.Fatal(err)
	}
	if f, err = os.Create(ballast); err != nil {
		t.Fatal(err)
	}
	take = int64(st.Bavail)*st.Bsize - int64(st.Blocks)*st.Bsize/20
	if err := unix.Fallocate(int(f.Fd()), 0, 0, max(take, 4096)); err != nil {
		t.Fatal(err)
	}
	f.Close()
	e.Sh("full", "nohup sh -c 'dd if=/dev/zero bs=64k count=512 | tr \"\\0\" x >/root/more && sync && echo whole >/run/more' >/dev/null 2>&1 &")
	waitInfo(e, "full", "paused", func(i control.Info) bool { return i.NoSpace })
	e.Sleep("full")
	e.Wake("full")
	waitInfo(e, "full", "paused after its wake", func(i control.Info) bool { return i.NoSpace })
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	waitInfo(e, "full", "at work again", func(i control.Info) bool { return !i.NoSpace })
	got := e.Sh("full", "for i in 1 2 3 4 5 6 7 8 9 10; do [ -e /run/more ] && break; sleep 1; done; cat /run/more; wc -c </root/more; sha256sum </root/big; touch /root/writable && echo writable")
	for _, want := range []string{"whole", "33554432", said[1], "writable"} {
		if !strings.Contains(got, want) {
			t.Errorf("after all of it the guest says %q, which lacks %q", got, want)
		}
	}
	if console, _ := os.ReadFile(e.Store.State.ConsoleLog("full")); strings.Contains(string(console), "I/O error") || strings.Contains(string(console), "Remounting filesystem read-only") {
		t.Errorf("the guest's kernel has met an error:\n%s", console)
	}
}
