package limits

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/vmm"
)

// The ledger of the host's memory is the file memory.lock. Each awake VM locks one byte per MiB of its RAM in it
// (fcntl(2), open file description locks). The file stays empty and needs no cleanup: the kernel ends the locks of
// a dead process. Beyond the bytes of memory there are three more.
const (
	memoryLedger = "memory.lock"

	ledgerMemory = int64(1) << 40 // bytes of memory are below this
	ledgerTake   = ledgerMemory   // held while bytes are searched and locked
	ledgerWakes  = ledgerMemory + 1
	ledgerBoots  = ledgerMemory + 2 // these two are held by the first waiter, behind which others queue

	// A waiter polls after an eighth of its waiting time so far, within these bounds.
	minLedgerPoll, maxLedgerPoll = 200 * time.Microsecond, 10 * time.Millisecond
)

// AdmitMemory waits until the host has room for an awake VM of mib MiB, and takes it until release is called or
// this process has ended. A wake may use the reserve for wakes, and does not wait behind boots. Waiters of one
// kind are served in order of arrival. AdmitMemory fails with vmm.ErrHostMemory if there is no room after
// MemoryWaitSeconds or can never be, and with the cause of ctx.
func AdmitMemory(ctx context.Context, dir string, mib int, wake bool) (release func() error, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("waiting for %d MiB of the host's memory: %w", mib, err)
		}
	}()
	limits, err := Read(dir)
	if err != nil {
		return nil, err
	}
	capacity, err := limits.memory()
	if err != nil {
		return nil, err
	}
	queue := ledgerWakes
	if !wake {
		capacity, queue = capacity*int64(100-limits.WakeReservePercent)/100, ledgerBoots
	}
	if int64(mib) > capacity {
		return nil, fmt.Errorf("%w: all that awake VMs may have is %d MiB: give the VM less, or raise the limit with Limits.Write", vmm.ErrHostMemory, capacity)
	}
	l, err := openLedger(filepath.Join(dir, memoryLedger))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.f.Close())
		}
	}()
	full := fmt.Errorf("%w: awake VMs have %d MiB at most, the host needs %d available, and no room came in %d s: put some to sleep, or raise the limits with Limits.Write",
		vmm.ErrHostMemory, capacity, memoryFloor>>20, limits.MemoryWaitSeconds)
	wait, cancel := context.WithTimeoutCause(ctx, time.Duration(limits.MemoryWaitSeconds)*time.Second, full)
	defer cancel()
	if err := l.await(wait, func() (bool, error) { return l.lock(queue, 1) }); err != nil {
		return nil, err
	}
	if err := l.await(wait, func() (bool, error) { return l.take(int64(mib), capacity) }); err != nil {
		return nil, err
	}
	if err := l.unlock(queue, 1); err != nil {
		return nil, err
	}
	return l.f.Close, nil
}

// AwakeMemory returns how many MiB of RAM awake VMs have, and how many they may have.
func AwakeMemory(dir string) (used, capacity int64, err error) {
	limits, err := Read(dir)
	if err != nil {
		return 0, 0, err
	}
	if capacity, err = limits.memory(); err != nil {
		return 0, 0, err
	}
	l, err := openLedger(filepath.Join(dir, memoryLedger))
	if err != nil {
		return 0, 0, err
	}
	defer l.f.Close()
	for at := int64(0); at < ledgerMemory; {
		begin, after, err := l.taken(at, ledgerMemory)
		if err != nil {
			return 0, 0, err
		}
		used += after - begin
		at = after
	}
	return used, capacity, nil
}

// memory returns how many MiB awake VMs may have.
func (l Limits) memory() (int64, error) {
	total, err := vmm.HostMemory()
	return int64(float64(total>>20) * l.MemoryOvercommit), err
}

func openLedger(path string) (*ledger, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &ledger{f}, nil
}

// ledger is an open file of the ledger. Its locks belong to the file.
type ledger struct{ f *os.File }

// await calls try until it returns true.
func (l *ledger) await(ctx context.Context, try func() (bool, error)) error {
	for begin := time.Now(); ; {
		if ok, err := try(); ok || err != nil {
			return err
		}
		if wait.For(ctx, min(max(time.Since(begin)/8, minLedgerPoll), maxLedgerPoll)) != nil {
			return context.Cause(ctx)
		}
	}
}

// take locks n free bytes below capacity, wherever they are, or none. The host must have memory available as well.
func (l *ledger) take(n, capacity int64) (ok bool, err error) {
	if free, err := AvailableMemory(); err != nil || free < memoryFloor {
		return false, err
	}
	if ok, err := l.lock(ledgerTake, 1); err != nil || !ok {
		return false, err
	}
	defer func() {
		if !ok {
			err = errors.Join(err, l.unlock(0, ledgerMemory))
		}
		err = errors.Join(err, l.unlock(ledgerTake, 1))
	}()
	for at := int64(0); n > 0 && at < capacity; {
		next, after, err := l.taken(at, capacity)
		if err != nil {
			return false, err
		}
		if size := min(n, next-at); size > 0 {
			if ok, err := l.lock(at, size); err != nil || !ok {
				return false, err
			}
			n -= size
		}
		at = after
	}
	return n == 0, nil
}

// taken finds the first bytes from at on that other files have locked; begin is end if there are none. The kernel
// reports some locked bytes, not the first.
func (l *ledger) taken(at, end int64) (begin, after int64, err error) {
	for begin, after = end, end; begin > at; {
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: begin - at}
		if err := l.control(unix.F_OFD_GETLK, &lock); err != nil {
			return 0, 0, err
		}
		if lock.Type == unix.F_UNLCK {
			break
		}
		begin, after = max(lock.Start, at), min(lock.Start+lock.Len, end)
	}
	return begin, after, nil
}

// lock locks bytes, unless another file has locked some of them.
func (l *ledger) lock(at, n int64) (bool, error) {
	err := l.control(unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: n})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, err
}

func (l *ledger) unlock(at, n int64) error {
	return l.control(unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: at, Len: n})
}

func (l *ledger) control(cmd int, lock *unix.Flock_t) error {
	for {
		err := unix.FcntlFlock(l.f.Fd(), cmd, lock)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			return &fs.PathError{Op: "lock", Path: l.f.Name(), Err: err}
		}
		return err
	}
}

// memoryFloor is what the host must have available to start a VM: what wakes and boots touch at once, and a margin
// that keeps the host from killing processes for memory.
const memoryFloor = 128 << 20

// AvailableMemory returns how many bytes of memory programs can have without swapping (MemAvailable, proc_meminfo(5));
// math.MaxInt64 if the kernel does not say.
func AvailableMemory() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 53)
			if err != nil {
				return 0, fmt.Errorf("reading /proc/meminfo: %w", err)
			}
			return kib << 10, nil
		}
	}
	return math.MaxInt64, lines.Err() // a kernel before 3.14
}
