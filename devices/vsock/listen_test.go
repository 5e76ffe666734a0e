package vsock

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newDevice(t *testing.T, path string) (*Device, error) {
	return New(newMemory(t), Config{CID: testCID, Path: path})
}

func TestClose_removes_the_socket_and_its_lock(t *testing.T) {
	dir := t.TempDir()
	d, err := newDevice(t, filepath.Join(dir, "v"))
	must(t, err)
	st, err := os.Stat(filepath.Join(dir, "v"))
	must(t, err)
	if st.Mode().Perm() != 0o600 || st.Mode()&os.ModeSocket == 0 {
		t.Errorf("the socket has mode %v", st.Mode())
	}
	must(t, d.Close())
	must(t, d.Close())
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestPath_that_somebody_serves_is_refused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v")
	d, err := newDevice(t, path)
	must(t, err)
	defer d.Close()
	if _, err := newDevice(t, path); !errors.Is(err, ErrInUse) {
		t.Errorf("a second device: got %v, want ErrInUse", err)
	}
	foreign := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", foreign)
	must(t, err)
	defer l.Close()
	if _, err := newDevice(t, foreign); !errors.Is(err, ErrInUse) {
		t.Errorf("another program's socket: got %v, want ErrInUse", err)
	}
	c, err := net.Dial("unix", foreign)
	if err != nil {
		t.Fatalf("the other program's socket is gone: %v", err)
	}
	c.Close()
}

func TestSocket_of_a_dead_owner_is_replaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", path)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	must(t, os.WriteFile(path+".lock", nil, 0o600))
	d, err := newDevice(t, path)
	must(t, err)
	c, err := net.Dial("unix", path)
	must(t, err)
	c.Close()
	must(t, d.Close())
}

func TestOnly_one_of_many_takes_a_stale_path(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v")
	mem := newMemory(t)
	for range 20 {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
		unix.Close(fd)
		const rivals = 8
		got := make(chan *Device, rivals)
		for range rivals {
			go func() {
				d, err := New(mem, Config{CID: testCID, Path: path})
				if err != nil && !errors.Is(err, ErrInUse) {
					t.Error(err)
				}
				got <- d
			}()
		}
		var winner *Device
		for range rivals {
			if d := <-got; d != nil {
				if winner != nil {
					t.Fatal("two devices on one path")
				}
				winner = d
			}
		}
		if winner == nil {
			t.Fatal("nobody got the path")
		}
		c, err := net.Dial("unix", path)
		must(t, err)
		c.Close()
		must(t, winner.Close())
	}
}

func TestBad_paths_are_refused_with_the_reason(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	for name, tc := range map[string]struct {
		path string
		want error
	}{
		"empty":                {"", ErrPath},
		"a directory":          {dir + "/", ErrPath},
		"a regular file":       {file, ErrPath},
		"a long last element":  {filepath.Join(dir, strings.Repeat("x", 250)), ErrPath},
		"too long for any way": {filepath.Join(dir, strings.Repeat("x", 100)), ErrPath},
		"no such directory":    {filepath.Join(dir, "none", "v"), os.ErrNotExist},
	} {
		d, err := newDevice(t, tc.path)
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
		if d != nil {
			d.Close()
		}
	}
	if p, err := os.ReadFile(file); err != nil || string(p) != "precious" {
		t.Errorf("the regular file was touched: %q, %v", p, err)
	}
}

func TestPath_longer_than_a_socket_address_works(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 100))
	must(t, os.MkdirAll(dir, 0o700))
	g := inactiveGuest(t, newMemory(t), filepath.Join(dir, "v"))
	g.activate(false)
	g.post(8)
	// The test reaches the path through a short name for the directory.
	short := filepath.Join(t.TempDir(), "s")
	must(t, os.Symlink(dir, short))
	g.path = filepath.Join(short, "v")
	g.connect(80)
	c, s := g.open(1, 2)
	s.write([]byte("x"))
	readFull(t, c, []byte("x"))
}

func TestListener_that_the_owner_holds_is_served_and_left_alone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", path)
	must(t, err)
	defer l.Close()
	f, err := l.(*net.UnixListener).File()
	must(t, err)
	early, err := net.Dial("unix", path)
	must(t, err)
	defer early.Close() // at any time, if it were left to the garbage collector
	early.Write([]byte("CONNECT 5\n"))
	mem := newMemory(t)
	dev, err := New(mem, Config{CID: testCID, Path: path, Listener: f})
	must(t, err)
	must(t, f.Close())
	g := &guest{t: t, mem: mem, dev: dev, path: path, wake: make(chan struct{}, 1)}
	g.rx, g.tx, g.ev = newRing(t, mem, rxRing, rxSize), newRing(t, mem, txRing, txSize), newRing(t, mem, evRing, eventSlot)
	g.activate(false)
	g.post(4)
	if p := g.receive(opRequest); p.dstPort != 5 {
		t.Fatalf("got %v", p)
	}
	must(t, dev.Close())
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the owner's listener is gone: %v", err)
	}
	c.Close()
	for _, r := range []*ring{g.rx, g.tx, g.ev} {
		r.kick.Close()
	}
}

func TestFile_that_is_not_a_listener_is_refused(t *testing.T) {
	f, err := os.Open(os.DevNull)
	must(t, err)
	defer f.Close()
	if _, err := New(newMemory(t), Config{CID: testCID, Path: filepath.Join(t.TempDir(), "v"), Listener: f}); err == nil {
		t.Fatal("accepted")
	}
}

func TestKilled_process_leaves_a_path_that_can_be_taken(t *testing.T) {
	if path := os.Getenv("VSOCK_TEST_HOLD"); path != "" {
		_, err := newDevice(t, path)
		must(t, err)
		os.Stdout.WriteString("held\n")
		time.Sleep(time.Minute)
		return
	}
	path := filepath.Join(t.TempDir(), "v")
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilled_process_leaves_a_path_that_can_be_taken$")
	cmd.Env = append(os.Environ(), "VSOCK_TEST_HOLD="+path)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if _, err := newDevice(t, path); !errors.Is(err, ErrInUse) {
		t.Errorf("while the owner lives: got %v, want ErrInUse", err)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	d, err := newDevice(t, path)
	must(t, err)
	must(t, d.Close())
}

func TestContext_IDs_out_of_range_are_refused(t *testing.T) {
	for _, cid := range []uint64{0, 1, 2, MaxCID + 1, 1 << 40} {
		if d, err := New(newMemory(t), Config{CID: cid, Path: filepath.Join(t.TempDir(), "v")}); err == nil {
			d.Close()
			t.Errorf("context ID %d was accepted", cid)
		}
	}
}
