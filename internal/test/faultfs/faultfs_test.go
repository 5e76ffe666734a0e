package faultfs

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

func newSim(t *testing.T) (*Sim, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := NewSim(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func create(t *testing.T, s osfile.FS, name string) osfile.File {
	t.Helper()
	f, err := s.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func write(t *testing.T, f osfile.File, p []byte, off int64) {
	t.Helper()
	_, err := f.WriteAt(p, off)
	must(t, err)
}

func crash(t *testing.T, s *Sim, seed uint64) string {
	t.Helper()
	dir := t.TempDir()
	must(t, s.Crash(seed, dir))
	return dir
}

func sector(b byte) []byte { return bytes.Repeat([]byte{b}, sectorSize) }

// outcomes collects what a file holds after many crashes; "-" is no file.
func outcomes(t *testing.T, s *Sim, name string, seeds int) map[string]int {
	t.Helper()
	got := map[string]int{}
	for seed := range seeds {
		p, err := os.ReadFile(filepath.Join(crash(t, s, uint64(seed)), name))
		if errors.Is(err, fs.ErrNotExist) {
			got["-"]++
			continue
		}
		must(t, err)
		key := ""
		for i := 0; i < len(p); i += sectorSize {
			key += string(p[i] + '0')
		}
		got[key]++
	}
	return got
}

func wantOutcomes(t *testing.T, got map[string]int, want ...string) {
	t.Helper()
	for _, w := range want {
		if got[w] == 0 {
			t.Errorf("outcome %q never happened; got %v", w, got)
		}
		delete(got, w)
	}
	if len(got) > 0 {
		t.Errorf("outcomes that must not happen: %v", got)
	}
}

func TestSynced_file_in_synced_directory_survives_every_crash(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	write(t, f, append(sector(1), sector(2)...), 0)
	must(t, f.Sync())
	must(t, s.SyncDir(dir))
	wantOutcomes(t, outcomes(t, s, "a", 20), "12")
}

func TestSynced_file_in_unsynced_directory_may_be_missing(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	write(t, f, sector(1), 0)
	must(t, f.Sync())
	wantOutcomes(t, outcomes(t, s, "a", 40), "-", "1")
}

func TestUnsynced_overwrites_are_old_or_new_sector_by_sector(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	write(t, f, append(sector(1), sector(1)...), 0)
	must(t, f.Sync())
	must(t, s.SyncDir(dir))
	write(t, f, append(sector(2), sector(2)...), 0)
	write(t, f, sector(3), sectorSize)
	wantOutcomes(t, outcomes(t, s, "a", 300), "11", "12", "13", "21", "22", "23")
}

func TestUnsynced_growth_may_be_short_or_zeros(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	must(t, s.SyncDir(dir))
	write(t, f, sector(1), 0)
	wantOutcomes(t, outcomes(t, s, "a", 100), "", "0", "1")
}

func TestHoles_and_truncation_are_undecided_until_sync(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	write(t, f, bytes.Repeat(sector(1), 16), 0)
	must(t, f.Sync())
	must(t, s.SyncDir(dir))
	must(t, f.Fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
	must(t, f.Datasync())
	wantOutcomes(t, outcomes(t, s, "a", 5), "0000000011111111")
	must(t, f.Truncate(4096))
	got := outcomes(t, s, "a", 60)
	if got["00000000"] == 0 || len(got) < 2 {
		t.Errorf("outcomes of a truncation: %v", got)
	}
	must(t, f.Sync())
	wantOutcomes(t, outcomes(t, s, "a", 5), "00000000")
}

func TestRename_is_atomic_and_undecided_until_sync_dir(t *testing.T) {
	s, dir := newSim(t)
	for i, name := range []string{"a", "a.tmp"} {
		f := create(t, s, filepath.Join(dir, name))
		write(t, f, sector(byte(i+1)), 0)
		must(t, f.Sync())
	}
	must(t, s.SyncDir(dir))
	must(t, s.Rename(filepath.Join(dir, "a.tmp"), filepath.Join(dir, "a")))
	wantOutcomes(t, outcomes(t, s, "a", 40), "1", "2")
	wantOutcomes(t, outcomes(t, s, "a.tmp", 40), "-", "2")
	must(t, s.SyncDir(dir))
	wantOutcomes(t, outcomes(t, s, "a", 10), "2")
	wantOutcomes(t, outcomes(t, s, "a.tmp", 10), "-")
}

func TestFile_renamed_across_directories_is_never_lost(t *testing.T) {
	s, dir := newSim(t)
	x, y := filepath.Join(dir, "x"), filepath.Join(dir, "y")
	must(t, s.Mkdir(x, 0o755))
	must(t, s.Mkdir(y, 0o755))
	must(t, s.SyncDir(dir))
	f := create(t, s, filepath.Join(x, "a"))
	write(t, f, sector(1), 0)
	must(t, f.Sync())
	must(t, s.SyncDir(x))
	must(t, s.Rename(filepath.Join(x, "a"), filepath.Join(y, "a")))
	seen := map[string]bool{}
	for seed := range 60 {
		c := crash(t, s, uint64(seed))
		_, inX := os.Stat(filepath.Join(c, "x/a"))
		_, inY := os.Stat(filepath.Join(c, "y/a"))
		if inX != nil && inY != nil {
			t.Fatalf("seed %d lost the file", seed)
		}
		if inY == nil && inX != nil {
			seen["moved"] = true
		}
		if inX == nil && inY != nil {
			seen["not moved"] = true
		}
	}
	if len(seen) != 2 {
		t.Errorf("seen only %v", seen)
	}
}

func TestLink_and_remove_survive_together(t *testing.T) {
	s, dir := newSim(t)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	f := create(t, s, a)
	write(t, f, sector(7), 0)
	must(t, f.Sync())
	must(t, s.Link(a, b))
	if err := s.Link(a, b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second link: %v", err)
	}
	must(t, s.Remove(a))
	must(t, s.SyncDir(dir))
	wantOutcomes(t, outcomes(t, s, "a", 5), "-")
	wantOutcomes(t, outcomes(t, s, "b", 5), "7")
}

func TestFailed_sync_loses_its_data_for_ever(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	write(t, f, sector(1), 0)
	must(t, f.Sync())
	must(t, s.SyncDir(dir))
	write(t, f, sector(2), 0)
	s.Inject(Fault{Op: OpSync, Nth: 1, Err: unix.EIO})
	if err := f.Datasync(); !errors.Is(err, unix.EIO) {
		t.Fatalf("sync: %v", err)
	}
	must(t, f.Datasync()) // answers success, as Linux does
	wantOutcomes(t, outcomes(t, s, "a", 10), "1")
	got := make([]byte, sectorSize)
	_, err := f.ReadAt(got, 0)
	must(t, err)
	if !bytes.Equal(got, sector(2)) {
		t.Error("the page cache must still show the new data")
	}
}

func TestFaults_hit_the_nth_matching_call_and_stop(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	g := create(t, s, filepath.Join(dir, "b"))
	s.Inject(Fault{Op: OpWrite, Path: "/a", Nth: 2, Times: 2, Err: unix.ENOSPC})
	var got []bool
	for range 5 {
		_, err := f.WriteAt(sector(1), 0)
		got = append(got, errors.Is(err, unix.ENOSPC))
		write(t, g, sector(1), 0)
	}
	want := []bool{false, true, true, false, false}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("failed calls: %v, want %v", got, want)
		}
	}
	if s.Count(OpWrite) != 10 || s.Fired() != 2 {
		t.Errorf("counted %d writes, %d faults", s.Count(OpWrite), s.Fired())
	}
}

func TestShort_write_puts_down_half(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	s.Inject(Fault{Op: OpWrite, Nth: 1, Times: -1, Err: unix.ENOSPC, Short: true})
	n, err := f.WriteAt(append(sector(1), sector(2)...), 0)
	if n != sectorSize || !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("short write: %d, %v", n, err)
	}
	s.ClearFaults()
	must(t, f.Sync())
	must(t, s.SyncDir(dir))
	wantOutcomes(t, outcomes(t, s, "a", 5), "1")
}

// Two directories that were exchanged have changed their names both or not at all.
func TestAn_exchange_is_whole_or_did_not_happen(t *testing.T) {
	s, dir := newSim(t)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, d := range []string{a, b} {
		must(t, s.Mkdir(d, 0o755))
		must(t, create(t, s, filepath.Join(d, "was-"+filepath.Base(d))).Sync())
		must(t, s.SyncDir(d))
	}
	must(t, s.SyncDir(dir))
	must(t, s.Exchange(a, b))
	if _, err := os.Stat(filepath.Join(a, "was-b")); err != nil {
		t.Error(err)
	}
	after := func(seed uint64) (exchanged bool) {
		dest := t.TempDir()
		must(t, s.Crash(seed, dest))
		has := func(name string) bool {
			_, err := os.Stat(filepath.Join(dest, name))
			return err == nil
		}
		exchanged = has("a/was-b")
		if has("b/was-a") != exchanged || has("a/was-a") == exchanged || has("b/was-b") == exchanged {
			t.Fatalf("seed %d: half of the exchange happened", seed)
		}
		return exchanged
	}
	seen := map[bool]bool{}
	for seed := range uint64(20) {
		seen[after(seed)] = true
	}
	if len(seen) != 2 {
		t.Errorf("only %v was seen before the sync", seen)
	}
	must(t, s.SyncDir(dir))
	for seed := range uint64(20) {
		if !after(seed) {
			t.Errorf("seed %d: the exchange was not durable", seed)
		}
	}
}

func TestEvery_kind_of_call_can_fail(t *testing.T) {
	for _, op := range Ops {
		s, dir := newSim(t)
		a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
		f := create(t, s, a)
		s.Inject(Fault{Op: op, Nth: 1, Times: -1, Err: unix.EIO})
		calls := map[Op]func() error{
			OpOpen:      func() error { _, err := s.OpenFile(b, os.O_RDONLY, 0); return err },
			OpRename:    func() error { return s.Rename(a, b) },
			OpLink:      func() error { return s.Link(a, b) },
			OpExchange:  func() error { return s.Exchange(a, b) },
			OpRemove:    func() error { return s.Remove(a) },
			OpMkdir:     func() error { return s.Mkdir(b, 0o755) },
			OpSyncDir:   func() error { return s.SyncDir(dir) },
			OpRead:      func() error { _, err := f.ReadAt(make([]byte, 1), 0); return err },
			OpWrite:     func() error { _, err := f.WriteAt([]byte{1}, 0); return err },
			OpTruncate:  func() error { return f.Truncate(1) },
			OpSync:      f.Sync,
			OpFallocate: func() error { return f.Fallocate(0, 0, 4096) },
		}
		if err := calls[op](); !errors.Is(err, unix.EIO) {
			t.Errorf("%s: %v, want EIO", op, err)
		}
		if st, err := os.Stat(a); err != nil || st.Size() != 0 {
			t.Errorf("%s had an effect: %v, %v", op, st, err)
		}
	}
}

func TestPower_cut_stops_everything_and_decides_nothing(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	must(t, s.SyncDir(dir))
	s.CutAfter(1)
	write(t, f, sector(1), 0)
	for _, err := range []error{f.Sync(), s.SyncDir(dir), s.Remove(filepath.Join(dir, "a"))} {
		if !errors.Is(err, ErrPowerCut) {
			t.Fatalf("after the cut: %v", err)
		}
	}
	wantOutcomes(t, outcomes(t, s, "a", 100), "", "0", "1")
}

func TestSim_takes_over_an_existing_directory_and_crashes_alike_for_one_seed(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "sub/a"), append(make([]byte, 9000), 5), 0o644))
	s, err := NewSim(dir)
	must(t, err)
	f := create(t, s, filepath.Join(dir, "sub/a"))
	for i := range 50 {
		write(t, f, sector(byte(i)), int64(i%7)*sectorSize)
	}
	for seed := range uint64(5) {
		one, err := os.ReadFile(filepath.Join(crash(t, s, seed), "sub/a"))
		must(t, err)
		two, err := os.ReadFile(filepath.Join(crash(t, s, seed), "sub/a"))
		must(t, err)
		if !bytes.Equal(one, two) {
			t.Errorf("seed %d gave two results", seed)
		}
		if one[9000] != 5 {
			t.Errorf("seed %d lost what was there before", seed)
		}
	}
	if _, err := s.OpenFile("/etc/passwd", os.O_RDONLY, 0); err == nil {
		t.Error("a path outside of the root was opened")
	}
}

