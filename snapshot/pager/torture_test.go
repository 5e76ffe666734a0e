package pager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// childEnv makes the test binary run one of the torture children instead of the tests. Its value is the child's
// name and the snapshot's directory.
const childEnv = "DROWSE_PAGER_TORTURE"

// collecting is what a child prints before it starts the collector while a page is awaited.
const collecting = "collecting\n"

// collected ends the names of children that run the collector. The others run without any collection.
const collected = " while the collector runs"

func childMain() (code int, ok bool) {
	name, dir, ok := strings.Cut(os.Getenv(childEnv), ":")
	if !ok {
		return 0, false
	}
	if err := torture(name, dir); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1, true
	}
	return 0, true
}

// torture touches all of a restored RAM in the way that name gives: by the rule of package guestmem, or against
// it.
func torture(name, dir string) error {
	t := &childT{}
	s := openSnapshot(t, dir)
	p, mem := newPagerFor(t, s, Options{})
	o := newToucher(t)
	name, collect := strings.CutSuffix(name, collected)
	name, protected := strings.CutPrefix(name, frozenRAM)
	read := func() error { return nil }
	if protected {
		var err error
		if read, err = protectForTorture(p, mem); err != nil {
			return err
		}
	}
	touch := map[string]func(page uint64, b []byte) error{
		"Read":        func(page uint64, b []byte) error { return mem.Read(guestmem.GPA(page*pageSize), b) },
		"Write":       func(page uint64, b []byte) error { return mem.Write(guestmem.GPA(page*pageSize+8), b[:8]) },
		"system call": func(page uint64, b []byte) error { return o.read(mem, guestmem.GPA(page*pageSize), b) },
		"copy without Ensure": func(page uint64, b []byte) error {
			copy(b, rawPage(mem, page))
			return nil
		},
		"StoreUint16": func(page uint64, _ []byte) error { return mem.StoreUint16(guestmem.GPA(page*pageSize+8), 7) },
		"write by a system call": func(page uint64, b []byte) error {
			return o.write(mem, guestmem.GPA(page*pageSize), b)
		},
		"copy without asking": func(page uint64, b []byte) error {
			copy(rawPage(mem, page), b)
			return nil
		},
	}[name]
	if touch == nil {
		return errors.New("no such child: " + name)
	}
	if err := collectDuringFault(p, touch, collect); err != nil {
		return err
	}
	if !collect {
		return p.Close()
	}
	var stop atomic.Bool
	var collector, touchers sync.WaitGroup
	collector.Go(func() {
		for !stop.Load() {
			runtime.GC()
		}
	})
	errs := make(chan error, 3)
	touchers.Go(func() { errs <- read() })
	for k := range uint64(2) {
		touchers.Go(func() {
			b := make([]byte, pageSize)
			for page := k; page < 3000; page += 2 {
				if err := touch(page, b); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	touchers.Wait()
	stop.Store(true)
	collector.Wait()
	close(errs)
	err := p.Close()
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}

// frozenRAM begins the names of children that touch pages which are all present but write-protected. There is room
// for few copies, so a reader must make progress.
const frozenRAM = "frozen, "

func protectForTorture(p *Pager, mem *guestmem.Memory) (read func() error, err error) {
	if err := p.Load(context.Background()); err != nil {
		return nil, err
	}
	f, err := Prepare(mem, p, FreezeOptions{CopyBytes: MinCopyBytes})
	if err != nil {
		return nil, err
	}
	set := guestmem.NewPageSet(mem.Size() / pageSize)
	set.Add(0, 3000)
	if err := f.Freeze(set); err != nil {
		return nil, err
	}
	if !f.Stats().Protected {
		return nil, errors.New("everything was copied")
	}
	return func() error {
		b := make([]byte, pageSize)
		for page := uint64(0); ; page++ {
			first, end, err := f.NextData(page)
			if err != nil || first == end {
				return err
			}
			page = first
			if err := f.ReadPages(page, b); err != nil {
				return err
			}
			f.Release(page, page+1)
		}
	}, nil
}

// collectDuringFault runs the collector at the moment when a page is awaited, and only then lets the pager work.
func collectDuringFault(p *Pager, touch func(uint64, []byte) error, collect bool) error {
	touched := make(chan error, 1)
	go func() { touched <- touch(1, make([]byte, pageSize)) }()
	fds := []unix.PollFd{{Fd: int32(p.uffd), Events: unix.POLLIN}}
	for fds[0].Revents == 0 {
		select {
		case err := <-touched: // no fault: Ensure has loaded the page
			p.Start()
			return err
		default:
		}
		if _, err := unix.Poll(fds, 1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	if collect {
		os.Stdout.WriteString(collecting)
		runtime.GC()
	}
	p.Start()
	return <-touched
}

func TestThe_collector_and_the_pager_do_not_wait_for_each_other(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	newPagerFor(t, openSnapshot(t, dir), Options{}) // skips where there is no userfaultfd
	const tries = 3
	run := func(name string, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+name+":"+dir)
		if !strings.HasSuffix(name, collected) {
			cmd.Env = append(cmd.Env, "GOGC=off")
		}
		out, err := cmd.CombinedOutput()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	for _, name := range []string{
		"Read" + collected, "Write" + collected, "system call" + collected, "copy without Ensure",
		frozenRAM + "Read" + collected, frozenRAM + "Write" + collected, frozenRAM + "StoreUint16" + collected,
		frozenRAM + "write by a system call" + collected, frozenRAM + "copy without asking",
	} {
		t.Run(name+" passes", func(t *testing.T) {
			for i := range tries {
				if err := run(name, time.Minute); err != nil {
					t.Fatalf("try %d of %d: %v", i+1, tries, err)
				}
			}
		})
	}
	for _, name := range []string{"copy without Ensure" + collected, frozenRAM + "copy without asking" + collected} {
		t.Run(name+" hangs", func(t *testing.T) {
			var hung atomic.Int32
			var wg sync.WaitGroup
			for range tries {
				wg.Go(func() {
					if err := hangs(name, dir); err != nil {
						t.Log(err)
					} else {
						hung.Add(1)
					}
				})
			}
			wg.Wait()
			if n := hung.Load(); n != tries {
				t.Errorf("the rule was broken %d times and only %d hung: this test does not show any more what the rule is for", tries, n)
			}
		})
	}
}

// hangs returns an error if a child does not hang from the moment at which it starts the collector.
func hangs(name, dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	// Only the child's own collection may run: one that comes by itself would hang it earlier.
	cmd.Env = append(os.Environ(), childEnv+"="+name+":"+dir, "GOGC=off")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := io.ReadFull(out, make([]byte, len(collecting))); err != nil {
		return errors.Join(fmt.Errorf("it did not come as far as the collector: %w", err), cmd.Wait())
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return fmt.Errorf("it ended: %v", err)
	case <-time.After(4 * time.Second):
		cancel()
		<-done
		return nil
	}
}

// childT stands in for testing.TB in a child process.
type childT struct{ testing.TB }

func (*childT) Helper()                          {}
func (*childT) Cleanup(func())                   {}
func (*childT) Fatal(args ...any)                { panic(args) }
func (*childT) Skipf(format string, args ...any) { panic(format) }
