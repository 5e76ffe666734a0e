package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCall_takes_an_argument_and_files_and_returns_a_reply_and_files(t *testing.T) {
	sameFDs(t)
	keeper, child := pair(t, Options{Handler: echo}, Options{Handler: echo})
	for _, c := range []*Conn{keeper, child} {
		var reply struct{ Text string }
		files, err := c.Call(t.Context(), "echo", struct{ Text string }{"hello"}, &reply, temp(t, "one"), temp(t, "two"))
		if err != nil {
			t.Fatal(err)
		}
		if reply.Text != "hello" || len(files) != 2 {
			t.Fatalf("reply %q with %d files", reply.Text, len(files))
		}
		for i, want := range []string{"one", "two"} {
			got := make([]byte, 3)
			if _, err := files[i].ReadAt(got, 0); err != nil || string(got) != want {
				t.Errorf("file %d has %q (%v), want %q", i, got, err, want)
			}
			if err := control(files[i], func(fd int) {
				if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
					t.Errorf("a child of this process would get file %d (%v)", i, err)
				}
			}); err != nil {
				t.Error(err)
			}
		}
		closeAll(files)
	}
}

func TestMessages_have_up_to_the_limit(t *testing.T) {
	keeper, _ := pair(t, Options{}, Options{Handler: echo})
	const packet = packetSize - headerSize - len(`echo""`) // one that is full
	for _, n := range []int{0, packet, packet + 1, 3 * packetSize, 1<<20 - len(`""`)} {
		text, reply := strings.Repeat("x", n), ""
		if _, err := keeper.Call(t.Context(), "echo", text, &reply); err != nil || reply != text {
			t.Errorf("%d bytes: got %d (%v)", n, len(reply), err)
		}
	}
}

func TestCall_refuses_what_exceeds_a_limit_and_the_connection_stays(t *testing.T) {
	sameFDs(t)
	long := func(_ context.Context, method string, _ []byte, files osFiles) (any, osFiles, error) {
		closeAll(files)
		switch method {
		case "long":
			return strings.Repeat("x", 1<<20), nil, nil
		case "files":
			return nil, []*os.File{temp(t, ""), temp(t, ""), temp(t, "")}, nil
		}
		return nil, nil, nil
	}
	o := Options{Handler: long, MaxFiles: 2}
	keeper, _ := pair(t, o, o)
	for _, c := range []struct {
		method string
		arg    any
		files  []*os.File
		want   string
	}{
		{"a", strings.Repeat("x", 1<<20), []*os.File{temp(t, "")}, "limit is 1048576"},
		{"a", nil, []*os.File{temp(t, ""), temp(t, ""), temp(t, "")}, "limit is 2"},
		{"a", nil, []*os.File{temp(t, ""), nil}, "nil"},
		{"", nil, nil, "name"},
		{"a b", nil, nil, "name"},
		{strings.Repeat("a", 65), nil, nil, "name"},
		{"a", make(chan int), nil, "JSON"},
		{"long", nil, nil, "limit is 1048576"},
		{"files", nil, nil, "limit is 2"},
	} {
		_, err := keeper.Call(t.Context(), c.method, c.arg, nil, c.files...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.10q: %v, want %q", c.method, err, c.want)
		}
	}
	if _, err := keeper.Call(t.Context(), "a", nil, nil); err != nil {
		t.Error(err)
	}
}

func TestFiles_that_are_closed_fail_only_their_call(t *testing.T) {
	sameFDs(t)
	closed := func() *os.File {
		f := temp(t, "")
		f.Close()
		return f
	}
	keeper, _ := pair(t, Options{}, Options{
		Handler: func(_ context.Context, _ string, _ []byte, files osFiles) (any, osFiles, error) {
			closeAll(files)
			return nil, []*os.File{closed()}, nil
		}})
	if _, err := keeper.Call(t.Context(), "a", nil, nil, temp(t, ""), closed()); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	_, err := keeper.Call(t.Context(), "a", nil, nil)
	if err == nil || !strings.Contains(err.Error(), "file already closed") {
		t.Error(err)
	}
}

