package bench

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func counted(t *testing.T) *counter {
	t.Helper()
	c := counting()
	t.Cleanup(c.close)
	if why := c.missing[countCalls]; why != "" {
		t.Skip("this host does not count system calls: ", why)
	}
	return c
}

// copies returns a command that copies that many blocks, with a read(2) and a write(2) each, and then waits for the
// disk once for each word sync.
func copies(t *testing.T, blocks int, sync ...string) string {
	cmd := fmt.Sprintf("dd if=/dev/zero of=%s bs=1 count=%d status=none", filepath.Join(t.TempDir(), "f"), blocks)
	for _, word := range sync {
		cmd += " conv=" + word
	}
	return cmd
}

// shell runs a script and returns what it has counted.
func shell(t *testing.T, c *counter, script string) tally {
	t.Helper()
	begin := c.begin(true)
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return c.since(begin)
}

func TestCounter_system_calls_of_a_child_are_counted_exactly(t *testing.T) {
	c := counted(t)
	const few, many = 10, 1010
	for name, script := range map[string]string{
		"child": "exec %s", "grandchild": "%s; true", "orphan": "(setsid %s; echo > $0.done) & while ! [ -e $0.done ]; do sleep 0.01; done",
	} {
		t.Run(name, func(t *testing.T) {
			run := func(blocks int, sync ...string) [places]uint64 {
				s := fmt.Sprintf(script, copies(t, blocks, sync...))
				return shell(t, c, strings.ReplaceAll(s, "$0", filepath.Join(t.TempDir(), "orphan"))).process[1]
			}
			// Where the kernel puts a program decides about a call or so of its start: the least of several runs has none.
			least := func(blocks int) (n [places]uint64) {
				n = run(blocks)
				for range 6 {
					if again := run(blocks); again[callsAt] < n[callsAt] {
						n = again
					}
				}
				return n
			}
			a, b := least(few), least(many)
			// The shell that waits for an orphan looks a changing number of times.
			if got := b[callsAt] - a[callsAt]; name != "orphan" && got != 2*(many-few) || b[callsAt] < 2*many {
				t.Errorf("%d blocks more take %d system calls, want %d", many-few, got, 2*(many-few))
			}
			if a[syncsAt] != 0 {
				t.Errorf("%d waits for the disk, want none", a[syncsAt])
			}
			if got := run(few, "fsync")[syncsAt]; got != 1 {
				t.Errorf("dd conv=fsync waits for the disk %d times, want once", got)
			}
			if got := run(few, "fdatasync")[syncsAt]; got != 1 {
				t.Errorf("dd conv=fdatasync waits for the disk %d times, want once", got)
			}
		})
	}
}

func TestCounter_processes_from_before_and_their_children_do_not_count(t *testing.T) {
	cmd := exec.Command("sh", "-c", "read line; "+copies(t, 1000, "fsync")+"; echo done; read line")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil && !strings.Contains(err.Error(), "exit status") {
			t.Error(err)
		}
	}()
	c := counted(t)
	begin := c.begin(true)
	if _, err := io.WriteString(stdin, "go\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "done\n" {
		t.Fatal(line, err)
	}
	if got := c.since(begin).process[1]; got != [places]uint64{} {
		t.Errorf("counted %v of others", got)
	}
}

func TestCounter_own_system_calls_count_apart(t *testing.T) {
	c := counted(t)
	begin := c.begin(true)
	const own = 500
	for range own {
		unix.Getppid()
	}
	got := c.since(begin)
	if got.process[0][callsAt] < own || got.process[1] != [places]uint64{} {
		t.Errorf("%v, want at least %d of this process and none of others", got.process, own)
	}
	if with, without := got.by(c, true)[countCalls], got.by(c, false)[countCalls]; with < own || without != 0 {
		t.Errorf("%v with this process, %v without", with, without)
	}
}

func TestSeries_counts_of_timed_runs_give_medians_and_missing_ones_a_reason(t *testing.T) {
	run := func(timed bool, calls, emulated uint64) tally {
		return tally{process: [2][places]uint64{{callsAt: 1000}, {callsAt: calls, waitsAt: 3, emulatedAt: emulated}}, timed: timed}
	}
	for name, tt := range map[string]struct {
		c       *counter
		runs    []tally
		counts  string
		without string
	}{
		"median of odd runs":        {&counter{}, []tally{run(true, 5, 1), run(true, 9, 1), run(true, 7, 1)}, "map[emulated:1 exits:0 syncs:0 syscalls:7 waits:3]", "map[]"},
		"warm-up runs do not count": {&counter{}, []tally{run(false, 99, 9), run(true, 5, 1)}, "map[emulated:1 exits:0 syncs:0 syscalls:5 waits:3]", "map[]"},
		"one is missing":            {&counter{missing: map[string]string{countExits: "no KVM"}}, []tally{run(true, 5, 1)}, "map[emulated:1 syncs:0 syscalls:5 waits:3]", "map[exits:no KVM]"},
		"instructions of a KVM that interprets count in warm-up runs": {
			&counter{interpreted: true}, []tally{run(false, 99, 9), run(true, 5, 1)}, "map[emulated:9 exits:0 syncs:0 syscalls:5 waits:3]", "map[]",
		},
		"no warm-up runs on it": {
			&counter{interpreted: true}, []tally{run(true, 5, 1)}, "map[exits:0 syncs:0 syscalls:5 waits:3]",
			"map[emulated:on a KVM that interprets they are counted in warm-up runs, and there was none]",
		},
		"no counter": {nil, []tally{run(true, 5, 1)}, "map[]", "map[]"},
	} {
		s := newSeries(inMs)
		for _, r := range tt.runs {
			s.counted(tt.c, r, false)
		}
		row := s.row("x", nil)
		if fmt.Sprint(row.Counts) != tt.counts || fmt.Sprint(row.Uncounted) != tt.without {
			t.Errorf("%s: %v without %v, want %s without %s", name, row.Counts, row.Uncounted, tt.counts, tt.without)
		}
	}
}

func TestCounter_without_permission_says_so_for_every_count(t *testing.T) {
	missing := make(chan map[string]string)
	go func() {
		// The thread loses its capabilities, and ends with this goroutine.
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			t.Error(err)
		}
		c := counting()
		defer c.close()
		s := newSeries(inMs)
		s.counted(c, c.since(c.begin(true)), true)
		row := s.row("x", nil)
		if row.Counts != nil {
			t.Errorf("counts %v", row.Counts)
		}
		missing <- row.Uncounted
	}()
	got := <-missing
	for _, name := range CountNames {
		if !strings.Contains(got[name], "permitted") && !strings.Contains(got[name], "denied") {
			t.Errorf("%s: %q", name, got[name])
		}
	}
}
