package disk

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// needsE2fsprogs skips the test if the host has no mkfs.ext4.
func needsE2fsprogs(t *testing.T) {
	t.Helper()
	if _, err := findMkfs(mkfsNames); err != nil {
		t.Skip(err)
	}
}

// e2fsTool finds a program of e2fsprogs where Debian installs it.
func e2fsTool(t *testing.T, name string) string {
	t.Helper()
	for _, p := range []string{name, "/usr/sbin/" + name, "/sbin/" + name} {
		if p, err := exec.LookPath(p); err == nil {
			return p
		}
	}
	t.Skipf("%s is missing: apt-get install e2fsprogs", name)
	return ""
}

func TestFormat_ext4_makes_a_clean_file_system_with_label_and_zeroed_inode_tables(t *testing.T) {
	needsE2fsprogs(t)
	fsck, dump := e2fsTool(t, "e2fsck"), e2fsTool(t, "dumpe2fs")
	for _, size := range []int64{MinExt4Size, 256 * mib, DefaultExt4Size} {
		dir := t.TempDir()
		s, err := FormatExt4(t.Context(), filepath.Join(dir, "cache"), filepath.Join(dir, "disk"), size)
		must(t, err)
		d := mustOpen(t, s)
		if d.Size() != size {
			t.Fatalf("size is %d, want %d", d.Size(), size)
		}
		infos, err := d.stats()
		must(t, err)
		if a := infos[0].Allocated; a > mib {
			t.Errorf("template of %d bytes takes %d bytes on the host, want less than 1 MiB", size, a)
		}
		t.Logf("%d MiB: template holds %d KiB, takes %d KiB on the host; new disk takes %d KiB", size/mib, infos[0].Data>>10, infos[0].Allocated>>10, infos[1].Allocated>>10)
		raw := filepath.Join(dir, "raw")
		rawCopy(t, d, raw)
		if out, err := exec.Command(fsck, "-fn", raw).CombinedOutput(); err != nil {
			t.Errorf("e2fsck: %v\n%s", err, out)
		}
		out, err := exec.Command(dump, raw).CombinedOutput()
		must(t, err)
		text := string(out)
		if !strings.Contains(text, Ext4Label) || !strings.Contains(text, "has_journal") {
			t.Errorf("no label or no journal:\n%.1500s", text)
		}
		if strings.Contains(text, "metadata_csum") {
			t.Error("metadata_csum is on")
		}
		if g, z := strings.Count(text, "\nGroup "), strings.Count(text, "ITABLE_ZEROED"); g == 0 || g != z {
			t.Errorf("%d of %d groups have zeroed inode tables, so the guest would zero the others", z, g)
		}
		must(t, d.Close())
	}
}

