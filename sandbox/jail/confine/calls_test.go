package confine

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/i386"
)

// lastCall is above all numbers of system calls.
const lastCall = 480

// mark is an errno that no system call returns. In a test, it is the filter's answer instead of a kill.
const mark = 4000

// harmful are allowed calls that end the caller, whatever their arguments.
var harmful = []uintptr{unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_RT_SIGRETURN}

// unfiltered are uretprobe and uprobe, which Linux shows to no filter (kernel/seccomp.c, seccomp_uprobe_exception).
// They do nothing outside a trampoline of the kernel's: the first ends in SIGILL, the second in ENXIO.
var unfiltered = []uintptr{335, 336}

func init() {
	roles["sweep"] = sweep
	roles["i386"] = func([]string) { fmt.Println(i386.Call(20, 0, 0, 0)) } // getpid
	roles["kill"] = func(args []string) {
		nr, err := strconv.ParseUint(args[1], 10, 64)
		if err != nil {
			fatal(err)
		}
		if err := Lock(LockOptions{}); err != nil {
			fatal(err)
		}
		if args[0] == "i386" {
			i386.Call(uint32(nr), ^uint32(0), ^uint32(0), ^uint32(0))
		} else {
			unix.RawSyscall6(uintptr(nr), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0))
		}
		fmt.Println("it has gone on")
	}
}

// abi32 returns "i386" if this host's kernel has that ABI, without which interrupt 0x80 is a fault.
var abi32 = sync.OnceValue(func() string {
	if _, err := run("i386"); err != nil {
		return ""
	}
	return "i386"
})

// permits is what the list means, in plain Go.
func permits(groups []group, nr uintptr, args [6]uint64) bool {
	for _, g := range groups {
		found := false // alternatives are in one group
	calls:
		for _, c := range g.calls {
			if c.nr != nr {
				continue
			}
			found = true
			for _, k := range c.checks {
				a := args[k.arg]
				if k.is == nil && a > uint64(k.max) || k.is != nil && !slices.ContainsFunc(k.is, func(v value) bool { return v.n == a }) {
					continue calls
				}
			}
			return g.errno == 0
		}
		if found {
			return false
		}
	}
	return false
}

// hostile returns arguments to try with a system call: all bits, none, and for each check each value with a bit in the
// upper half, its neighbours, and the value itself.
func hostile(groups []group, nr uintptr) [][6]uint64 {
	ones := [6]uint64{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}
	out := [][6]uint64{ones, {}}
	for _, g := range groups {
		for _, c := range g.calls {
			if c.nr != nr || len(c.checks) == 0 {
				continue
			}
			good := ones
			for _, k := range c.checks {
				good[k.arg] = uint64(k.max)
				if k.is != nil {
					good[k.arg] = k.is[0].n
				}
			}
			for _, k := range c.checks {
				values := []uint64{uint64(k.max)}
				for _, v := range k.is {
					values = append(values, v.n)
				}
				for _, v := range values {
					for _, a := range []uint64{v, v | 1<<32, v | 1<<63, v + 1, v - 1, v ^ 1<<31} {
						x := good
						x[k.arg] = a
						out = append(out, x)
					}
				}
			}
		}
	}
	return out
}

// sweep tries all system calls and prints those that the filter does not do as the list says.
func sweep(args []string) {
	o := entered()
	groups := allowed(os.Getpid(), o)
	if err := lock(o, unix.SECCOMP_RET_ERRNO|mark); err != nil {
		fatal(err)
	}
	var out strings.Builder
	var tried, refused, permitted, wrong int
	judge := func(abi string, nr uintptr, args [6]uint64, want bool, errno int) {
		tried++
		got := errno != mark
		if got {
			permitted++
		} else {
			refused++
		}
		if got != want {
			wrong++
			if wrong < 20 {
				fmt.Fprintf(&out, "%s %d %#x: allowed %v, want %v (errno %d)\n", abi, nr, args, got, want, errno)
			}
		}
	}
	for nr := uintptr(0); nr < lastCall; nr++ {
		if slices.Contains(harmful, nr) || slices.Contains(unfiltered, nr) {
			continue
		}
		for _, a := range hostile(groups, nr) {
			may := permits(groups, nr, a)
			if may && nr == unix.SYS_CLONE {
				continue // a thread without a stack
			}
			_, _, errno := unix.RawSyscall6(nr, uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5]))
			if nr == unix.SYS_SENDFILE || nr == unix.SYS_SPLICE || o.Network && nr == unix.SYS_PIPE2 {
				if may = errno == unix.ENOSYS; !may {
					errno = 0
				}
				may = true
			}
			judge("x86-64", nr, a, may, int(errno))
		}
	}
	for nr := uintptr(x32); nr < x32+lastCall+100; nr++ {
		_, _, errno := unix.RawSyscall6(nr, ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0))
		judge("x32", nr, [6]uint64{}, false, int(errno))
	}
	for nr := uint32(0); nr < lastCall && args[0] == "i386"; nr++ {
		judge("i386", uintptr(nr), [6]uint64{}, false, int(-i386.Call(nr, ^uint32(0), ^uint32(0), ^uint32(0))))
	}
	fmt.Printf("%ssum %d %d %d %d\n", out.String(), tried, refused, permitted, wrong)
}

