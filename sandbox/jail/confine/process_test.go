package confine

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func init() {
	roles["idle"] = func([]string) {
		confined()
		fmt.Println("ready")
		if _, err := os.NewFile(firstFile, "until").Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
			fatal(err)
		}
	}
	roles["spin"] = func([]string) {
		confined()
		go func() {
			for {
				time.Sleep(time.Microsecond)
			}
		}()
		for i := 0; ; i++ {
			runtime.KeepAlive(i)
		}
	}
	roles["crash"] = func(args []string) {
		confined()
		switch args[0] {
		case "panic":
			panic("the reason")
		case "nil":
			fmt.Println(*(*int)(nil)) //nolint:staticcheck // it is meant to crash
		case "deadlock":
			select {}
		case "stack":
			debug.SetMaxStack(1 << 20)
			var f func(int) int
			f = func(n int) int { return f(n+1) + 1 }
			fmt.Println(f(0))
		case "refused":
			_, _ = unix.Open("/", 0, 0)
		}
	}
	roles["thread"] = func([]string) {
		// This thread is there before the filter.
		locked, done := make(chan bool), make(chan bool)
		go func() {
			runtime.LockOSThread()
			<-locked
			unix.Getppid()
			done <- true
		}()
		time.Sleep(time.Millisecond)
		confined()
		locked <- true
		<-done
		fmt.Println("it has gone on")
	}
	roles["share"] = func([]string) {
		confined()
		if err := share(firstFile); err != nil {
			fatal(err)
		}
		fmt.Println("done")
	}
	roles["log"] = func([]string) {
		confined()
		fmt.Println("parent", unix.Getppid())
	}
	roles["work"] = func([]string) {
		confined()
		log.Println("with the host's time zone, without opening its file")
		if err := work(); err != nil {
			fatal(err)
		}
		fmt.Println("done")
	}
	roles["eat"] = func(args []string) {
		confined()
		n, err := strconv.Atoi(args[0])
		if err != nil {
			fatal(err)
		}
		b := make([]byte, n)
		for i := 0; i < n; i += 4096 {
			b[i] = 1
		}
		fmt.Println("ate", len(b))
	}
	roles["threads"] = func(args []string) {
		confined()
		n, err := strconv.Atoi(args[0])
		if err != nil {
			fatal(err)
		}
		for range n {
			go func() {
				runtime.LockOSThread()
				select {}
			}()
		}
		time.Sleep(10 * time.Second)
	}
	roles["write"] = func([]string) {
		confined()
		f := os.NewFile(firstFile, "file")
		_, err := f.WriteAt(make([]byte, 100), 1<<20-50)
		_, err2 := f.WriteAt(make([]byte, 1), 1<<20)
		fmt.Println(err == nil || errors.Is(err, unix.EFBIG) || errors.Is(err, io.ErrShortWrite), errors.Is(err2, unix.EFBIG))
		var fds []int
		for {
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
			if err != nil {
				fmt.Println(errors.Is(err, unix.EMFILE), len(fds) < 32)
				return
			}
			fds = append(fds, fd)
		}
	}
	// A keeper has an idle child until it is killed.
	roles["keeper"] = func(args []string) {
		n, err := strconv.Atoi(args[1])
		if err != nil {
			fatal(err)
		}
		idDir, firstID = args[0], n
		r, _, err := os.Pipe()
		if err != nil {
			fatal(err)
		}
		c, err := Start(context.Background(), Profile{Program: self("idle"), Files: []*os.File{r}, Name: "kept", Output: os.Stderr})
		if err != nil {
			fatal(err)
		}
		fmt.Println(c.PID())
		for _, d := range c.cgroup.dirs() {
			fmt.Println(d)
		}
		fmt.Println("end")
		select {}
	}
}

