package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// packets is a pair of sockets as between a pool and its processes.
func packets(t *testing.T) (here, there *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []**net.UnixConn{&here, &there} {
		if *c, err = fileConn(os.NewFile(uintptr(fds[i]), "pair")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*c).Close() })
	}
	return here, there
}

// canary is a file of which copies are passed on, and that says whether all of them have been closed.
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

// pass sends a message with n copies.
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

// gone fails if a copy is open.
func (c canary) gone(t *testing.T) {
	t.Helper()
	c.write.Close()
	_ = c.read.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.read.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a file that was passed is still open: %v", err)
	}
}

// maxFuzzed bounds inputs, in bytes: more than what is read of a message, but not by much.
const maxFuzzed = maxOrder + 1024

// FuzzPoolOrder gives a process that stands by any message for an order: it is one with as many files as it says, or
// all files are closed.
func FuzzPoolOrder(f *testing.F) {
	for _, ord := range []order{{Name: "a"}, {Name: "a", Snapshot: "0123", Hold: true}, {Name: "a", Fork: true, NewIdentity: true, Cause: "cli"}} {
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
		ord, files, err := receiveOrder(here)
		if err != nil && files != nil {
			t.Errorf("an error with files: %v", err)
		}
		if err == nil {
			want := 2
			if ord.Fork || ord.Hold {
				want = 3
			}
			if len(files) != want || n != want || len(text) > maxOrder {
				t.Errorf("%+v with %d files of %d", ord, len(files), n)
			}
			// What was understood is understood again.
			if err := sendOrder(there, ord, files...); err != nil {
				t.Fatal(err)
			}
			again, more, err := receiveOrder(here)
			if err != nil || !reflect.DeepEqual(again, ord) || len(more) != want {
				t.Errorf("%+v was sent on as %+v with %d files, %v", ord, again, len(more), err)
			}
			closeAll(more)
		}
		closeAll(files)
		c.gone(t)
	})
}

// FuzzPoolReply answers one who asks a pool for a process with any message: a process has both its files, and all
// others are closed.
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
			// The first is the process's socket.
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
				// The other end is closed everywhere.
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
		// As whoever asks does when its VM is there. What was not read, because it came too late, ends with that.
		here.Close()
		c.gone(t)
	})
}

// FuzzPoolRequest asks one who serves a pool by any message. A process is given to who asks for one of the same program
// by this version, and to nobody else.
func FuzzPoolRequest(f *testing.F) {
	of := program{Device: 1, Inode: 2, Size: 3, Modified: 4, Args: []string{"vmm"}, Environment: []string{"a"}, Namespaces: []string{"n"}}
	shape := spec.Shape{MemoryMiB: 128, VCPUs: 1}
	for _, req := range []poolRequest{{poolVersion, shape, of}, {poolVersion, spec.Shape{}, of}, {poolVersion, shape, program{}}, {2, shape, of}} {
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
		p := &Pool{launcher: shellLauncher("exit 0"), store: &Store{}, log: slog.New(slog.DiscardHandler), want: make(chan struct{}, 1)}
		p.ready = []*standby{{conn: standing, pid: os.Getpid(), shape: shape, what: of}}
		var req poolRequest
		cut := text[:min(len(text), maxPoolMessage)]
		known := json.Unmarshal(cut, &req) == nil
		give := known && req.Version == poolVersion && req.Program.equal(of)
		if !give {
			p.ready[0].what = program{} // and dropOld, which asks the host which program it is, has nothing to do
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
		n, files, err := readWithFiles(there, buf, 2)
		there.Close()
		closeAll(files)
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

// FuzzControl asks the process of a VM that has just gone to sleep for anything. Each request is answered, nothing is
// done for it, and its error is one that can be passed on. Bodies that change a record leave one that may be, or the
// one that was.
func FuzzControl(f *testing.F) {
	methods := []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
	paths := []string{"/sleep", "/snapshot", "/policy", "/policy/stats", "/tags", "/secrets", "/services", "/ending", "/none"}
	f.Add(uint8(1), uint8(0), "hooks=skip", []byte{})
	f.Add(uint8(1), uint8(1), "note=x&hooks=require&disk-only=true", []byte{})
	f.Add(uint8(2), uint8(2), "", []byte(`{"version":1,"rules":[]}`))
	f.Add(uint8(3), uint8(4), "", []byte(`{"add":["a"],"remove":["b"]}`))
	f.Add(uint8(2), uint8(5), "", []byte(`[{"name":"a","value":"eA=="}]`))
	f.Add(uint8(2), uint8(6), "", []byte(`{"name":"web","argv":["true"],"restart":"always"}`))
	f.Add(uint8(4), uint8(6), "name=web", []byte{})
	f.Fuzz(func(t *testing.T, method, path uint8, query string, body []byte) {
		if len(body) > maxFuzzed || len(query) > 4096 {
			return
		}
		r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "a", Services: []spec.Service{{Name: "kept", Argv: []string{"true"}}}}}
		p := &process{store: &Store{}, log: slog.New(slog.DiscardHandler), r: r, asleep: true}
		where := paths[int(path)%len(paths)]
		req := httptest.NewRequestWithContext(t.Context(), methods[int(method)%len(methods)], where, bytes.NewReader(body))
		req.URL.RawQuery = query
		if where == "/secrets" && req.Method != http.MethodPut || where == "/policy/stats" || where == "/ending" {
			return // these do not ask whether it sleeps: nobody can reach them then
		}
		before, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		p.control().Handler.ServeHTTP(w, req)
		after, err := json.Marshal(r)
		if err != nil || !bytes.Equal(before, after) {
			t.Errorf("the record was changed: %s", after)
		}
		var said ErrorReport
		switch w.Code {
		case http.StatusNotFound, http.StatusMethodNotAllowed:
		case http.StatusInternalServerError:
			if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || said.Code == "" || said.Message == "" || w.Body.Len() > len(body)*6+len(query)*6+1024 {
				t.Errorf("%s %s: %d bytes, %v: %.200s", req.Method, where, w.Body.Len(), err, w.Body)
			}
		default:
			t.Errorf("%s %s of one that sleeps: %d %.200s", req.Method, where, w.Code, w.Body)
		}
		// What a body changes of a record.
		var service spec.Service
		if json.Unmarshal(body, &service) == nil {
			if err := r.SetService(service); err == nil {
				if err := spec.ValidateServices(r.Spec.Services); err != nil || state.FindService(r.Spec.Services, service.Name) < 0 || state.FindService(r.Spec.Services, "kept") < 0 {
					t.Errorf("services %+v: %v", r.Spec.Services, err)
				}
			} else if len(r.Spec.Services) != 1 || !reflect.DeepEqual(r.Spec.Services[0], spec.Service{Name: "kept", Argv: []string{"true"}}) {
				t.Errorf("what was refused (%v) has changed services: %+v", err, r.Spec.Services)
			}
		}
		var tags spec.TagChange
		if json.Unmarshal(body, &tags) == nil && tags.Validate() == nil {
			old := r.Spec.Tags
			if err := r.Spec.UseTags(tags); err != nil && !reflect.DeepEqual(r.Spec.Tags, old) {
				t.Errorf("what was refused (%v) has changed tags: %q", err, r.Spec.Tags)
			}
		}
		if q, err := url.ParseQuery(query); err == nil {
			_ = r.DropService(q.Get("name"))
			if err := spec.ValidateServices(r.Spec.Services); err != nil {
				t.Errorf("without one: %v", err)
			}
		}
	})
}
