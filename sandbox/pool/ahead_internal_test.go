package pool

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/state"
)

// severalCPUs skips a test on a host where Ahead has no processor for another process.
func severalCPUs(t *testing.T) {
	t.Helper()
	if runtime.NumCPU() < 2 {
		t.Skip("with one processor nothing is made ahead")
	}
}

func TestAhead_gives_each_VM_one_process_and_ends_the_others(t *testing.T) {
	severalCPUs(t)
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	shape, pids := oneShape()[0], filepath.Join(t.TempDir(), "pids")
	l := shellLauncher("echo $$ >> " + pids + "; " + standsBy)
	with, done := Ahead(t.Context(), s, l, shape, 1)
	from, started := standbys(s, with)
	first, second := from(shape), from(shape)
	started()
	done()
	if first == nil || !first.own || first.shape != shape {
		t.Fatalf("the first VM got %+v", first)
	}
	if second != nil {
		t.Errorf("the second VM got %+v, which nobody has made", second)
	}
	if err := unix.Kill(first.pid, 0); err != nil {
		t.Errorf("the process of the first VM has ended with the others: %v", err)
	}
	first.end()
	_, done = Ahead(t.Context(), s, l, shape, 1)
	eventually(t, "a process has started", func() bool {
		text, err := os.ReadFile(pids)
		return err == nil && bytes.Count(text, []byte("\n")) == 2
	})
	done()
	text, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range strings.Fields(string(text)) {
		if _, err := os.Stat("/proc/" + pid); err == nil {
			t.Errorf("process %s runs on, and nobody has it", pid)
		}
	}
}

func TestAhead_takes_what_a_pool_has(t *testing.T) {
	severalCPUs(t)
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := shellLauncher(standsBy)
	l.Supervised = true
	p := servePool(t, s, l, Options{Processes: 1, Shapes: oneShape()})
	pids := p.PIDs()
	with, done := Ahead(t.Context(), s, l, oneShape()[0], 1)
	defer done()
	from, started := standbys(s, with)
	defer started()
	if got := from(oneShape()[0]); got == nil || got.own || got.pid != pids[0] {
		t.Errorf("got %+v, want process %d of the pool", got, pids[0])
	} else {
		got.end()
		got.close()
	}
}

func TestAhead_that_fails_leaves_it_to_the_VM_to_start_a_process(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx context.Context
		l   Launcher
	}{
		"a program that ends":    {t.Context(), shellLauncher("exit 1")},
		"a program that is none": {t.Context(), Launcher{Command: []string{"/nonexistent"}}},
		"no program":             {t.Context(), Launcher{}},
		"a canceled fork":        {canceled, shellLauncher("exec sleep 1000")},
	} {
		t.Run(name, func(t *testing.T) {
			l, done := Ahead(tc.ctx, s, tc.l, oneShape()[0], 2)
			defer done()
			from, started := standbys(s, l)
			defer started()
			for range 3 {
				if got := from(oneShape()[0]); got != nil {
					t.Errorf("a VM got %+v", got)
				}
			}
		})
	}
}