// work does what a VM's process does with Go's runtime and open files, in many threads.
func work() error {
	file, conn := os.NewFile(firstFile, "file"), os.NewFile(firstFile+1, "socket")
	peer, err := net.FileConn(conn)
	if err != nil {
		return err
	}
	defer peer.Close()
	if _, err := io.WriteString(peer, "hello"); err != nil {
		return err
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(peer, b); err != nil || string(b) != "world" {
		return fmt.Errorf("read %q, %w", b, err)
	}
	if _, err := file.WriteAt(bytes.Repeat([]byte("x"), 1<<16), 0); err != nil {
		return err
	}
	// These would be sendfile, splice and copy_file_range.
	if n, err := io.Copy(peer, io.NewSectionReader(file, 0, 10)); n != 10 || err != nil {
		return fmt.Errorf("copy %d, %w", n, err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if n, err := io.CopyN(peer, file, 1000); n != 1000 || err != nil {
		return fmt.Errorf("copy %d, %w", n, err)
	}
	fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if err != nil {
		return err
	}
	image := os.NewFile(uintptr(fd), "image")
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := io.Copy(image, file); err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Truncate(100)); err != nil {
		return err
	}
	if _, err := unix.FcntlInt(image.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		return err
	}
	// A message with a descriptor comes back.
	if err := unix.Sendmsg(int(conn.Fd()), []byte("m"), unix.UnixRights(int(image.Fd())), nil, 0); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			runtime.LockOSThread() // without Unlock: the thread ends, too
			waste := make([][]byte, 0)
			for j := range 200 {
				waste = append(waste, make([]byte, 1<<12*(1+(i+j)%5)))
			}
			time.Sleep(time.Duration(len(waste)) * time.Microsecond)
			for k, end := 0, time.Now().Add(20*time.Millisecond); time.Now().Before(end); k++ { // preempted
			}
		})
		if i%10 == 0 {
			runtime.GC()
		}
	}
	wg.Wait()
	return nil
}

// share does in a shared directory what devices/fs does.
func share(dir int) error {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV}
	var st unix.Statx_t
	var sf unix.Statfs_t
	fd, err := unix.Openat(dir, "new", unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if _, err := unix.Pwritev2(fd, [][]byte{[]byte("text")}, 0, 0); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	path, err := unix.Openat2(dir, "new", &how)
	if err != nil {
		return fmt.Errorf("find: %w", err)
	}
	proc := "/proc/self/fd/" + strconv.Itoa(path)
	again, err := unix.Open(proc, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open again: %w", err)
	}
	list, err := unix.Open("/proc/self/fd/"+strconv.Itoa(dir), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the directory again: %w", err)
	}
	b := make([]byte, 4096)
	if n, err := unix.Getdents(list, b); err != nil || n == 0 {
		return fmt.Errorf("list: %d, %w", n, err)
	}
	for what, err := range map[string]error{
		"statx":    unix.Statx(path, "", unix.AT_EMPTY_PATH|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st),
		"chmod":    unix.Chmod(proc, 0o640),
		"truncate": unix.Ftruncate(again, 2),
		"times":    unix.UtimesNanoAt(path, "", []unix.Timespec{{Sec: 1}, {Sec: 2}}, unix.AT_EMPTY_PATH),
		"statfs":   unix.Fstatfs(path, &sf),
		"mkdir":    unix.Mkdirat(dir, "d", 0o700),
		"symlink":  unix.Symlinkat("to", dir, "l"),
		"chown":    unix.Fchownat(path, "", -1, -1, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW),
	} {
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if n, err := unix.Readlinkat(dir, "l", b); err != nil || string(b[:n]) != "to" {
		return fmt.Errorf("readlink: %q, %w", b[:n], err)
	}
	if err := unix.Renameat2(dir, "new", dir, "d/new", 0); err != nil {
		return fmt.Errorf("rename into another directory: %w", err)
	}
	for _, gone := range []struct {
		name string
		flag int
	}{{"d/new", 0}, {"l", 0}, {"d", unix.AT_REMOVEDIR}} {
		if err := unix.Unlinkat(dir, gone.name, gone.flag); err != nil {
			return fmt.Errorf("remove %s: %w", gone.name, err)
		}
	}
	return nil
}

// idle starts a child that runs until stop is called.
func idle(t *testing.T, p Profile) (c *Process, stop func() (string, error)) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Program, p.Output = self("idle"), outW
	p.Files = append([]*os.File{r}, p.Files...)
	if p.Name == "" {
		p.Name = t.Name()
	}
	c, err = Start(t.Context(), p)
	r.Close()
	outW.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Close()
		out.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	b := make([]byte, 6)
	if _, err := io.ReadFull(out, b); err != nil || string(b) != "ready\n" {
		more, _ := io.ReadAll(out)
		t.Fatalf("it is not ready: %s%s, %v", b, more, c.Wait())
	}
	return c, func() (string, error) {
		w.Close()
		rest, _ := io.ReadAll(out)
		return string(rest), c.Wait()
	}
}

