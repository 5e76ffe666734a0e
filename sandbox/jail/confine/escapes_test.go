package confine

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func init() {
	roles["escape"] = func(args []string) {
		i, err1 := strconv.Atoi(args[0])
		pid, err2 := strconv.Atoi(args[2])
		if err1 != nil || err2 != nil {
			fatal(fmt.Errorf("arguments: %v", args))
		}
		keeperPID = uintptr(pid)
		e := escapes()[i]
		if e.shares {
			if err := ViewOnly(); err != nil {
				fatal(err)
			}
			if openedAhead, err1 = unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err1 != nil {
				fatal(err1)
			}
		}
		if o := entered(); args[1] != "inner" {
			if err := Lock(o); err != nil {
				fatal(err)
			}
		}
		if err := e.try(); err != nil {
			fmt.Println("refused:", err)
			return
		}
		fmt.Println("gained")
	}
}

// openedAhead is a device that a child with shares has opened before Enter.
var openedAhead int

func TestAttack_escapes_are_refused_by_the_filter_and_by_the_walls_behind_it(t *testing.T) {
	confinable(t)
	all := escapes()
	if len(all) < 80 {
		t.Fatalf("only %d escapes", len(all))
	}
	dir := t.TempDir()
	for _, path := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	share := filepath.Join(dir, "share")
	for _, err := range []error{
		os.Mkdir(share, 0o777), os.Chmod(share, 0o777), os.WriteFile(filepath.Join(dir, "secret"), []byte("x"), 0o666), os.Chmod(filepath.Join(dir, "secret"), 0o666),
		os.WriteFile(filepath.Join(share, "file"), []byte("x"), 0o666), os.Symlink("../secret", filepath.Join(share, "out")),
		os.Symlink("/etc/passwd", filepath.Join(share, "absolute")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var shareDir *os.File
	if !asUser() {
		tree, d, err := OpenTree(share, true)
		if err != nil {
			t.Fatal(err)
		}
		defer tree.Close()
		defer d.Close()
		shareDir = d
	}
	l, err := net.Listen("unix", "@"+keeperSocket(uintptr(os.Getpid()))[1:])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	type try struct {
		i    int
		wall string
	}
	work := make(chan try)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for w := range work {
				attempt(t, w.i, all[w.i], w.wall, shareDir)
			}
		})
	}
	for i, e := range all {
		if e.shares && asUser() {
			continue
		}
		work <- try{i, "filter"}
		if !e.shares {
			work <- try{i, "network"}
		}
		if !e.filterOnly && !(e.ownersOnly && asUser()) {
			work <- try{i, "inner"}
		}
	}
	close(work)
	wg.Wait()
	// The directories of t.TempDir are elsewhere.
	if above, err := os.ReadDir(dir); err != nil || len(above) != 2 || above[0].Name() != "secret" || above[1].Name() != "share" {
		gained.Add(1)
		t.Errorf("above the share are now %v, %v", above, err)
	}
	t.Logf("%d escapes", len(all))
}

func attempt(t *testing.T, i int, e escape, wall string, share *os.File) {
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Error(err)
		return
	}
	defer file.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Error(err)
		return
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	p := Profile{Program: self("escape", strconv.Itoa(i), wall, strconv.Itoa(os.Getpid())), Files: []*os.File{file, theirs}, Shares: e.shares, Name: e.name + wall,
		Network: wall == "network"}
	if e.shares {
		v, err := NewView()
		if err != nil {
			t.Error(err)
			return
		}
		defer v.Close()
		read, err := v.Open(file.Name(), os.O_RDONLY)
		if err != nil {
			t.Error(err)
			return
		}
		defer read.Close()
		p.Files = append(p.Files, share, read)
	}
	_, wait := start(t, p)
	out, err := wait()
	tried.Add(1)
	out = strings.TrimSpace(out)
	switch {
	case err == nil && strings.HasPrefix(out, "refused:"), wall != "inner" && out == "" && errors.Is(err, ErrRefused):
		refused.Add(1)
	case out == "gained" && e.inside:
		refused.Add(1) // the caller looks whether it has led out
	case out == "gained":
		gained.Add(1)
		t.Errorf("%s (%s): it has succeeded", e.name, wall)
	default:
		t.Errorf("%s (%s): it has ended with %v: %s", e.name, wall, err, out)
	}
}
