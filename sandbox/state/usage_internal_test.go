package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

func TestUsage_counts_each_file_once_by_what_it_is_for(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const kib = 1 << 10
	write := func(size int, path ...string) string {
		t.Helper()
		name := filepath.Join(append([]string{s.Dir()}, path...)...)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		// The data must not shrink on file systems that compress.
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i*i>>3 ^ i)
		}
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil { // file systems allocate blocks late
			t.Fatal(err)
		}
		return name
	}
	r := &Record{Version: RecordVersion, ID: "0123456789abcdef0123456789abcdef", Phase: Asleep, Snapshot: "used", Spec: spec.VM{Name: "a", Image: "app"}}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	before, err := s.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own, err := s.DiskUse(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	write(64*kib, "layers", "l")
	shared := write(128*kib, "snapshots", "used", "memory")
	write(256*kib, "snapshots", "earlier", "memory")
	if err := os.Link(shared, filepath.Join(s.Dir(), "snapshots", "earlier", "shared")); err != nil {
		t.Fatal(err)
	}
	write(512*kib, "pages", "p")
	write(1024*kib, "volumes", "v", "disk")
	// Several stores may share a directory of images.
	elsewhere := t.TempDir()
	if err := os.WriteFile(filepath.Join(elsewhere, "i"), make([]byte, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, filepath.Join(s.Dir(), "images")); err != nil {
		t.Fatal(err)
	}
	u, err := s.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Directories and the file system's own blocks come on top.
	const slack = 48 * kib
	for _, c := range []struct {
		kind      string
		got, want int64
	}{
		{"layers", u.Layers - before.Layers, 64 * kib}, {"snapshots", u.Snapshots - before.Snapshots, 128 * kib}, {"kept", u.Kept - before.Kept, 256 * kib},
		{"pages", u.Pages - before.Pages, 512 * kib}, {"volumes", u.Volumes - before.Volumes, 1024 * kib}, {"images", u.Images, 0},
	} {
		if c.got < c.want || c.got > c.want+slack {
			t.Errorf("%s: %d bytes, not some %d", c.kind, c.got, c.want)
		}
	}
	if u.Images == 0 {
		t.Error("images: nothing, though there is a file behind the link")
	}
	// A snapshot whose memory is on its way counts as it will when all is there.
	r.Snapshot = "coming"
	write(32*kib, "arriving", "coming", "memory")
	write(0, "arriving", "coming", snapshot.ManifestName)
	after, err := s.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := after.Snapshots - u.Snapshots; n < 32*kib || n > 32*kib+slack {
		t.Errorf("a snapshot on its way: %d bytes, not some %d", n, 32*kib)
	}
	now, err := s.DiskUse(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if n := now.Bytes - own.Bytes; n < 32*kib || n > 32*kib+slack {
		t.Errorf("what a sandbox has whose memory is on its way: %d bytes more, not some %d", n, 32*kib)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Usage(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("of a context that has ended: %v", err)
	}
}
