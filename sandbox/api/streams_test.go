package api_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

var streamCount = flag.Int("streams", 24, "how many sandboxes to have a stream each")

// used is what this process has and has used.
type used struct {
	heap, stacks     uint64
	routines, files  int
	processor, clock time.Duration
}

func usedNow(t *testing.T) (u used) {
	t.Helper()
	runtime.GC()
	runtime.GC() // what pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	var r unix.Rusage
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil || unix.Getrusage(unix.RUSAGE_SELF, &r) != nil {
		t.Fatal(err)
	}
	return used{m.HeapAlloc, m.StackInuse, runtime.NumGoroutine(), len(list), time.Duration(r.Utime.Nano() + r.Stime.Nano()), time.Duration(time.Now().UnixNano())}
}

// since describes the difference for each of n.
func (u used) since(was used, n int) string {
	per := func(a, b uint64) int64 { return (int64(a) - int64(b)) / int64(n) }
	return fmt.Sprintf("%d bytes of heap, %d of stacks, %.1f goroutines, %.1f descriptors each", per(u.heap, was.heap), per(u.stacks, was.stacks),
		float64(u.routines-was.routines)/float64(n), float64(u.files-was.files)/float64(n))
}

// mostOfStream bounds the memory of a stream with its client, the server, and the guest's part, in bytes.
const mostOfStream = 256 << 10

// Each sandbox has a process that prints without end, and a client. A tenth of the clients, ten at most, stop reading.
func TestStream_many_streams_go_on_beside_clients_that_do_not_read(t *testing.T) {
	const share, most = 1 << 20, 16 << 20 // bytes that each client must get in a phase; that a process may be ahead
	n := *streamCount
	stalled := max(1, min(10, n/10))
	s := serve(t)
	begin := make(chan struct{})
	printed := make([]atomic.Int64, n)
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, p *fakeguest.Process) int {
			i, err := strconv.Atoi(p.Args[1])
			if err != nil {
				return 2
			}
			select {
			case <-begin:
			case <-ctx.Done():
				return 1
			}
			for buf := make([]byte, 16<<10); ctx.Err() == nil; {
				k, err := p.Stdout.Write(buf)
				if printed[i].Add(int64(k)); err != nil {
					return 1
				}
			}
			return 0
		}
	})
	for i := range n {
		s.made(t, fmt.Sprintf("s%d", i))
	}
	before := usedNow(t)
	clients := make([]*stream, n)
	for i := range clients {
		clients[i] = s.dial(t, fmt.Sprintf("/v1/sandboxes/s%d/exec", i))
		clients[i].say(startOf(wire.ExecStart{Command: []string{"run", strconv.Itoa(i)}}))
		clients[i].started()
	}
	idle := usedNow(t)
	t.Logf("%d idle streams, with their clients and guests: %s", n, idle.since(before, n))
	if each := (int64(idle.heap+idle.stacks) - int64(before.heap+before.stacks)) / int64(n); each > mostOfStream {
		t.Errorf("an idle stream has %d bytes, want at most %d", each, mostOfStream)
	}
	read := make([]atomic.Int64, n)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	gets := func(i int, bytes int64) error {
		buf := make([]byte, 64<<10)
		for want := read[i].Load() + bytes; read[i].Load() < want; {
			_, r, err := clients[i].Reader(ctx)
			if err != nil {
				return err
			}
			for err == nil {
				var k int
				k, err = r.Read(buf)
				read[i].Add(int64(k))
			}
		}
		return nil
	}
	phase := func(what string, from int) {
		was := usedNow(t)
		base := make([]int64, n)
		for i := range base {
			base[i] = read[i].Load()
		}
		var all sync.WaitGroup
		var first sync.Once
		var shares []int64 // of all, when the first has its own
		for i := from; i < n; i++ {
			all.Go(func() {
				if err := gets(i, share); err != nil {
					t.Errorf("stream %d: %v", i, err)
				}
				first.Do(func() {
					for j := from; j < n; j++ {
						shares = append(shares, read[j].Load()-base[j])
					}
				})
			})
		}
		all.Wait()
		now := usedNow(t)
		slices.Sort(shares)
		mib, took := float64(n-from)*share/(1<<20), (now.clock - was.clock).Seconds()
		t.Logf("%s: %.0f MiB in %.2f s, %.1f MiB/s, %.1f ms of processor for each MiB; when the first had its %d KiB, the others had %d to %d KiB, p10 %d, median %d; heap %+d KiB",
			what, mib, took, mib/took, (now.processor-was.processor).Seconds()*1000/mib, share>>10, shares[0]>>10, shares[len(shares)-1]>>10,
			shares[len(shares)/10]>>10, shares[len(shares)/2]>>10, (int64(now.heap)-int64(was.heap))>>10)
	}
	close(begin)
	phase("all clients read", 0)
	phase(fmt.Sprintf("%d do not read", stalled), stalled)
	phase("and later", stalled)
	for i := range stalled {
		if ahead := printed[i].Load() - read[i].Load(); ahead > most {
			t.Errorf("process %d is %d bytes ahead of its client, which does not read: want at most %d", i, ahead, most)
		} else {
			t.Logf("process %d is %d KiB ahead of its client", i, ahead>>10)
		}
	}
	full := usedNow(t)
	t.Logf("%d streams of which %d wait for their clients: %s", n, n, full.since(before, n))
	if each := (int64(full.heap+full.stacks) - int64(before.heap+before.stacks)) / int64(n); each > 4*mostOfStream {
		t.Errorf("a stream whose client does not read has %d bytes, want at most %d", each, 4*mostOfStream)
	}
	// Who has stalled goes on where it was.
	if err := gets(0, 2*share); err != nil {
		t.Error(err)
	}
	cancel()
	for _, c := range clients {
		_ = c.CloseNow()
	}
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		left := usedNow(t)
		if left.routines <= before.routines+5 && left.files <= before.files+5 {
			t.Logf("after all: %s", left.since(before, n))
			break
		}
		if time.Since(begun) > time.Minute {
			t.Fatalf("it leaves %s", left.since(before, n))
		}
	}
}
