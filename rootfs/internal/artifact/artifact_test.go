package artifact

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestWrite_file_replaces_whole_file(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "a")
	for _, want := range []string{"first and longer", "second"} {
		err := WriteFile(path, func(f *os.File) error { _, err := f.WriteString(want); return err })
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Fatalf("got %q, %v; want %q", got, err, want)
		}
	}
	if got := names(t, filepath.Dir(path)); len(got) != 1 {
		t.Errorf("files left: %q", got)
	}
}

func TestWrite_file_that_fails_leaves_old_file_and_no_other(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	err := WriteFile(path, func(f *os.File) error { _, _ = f.WriteString("half of the n"); return broken })
	if !errors.Is(err, broken) {
		t.Fatalf("got error %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != "old" {
		t.Errorf("old file now holds %q", got)
	}
	if got := names(t, dir); len(got) != 1 {
		t.Errorf("files left: %q", got)
	}
}

func TestWrite_file_removes_only_stale_temporary_files(t *testing.T) {
	dir := t.TempDir()
	old, young := filepath.Join(dir, tempPrefix+"old"), filepath.Join(dir, tempPrefix+"young")
	for _, p := range []string{old, young} {
		if err := os.WriteFile(p, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-2 * staleAfter)
	if err := os.Chtimes(old, past, past); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "a"), func(*os.File) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stale file: %v, want it gone", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Errorf("young file: %v, want it kept", err)
	}
}

func TestLock_is_exclusive_and_wait_ends_with_context(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("second lock: %v, want the deadline", err)
	}
	got := make(chan error, 1)
	go func() {
		u, err := Lock(t.Context(), path)
		if err == nil {
			u()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Fatalf("lock after unlock: %v", err)
	}
}

func TestStaging_dir_starts_empty_after_interrupted_run(t *testing.T) {
	dir := t.TempDir()
	first, err := StagingDir(dir, "key")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(first, "half"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	second, err := StagingDir(dir, "key")
	if err != nil {
		t.Fatal(err)
	}
	if got := names(t, second); len(got) != 0 || !IsTemp(filepath.Base(second)) {
		t.Errorf("staging %s holds %q", second, got)
	}
}

func TestPublish_dir_gives_final_name_and_refuses_existing_one(t *testing.T) {
	dir := t.TempDir()
	final := filepath.Join(dir, "final")
	publish := func() error {
		staging, err := StagingDir(dir, "key")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(staging, "a"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		return PublishDir(t.Context(), staging, final)
	}
	if err := publish(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(final, "a")); err != nil || string(got) != "x" {
		t.Fatalf("published file: %q, %v", got, err)
	}
	if err := publish(); err == nil {
		t.Fatal("publishing over an existing folder succeeded")
	}
}

func TestHash_file_known_sum(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, []byte("abc"), 0o644); err != nil {
		t.Fatal(err)
	}
	// FIPS 180-2, appendix B.1.
	const want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	sum, size, err := HashFile(t.Context(), path)
	if err != nil || sum != want || size != 3 {
		t.Fatalf("got %s, %d, %v", sum, size, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := HashFile(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestRemove_remains_leaves_what_is_locked_or_unknown(t *testing.T) {
	dir := t.TempDir()
	for _, key := range []string{"dead", "alive", "unknown"} {
		if _, err := StagingDir(dir, key); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "dead"), 0o755); err != nil {
		t.Fatal(err)
	}
	locks := t.TempDir()
	unlock, err := Lock(t.Context(), filepath.Join(locks, "alive"))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	RemoveRemains(dir, func(key string) string {
		if key == "unknown" {
			return ""
		}
		return filepath.Join(locks, key)
	})
	want := []string{tempPrefix + "alive", tempPrefix + "unknown", "dead"}
	if got := names(t, dir); !slices.Equal(got, want) {
		t.Errorf("left %q, want %q", got, want)
	}
}

func TestLine_writer_gives_lines_cut_to_their_bound(t *testing.T) {
	var got []string
	w := &LineWriter{Max: 4, Line: func(line string) { got = append(got, line) }}
	for _, piece := range []string{"ab", "c\nde", "fghi", "j\r\nk", "", strings.Repeat("z", 100)} {
		if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("write of %q: %d, %v", piece, n, err)
		}
		if len(w.part) > w.Max {
			t.Fatalf("%d bytes are kept of a line", len(w.part))
		}
	}
	w.Flush()
	if want := []string{"abc", "defg", "", "kzzz"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