func TestEnter_takes_everything_from_all_threads(t *testing.T) {
	confinable(t)
	c, stop := idle(t, Profile{})
	proc := filepath.Join("/proc", strconv.Itoa(c.PID()))
	tasks, err := filepath.Glob(filepath.Join(proc, "task/*/status"))
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads %v, %v", tasks, err)
	}
	id := strconv.Itoa(c.UID())
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			t.Fatal(err)
		}
		has := map[string]string{}
		for line := range strings.Lines(string(text)) {
			k, v, _ := strings.Cut(line, ":")
			has[k] = strings.Join(strings.Fields(v), " ")
		}
		none := strings.Repeat("0", 16)
		for k, want := range map[string]string{
			"Uid": strings.Repeat(id+" ", 3) + id, "Gid": strings.Repeat(id+" ", 3) + id, "Groups": "", "CapInh": none, "CapPrm": none, "CapEff": none,
			"CapBnd": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1",
		} {
			if has[k] != want {
				t.Errorf("%s: %s is %q, want %q", task, k, has[k], want)
			}
		}
	}
	namespaces := []string{"mnt", "pid", "ipc", "uts", "net", "cgroup"}
	if asUser() {
		namespaces = append(namespaces, "user")
	}
	for _, ns := range namespaces {
		own, err1 := os.Readlink("/proc/self/ns/" + ns)
		its, err2 := os.Readlink(filepath.Join(proc, "ns", ns))
		if err := errors.Join(err1, err2); err != nil || own == its {
			t.Errorf("the namespace %s is the keeper's, %v", ns, err)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(proc, "root")); err != nil || len(entries) != 0 {
		t.Errorf("its root has %v, %v", entries, err)
	}
	if mounts, err := os.ReadFile(filepath.Join(proc, "mountinfo")); err != nil || bytes.Count(mounts, []byte("\n")) != 1 || !bytes.Contains(mounts, []byte(" ro")) {
		t.Errorf("its mounts are %s, %v", mounts, err)
	}
	limits, err := os.ReadFile(filepath.Join(proc, "limits"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Max core file size 0 0 bytes", "Max open files 4096 4096 files"} {
		if !strings.Contains(strings.Join(strings.Fields(string(limits)), " "), want) {
			t.Errorf("not %q in %s", want, limits)
		}
	}
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil && !(asUser() && errors.Is(err, os.ErrPermission)) { // Enter has made it unreadable
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, _ := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		if strings.HasPrefix(to, "/") && to != "/dev/null" {
			t.Errorf("descriptor %s is %s", fd.Name(), to)
		}
	}
	if out, err := stop(); err != nil || out != "" {
		t.Errorf("it has ended with %v, %s", err, out)
	}
}

func TestCPU_of_a_child_is_known_until_its_end_and_after_it(t *testing.T) {
	confinable(t)
	c, _ := idle(t, Profile{})
	during := c.CPU()
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	// The times of wait4(2) may have steps of a tick.
	if after := c.CPU(); during <= 0 || after < during-10*time.Millisecond || after == 0 {
		t.Errorf("%v, and after its end %v", during, after)
	}
}

func TestFreeze_of_a_child_that_works_stops_it_until_it_is_thawed_or_killed(t *testing.T) {
	confinable(t)
	c, _ := start(t, Profile{Program: self("spin")})
	works := func() {
		t.Helper()
		for begun, end := c.CPU(), time.Now().Add(time.Minute); c.CPU() < begun+20*time.Millisecond; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it does not work")
			}
		}
	}
	for range 3 {
		works()
		if err := c.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := c.CPU()
		time.Sleep(20 * time.Millisecond)
		if after := c.CPU(); after != before {
			t.Errorf("it has worked for %v", after-before)
		}
		if err := c.Thaw(); err != nil {
			t.Fatal(err)
		}
	}
	works()
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	// What has ended stands still.
	if err := errors.Join(c.Freeze(t.Context()), c.Thaw()); err != nil {
		t.Error(err)
	}
}

