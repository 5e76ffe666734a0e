package pool

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

// starting is a fake process that has to start a VM.
type starting struct {
	report *os.File
	ended  chan struct{}
	killed bool
}

func (p *starting) Kill() error {
	if !p.killed {
		p.killed = true
		p.report.Close()
		close(p.ended)
	}
	return nil
}

func (p *starting) Close() error { return nil }

func (p *starting) Wait(atMost time.Duration) bool {
	limit := make(<-chan time.Time)
	if atMost > 0 {
		limit = time.After(atMost)
	}
	select {
	case <-p.ended:
		return true
	case <-limit:
		return false
	}
}

// A canceled wake must not kill a VM that others already use.
func TestLaunch_that_is_called_off_kills_only_what_nobody_else_can_use(t *testing.T) {
	limit := cancelTime
	cancelTime = 200 * time.Millisecond
	t.Cleanup(func() { cancelTime = limit })
	for _, c := range []struct {
		name   string
		shared bool
		do     func(t *testing.T, s *state.Store, p *starting) // after its report lost its reader
		killed bool
	}{
		{"it notices and gives up", true, func(_ *testing.T, _ *state.Store, p *starting) { close(p.ended) }, false},
		{"the VM runs already", true, func(t *testing.T, s *state.Store, _ *starting) {
			r, err := s.Load("a")
			if err == nil {
				r.Phase = state.Running
				err = s.Save(r)
			}
			if err != nil {
				t.Error(err)
			}
		}, false},
		{"it does not notice", true, func(*testing.T, *state.Store, *starting) {}, true},
		{"a new VM", false, func(*testing.T, *state.Store, *starting) {}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := statetest.TempStore(t)
			statetest.WithMetadata(t, s, "a", state.Asleep, nil)
			// A running VM holds the lock. Without it the record is that of a crashed VM.
			l, err := s.Lock("a")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release()
			log, err := os.Create(s.ProcessLog("a"))
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			ctx, cancel := context.WithCancel(t.Context())
			p := &starting{ended: make(chan struct{})}
			did := make(chan struct{})
			_, err = launchBy(ctx, s, control.Order{Name: "a", Shared: c.shared}, log, nil, func(_ control.Order, files []*os.File) (Process, error) {
				n, err := unix.FcntlInt(files[1].Fd(), unix.F_DUPFD_CLOEXEC, 0)
				if err != nil {
					return nil, err
				}
				fd := os.NewFile(uintptr(n), "report")
				p.report = fd
				go func() {
					defer close(did)
					cancel()
					for c.shared && control.HasReader(fd) {
						time.Sleep(time.Millisecond)
					}
					c.do(t, s, p)
				}()
				return p, nil
			})
			<-did
			if !errors.Is(err, context.Canceled) || p.killed != c.killed {
				t.Errorf("it has ended with %v, killed: %v", err, p.killed)
			}
			if !p.killed {
				p.report.Close()
			}
		})
	}
}

func TestOrder_is_not_told_whether_it_is_shared(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(control.Order{Name: "a", Shared: true})
	if err != nil || string(b) != `{"name":"a"}` {
		t.Errorf("%s, %v", b, err)
	}
}