func TestErrors_keep_their_identity(t *testing.T) {
	mine, other := errors.New("mine"), errors.New("other")
	var fail atomic.Pointer[error]
	sent := map[string]error{"mine": mine, "other": other}
	keeper, _ := pair(t, Options{Sentinels: sent}, Options{Sentinels: sent,
		Handler: func(context.Context, string, []byte, osFiles) (any, osFiles, error) { return nil, nil, *fail.Load() }})
	_, notExist := os.Open("/does/not/exist")
	for _, c := range []struct {
		err, is error
		text    string
	}{
		{errors.New("plain"), nil, "plain"},
		{notExist, fs.ErrNotExist, "open /does/not/exist: no such file or directory"},
		{fmt.Errorf("write: %w", unix.ENOSPC), unix.ENOSPC, "write: no space left on device"},
		{fmt.Errorf("a: %w", mine), mine, "a: mine"},
		{fmt.Errorf("wait: %w", context.Canceled), context.Canceled, "wait: context canceled"},
		{context.DeadlineExceeded, context.DeadlineExceeded, "context deadline exceeded"},
		{errors.New("a\x1b[2J\n\xffb"), nil, "a [2J ?b"},
		{errors.New(strings.Repeat("ü", 4000)), nil, strings.Repeat("ü", 2046) + "..."},
		{errors.New(strings.Repeat("<", 5000)), nil, strings.Repeat("<", 4093) + "..."},
		{errors.New(""), nil, "the peer failed and does not say why"},
	} {
		fail.Store(&c.err)
		_, err := keeper.Call(t.Context(), "fail", nil, nil)
		if err == nil || err.Error() != c.text {
			t.Errorf("%.100v, want %.100q", err, c.text)
		}
		for _, is := range []error{fs.ErrNotExist, unix.ENOSPC, mine, other, context.Canceled, context.DeadlineExceeded} {
			if errors.Is(err, is) != (is == c.is) {
				t.Errorf("%.100v: errors.Is(%v) is wrong", err, is)
			}
		}
	}
}

func TestErrors_of_a_hostile_peer_are_bounded(t *testing.T) {
	s := newSentinels(nil)
	long := strings.Repeat("x", 1<<20)
	for body, want := range map[string]string{
		`{"text":"` + long + `"}`:                     long[:maxErrorText-3] + "...",
		`{"text":"a","errno":-1,"codes":["nothing"]}`: "a",
		`{"text":"a","errno":99999}`:                  "a",
		`{"text":"a","codes":[` + strings.Repeat(`"context.Canceled",`, 1000) + `"x"]}`: "a",
		`}`: "the peer failed, and its error cannot be read: invalid character '}' looking for beginning of value",
	} {
		err := s.decode([]byte(body))
		if err.Error() != want {
			t.Errorf("%.100q, want %.100q", err, want)
		}
		var errno syscall.Errno
		if errors.As(err, &errno) {
			t.Errorf("%v has the errno %d", err, errno)
		}
	}
}