func TestStart_leaves_the_keeper_its_capabilities(t *testing.T) {
	confinable(t)
	bound := func() string {
		text, err := exec.Command("cat", "/proc/self/status").Output()
		if err != nil {
			t.Fatal(err)
		}
		_, after, _ := strings.Cut(string(text), "CapBnd:")
		return strings.Fields(after)[0]
	}
	before := bound()
	for range 5 {
		c, _ := idle(t, Profile{})
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		for range 3 {
			if now := bound(); now != before {
				t.Fatalf("a program of the keeper has %s, before it was %s", now, before)
			}
		}
	}
}

func TestEnter_needs_Start_and_no_cgo(t *testing.T) {
	out, err := run("idle")
	if err == nil || !strings.Contains(out, ErrNotStarted.Error()) && !strings.Contains(out, ErrCgo.Error()) {
		t.Errorf("%v, %s", err, out)
	}
	if threads := Probe().Missing(true); len(threads) > 0 && threads[0].Name == "threads" && !strings.Contains(out, ErrCgo.Error()) {
		t.Errorf("with cgo: %s", out)
	}
}

func TestChildren_have_different_ids(t *testing.T) {
	confinable(t)
	rootOnly(t)
	a, _ := idle(t, Profile{Name: "same"})
	b, _ := idle(t, Profile{Name: "same"})
	if a.UID() == b.UID() {
		t.Errorf("both have %d", a.UID())
	}
	before := b.UID()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if c, _ := idle(t, Profile{Name: "same"}); c.UID() != before {
		t.Errorf("it has %d, and before %d", c.UID(), before)
	}
}

func TestLocked_process_does_its_work(t *testing.T) {
	confinable(t)
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	_, wait := start(t, Profile{Program: self("work"), Files: []*os.File{file, theirs}})
	theirs.Close()
	if _, err := ours.WriteString("world"); err != nil {
		t.Error(err)
	}
	go func() { _, _ = io.Copy(io.Discard, ours) }()
	if out, err := wait(); err != nil || !strings.HasSuffix(out, "done\n") {
		t.Errorf("%v, %s", err, out)
	}
}

func TestLocked_process_serves_a_share(t *testing.T) {
	confinable(t)
	rootOnly(t)
	dir, err := os.MkdirTemp("", "confine-share")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, wait := start(t, Profile{Program: self("share"), Files: []*os.File{f}, Shares: true})
	if out, err := wait(); err != nil || out != "done\n" {
		t.Errorf("%v, %s", err, out)
	}
}

func TestCrash_of_a_locked_process_says_why(t *testing.T) {
	confinable(t)
	for how, want := range map[string]string{
		"panic": "panic: the reason", "nil": "nil pointer dereference", "deadlock": "all goroutines are asleep", "stack": "stack overflow",
	} {
		_, wait := start(t, Profile{Program: self("crash", how)})
		var exit *exec.ExitError
		if out, err := wait(); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(out, want) || !strings.Contains(out, "goroutine 1") {
			t.Errorf("%s: %v, %s", how, err, out)
		}
	}
	_, wait := start(t, Profile{Program: self("crash", "refused")})
	if out, err := wait(); !errors.Is(err, ErrRefused) || out != "" {
		t.Errorf("a call that is refused: %v, %s", err, out)
	}
}

func TestLock_is_for_threads_that_were_there_before(t *testing.T) {
	confinable(t)
	_, wait := start(t, Profile{Program: self("thread")})
	if out, err := wait(); !errors.Is(err, ErrRefused) {
		t.Errorf("%v, %s", err, out)
	}
}

func TestLogOnly_refuses_nothing(t *testing.T) {
	confinable(t)
	_, wait := start(t, Profile{Program: self("log"), LogOnly: true})
	if out, err := wait(); err != nil || !strings.HasPrefix(out, "parent 0\n") {
		t.Errorf("%v, %s", err, out)
	}
}

func TestStart_refuses_files_that_may_not_pass(t *testing.T) {
	confinable(t)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := Start(t.Context(), Profile{Program: self("idle"), Files: []*os.File{dir}}); !errors.Is(err, ErrMayNotPass) {
		t.Errorf("a directory without shares: %v", err)
	}
	checkNothingLeft(t)
}

