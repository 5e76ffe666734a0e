package jail

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
)

// slow gives a pace a clock that only its own waits move.
func slow(p *rpc.Pace) (slept *time.Duration) {
	slept = new(time.Duration)
	begin := time.Now()
	p.Now = func() time.Time { return begin.Add(*slept) }
	p.Sleep = func(d time.Duration) { *slept += d }
	return slept
}

func TestAttack_process_that_asks_without_end_takes_the_processors_of_its_keeper(t *testing.T) {
	j, _ := cell(t)
	const calls = 3*callBurst + callsPerSecond*7
	slept := slow(j.vm.pace)
	for range calls {
		if _, _, err := j.vm.serve(t.Context(), callFile, json.RawMessage(`{}`), nil); !errors.Is(err, unix.EACCES) {
			t.Fatal(err)
		}
	}
	// Each has two bytes, which count little.
	if want := (2*callBurst/callsPerSecond + 7) * time.Second; *slept < want-time.Second || *slept > want+time.Second {
		t.Errorf("it has waited for %v, want %v", *slept, want)
	}
	// Nor by few that take long to read.
	*slept = 0
	long := json.RawMessage(`{"op":"` + strings.Repeat("x", maxMessage-9) + `"}`)
	for range 10 {
		if _, _, err := j.vm.serve(t.Context(), callFile, long, nil); !errors.Is(err, unix.EACCES) {
			t.Fatal(err)
		}
	}
	if *slept < 5*time.Second {
		t.Errorf("with 10 MiB in ten calls it has waited for %v", *slept)
	}
}

// arrivals tells of each write.
type arrivals chan int

func (a arrivals) Write(p []byte) (int, error) {
	a <- len(p)
	return len(p), nil
}

// A process writes to its console byte by byte, and its keeper reads each by itself.
func TestAttack_console_that_is_written_byte_by_byte_takes_a_processor_of_the_keeper(t *testing.T) {
	const burst, perSecond, bytes = 100, 1000, 5000
	pace := rpc.NewPace(burst<<10, perSecond<<10)
	slept := slow(pace)
	to := make(arrivals)
	c, w, err := copyConsole(to, pace)
	if err != nil {
		t.Fatal(err)
	}
	for range bytes {
		if _, err := w.Write([]byte{'x'}); err != nil {
			t.Fatal(err)
		}
		if n := <-to; n != 1 {
			t.Fatalf("%d bytes were read at once", n)
		}
	}
	if err := errors.Join(w.Close(), c.close(time.Minute)); err != nil {
		t.Error(err)
	}
	if *slept < time.Second {
		t.Errorf("for %d reads it has waited for %v", bytes, *slept)
	}
}

func TestNames_that_a_process_may_read_are_no_more_than_its_disk_has_layers(t *testing.T) {
	g := newGrants(instance.Parts{Image: "/image", Disk: disk.Stack{Layers: []string{"/l/1", "/l/2"}}}, "")
	for range 1000 {
		g.read("/l/3")
		g.forget([]string{"/l/2", "/l/3"})
		g.read("/l/2")
	}
	if len(g.reads) != 3 || !g.mayRead("/image") || !g.mayRead("/l/2") || g.mayRead("/l/3") {
		t.Errorf("it may read %v", g.reads)
	}
}

// talk returns a confined process, in this one, and its keeper, who hears of each call and refuses it.
func talk(t *testing.T, hear func(method string)) (*rpc.Conn, *child) {
	t.Helper()
	mine, its, err := rpc.Pair()
	if err != nil {
		t.Fatal(err)
	}
	keeper, err := rpc.New(mine, options(func(_ context.Context, method string, _ []byte, files []*os.File) (any, []*os.File, error) {
		hear(method)
		return nil, nil, errors.Join(errRefused, closeAll(files))
	}))
	if err != nil {
		t.Fatal(err)
	}
	c := &child{ended: make(chan struct{}), connects: make(chan struct{}, maxConnects)}
	conn, err := rpc.New(its, options(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c.conn.Store(conn)
	close(c.connected())
	return keeper, c
}

func TestAttack_connections_of_a_guest_keep_its_process_from_asking_for_files(t *testing.T) {
	asked := make(chan string, 5*maxCalls)
	hold := make(chan struct{})
	keeper, c := talk(t, func(method string) {
		asked <- method
		if method == callConnect {
			<-hold
		}
	})
	defer keeper.Close()
	done := make(chan error, 4*maxCalls)
	for range 4 * maxCalls {
		c.connect(guest.ReadyPort, func(_ int, _ bool, err error) { done <- err })
	}
	for range maxConnects {
		<-asked
	}
	// The others wait, and a file does not.
	if _, _, err := c.askFile(fileOrder{Op: fileStat, Name: "/x"}); err == nil {
		t.Error("no keeper has refused")
	}
	if method := <-asked; method != callFile {
		t.Errorf("asked for %s", method)
	}
	close(hold)
	for range 4 * maxCalls {
		<-done
	}
}
