package hwkvm

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDiagnose(t *testing.T) {
	for _, c := range []struct {
		name        string
		guest, qemu []string
		want        string
	}{
		{"a panic", []string{"[1.0] Kernel panic - not syncing: X", "trace"}, nil, "panicked: Kernel panic - not syncing: X"},
		{"a panic for want of memory", []string{"[1] Out of memory: Killed process 1 (init)", "[1] Kernel panic - not syncing: Y"}, nil, "give it more memory"},
		{"a message of init", []string{"hwkvm-init: no port"}, nil, "no port"},
		{"a message of QEMU", nil, []string{"qemu: no memory", "qemu: warning: slow"}, "QEMU failed: qemu: no memory"},
		{"a warning of QEMU explains nothing", nil, []string{"qemu: warning: slow"}, "turned itself off"},
		{"silence", nil, nil, "turned itself off"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := diagnose(c.guest, c.qemu); !strings.Contains(got, c.want) {
				t.Errorf("got %q, want it to contain %q", got, c.want)
			}
		})
	}
}

func TestExcerpt_shows_the_panic_from_its_beginning_else_the_end(t *testing.T) {
	var lines []string
	for range 100 {
		lines = append(lines, "noise")
	}
	lines[10] = "Kernel panic - not syncing: here"
	if got := strings.Split(excerpt(lines, []string{"qemu"}), "\n"); len(got) != consoleLines+1 || got[0] != "qemu" || got[1] != lines[10] {
		t.Errorf("got %d lines beginning with %q", len(got), got[:2])
	}
	lines[10], lines[99] = "noise", "last"
	if got := strings.Split(excerpt(lines, nil), "\n"); len(got) != consoleLines || got[consoleLines-1] != "last" {
		t.Errorf("got %d lines ending with %q", len(got), got[len(got)-1])
	}
}

func TestConsole_keeps_the_end_and_copies_all(t *testing.T) {
	var tee bytes.Buffer
	c := &console{tee: &tee}
	for range 3 {
		if n, err := c.Write(bytes.Repeat([]byte("x"), consoleKept/2)); n != consoleKept/2 || err != nil {
			t.Fatalf("wrote %d, error %v", n, err)
		}
	}
	if _, err := c.Write([]byte("\r\nend\xff\r\n")); err != nil {
		t.Fatal(err)
	}
	if got := c.lines(); len(c.buf) != consoleKept || got[len(got)-1] != "end?" {
		t.Errorf("kept %d bytes, the last line is %q", len(c.buf), got[len(got)-1])
	}
	if tee.Len() != consoleKept/2*3+8 {
		t.Errorf("copied %d bytes", tee.Len())
	}
}

func TestConfig_is_refused_or_filled(t *testing.T) {
	ok := Config{Args: []string{"true"}, Dir: "/"}
	with := func(f func(*Config)) Config { c := ok; f(&c); return c }
	for _, c := range []struct {
		name string
		in   Config
		want string
	}{
		{"no command", with(func(c *Config) { c.Args = nil }), "no command"},
		{"a relative folder", with(func(c *Config) { c.Dir = "x" }), "not an absolute path"},
		{"too many CPUs", with(func(c *Config) { c.CPUs = MaxCPUs + 1 }), "CPUs"},
		{"a negative number of CPUs", with(func(c *Config) { c.CPUs = -1 }), "CPUs"},
		{"too little memory", with(func(c *Config) { c.MemoryMiB = MinMemoryMiB - 1 }), "memory"},
		{"too much memory", with(func(c *Config) { c.MemoryMiB = MaxMemoryMiB + 1 }), "memory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.in.fill(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want one with %q", err, c.want)
			}
		})
	}
	if err := ok.fill(); err != nil || ok.CPUs != DefaultCPUs || ok.MemoryMiB != DefaultMemoryMiB || ok.Stdout == nil || ok.Stderr == nil {
		t.Errorf("filled to %+v, error %v", ok, err)
	}
}

func TestLast_wins_keeps_the_last_value_of_each_variable(t *testing.T) {
	got := lastWins([]string{"A=1", "B=2", "A=3", "C="})
	if want := []string{"B=2", "A=3", "C="}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRead_kernel_without_its_files_is_not_there(t *testing.T) {
	dir := t.TempDir()
	if _, err := readKernel(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty cache gives %v", err)
	}
	record := filepath.Join(dir, kernelFile)
	if err := os.WriteFile(record, []byte(`{"package":"p","image":"i","release":"r"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readKernel(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing files give %v", err)
	}
	if err := os.WriteFile(record, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readKernel(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a damaged record gives %v", err)
	}
}

func TestPrepare_without_QEMU_says_how_to_install_it(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Prepare(t.Context(), t.TempDir())
	if !errors.Is(err, ErrNoQEMU) || !strings.Contains(err.Error(), "apt-get install") {
		t.Errorf("error is %v", err)
	}
}

func TestInit_key_depends_on_the_kernel(t *testing.T) {
	a, errA := initKey(kernel{Package: "a"})
	b, errB := initKey(kernel{Package: "b"})
	again, err := initKey(kernel{Package: "a"})
	if errA != nil || errB != nil || err != nil || a == b || a != again {
		t.Errorf("keys %q (%v), %q (%v), %q (%v)", a, errA, b, errB, again, err)
	}
}

func TestProgram_stopped_by_its_context_is_reported_as_that(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := output(ctx, "", "sleep", "100"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v, want context.DeadlineExceeded", err)
	}
	if _, err := output(t.Context(), "", "sh", "-c", "echo reason >&2; exit 1"); err == nil || !strings.Contains(err.Error(), "reason") {
		t.Errorf("error is %v, want what was printed", err)
	}
}
