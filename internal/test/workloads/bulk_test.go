//go:build workloads

package workloads

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
)

var (
	bulkMiB   = flag.Int64("bulk-mib", 1024, "copy a file of so many MiB into a guest and out of it, and have one print as much")
	bulkExecs = flag.Int("bulk-execs", 100, "so many commands at once")
)

const (
	bulkVM    = "bulk"
	neighbour = "neighbour"

	// maxGrowth bounds the growth of the client and the VM's process while a command prints, in MiB. It is far
	// less than the command prints.
	maxGrowth = 64
)

// resident samples the memory of processes, in MiB. end returns the first values and the highest ones.
func resident(t *testing.T, pids ...int) (end func() (before, peak []int)) {
	t.Helper()
	now := func(pid int) int {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Errorf("the memory of process %d: %v", pid, err)
			return 0
		}
		_, rest, _ := strings.Cut(string(b), "VmRSS:")
		kib, err := strconv.Atoi(strings.Fields(rest)[0])
		if err != nil {
			t.Errorf("the memory of process %d: %v", pid, err)
		}
		return kib >> 10
	}
	var before []int
	for _, pid := range pids {
		before = append(before, now(pid))
	}
	peak := slices.Clone(before)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			for i, pid := range pids {
				peak[i] = max(peak[i], now(pid))
			}
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	return func() ([]int, []int) { close(stop); <-done; return before, peak }
}