func TestStart_that_fails_leaves_nothing(t *testing.T) {
	confinable(t)
	if _, err := Start(t.Context(), Profile{Program: []string{"/does/not/exist"}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	checkNothingLeft(t)
}

// checkNothingLeft checks that there are no ids and no cgroups of children.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	if entries, err := os.ReadDir(idDir); err != nil && !errors.Is(err, os.ErrNotExist) || len(entries) > 0 {
		t.Errorf("ids left: %v, %v", entries, err)
	}
	h, err := findHierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, parent := range h.parent {
		if parent == "" {
			continue
		}
		all, err := filepath.Glob(filepath.Join(parent, "drowse-*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range all {
			n, _ := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "drowse-"))
			if n >= firstID && n < firstID+NumIDs || strings.HasPrefix(filepath.Base(dir), fmt.Sprintf("%s%d-", userCgroups, userOfTests)) {
				t.Errorf("cgroup left: %s", dir)
			}
		}
	}
}

var rounds = flag.Int("rounds", 1, "how often children end, are killed and are closed")

// held is what this process has, and the mounts and namespaces that it sees.
func held(t *testing.T) map[string]int {
	t.Helper()
	n := map[string]int{"goroutines": runtime.NumGoroutine()}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n["descriptors"] = len(fds)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	n["mounts"] = bytes.Count(mounts, []byte("\n"))
	links, err := filepath.Glob("/proc/self/task/*/ns/*")
	if err != nil {
		t.Fatal(err)
	}
	spaces := map[string]bool{}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil { // a thread that has ended has none
			spaces[to] = true
		}
	}
	n["namespaces"] = len(spaces)
	return n
}

func TestClose_leaves_nothing_of_a_child_that_ended_or_was_killed_or_runs(t *testing.T) {
	confinable(t)
	round := func(t *testing.T) {
		for _, how := range []string{"ended", "killed", "runs"} {
			c, stop := idle(t, Profile{Name: how})
			switch how {
			case "ended":
				if _, err := stop(); err != nil {
					t.Error(err)
				}
			case "killed":
				if err := unix.Kill(c.PID(), unix.SIGKILL); err != nil {
					t.Error(err)
				}
				if err := c.Wait(); err == nil || errors.Is(err, ErrRefused) {
					t.Errorf("Wait returns %v", err)
				}
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if err := unix.Kill(c.PID(), 0); !errors.Is(err, unix.ESRCH) {
				t.Errorf("%s: the process is still there: %v", how, err)
			}
			checkNothingLeft(t)
		}
	}
	t.Run("first", round)
	before := held(t)
	for range *rounds {
		if !t.Run("round", round) {
			t.FailNow()
		}
	}
	// Goroutines that end by themselves may take a moment.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		now := held(t)
		more := ""
		for what, n := range now {
			if n > before[what] {
				more += fmt.Sprintf(" %s: %d, %d before;", what, n, before[what])
			}
		}
		if more == "" {
			t.Logf("%d children have left nothing: %v", 3**rounds, now)
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d children have left%s", 3**rounds, more)
		}
	}
}

// killedKeeper starts a keeper with a child, kills it, and waits until the child has ended.
func killedKeeper(t *testing.T) (cgroups []string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "confined", "keeper", idDir, strconv.Itoa(firstID))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stdout = w
	ready := make(chan string, 1)
	cmd.Stderr = lineWriter(ready)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	<-ready
	var pid int
	var text []byte
	for b := make([]byte, 1000); !bytes.Contains(text, []byte("end")); {
		n, err := r.Read(b)
		if text = append(text, b[:n]...); err != nil {
			t.Fatalf("the keeper says %s, %v", text, err)
		}
	}
	said := strings.Fields(string(text))
	if pid, err = strconv.Atoi(said[0]); err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, -1)
	_ = cmd.Wait()
	return said[1 : len(said)-1]
}

type lineWriter chan string

func (w lineWriter) Write(p []byte) (int, error) {
	select {
	case w <- string(p):
	default:
	}
	return len(p), nil
}

