package osfile

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestTryLock_lets_in_many_that_share_or_one(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	a, b := open(t, path), open(t, path)
	for _, tt := range []struct {
		f    *os.File
		mode LockMode
		want error
	}{
		{a, Shared, nil}, {b, Shared, nil}, {b, Exclusive, ErrLocked},
		// A change that fails has lost the lock: flock(2).
		{a, Exclusive, nil}, {b, Shared, ErrLocked}, {b, Shared, unix.EWOULDBLOCK}, {a, Shared, nil}, {b, Shared, nil},
	} {
		if err := TryLock(tt.f, tt.mode); !errors.Is(err, tt.want) {
			t.Errorf("mode %d: got %v, want %v", tt.mode, err, tt.want)
		}
	}
}

func TestLock_belongs_to_the_open_file_and_not_to_a_descriptor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f := open(t, path)
	if err := TryLock(f, Exclusive); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := TryLock(open(t, path), Exclusive); !errors.Is(err, ErrLocked) {
		t.Errorf("with another descriptor of it: %v", err)
	}
	if err := unix.Close(fd); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(open(t, path), Exclusive); err != nil {
		t.Errorf("with none: %v", err)
	}
}

func TestUnlock_releases_what_a_copy_of_the_descriptor_would_hold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f := open(t, path)
	if err := TryLock(f, Exclusive); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0) // as a child between fork and execve has it
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(Unlock(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(open(t, path), Exclusive); err != nil {
		t.Error(err)
	}
	if err := Unlock(f); err == nil {
		t.Error("a closed file was unlocked")
	}
}

func TestLock_tries_once_and_waits_until_the_context_ends(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f, waits := open(t, path), open(t, path)
	patience := errors.New("too long")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, patience)
	defer cancel()
	<-ctx.Done()
	if err := Lock(ctx, f, Exclusive); err != nil {
		t.Errorf("a lock that is free: %v", err)
	}
	if err := Lock(ctx, waits, Exclusive); !errors.Is(err, patience) {
		t.Errorf("got %v, want the cause of the context's end", err)
	}
	got := make(chan error, 1)
	go func() { got <- Lock(t.Context(), waits, Exclusive) }()
	select {
	case err := <-got:
		t.Fatalf("it has not waited: %v", err)
	case <-time.After(2 * maxPoll):
	}
	f.Close()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestOpenLocked_locks_the_file_that_has_the_name_then(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	const flags = os.O_RDWR | os.O_CREATE
	f, err := TryOpenLocked(path, flags, 0o600, Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TryOpenLocked(path, flags, 0o600, Shared); !errors.Is(err, ErrLocked) {
		t.Fatalf("got %v, want ErrLocked", err)
	}
	type locked struct {
		f   *os.File
		err error
	}
	got := make(chan locked, 2)
	for range cap(got) {
		go func() {
			f, err := OpenLocked(t.Context(), path, os.O_RDWR, 0, Shared)
			got <- locked{f, err}
		}()
	}
	time.Sleep(5 * maxPoll) // they wait for it
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	now, err := open(t, path).Stat()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	for range cap(got) {
		l := <-got
		if l.err != nil {
			t.Fatal(l.err)
		}
		defer l.f.Close()
		if st, err := l.f.Stat(); err != nil || !os.SameFile(st, now) {
			t.Errorf("it has locked another file: %v", err)
		}
	}
}
