package sandbox_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

var cycles = flag.Int("cycles", fromEnv("DROWSE_TEST_CYCLES", 200), "how many times the busy guest sleeps and wakes")

// fromEnv returns a number from the environment, for runs that must be short.
func fromEnv(name string, def int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return def
}

// worker writes blocks to disk and reads earlier ones back, counts, serves an endless stream on a vsock port, and
// checks that monotonic time never goes back. One loop does all of it, so a sleep can interrupt it anywhere.
const worker = `
import hashlib, os, random, select, socket, time
SIZE, BLOCKS = 4096, 1024
def block(i):
    return hashlib.sha256(b'%d' % i).digest() * (SIZE // 32)
last, back = time.monotonic_ns(), 0
def look():
    global last, back
    now = time.monotonic_ns()
    back += now < last
    last = now
f = os.open('/root/blocks', os.O_RDWR | os.O_CREAT)
server = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
server.bind((socket.VMADDR_CID_ANY, 5000))
server.listen(8)
count, bad, written, streams = 0, 0, {}, {}
poll = select.poll()
poll.register(server, select.POLLIN)
sockets = {server.fileno(): server}
def drop(fd):
    poll.unregister(fd)
    sockets.pop(fd).close()
    streams.pop(fd, None)
while True:
    count += 1
    i = count % BLOCKS
    look()
    os.pwrite(f, block(count), i * SIZE)
    look()
    written[i] = count
    j = random.choice(list(written))
    if os.pread(f, SIZE, j * SIZE) != block(written[j]):
        bad += 1
    look()
    if count % 32 == 0:
        os.fsync(f)
        look()
    for fd, event in poll.poll(10):
        look()
        s = sockets[fd]
        if s is server:
            c, _ = server.accept()
            sockets[c.fileno()] = c
            poll.register(c, select.POLLIN)
            continue
        try:
            if event & (select.POLLHUP | select.POLLERR):
                drop(fd)
            elif event & select.POLLIN:
                word, _, arg = s.recv(64).decode().partition(' ')
                if word == 'status':
                    s.send(b'%d %d %d %d\n' % (os.getpid(), count, bad, back))
                elif word == 'stream':
                    s.setblocking(False)
                    streams[fd] = int(arg)
                    poll.modify(fd, select.POLLOUT)
                else:
                    drop(fd)
            elif event & select.POLLOUT:
                at = streams[fd]
                piece = block(at // SIZE)[at % SIZE:]
                streams[fd] += s.send(piece)
        except OSError:
            drop(fd)
`

// stream checks what the worker sends, from its first byte on.
type stream struct{ at int64 }

const streamBlock = 4096

// check compares p with the next bytes of the stream.
func (s *stream) check(p []byte) error {
	for len(p) > 0 {
		sum := sha256.Sum256(fmt.Append(nil, s.at/streamBlock))
		n := min(len(p), int(streamBlock-s.at%streamBlock))
		for i, b := range p[:n] {
			if want := sum[(s.at+int64(i))%streamBlock%32]; b != want {
				return fmt.Errorf("byte %d of the stream is %#x, want %#x", s.at+int64(i), b, want)
			}
		}
		s.at += int64(n)
		p = p[n:]
	}
	return nil
}

// follow reads the stream until it ends and returns what is wrong with it. It closes reached after enough bytes.
func (s *stream) follow(c net.Conn, enough int64, reached chan<- struct{}) error {
	buf := make([]byte, 64<<10)
	start := s.at
	for {
		n, err := c.Read(buf)
		if cerr := s.check(buf[:n]); cerr != nil {
			return cerr
		}
		if reached != nil && s.at-start >= enough {
			close(reached)
			reached = nil
		}
		switch {
		case errors.Is(err, io.EOF) || err != nil && strings.Contains(err.Error(), "reset"):
			if reached != nil {
				return fmt.Errorf("the stream ended after %d bytes", s.at-start)
			}
			return nil
		case err != nil:
			return err
		}
	}
}

// busy is the VM that runs the worker.
const busy = "base"

func TestMany_sleeps_of_a_busy_guest_lose_nothing(t *testing.T) {
	t.Parallel()
	e, _, _ := base(t)
	e.Wake(busy)
	c := e.Agent(busy)
	if err := c.WriteFile(t.Context(), "/root/worker.py", strings.NewReader(worker), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"python3", "-S", "-E", "/root/worker.py"}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	dial := func(what string) net.Conn {
		t.Helper()
		var err error
		for deadline := time.Now().Add(10 * time.Minute); time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			var conn net.Conn
			conn, err = guest.UnixDialer(e.Store.State.VsockPath(busy))(ctx, 5000)
			cancel()
			if err == nil {
				if _, err = fmt.Fprint(conn, what); err == nil {
					return conn
				}
				conn.Close()
			}
		}
		t.Fatalf("connecting to the worker: %v", err)
		return nil
	}
	status := func() (pid, count, bad, back int) {
		t.Helper()
		conn := dial("status")
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Minute))
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(line, &pid, &count, &bad, &back); err != nil {
			t.Fatal(err)
		}
		return pid, count, bad, back
	}
	const enough = 64 << 10
	s := &stream{}
	pid0, last, _, _ := status()
	begin := time.Now()
	for i := range *cycles {
		conn := dial(fmt.Sprintf("stream %d", s.at))
		reached, ended := make(chan struct{}), make(chan error, 1)
		go func() { ended <- s.follow(conn, enough, reached) }()
		select {
		case <-reached:
		case err := <-ended:
			t.Fatalf("cycle %d: %v", i, err)
		case <-time.After(10 * time.Minute):
			t.Fatalf("cycle %d: the stream has stopped at byte %d", i, s.at)
		}
		e.Sleep(busy)
		if err := <-ended; err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
		conn.Close()
		e.Wake(busy)
		pid, count, bad, back := status()
		if pid != pid0 || count < last || bad != 0 || back != 0 {
			t.Fatalf("cycle %d: the worker with pid %d counted to %d; now pid %d has counted to %d, found %d bad blocks, and saw time go back %d times",
				i, pid0, last, pid, count, bad, back)
		}
		last = count
		if i%10 == 9 {
			t.Logf("%d cycles in %v: %d blocks written and checked, %d MiB streamed", i+1, time.Since(begin).Round(time.Second), count, s.at>>20)
		}
	}
	r, err := e.Store.State.Get(busy)
	if err != nil {
		t.Fatal(err)
	}
	// The empty file system, a few loose layers, and the one that the VM writes to.
	if n := len(r.Disk.Layers); n > 8 {
		t.Errorf("after %d sleeps the disk has %d layers", *cycles, n)
	}
	if out := e.Sh(busy, "sync; dmesg | grep -ci 'ext4.*error\\|i/o error' || true"); out != "0" {
		t.Errorf("the guest's kernel reports %s file system errors", out)
	}
}