func TestTwin_leads_from_the_kernels_file_to_the_recorded_one(t *testing.T) {
	s, dir := newSim(t)
	f := create(t, s, filepath.Join(dir, "a"))
	if s.Twin(f.OS()) != f {
		t.Error("no twin")
	}
	must(t, f.Close())
	if s.Twin(f.OS()) != nil {
		t.Error("a closed file has a twin")
	}
}

func TestCopy_range_gives_the_same_bytes_in_kernel_and_by_hand(t *testing.T) {
	src := bytes.Repeat([]byte("0123456789"), 2000)
	s, dir := newSim(t)
	for _, fsys := range []osfile.FS{osfile.OS, s} {
		a, b := create(t, fsys, filepath.Join(dir, "src")), create(t, fsys, filepath.Join(dir, "dst"))
		must(t, a.Truncate(0))
		must(t, b.Truncate(0))
		write(t, a, src, 0)
		must(t, osfile.CopyRange(b, 5, a, 3, 12345, make([]byte, 1000)))
		got := make([]byte, 12345)
		_, err := b.ReadAt(got, 5)
		must(t, err)
		if !bytes.Equal(got, src[3:3+12345]) {
			t.Errorf("%T copied other bytes", fsys)
		}
		if err := osfile.CopyRange(b, 0, a, int64(len(src))-5, 10, make([]byte, 100)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%T: copy beyond the end: %v", fsys, err)
		}
	}
}