func TestCancellation_reaches_the_handler_and_Call_returns_at_once(t *testing.T) {
	serving, cancelled := make(chan bool), make(chan error)
	keeper, _ := pair(t, Options{}, Options{
		Handler: func(ctx context.Context, _ string, _ []byte, _ osFiles) (any, osFiles, error) {
			serving <- true
			<-ctx.Done()
			cancelled <- ctx.Err()
			return nil, []*os.File{temp(t, "")}, nil
		}})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-serving; cancel() }()
	if _, err := keeper.Call(ctx, "wait", nil, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := <-cancelled; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	until(t, "the answer frees the place of the call", func() bool { return len(keeper.calls) == 0 })
	if _, err := keeper.Call(ctx, "wait", nil, nil, temp(t, "")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestHandlers_call_back(t *testing.T) {
	handler := func(ctx context.Context, _ string, body []byte, _ osFiles) (any, osFiles, error) {
		n := len(body) - len(`""`)
		if n == 0 {
			return "", nil, nil
		}
		var deeper string
		_, err := Peer(ctx).Call(ctx, "deeper", strings.Repeat("x", n-1), &deeper)
		return deeper + "x", nil, err
	}
	keeper, _ := pair(t, Options{Handler: handler}, Options{Handler: handler})
	var got string
	if _, err := keeper.Call(t.Context(), "deeper", "xxxxxxxxx", &got); err != nil || got != "xxxxxxxxx" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestCalls_beyond_the_limit_wait(t *testing.T) {
	var now, most atomic.Int32
	o := Options{MaxCalls: 4, Handler: func(context.Context, string, []byte, osFiles) (any, osFiles, error) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(100 * time.Microsecond)
		now.Add(-1)
		return nil, nil, nil
	}}
	keeper, child := pair(t, o, o)
	var wg sync.WaitGroup
	for range 100 {
		for _, c := range []*Conn{keeper, child} {
			wg.Go(func() {
				for range 5 {
					if _, err := c.Call(t.Context(), "work", nil, nil); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	if n := most.Load(); n > 8 {
		t.Errorf("%d calls at a time, want 4 of each end", n)
	}
}

func TestPosts_are_served_in_order_and_are_bounded(t *testing.T) {
	var got []string
	begun, goOn := make(chan bool, 1), make(chan bool)
	o := Options{MaxCalls: 4}
	served := make(chan bool, 5)
	keeper, child := pair(t, Options{MaxCalls: 4,
		Handler: func(_ context.Context, _ string, body []byte, _ osFiles) (any, osFiles, error) {
			if len(got) == 0 {
				begun <- true
				<-goOn
			}
			got = append(got, string(body))
			served <- true
			return nil, []*os.File{temp(t, "")}, errors.New("nobody hears of it")
		}}, o)
	for i := range 4 {
		if err := child.Post("log", i); err != nil {
			t.Fatal(err)
		}
	}
	<-begun
	if err := child.Post("log", 4); !errors.Is(err, ErrBusy) {
		t.Errorf("the fifth: %v", err)
	}
	close(goOn)
	for range 4 {
		<-served
	}
	if !slices.Equal(got, []string{"0", "1", "2", "3"}) {
		t.Error(got)
	}
	until(t, "the answers free the places of the posts", func() bool { return len(child.posted) == 0 })
	child.Close()
	if err := child.Post("log", 5); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	<-keeper.Done()
	if err := keeper.Err(); !errors.Is(err, ErrPeerClosed) {
		t.Error(err)
	}
}

func TestReplies_before_the_end_arrive(t *testing.T) {
	for range 50 {
		ready, end := make(chan bool), make(chan bool)
		keeper, child := pair(t, Options{}, Options{
			Handler: func(context.Context, string, []byte, osFiles) (any, osFiles, error) {
				close(ready)
				<-end
				return "bye", nil, nil
			}})
		var wg sync.WaitGroup
		wg.Go(func() {
			var reply string
			if _, err := keeper.Call(t.Context(), "last", nil, &reply); err != nil || reply != "bye" {
				t.Errorf("%q, %v", reply, err)
			}
		})
		<-ready
		close(end)
		until(t, "the reply is sent", func() bool {
			child.mu.Lock()
			defer child.mu.Unlock()
			return len(child.serving) == 0
		})
		child.out.Lock() // the reply has left once this is free
		child.out.Unlock()
		child.Close()
		wg.Wait()
	}
}

func TestClose_ends_calls_and_handlers_of_both_ends(t *testing.T) {
	sameFDs(t)
	serving := make(chan bool)
	var ended atomic.Int32
	o := Options{Handler: func(ctx context.Context, _ string, _ []byte, files osFiles) (any, osFiles, error) {
		serving <- true
		<-ctx.Done()
		ended.Add(1)
		return nil, files, nil
	}}
	keeper, child := pair(t, o, o)
	var wg sync.WaitGroup
	for _, c := range []*Conn{keeper, child} {
		wg.Go(func() {
			_, err := c.Call(t.Context(), "wait", nil, nil, temp(t, ""))
			if want := map[bool]error{true: ErrClosed, false: ErrPeerClosed}[c == keeper]; !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		})
		<-serving
	}
	wg.Go(func() { keeper.Close() })
	if err := keeper.Close(); err != nil {
		t.Error(err)
	}
	<-child.Done()
	child.Close()
	if n := ended.Load(); n != 2 {
		t.Errorf("Close waited for %d handlers, want 2", n)
	}
	wg.Wait()
}

func TestNew_refuses_what_is_no_socket_and_closes_it(t *testing.T) {
	sameFDs(t)
	if _, err := New(temp(t, ""), Options{}); err == nil {
		t.Error("a file is a connection")
	}
	if _, err := New(temp(t, ""), Options{MaxFiles: 1000}); err == nil {
		t.Error("1000 files fit a packet")
	}
}

func TestCall_without_a_handler_fails(t *testing.T) {
	sameFDs(t)
	keeper, _ := pair(t, Options{}, Options{})
	_, err := keeper.Call(t.Context(), "a", nil, nil, temp(t, ""))
	if err == nil || !strings.Contains(err.Error(), "serves no calls") {
		t.Error(err)
	}
}

func TestDup_leaves_the_file_with_its_owner(t *testing.T) {
	sameFDs(t)
	f := temp(t, "")
	d, err := Dup(f)
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if _, err := f.Stat(); err != nil {
		t.Error(err)
	}
	f.Close()
	if _, err := Dup(f); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// childEnv makes the test program a child that serves echo on descriptor 3.
const childEnv = "DROWSE_RPC_TEST_CHILD"

func runChild() int {
	c, err := New(os.NewFile(3, "keeper"), Options{Handler: echo})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	<-c.Done()
	c.Close()
	return 0
}

// process makes a child that is a process.
func process(t testing.TB) *Conn {
	t.Helper()
	k, c, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.ExtraFiles, cmd.Stderr = []*os.File{c}, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.Close()
	keeper := connect(t, k, Options{})
	t.Cleanup(func() {
		keeper.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return keeper
}

func TestChild_in_a_process_serves_calls(t *testing.T) {
	sameFDs(t)
	keeper := process(t)
	for range 100 {
		var got int
		files, err := keeper.Call(t.Context(), "echo", 7, &got, temp(t, ""))
		if err != nil || got != 7 || len(files) != 1 {
			t.Fatal(got, files, err)
		}
		closeAll(files)
	}
}

// With one file each way.
func BenchmarkCall(b *testing.B) {
	inProcess := func(b testing.TB) *Conn {
		k, _ := pair(b, Options{}, Options{Handler: echo})
		return k
	}
	for _, bb := range []struct {
		name  string
		conn  func(testing.TB) *Conn
		files bool
	}{
		{"process/file", process, true}, {"process/plain", process, false},
		{"here/file", inProcess, true}, {"here/plain", inProcess, false},
	} {
		b.Run(bb.name, func(b *testing.B) {
			keeper := bb.conn(b)
			var files []*os.File
			if bb.files {
				files = append(files, temp(b, ""))
			}
			type small struct {
				Name string
				N    int
			}
			b.ReportAllocs()
			for b.Loop() {
				var reply small
				var err error
				if files, err = keeper.Call(b.Context(), "echo", small{"system.erofs", 12}, &reply, files...); err != nil {
					b.Fatal(err)
				}
			}
			closeAll(files)
		})
	}
}
