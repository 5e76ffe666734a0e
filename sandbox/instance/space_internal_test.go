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

func TestQuota_counts_what_the_disk_takes_and_not_what_was_written(t *testing.T) {
	var taken int64
	q := &quota{allocated: func() (int64, error) { return taken, nil }}
	const room = 100 << 20
	if err := q.set(room); err != nil {
		t.Fatal(err)
	}
	// Overwritten and discarded blocks are written again and again, and take nothing more.
	for range 1000 {
		if err := q.take(1 << 20); err != nil {
			t.Fatal(err)
		}
	}
	// New ones are refused before the host has more.
	for {
		err := q.take(1 << 20)
		if errors.Is(err, unix.EDQUOT) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if taken += 1 << 20; taken > room {
			t.Fatalf("%d bytes were let through, and %d may be", taken, room)
		}
	}
	if taken < room-1<<20 || q.room() {
		t.Errorf("refused at %d of %d bytes, room: %t", taken, room, q.room())
	}
	// A request that does not fit has no room, though smaller ones have.
	taken = 50 << 20
	if !q.room() {
		t.Error("no room after half of it was given back")
	}
	if err := q.take(60 << 20); !errors.Is(err, unix.EDQUOT) || q.room() {
		t.Errorf("more than there is: %v, room: %t", err, q.room())
	}
	if err := q.set(60 << 20); err != nil || !q.room() {
		t.Errorf("with more: %v, room: %t", err, q.room())
	}
	if none := (*quota)(nil); !none.room() {
		t.Error("no quota has no room")
	}
}
