package process

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
)

// sizes returns the total size of the files in a directory.
func sizes(t *testing.T, dir string) (total int64) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		st, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		total += st.Size()
	}
	return total
}

// A guest that makes its process log as fast and as long as it can fills at most two files of the log's size.
func TestAttack_log_of_a_process_that_a_guest_fills_is_bounded(t *testing.T) {
	const limit = 64 << 10
	path := filepath.Join(t.TempDir(), "vmm.log")
	var at *os.File
	l, err := newProcessLog(path, limit, func(f *os.File) error { at = f; return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer l.ring.Close()
	now := time.Now()
	l.now = func() time.Time { return now }
	log := slog.New(slog.NewTextHandler(l, nil))
	for i := range 20_000 {
		now = now.Add(logEvery) // slow enough to be written
		log.Warn("device needs a reset", "n", i, "cause", strings.Repeat("x", 200))
		if i%5000 == 0 {
			log.Warn(strings.Repeat("y", 1<<20)) // a line that is longer than the log
			if total := sizes(t, filepath.Dir(path)); total > 2*(limit+maxLogLine+64) {
				t.Fatalf("the log takes %d bytes after a message of 1 MiB", total)
			}
		}
	}
	if total := sizes(t, filepath.Dir(path)); total > 2*(limit+maxLogLine+64) {
		t.Errorf("the log takes %d bytes, with a limit of %d for each of two files", total, limit)
	}
	if at == nil {
		t.Fatal("nobody was told of the new file")
	}
	if line := control.LastLine(path); !strings.Contains(line, "n=19999") {
		t.Errorf("the log ends with %q", line)
	}
}

// Lines that come faster than logEvery are counted, not written.
func TestAttack_log_of_a_process_has_a_rate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vmm.log")
	l, err := newProcessLog(path, maxProcessLog, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.ring.Close()
	now := time.Now()
	l.now = func() time.Time { return now }
	const said = 100_000
	for i := range said {
		if n, err := fmt.Fprintf(l, "line %d\n", i); n == 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	now = now.Add(2 * logEvery)
	fmt.Fprintln(l, "and the last")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(data, []byte("\n")); n != logBurst+2 {
		t.Errorf("%d lines were written of %d at once, want %d", n, said, logBurst+2)
	}
	if want := fmt.Sprintf("number=%d\nand the last\n", said-logBurst); !bytes.HasSuffix(data, []byte(want)) {
		t.Errorf("it does not end with %q", want)
	}
}

// A process that writes empty lines has its keeper read millions of them in a second, on a processor that does not
// count for it.
func TestAttack_log_of_a_process_is_read_no_faster_for_short_lines(t *testing.T) {
	begin, pace := time.Now(), newLogPace()
	for range logFlood/logLine + 2 {
		pace(1)
	}
	if took := time.Since(begin); took < logSpan {
		t.Errorf("%d lines were read in %v", logFlood/logLine, took)
	}
}