func TestKilled_keeper_takes_its_child_along_and_the_next_one_removes_the_rest(t *testing.T) {
	confinable(t)
	checkNothingLeft(t)
	for _, by := range []string{"Sweep", "Start"} {
		if asUser() && by == "Start" {
			continue // it takes no id
		}
		cgroups := killedKeeper(t)
		if entries, err := os.ReadDir(idDir); !asUser() && (err != nil || len(entries) != 1) {
			t.Fatalf("the id is not there any more: %v, %v", entries, err)
		}
		for _, dir := range cgroups {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
		if by == "Start" {
			c, _ := idle(t, Profile{Name: "kept"})
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		} else if err := Sweep(); err != nil {
			t.Error(err)
		}
		checkNothingLeft(t)
	}
}

func TestSweep_leaves_what_is_used(t *testing.T) {
	confinable(t)
	_, stop := idle(t, Profile{})
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	if out, err := stop(); err != nil {
		t.Errorf("%v, %s", err, out)
	}
}

// limitable skips a test if the host lacks a controller.
func limitable(t *testing.T, of ...controller) {
	t.Helper()
	h, err := findHierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range of {
		if h.parent[c] == "" {
			t.Skipf("this host does not have the controller %s", controllerNames[c])
		}
	}
}

func TestLimits_hold_a_child(t *testing.T) {
	confinable(t)
	limitable(t, memory, pids)
	c, wait := start(t, Profile{Program: self("eat", strconv.Itoa(256<<20)), Limits: Limits{MemoryBytes: 64 << 20, Pids: 100}})
	if out, err := wait(); err == nil || strings.Contains(out, "ate") {
		t.Errorf("it has got more memory than its limit: %s", out)
	}
	if s, err := c.Stats(); err != nil || s.OutOfMemory == 0 || s.CPU == 0 {
		t.Errorf("counters %+v, %v", s, err)
	}
	_, wait = start(t, Profile{Program: self("threads", "50"), Limits: Limits{Pids: 12}})
	if out, err := wait(); err == nil || !strings.Contains(out, "failed to create new OS thread") {
		t.Errorf("it has got more threads than its limit: %v, %s", err, out)
	}
}

func TestSetLimits_changes_those_of_the_cgroup(t *testing.T) {
	confinable(t)
	limitable(t, memory, pids, cpu)
	c, stop := idle(t, Profile{Limits: Limits{MemoryBytes: 1 << 30}})
	if err := c.SetLimits(Limits{MemoryBytes: 512 << 20, Pids: 77, CPUWeight: 200, CPUMax: 0.5}); err != nil {
		t.Fatal(err)
	}
	check := func(ctl controller, file1, want1, file2, want2 string) {
		t.Helper()
		file, want := file1, want1
		if c.cgroup.v2[ctl] {
			file, want = file2, want2
		}
		if text, err := os.ReadFile(filepath.Join(c.cgroup.dir[ctl], file)); err != nil || strings.TrimSpace(string(text)) != want {
			t.Errorf("%s is %s, %v, want %s", file, text, err, want)
		}
	}
	check(memory, "memory.limit_in_bytes", "536870912", "memory.max", "536870912")
	check(pids, "pids.max", "77", "pids.max", "77")
	check(cpu, "cpu.shares", "2048", "cpu.weight", "200")
	check(cpu, "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000")
	c.Urgent(true)
	check(cpu, "cpu.shares", "18432", "cpu.weight", "1800")
	if err := c.SetLimits(Limits{CPUWeight: 300}); err != nil {
		t.Fatal(err)
	}
	check(cpu, "cpu.shares", "27648", "cpu.weight", "2700")
	c.Urgent(false)
	c.Urgent(false)
	check(cpu, "cpu.shares", "3072", "cpu.weight", "300")
	if err := c.SetLimits(Limits{}); err != nil {
		t.Fatal(err)
	}
	check(pids, "pids.max", "max", "pids.max", "max")
	check(cpu, "cpu.shares", "1024", "cpu.weight", "100")
	check(cpu, "cpu.cfs_quota_us", "-1", "cpu.max", "max 100000")
	if s, err := c.Stats(); err != nil || s.MemoryBytes == 0 || s.Pids == 0 || s.CPU == 0 || s.OutOfMemory != 0 {
		t.Errorf("counters %+v, %v", s, err)
	}
	if _, err := stop(); err != nil {
		t.Error(err)
	}
}

func TestSetLimits_of_block_devices(t *testing.T) {
	confinable(t)
	limitable(t, blockIO)
	dev, err := DeviceOf("/")
	if err != nil {
		t.Skip(err)
	}
	c, stop := idle(t, Profile{})
	lines := func(file string) string {
		text, err := os.ReadFile(filepath.Join(c.cgroup.dir[blockIO], file))
		if err != nil {
			t.Error(err)
		}
		return strings.TrimSpace(string(text))
	}
	set := func(l Limits) {
		t.Helper()
		if err := c.SetLimits(l); err != nil {
			t.Fatal(err)
		}
	}
	check := func(read1, ops1, all2 string) {
		t.Helper()
		if c.cgroup.v2[blockIO] {
			if got := lines("io.max"); got != all2 {
				t.Errorf("io.max is %q, want %q", got, all2)
			}
		} else if r, o := lines("blkio.throttle.read_bps_device"), lines("blkio.throttle.write_iops_device"); r != read1 || o != ops1 {
			t.Errorf("limits are %q and %q, want %q and %q", r, o, read1, ops1)
		}
	}
	set(Limits{IO: IOMax{Device: dev, ReadBytes: 1 << 20, WriteOps: 50}})
	check(dev+" 1048576", dev+" 50", dev+" rbps=1048576 wbps=max riops=max wiops=50")
	set(Limits{IO: IOMax{Device: dev, ReadBytes: 2 << 20}})
	check(dev+" 2097152", "", dev+" rbps=2097152 wbps=max riops=max wiops=max")
	set(Limits{})
	check("", "", "")
	if _, err := stop(); err != nil {
		t.Error(err)
	}
}

func TestStats_of_block_devices_are_read_in_both_versions(t *testing.T) {
	for name, text := range map[string]string{
		"version 1": "8:0 Read 4096\n8:0 Write 100\n8:0 Sync 4196\n8:16 Read 4\n8:16 Total 4\nTotal 4200",
		"version 2": "8:0 rbytes=4096 wbytes=100 rios=1 wios=1 dbytes=7 dios=1\n8:16 rbytes=4 wbytes=0",
	} {
		var s Stats
		for line := range strings.SplitSeq(text, "\n") {
			s.addIO(line)
		}
		if s.ReadBytes != 4100 || s.WrittenBytes != 100 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

func TestLimits_of_a_running_child_hold_for_files_and_locked_memory(t *testing.T) {
	confinable(t)
	c, stop := idle(t, Profile{Limits: Limits{LockedBytes: 5 << 20}})
	if err := c.SetLimits(Limits{FileBytes: 3 << 20}); err != nil {
		t.Fatal(err)
	}
	for which, want := range map[int]uint64{unix.RLIMIT_MEMLOCK: 5 << 20, unix.RLIMIT_FSIZE: 3 << 20} {
		var got unix.Rlimit
		if err := unix.Prlimit(c.PID(), which, nil, &got); errors.Is(err, unix.EPERM) {
			t.Log("this test may not look at limits of others: that needs CAP_SYS_RESOURCE")
		} else if err != nil || got.Cur != want || got.Max != want {
			t.Errorf("limit %d is %+v, %v, want %d", which, got, err, want)
		}
	}
	if _, err := stop(); err != nil {
		t.Error(err)
	}
}

func TestCgroups_of_a_login_of_root_are_in_the_service_s_slice(t *testing.T) {
	for _, tt := range []struct {
		path  string
		slice bool
		want  string
	}{
		{"/", true, "/"},
		{"/user.slice/user-0.slice/session-1.scope", true, "/drowse.slice"},
		{"/user.slice/user-0.slice/session-1.scope", false, "/user.slice/user-0.slice"},
		{"/drowse.slice/drowse.service", true, "/drowse.slice"},
		{"/limited.slice/embedder.service", true, "/limited.slice"},
	} {
		if got := parentOf(tt.path, tt.slice); got != tt.want {
			t.Errorf("%+v: %s", tt, got)
		}
	}
}

func TestLimits_without_a_controller_are_an_error(t *testing.T) {
	for _, l := range []Limits{{MemoryBytes: 1}, {Pids: 1}, {CPUWeight: 1}, {CPUMax: 1}, {IOWeight: 1}, {IO: IOMax{Device: "8:0", ReadOps: 1}}} {
		if err := (&cgroup{}).limit(l, Limits{}); !errors.Is(err, ErrNoCgroup) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	if err := (&cgroup{}).limit(Limits{FileBytes: 1}, Limits{}); err != nil {
		t.Error(err)
	}
}

func TestLimits_of_files_give_errors(t *testing.T) {
	confinable(t)
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	_, wait := start(t, Profile{Program: self("write"), Files: []*os.File{file}, Limits: Limits{FileBytes: 1 << 20, OpenFiles: 32}})
	if out, err := wait(); err != nil || out != "true true\ntrue true\n" {
		t.Errorf("%v, %s", err, out)
	}
}