func TestAttack_every_system_call_is_refused_unless_it_is_in_the_list(t *testing.T) {
	confinable(t)
	for _, o := range []LockOptions{{}, {Shares: true}, {Network: true}} {
		if o.Shares && asUser() {
			continue
		}
		_, wait := start(t, Profile{Program: self("sweep", abi32()), Shares: o.Shares, Network: o.Network})
		out, err := wait()
		if err != nil {
			t.Errorf("%+v: the sweep has ended with %v: %s", o, err, out)
			continue
		}
		var n [4]int64
		for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); {
			if _, err := fmt.Sscanf(s.Text(), "sum %d %d %d %d", &n[0], &n[1], &n[2], &n[3]); err != nil {
				t.Errorf("%+v: %s", o, s.Text())
			}
		}
		if n[0] == 0 || n[3] != 0 {
			t.Errorf("%+v: of %d tries, %d came out otherwise than the list says", o, n[0], n[3])
		}
		t.Logf("%+v: tried %d, refused %d, allowed %d", o, n[0], n[1], n[2])
		for i, c := range []interface{ Add(int64) int64 }{&tried, &refused, &permitted, &gained} {
			c.Add(n[i])
		}
	}
}

func TestAttack_a_call_that_is_not_in_the_list_kills_the_process(t *testing.T) {
	confinable(t)
	listed := map[uintptr]bool{}
	for _, g := range allowed(1, LockOptions{}) {
		for _, c := range g.calls {
			listed[c.nr] = len(c.checks) == 0
		}
	}
	type try struct {
		abi string
		nr  uintptr
	}
	var tries []try
	for nr := uintptr(0); nr < lastCall; nr++ {
		if slices.Contains(unfiltered, nr) {
			continue
		}
		if free, ok := listed[nr]; !free && !(ok && (nr == unix.SYS_SENDFILE || nr == unix.SYS_SPLICE)) {
			tries = append(tries, try{"x86-64", nr})
		}
	}
	for _, nr := range []uintptr{unix.SYS_READ, unix.SYS_GETPID, unix.SYS_OPENAT, 512, 520, 545} {
		tries = append(tries, try{"x32", x32 | nr})
	}
	// read, open, execve, getpid, openat, and clone3 of i386.
	for _, nr := range []uintptr{3, 5, 11, 20, 295, 435} {
		if abi32() == "" {
			break
		}
		tries = append(tries, try{"i386", nr})
	}
	work := make(chan try)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for w := range work {
				tried.Add(1)
				if out, err := run("kill", w.abi, strconv.FormatUint(uint64(w.nr), 10)); refusedBySignal(err) && out == "" {
					refused.Add(1)
				} else {
					gained.Add(1)
					t.Errorf("%s %d: %v, %s", w.abi, w.nr, err, out)
				}
			}
		})
	}
	for _, w := range tries {
		work <- w
	}
	close(work)
	wg.Wait()
	t.Logf("%d processes", len(tries))
}

func TestAttack_the_two_calls_that_no_filter_sees_give_nothing(t *testing.T) {
	confinable(t)
	for _, nr := range unfiltered {
		tried.Add(1)
		out, err := run("kill", "x86-64", strconv.FormatUint(uint64(nr), 10))
		if err == nil && nr == 336 || refusedBySignal(err) || strings.HasPrefix(out, "SIGILL") {
			refused.Add(1)
		} else {
			gained.Add(1)
			t.Errorf("%d: %v, %s", nr, err, out)
		}
	}
}
