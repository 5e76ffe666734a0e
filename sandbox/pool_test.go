package sandbox_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestNewPool_of_what_cannot_be_is_refused(t *testing.T) {
	t.Parallel()
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := pool.Launcher{Command: []string{"/bin/false"}}
	fits := spec.Shape{MemoryMiB: 256, VCPUs: 1}
	for name, o := range map[string]pool.Options{
		"no process":     {Shapes: []spec.Shape{fits}},
		"too many":       {Shapes: []spec.Shape{fits}, Processes: pool.MaxSize + 1},
		"no shape":       {Processes: 1},
		"too little RAM": {Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 1, VCPUs: 1}}},
		"too many vCPUs": {Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 256, VCPUs: 1000}}},
	} {
		if _, err := pool.New(s.State, l, o); !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
	if _, err := pool.New(s.State, pool.Launcher{}, pool.Options{Processes: 1, Shapes: []spec.Shape{fits}}); err == nil {
		t.Error("a pool without a program was made")
	}
}

func TestPool_whose_processes_fail_says_why(t *testing.T) {
	t.Parallel()
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ script, want string }{
		"it ends":               {"echo out of luck >&2; exit 1", "out of luck"},
		"it is another program": {"echo -n hello >&3; read line <&3", "hello"},
	} {
		t.Run(name, func(t *testing.T) {
			l := pool.Launcher{Command: []string{"/bin/sh", "-c", tc.script, "sh"}}
			p, err := pool.New(s.State, l, pool.Options{Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 256, VCPUs: 1}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
			if st := p.Stats(); st.Failed == 0 || st.Ready != 0 || st.Size != 1 {
				t.Errorf("it counts %+v", st)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if err := p.Wait(t.Context()); !errors.Is(err, net.ErrClosed) {
				t.Errorf("waiting for a closed pool: got %v, want net.ErrClosed", err)
			}
		})
	}
}

func TestPool_Wait_ends_with_its_context(t *testing.T) {
	t.Parallel()
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := pool.Launcher{Command: []string{"/bin/sh", "-c", "read line <&3", "sh"}}
	p, err := pool.New(s.State, l, pool.Options{Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 256, VCPUs: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	// Close comes while the pool makes a process.
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
