package fswatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// until reads events until one of them is about a path, which is the last thing that the test has done.
func until(t *testing.T, w *Watcher, last string) (lines []string) {
	t.Helper()
	limit := time.AfterFunc(time.Minute, func() { w.Close() })
	defer limit.Stop()
	for {
		events, err := w.Read()
		if err != nil {
			t.Fatalf("no event about %s, only %q: %v", last, lines, err)
		}
		for _, e := range events {
			if e.Path == last {
				return lines
			}
			line := string(e.Kind) + " " + e.Path
			if e.From != "" {
				line = string(e.Kind) + " " + e.From + " " + e.Path
			}
			if e.Dir {
				line += "/"
			}
			// The kernel may tell of one change in several events, which reads may part.
			if len(lines) == 0 || lines[len(lines)-1] != line {
				lines = append(lines, line)
			}
		}
	}
}

func TestWatcher(t *testing.T) {
	write := func(path, text string) error { return os.WriteFile(path, []byte(text), 0o644) }
	for _, tt := range []struct {
		name      string
		recursive bool
		paths     []string // below the directory; "" is itself
		before    func(d string) error
		do        func(d string) error
		want      string // lines, with the directory as D
	}{
		{
			name: "a file is made, written, changed, renamed and removed", paths: []string{""},
			do: func(d string) error {
				return errors.Join(write(d+"/f", "text"), os.Chmod(d+"/f", 0o600), os.Rename(d+"/f", d+"/g"), os.Remove(d+"/g"))
			},
			want: "created D/f|written D/f|attributes D/f|renamed D/f D/g|removed D/g",
		},
		{
			name: "directories, without what is below", paths: []string{""},
			do: func(d string) error {
				return errors.Join(os.Mkdir(d+"/sub", 0o755), write(d+"/sub/f", ""), os.RemoveAll(d+"/sub"))
			},
			want: "created D/sub/|removed D/sub/",
		},
		{
			name: "below directories that were there", recursive: true, paths: []string{""},
			before: func(d string) error { return os.MkdirAll(d+"/a/b", 0o755) },
			do:     func(d string) error { return write(d+"/a/b/f", "text") },
			want:   "created D/a/b/f|written D/a/b/f",
		},
		{
			name: "a directory that is renamed, and what is below", recursive: true, paths: []string{""},
			before: func(d string) error { return os.MkdirAll(d+"/a/b", 0o755) },
			do:     func(d string) error { return errors.Join(os.Rename(d+"/a", d+"/z"), write(d+"/z/b/f", "")) },
			want:   "renamed D/a D/z/|created D/z/b/f|written D/z/b/f",
		},
		{
			name: "what is moved out is removed, and no longer watched", recursive: true, paths: []string{"in"},
			before: func(d string) error { return os.MkdirAll(d+"/in/a/b", 0o755) },
			do:     func(d string) error { return errors.Join(os.Rename(d+"/in/a", d+"/a"), write(d+"/a/b/f", "")) },
			want:   "removed D/in/a/",
		},
		{
			name: "what is moved in is created", recursive: true, paths: []string{"in"},
			before: func(d string) error { return errors.Join(os.MkdirAll(d+"/in", 0o755), os.MkdirAll(d+"/a", 0o755)) },
			do:     func(d string) error { return os.Rename(d+"/a", d+"/in/a") },
			want:   "created D/in/a/",
		},
		{
			name: "a file by its name, and one that takes its place", paths: []string{"f"},
			before: func(d string) error { return write(d+"/f", "") },
			do: func(d string) error {
				return errors.Join(write(d+"/other", "text"), write(d+"/f", "text"), os.Rename(d+"/other", d+"/f"), os.Chmod(d+"/f", 0o600))
			},
			want: "written D/f|created D/f|attributes D/f",
		},
		{
			name: "a link in place of a directory is not followed", recursive: true, paths: []string{"in"},
			before: func(d string) error { return errors.Join(os.MkdirAll(d+"/in", 0o755), os.MkdirAll(d+"/out", 0o755)) },
			do:     func(d string) error { return errors.Join(os.Symlink("../out", d+"/in/l"), write(d+"/out/f", "")) },
			want:   "created D/in/l",
		},
		{
			name: "the directory itself is removed", paths: []string{"in", ""},
			before: func(d string) error { return os.MkdirAll(d+"/in", 0o755) },
			do:     func(d string) error { return os.Remove(d + "/in") },
			want:   "removed D/in/",
		},
		{
			name: "the directory itself is moved", paths: []string{"in"},
			before: func(d string) error { return os.MkdirAll(d+"/in", 0o755) },
			do:     func(d string) error { return os.Rename(d+"/in", d+"/out") },
			want:   "overflow D/in/",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := t.TempDir()
			if tt.before != nil {
				if err := tt.before(d); err != nil {
					t.Fatal(err)
				}
			}
			end := filepath.Join(t.TempDir(), "end")
			paths := []string{filepath.Dir(end)}
			for _, p := range tt.paths {
				paths = append(paths, filepath.Join(d, p))
			}
			w, err := New(paths, tt.recursive)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if err := errors.Join(tt.do(d), write(end, "")); err != nil {
				t.Fatal(err)
			}
			got := strings.ReplaceAll(strings.Join(until(t, w, end), "|"), d, "D")
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestWatcher_new_directories_are_watched_before_their_making_is_told(t *testing.T) {
	d := t.TempDir()
	w, err := New([]string{d}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	const dirs = 200
	for i := range dirs {
		p := fmt.Sprintf("%s/d%d/e", d, i)
		if err := errors.Join(os.MkdirAll(p, 0o755), os.WriteFile(p+"/f", nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(d+"/end", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	lines := until(t, w, d+"/end")
	for i := range dirs {
		if !slices.Contains(lines, fmt.Sprintf("created %s/d%d/e/f", d, i)) {
			t.Errorf("of file %d nothing is told", i)
		}
	}
}

func TestWatcher_says_so_when_the_kernels_queue_was_full_and_goes_on(t *testing.T) {
	d := t.TempDir()
	if err := os.Mkdir(d+"/a", 0o755); err != nil {
		t.Fatal(err)
	}
	w, err := New([]string{d}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	limit := 16384 // fs.inotify.max_queued_events
	if b, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events"); err == nil {
		_, _ = fmt.Sscan(string(b), &limit)
	}
	if limit > 1<<17 {
		t.Skipf("the kernel's queue holds %d events", limit)
	}
	for i := range limit {
		// Two events each that differ from the one before.
		if err := os.Rename(fmt.Sprintf("%s/a", d), d+"/b"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(d+"/b", d+"/a"); err != nil {
			t.Fatal(i, err)
		}
	}
	lost := false
	for !lost {
		events, err := w.Read()
		if err != nil {
			t.Fatal(err)
		}
		lost = slices.ContainsFunc(events, func(e Event) bool { return e.Kind == Overflow })
	}
	if err := errors.Join(os.WriteFile(d+"/a/f", nil, 0o644), os.WriteFile(d+"/end", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if lines := until(t, w, d+"/end"); !slices.Contains(lines, "created "+d+"/a/f") {
		t.Errorf("after the overflow: %q", lines)
	}
}

func TestNew_of_what_is_not_there_fails(t *testing.T) {
	if _, err := New([]string{t.TempDir() + "/no"}, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestNew_of_too_many_directories_fails_and_says_so(t *testing.T) {
	d := t.TempDir()
	for i := range MaxDirs {
		if err := os.Mkdir(fmt.Sprintf("%s/%d", d, i), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := New([]string{d}, true); !errors.Is(err, ErrLimit) {
		t.Errorf("got %v, want ErrLimit", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 'f', 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 0, 64, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0})
	f.Add(make([]byte, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := New([]string{t.TempDir()}, true)
		if err != nil {
			t.Skip(err)
		}
		defer w.Close()
		w.parse(b)
		w.movedOut()
	})
}