// The agent of a real guest carries bulk data. Package guest has the same test with client and agent on the host.
func TestAgent_of_a_guest_carries_in_bulk(t *testing.T) {
	e := guesttest.New(t)
	size := *bulkMiB << 20
	e.Run(sandbox.Spec{Name: bulkVM, MemoryMiB: 512, DiskMiB: int(*bulkMiB) + 4096})
	res := e.Sleep(bulkVM)
	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), res.Snapshot, sandbox.CloneOptions{Name: neighbour}); err != nil {
		t.Fatal(err)
	}
	e.Wake(bulkVM)
	r, err := e.Store.State.Get(bulkVM)
	if err != nil {
		t.Fatal(err)
	}
	pids := []int{os.Getpid(), r.PID}
	rate := func(what string, begin time.Time) {
		took := time.Since(begin).Seconds()
		t.Logf("%s: %d MiB in %.1f s, %.1f MiB/s", what, *bulkMiB, took, float64(*bulkMiB)/took)
	}

	dir := t.TempDir()
	src, back := filepath.Join(dir, "src"), filepath.Join(dir, "back")
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	_, err = io.CopyN(io.MultiWriter(f, h), rand.NewChaCha8([32]byte{2}), size)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%x", h.Sum(nil))
	t.Run("a file is copied in and out", func(t *testing.T) {
		end := resident(t, pids[0])
		begin := time.Now()
		if _, err := e.Agent(bulkVM).CopyIn(t.Context(), src, "/root/big", guest.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
		rate("copied in", begin)
		if got, _, _ := strings.Cut(e.Sh(bulkVM, "sha256sum /root/big"), " "); got != want {
			t.Errorf("the guest has SHA-256 %s, want %s", got, want)
		}
		begin = time.Now()
		if _, err := e.Agent(bulkVM).CopyOut(t.Context(), "/root/big", back, guest.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
		rate("copied out", begin)
		f, err := os.Open(back)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil || fmt.Sprintf("%x", h.Sum(nil)) != want {
			t.Errorf("what came back has SHA-256 %x, want %s, %v", h.Sum(nil), want, err)
		}
		before, peak := end()
		t.Logf("the client's process: %d MiB before, at most %d", before[0], peak[0])
		if peak[0] > before[0]+maxGrowth {
			t.Errorf("the client grew by %d MiB, more than %d", peak[0]-before[0], maxGrowth)
		}
		if err := errors.Join(os.Remove(back), os.Remove(src)); err != nil {
			t.Error(err)
		}
		e.Sh(bulkVM, "rm /root/big")
	})

	t.Run("many commands at once", func(t *testing.T) {
		c := e.Agent(bulkVM)
		begin := time.Now()
		var all sync.WaitGroup
		for i := range *bulkExecs {
			all.Go(func() {
				var out bytes.Buffer
				cmd := guest.Cmd{Argv: []string{"/bin/sh", "-c", fmt.Sprintf("echo $((%d * %d)); cat; exit %d", i, i, i%100)}}
				cmd.Stdin, cmd.Stdout = strings.NewReader(strconv.Itoa(i)), &out
				st, err := c.Exec(t.Context(), cmd)
				var exit *guest.ExitError
				if err != nil && !errors.As(err, &exit) || st == nil || st.Code != i%100 || out.String() != fmt.Sprintf("%d\n%d", i*i, i) {
					t.Errorf("command %d: %+v, %q, %v", i, st, out.String(), err)
				}
			})
		}
		all.Wait()
		t.Logf("%d commands in %.1f s", *bulkExecs, time.Since(begin).Seconds())
	})

	t.Run("a command that prints without end takes no memory of the host", func(t *testing.T) {
		// The first run takes memory that it keeps.
		e.Sh(bulkVM, "head -c 1048576 /dev/zero | wc -c")
		end := resident(t, pids...)
		begin := time.Now()
		var n atomic.Int64
		cmd := guest.Cmd{Argv: []string{"head", "-c", strconv.FormatInt(size, 10), "/dev/zero"}}
		cmd.Stdout = writerFunc(func(p []byte) (int, error) {
			if len(bytes.TrimLeft(p, "\x00")) > 0 {
				return 0, errors.New("it printed something else")
			}
			n.Add(int64(len(p)))
			return len(p), nil
		})
		if _, err := e.Agent(bulkVM).Exec(t.Context(), cmd); err != nil || n.Load() != size {
			t.Errorf("%d of %d bytes, %v", n.Load(), size, err)
		}
		rate("printed", begin)
		before, peak := end()
		for i, who := range []string{"client", "VM's process"} {
			t.Logf("the %s: %d MiB before, at most %d", who, before[i], peak[i])
			if peak[i] > before[i]+maxGrowth {
				t.Errorf("the %s grew by %d MiB, more than %d", who, peak[i]-before[i], maxGrowth)
			}
		}
	})

	t.Run("a guest that floods and stalls all streams harms nobody", func(t *testing.T) {
		e.Sh(neighbour, "true")
		alone := answerTimes(t, e, neighbour)
		end := resident(t, pids...)
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		c := e.Agent(bulkVM)
		const streams = 16
		for i := range streams {
			begun := make(chan struct{}, 1)
			var out io.Writer = writerFunc(func(p []byte) (int, error) {
				select {
				case begun <- struct{}{}:
				default:
				}
				if i%2 == 0 {
					<-ctx.Done() // the reader stalls
				}
				return len(p), nil
			})
			all.Go(func() {
				cmd := guest.Cmd{Argv: []string{"/bin/sh", "-c", "yes & yes >&2"}}
				cmd.Stdout, cmd.Stderr = out, out
				if _, err := c.Exec(ctx, cmd); !errors.Is(err, context.Canceled) {
					t.Errorf("stream %d: %v", i, err)
				}
			})
			select {
			case <-begun:
			case <-time.After(answerLimit):
				t.Errorf("stream %d does not begin", i)
			}
		}
		beside := answerTimes(t, e, neighbour)
		own := answerTimes(t, e, bulkVM)
		stop()
		all.Wait()
		before, peak := end()
		t.Logf("a command of the neighbour: %v alone, %v beside %d streams; in the guest itself: %v", alone, beside, streams, own)
		for i, who := range []string{"client", "VM's process"} {
			t.Logf("the %s: %d MiB before, at most %d", who, before[i], peak[i])
			if peak[i] > before[i]+maxGrowth {
				t.Errorf("the %s grew by %d MiB, more than %d", who, peak[i]-before[i], maxGrowth)
			}
		}
		// The flood takes at most one processor for each vCPU and each reader. The rest is shared.
		if beside > 20*alone {
			t.Errorf("a neighbour's command takes %v, %v alone", beside, alone)
		}
		e.Sh(bulkVM, "pkill yes; true")
		if got := e.Sh(bulkVM, "echo still here"); got != "still here" {
			t.Errorf("afterwards it says %q", got)
		}
	})
	e.Sleep(bulkVM)
	e.Wake(bulkVM)
	e.Sh(bulkVM, "true")
}

// answerTimes returns the median time of a command in a VM.
func answerTimes(t *testing.T, e *guesttest.Env, name string) time.Duration {
	t.Helper()
	var all []time.Duration
	for range 5 {
		begin := time.Now()
		e.Sh(name, "true")
		all = append(all, time.Since(begin))
	}
	slices.Sort(all)
	return all[len(all)/2].Round(time.Millisecond)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
