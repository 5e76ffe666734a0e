package instance

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSpace_grants_are_parts_of_what_is_free_and_keep_the_reserve(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Skipf("mounting a tmpfs needs root: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	statfs := func() (st unix.Statfs_t, err error) { return st, unix.Statfs(dir, &st) }
	s := newSpace(dir, statfs, 1<<40)
	spare, reserve, err := s.spare()
	if err != nil || reserve != 64<<20/reservePart || spare > 64<<20-reserve {
		t.Fatalf("%d bytes and a reserve of %d, %v", spare, reserve, err)
	}
	if err := s.take(4096); err != nil {
		t.Fatal(err)
	}
	if got := s.grant.Load(); got != reserve/reserveUsed {
		t.Errorf("a grant of %d bytes, want %d", got, reserve/reserveUsed)
	}
	if err := s.take(spare + 1); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than is free: %v", err)
	}
	if err := s.take(4096); err != nil {
		t.Errorf("after a refusal, what there is room for: %v", err)
	}
	if small := newSpace(dir, statfs, 1<<20); !small.room() {
		t.Error("no room on an empty file system")
	} else if more, _, _ := small.spare(); more <= spare {
		t.Errorf("a VM with less RAM keeps as large a reserve: %d and %d are spare", more, spare)
	}
}
