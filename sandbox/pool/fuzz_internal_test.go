package pool

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// packets returns a pair of sockets like those between a pool and its processes.
func packets(t *testing.T) (here, there *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []**net.UnixConn{&here, &there} {
		if *c, err = control.FileConn(os.NewFile(uintptr(fds[i]), "pair")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*c).Close() })
	}
	return here, there
}

// A canary passes on copies of a file, and knows whether all of them are closed.
type canary struct{ read, write *os.File }

func newCanary(t *testing.T) canary {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return canary{r, w}
}

// pass sends a message with n copies of the file.
func (c canary) pass(t *testing.T, to *net.UnixConn, text []byte, n int) {
	t.Helper()
	var oob []byte
	if n > 0 {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = int(c.write.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := to.WriteMsgUnix(text, oob, nil); err != nil {
		t.Fatal(err)
	}
}

// gone fails the test if a copy is still open.
func (c canary) gone(t *testing.T) {
	t.Helper()
	c.write.Close()
	_ = c.read.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.read.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a file that was passed is still open: %v", err)
	}
}

// maxFuzzed bounds inputs, in bytes. It is a little more than what is read of a message.
const maxFuzzed = control.MaxOrder + 1024

// FuzzPoolOrder sends any message as an order to a standby process. Either it is an order with the right number of
// files, or all files are closed.
func FuzzPoolOrder(f *testing.F) {
	for _, ord := range []control.Order{{Name: "a"}, {Name: "a", Snapshot: "0123", WakeLock: true}, {Name: "a", Fork: true, NewIdentity: true, Cause: "cli"}} {
		text, err := json.Marshal(ord)
		if err != nil {
			f.Fatal(err)
		}
		for n := range 4 {
			f.Add(text, n)
		}
	}
	f.Add([]byte{}, 0)
	f.Add([]byte("{"), 2)
	f.Fuzz(func(t *testing.T, text []byte, n int) {
		if len(text) > maxFuzzed || n < 0 || n > 8 {
			return
		}
		here, there := packets(t)
		c := newCanary(t)
		c.pass(t, there, text, n)
		ord, files, err := control.ReceiveOrder(here)
		if err != nil && files != nil {
			t.Errorf("an error with files: %v", err)
		}
		if err == nil {
			want := 2
			if ord.Fork || ord.WakeLock {
				want = 3
			}
			if len(files) != want || n != want || len(text) > control.MaxOrder {
				t.Errorf("%+v with %d files of %d", ord, len(files), n)
			}
			// An order that was understood is understood again.
			if err := control.SendOrder(there, ord, files...); err != nil {
				t.Fatal(err)
			}
			again, more, err := control.ReceiveOrder(here)
			if err != nil || !reflect.DeepEqual(again, ord) || len(more) != want {
				t.Errorf("%+v was sent on as %+v with %d files, %v", ord, again, len(more), err)
			}
			control.CloseAll(more)
		}
		control.CloseAll(files)
		c.gone(t)
	})
}

// FuzzPoolReply answers a request to a pool with any message. A process comes with both its files, and all other
// files are closed.
func FuzzPoolReply(f *testing.F) {
	for n := range 4 {
		f.Add([]byte(`{"version":1,"pid":7}`), n)
		f.Add([]byte(`{"version":1}`), n)
	}
	f.Add([]byte(`[]`), 2)
	f.Fuzz(func(t *testing.T, text []byte, n int) {
		if len(text) == 0 || len(text) > maxFuzzed || n < 0 || n > 8 {
			return
		}
		here, there := packets(t)
		c := newCanary(t)
		if n == 0 {
			c.pass(t, there, text, 0)
		} else {
			// The first file is the process's socket.
			mine, theirs := packets(t)
			sock, err := theirs.File()
			if err != nil {
				t.Fatal(err)
			}
			fds := []int{int(sock.Fd())}
			for range n - 1 {
				fds = append(fds, int(c.write.Fd()))
			}
			_, _, err = there.WriteMsgUnix(text, unix.UnixRights(fds...), nil)
			sock.Close()
			theirs.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				// Every copy of the other end must be closed.
				_ = mine.SetReadDeadline(time.Now().Add(time.Minute))
				if k, err := mine.Read(make([]byte, 16)); k != 0 || err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("the socket that was passed is open: %d, %v", k, err)
				}
			}()
		}
		ready, err := askPool(here, poolRequest{Version: poolVersion, Shape: spec.Shape{MemoryMiB: 128, VCPUs: 1}})
		if ready != nil {
			if err != nil || n != 2 || ready.pid == 0 || ready.conn == nil {
				t.Errorf("%+v with %d files, %v", ready, n, err)
			}
			ready.close()
		}
		// A caller closes its end once its VM runs. That ends what came too late to be read.
		here.Close()
		c.gone(t)
	})
}

// FuzzPoolRequest sends any message as a request to the server of a pool. The server gives a process only to a
// request of this version for the same program.
func FuzzPoolRequest(f *testing.F) {
	of := program(`1 2 3 4 ["vmm"] "a" n`)
	shape := spec.Shape{MemoryMiB: 128, VCPUs: 1}
	for _, req := range []poolRequest{{poolVersion, shape, of}, {poolVersion, spec.Shape{}, of}, {poolVersion, shape, ""}, {2, shape, of}} {
		text, err := json.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"version":1,"program":null}`))
	f.Add([]byte(`{}{}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) == 0 || len(text) > maxFuzzed {
			return
		}
		here, there := packets(t)
		_, standing := packets(t)
		p := &Pool{launcher: shellLauncher("exit 0"), store: &state.Store{}, log: slog.New(slog.DiscardHandler), want: make(chan struct{}, 1)}
		p.ready = []*standby{{conn: standing, pid: os.Getpid(), shape: shape, what: of}}
		var req poolRequest
		cut := text[:min(len(text), maxPoolMessage)]
		known := json.Unmarshal(cut, &req) == nil
		give := known && req.Version == poolVersion && req.Program == of
		if !give {
			p.ready[0].what = "" // so that dropOld has no program to look up
			p.ready = nil
		}
		if _, err := there.Write(text); err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() {
			err := p.serve(here)
			here.Close()
			served <- err
		}()
		_ = there.SetReadDeadline(time.Now().Add(time.Minute))
		buf := make([]byte, maxPoolMessage)
		n, files, err := control.ReadWithFiles(there, buf, 2)
		there.Close()
		control.CloseAll(files)
		if serr := <-served; known != (serr == nil) {
			t.Errorf("it is understood: %v, and serving it says %v", known, serr)
		}
		if !known {
			return
		}
		var reply poolReply
		if err == nil {
			err = json.Unmarshal(buf[:n], &reply)
		}
		if err != nil || reply.Version != poolVersion || (reply.PID != 0) != give || (len(files) == 2) != give {
			t.Errorf("the answer is %+v with %d files, %v; to be given: %v", reply, len(files), err, give)
		}
	})
}
