package control

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// A log as large as a disk is looked at from its end.
func TestAttack_last_line_of_a_huge_log_is_read_from_its_end(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vmm.log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const huge = 1 << 40 // nothing but a hole
	if _, err := f.WriteAt([]byte("\nbefore\nthe end\n"), huge); err != nil {
		t.Skipf("no file of 1 TiB can be had here: %v", err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if line := LastLine(path); line != "the end" {
		t.Errorf("got %q", line)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes were allocated for one line", n)
	}
}

func TestLastLine(t *testing.T) {
	long := strings.Repeat("z", 2*maxLastLine)
	for name, c := range map[string]struct{ text, want string }{
		"empty":                  {"", ""},
		"one without its end":    {"one", "one"},
		"several":                {"one\ntwo\n\n", "two"},
		"longer than is read":    {"one\n" + long + "\n", long[:maxLastLine-1]},
		"after a longer one":     {long + "\ntwo\n", "two"},
		"exactly as much as is":  {strings.Repeat("\n", maxLastLine-1) + "x", "x"},
		"nothing but ends there": {"one" + strings.Repeat("\n", maxLastLine), ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := LastLine(path); got != c.want {
				t.Errorf("got %q", got)
			}
		})
	}
	if got := LastLine(filepath.Join(t.TempDir(), "none")); got != "" {
		t.Errorf("without a file: %q", got)
	}
}