func TestFormat_ext4_shares_one_template_among_concurrent_disks(t *testing.T) {
	needsE2fsprogs(t)
	dir := t.TempDir()
	cache := filepath.Join(dir, "cache")
	stacks := make([]Stack, 8)
	var wg sync.WaitGroup
	for i := range stacks {
		wg.Go(func() {
			var err error
			if stacks[i], err = FormatExt4(t.Context(), cache, filepath.Join(dir, string(rune('a'+i))), 64*mib); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, s := range stacks {
		d := mustOpen(t, s)
		if s.Layers[0] != stacks[0].Layers[0] {
			t.Error("disks have different templates")
		}
		mustWrite(t, d, 40*mib, fillBlock(byte(i+1), BlockSize))
	}
	ents, err := os.ReadDir(cache)
	must(t, err)
	if len(ents) != 2 { // besides the template and the lock
		t.Errorf("the cache holds %v, want the template and the lock only", ents)
	}
}

func TestMissing_mkfs_names_the_package(t *testing.T) {
	_, err := findMkfs([]string{filepath.Join(t.TempDir(), "mkfs.ext4")})
	wantErr(t, err, exec.ErrNotFound)
	if !strings.Contains(err.Error(), "apt-get install e2fsprogs") {
		t.Fatalf("error is %v, want the command that installs the tool", err)
	}
}

func TestFailing_mkfs_is_quoted_and_leaves_nothing_behind(t *testing.T) {
	bin := t.TempDir()
	must(t, os.WriteFile(filepath.Join(bin, "mkfs.ext4"), []byte("#!/bin/sh\necho no luck >&2\nexit 3\n"), 0o755))
	t.Setenv("PATH", bin)
	cache := filepath.Join(bin, "cache")
	_, err := Ext4Template(t.Context(), cache, 64*mib)
	if err == nil || !strings.Contains(err.Error(), "no luck") || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatalf("error is %v, want what the tool said", err)
	}
	ents, err := os.ReadDir(cache)
	must(t, err)
	if len(ents) != 1 || ents[0].Name() != ".ext4.lock" {
		t.Errorf("the cache holds %v, want the lock only", ents)
	}
}

func TestFormat_ext4_refuses_bad_sizes_and_a_damaged_template(t *testing.T) {
	dir := t.TempDir()
	for _, size := range []int64{-BlockSize, 1, MinExt4Size - BlockSize, MinExt4Size + 1, MaxSize + BlockSize} {
		_, err := Ext4Template(t.Context(), dir, size)
		wantErr(t, err, ErrSize)
	}
	needsE2fsprogs(t)
	s, err := Ext4Template(t.Context(), dir, 64*mib)
	must(t, err)
	must(t, os.Truncate(s.Top(), 100))
	_, err = Ext4Template(t.Context(), dir, 64*mib)
	wantErr(t, err, ErrTruncated)
}

func TestExt4_template_stops_waiting_for_the_lock_when_cancelled(t *testing.T) {
	dir := t.TempDir()
	lock, err := osfile.TryOpenLocked(filepath.Join(dir, templateLock), os.O_RDWR|os.O_CREATE, 0o644, osfile.Exclusive)
	must(t, err)
	defer lock.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = Ext4Template(ctx, dir, 64*mib)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error is %v, want the context's", err)
	}
}

// TestFormatted_disk_mounts_in_a_kernel_and_stays_clean mounts with the host's kernel in place of the guest's.
func TestFormatted_disk_mounts_in_a_kernel_and_stays_clean(t *testing.T) {
	needsE2fsprogs(t)
	fsck := e2fsTool(t, "e2fsck")
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip("the host has no loop devices: ", err)
	}
	dir := t.TempDir()
	s, err := FormatExt4(t.Context(), dir, filepath.Join(dir, "disk"), DefaultExt4Size)
	must(t, err)
	d := mustOpen(t, s)
	raw, mnt := filepath.Join(dir, "raw"), filepath.Join(dir, "mnt")
	rawCopy(t, d, raw)
	must(t, os.Mkdir(mnt, 0o755))
	if out, err := exec.Command("mount", "-t", "ext4", "-o", "loop", raw, mnt).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v\n%s", err, out)
	}
	werr := os.WriteFile(filepath.Join(mnt, "hello"), fillBlock('x', mib), 0o644)
	if out, err := exec.Command("umount", mnt).CombinedOutput(); err != nil {
		t.Fatalf("umount: %v\n%s", err, out)
	}
	must(t, werr)
	if out, err := exec.Command(fsck, "-fn", raw).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	// A guest that mounts, stores 1 MiB and unmounts must write little beyond that.
	after, err := Import(t.Context(), filepath.Join(dir, "after"), raw)
	must(t, err)
	ro, err := Open(after, Options{ReadOnly: true})
	must(t, err)
	defer func() { must(t, ro.Close()) }()
	infos, err := ro.stats()
	must(t, err)
	before, err := d.stats()
	must(t, err)
	grown := infos[0].Data - before[0].Data
	t.Logf("mounting, writing 1 MiB and unmounting added %d KiB", grown>>10)
	if grown > 2*mib {
		t.Errorf("mounting, writing 1 MiB and unmounting added %d bytes", grown)
	}
}
