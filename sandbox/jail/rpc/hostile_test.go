package rpc

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMessages_that_break_a_rule_end_the_connection_and_leave_no_descriptor(t *testing.T) {
	full := strings.Repeat("x", packetSize-headerSize)
	type sent struct {
		packet []byte
		files  int
	}
	begun := sent{packet(kindCall, 1, "a", 1, 64<<10, full[:packetSize-headerSize-1]), 1}
	tooLong := packet(kindCall, 1, "a", 1, 64<<10+1, full[:packetSize-headerSize-1])
	noSuchName := append(packet(kindCall, 1, "", 0, 0, "")[:1], bytes.Repeat([]byte{9}, headerSize-1)...)
	call, post := packet(kindCall, 1, "a", 1, 0, ""), packet(kindPost, 1, "a", 0, 0, "")
	withFile, shorter := packet(kindRest, 1, "", 1, 64<<10, full[:17]), packet(kindRest, 1, "", 0, 64<<10-1, full[:16])
	for name, c := range map[string]struct {
		packets []sent
		want    error
	}{
		"no header":                            {[]sent{{[]byte("x"), 1}}, ErrProtocol},
		"garbage":                              {[]sent{{bytes.Repeat([]byte{0xa5}, 1000), 1}}, ErrProtocol},
		"a packet that is too long":            {[]sent{{bytes.Repeat([]byte{1}, packetSize+1), 1}}, ErrProtocol},
		"a message that is too long":           {[]sent{{tooLong, 1}}, ErrProtocol},
		"too many files":                       {[]sent{{packet(kindCall, 1, "a", 3, 0, ""), 3}}, ErrProtocol},
		"so many files that some are lost":     {[]sent{{packet(kindCall, 1, "a", 100, 0, ""), 100}}, ErrProtocol},
		"fewer files than it says":             {[]sent{{packet(kindCall, 1, "a", 2, 0, ""), 1}}, ErrProtocol},
		"more files than it says":              {[]sent{{packet(kindCall, 1, "a", 0, 0, ""), 1}}, ErrProtocol},
		"an unknown kind":                      {[]sent{{packet(99, 1, "", 1, 0, ""), 1}}, ErrProtocol},
		"a rest of nothing":                    {[]sent{{packet(kindRest, 1, "", 0, 0, ""), 0}}, ErrProtocol},
		"a name that is none":                  {[]sent{{packet(kindCall, 1, "a\n", 1, 0, ""), 1}}, ErrProtocol},
		"no name":                              {[]sent{{packet(kindCall, 1, "", 1, 0, ""), 1}}, ErrProtocol},
		"a name beyond the packet":             {[]sent{{noSuchName, 0}}, ErrProtocol},
		"less of a body than it says":          {[]sent{{packet(kindCall, 1, "a", 1, 10, "x"), 1}}, ErrProtocol},
		"more of a body than it says":          {[]sent{{packet(kindCall, 1, "a", 1, 1, "xx"), 1}}, ErrProtocol},
		"a post with a file":                   {[]sent{{packet(kindPost, 1, "a", 1, 0, ""), 1}}, ErrProtocol},
		"an error with a file":                 {[]sent{{packet(kindError, 1, "", 1, 0, ""), 1}}, ErrProtocol},
		"a cancellation with a body":           {[]sent{{packet(kindCancel, 1, "", 0, 1, "x"), 0}}, ErrProtocol},
		"an answer to nothing":                 {[]sent{{packet(kindReply, 1, "", 1, 0, ""), 1}}, ErrProtocol},
		"an id twice":                          {[]sent{{call, 1}, {post, 0}}, ErrProtocol},
		"a message inside of one":              {[]sent{begun, {packet(kindCall, 2, "a", 1, 0, ""), 1}}, ErrProtocol},
		"a rest with a file":                   {[]sent{begun, {withFile, 1}}, ErrProtocol},
		"a rest of another length":             {[]sent{begun, {shorter, 0}}, ErrProtocol},
		"an end in the middle":                 {[]sent{begun}, ErrPeerClosed},
		"an end":                               {nil, ErrPeerClosed},
		"a cancellation of nothing and an end": {[]sent{{packet(kindCancel, 1, "", 0, 0, ""), 0}}, ErrPeerClosed},
		"an empty packet":                      {[]sent{{nil, 0}}, ErrPeerClosed},
	} {
		t.Run(name, func(t *testing.T) {
			sameFDs(t)
			file := temp(t, "")
			defer file.Close()
			keeper, peer := against(t, Options{MaxMessage: 64 << 10, MaxFiles: 2,
				Handler: func(ctx context.Context, _ string, _ []byte, files osFiles) (any, osFiles, error) {
					<-ctx.Done()
					return nil, files, nil
				}}, stall)
			for _, p := range c.packets {
				fds := make([]int, p.files)
				for i := range fds {
					fds[i] = int(file.Fd())
				}
				if err := peer.send(p.packet, fds...); err != nil {
					t.Fatal(err)
				}
			}
			if c.want == ErrPeerClosed {
				peer.close()
			}
			<-keeper.Done()
			if err := keeper.Err(); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if _, err := keeper.Call(t.Context(), "a", nil, nil, temp(t, "")); !errors.Is(err, c.want) {
				t.Errorf("a call afterwards: %v, want %v", err, c.want)
			}
		})
	}
}

func TestPeer_that_never_reads_loses_its_connection(t *testing.T) {
	sameFDs(t)
	keeper, _ := against(t, Options{MaxCalls: 8}, 50*time.Millisecond)
	long := strings.Repeat("x", 500_000)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := keeper.Call(ctx, "a", long, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := keeper.Call(t.Context(), "a", long, nil, temp(t, "")); !errors.Is(err, ErrStalled) {
				t.Error(err)
			}
		})
	}
	for range 4 { // they return although the socket is full
		if err := keeper.Post("a", long); err != nil && !errors.Is(err, ErrStalled) {
			t.Error(err)
		}
	}
	wg.Wait()
	<-keeper.Done()
}

func TestContext_ends_a_call_whose_message_has_not_been_sent(t *testing.T) {
	sameFDs(t)
	keeper, peer := against(t, Options{}, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			_, err := keeper.Call(ctx, "a", strings.Repeat("x", 1_000_000), nil, temp(t, ""))
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	until(t, "the socket is full", func() bool {
		keeper.out.Lock()
		defer keeper.out.Unlock()
		return keeper.out.writing
	})
	cancel()
	wg.Wait()
	peer.close()
	<-keeper.Done()
}

func TestPeer_that_never_replies_keeps_only_MaxCalls_calls(t *testing.T) {
	keeper, _ := against(t, Options{MaxCalls: 3}, stall)
	for i := range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, err := keeper.Call(ctx, "a", nil, nil)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	keeper.mu.Lock()
	defer keeper.mu.Unlock()
	if n := len(keeper.waiting); n != 3 {
		t.Errorf("%d calls are remembered, want 3", n)
	}
}

func TestPeer_cannot_answer_a_call_that_it_has_not_got(t *testing.T) {
	keeper, peer := against(t, Options{}, stall)
	var wg sync.WaitGroup
	for range 3 { // the socket has room for less than one
		wg.Go(func() {
			if _, err := keeper.Call(t.Context(), "a", strings.Repeat("x", 1_000_000), nil); !errors.Is(err, ErrProtocol) {
				t.Error(err)
			}
		})
	}
	until(t, "the calls wait", func() bool {
		keeper.mu.Lock()
		defer keeper.mu.Unlock()
		return len(keeper.waiting) == 3
	})
	if err := peer.send(packet(kindReply, 3, "", 0, 4, "null")); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
}

func TestReplies_to_calls_that_were_given_up_leave_no_descriptor(t *testing.T) {
	sameFDs(t)
	keeper, peer := against(t, Options{}, stall)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := keeper.Call(ctx, "a", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	file := temp(t, "")
	defer file.Close()
	if err := peer.send(packet(kindReply, 1, "", 1, 4, "null"), int(file.Fd())); err != nil {
		t.Fatal(err)
	}
	until(t, "the reply comes", func() bool { return len(keeper.calls) == 0 })
}

// A reply that is not JSON of the right kind fails the call, and its files are closed.
func TestReplies_that_cannot_be_read_fail_the_call(t *testing.T) {
	sameFDs(t)
	keeper, peer := against(t, Options{}, stall)
	file := temp(t, "")
	defer file.Close()
	for i, body := range []string{"", "{", `"text"`, strings.Repeat("[", 20_000), strings.Repeat("1", 50_000)} {
		var wg sync.WaitGroup
		wg.Go(func() {
			var n int
			if _, err := keeper.Call(t.Context(), "a", nil, &n); err == nil || len(err.Error()) > 5000 {
				t.Errorf("%.10q: %.100v", body, err)
			}
		})
		if _, err := unix.Read(peer.fd, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		if err := peer.send(packet(kindReply, uint64(i+1), "", 1, len(body), body), int(file.Fd())); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}
}

func TestPeer_that_floods_with_calls_loses_its_connection(t *testing.T) {
	sameFDs(t)
	var most atomic.Int32
	keeper, peer := against(t, Options{MaxCalls: 5,
		Handler: func(ctx context.Context, _ string, _ []byte, files osFiles) (any, osFiles, error) {
			most.Add(1)
			<-ctx.Done()
			return nil, files, nil
		}}, stall)
	file := temp(t, "")
	defer file.Close()
	for i := range uint64(1_000_000) {
		if err := peer.send(packet(kindCall, i, "a", 1, 0, ""), int(file.Fd())); err != nil {
			break
		}
	}
	<-keeper.Done()
	if err := keeper.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
	keeper.Close()
	if n := most.Load(); n > 5 {
		t.Errorf("%d calls were served at a time, want 5 at most", n)
	}
}

// Calls have a pace (see package jail), and what nobody has called needs none. Its keeper would read without end, on a
// processor that does not count for the peer.
func TestAttack_peer_that_cancels_what_it_has_not_called_takes_a_processor(t *testing.T) {
	sameFDs(t)
	keeper, peer := against(t, Options{MaxCalls: 5}, stall)
	for i := range uint64(1_000_000) {
		if err := peer.send(packet(kindCancel, i, "", 0, 0, "")); err != nil {
			break
		}
	}
	select {
	case <-keeper.Done():
	default:
		peer.close()
		<-keeper.Done()
	}
	if err := keeper.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
	keeper.Close()
}

// The peer stays within MaxCalls as far as it can tell, but reads no answer. So these fill the socket, then the queue.
func TestPeer_that_reads_no_answers_has_few_of_them_kept(t *testing.T) {
	sameFDs(t)
	const calls = 5
	long := strings.Repeat("x", 50_000)
	keeper, peer := against(t, Options{MaxCalls: calls,
		Handler: func(context.Context, string, []byte, osFiles) (any, osFiles, error) {
			return long, []*os.File{temp(t, "")}, nil
		}}, stall)
	for i := range uint64(1_000) {
		if err := peer.send(packet(kindCall, i, "a", 0, 0, "")); err != nil {
			break
		}
		keeper.out.Lock()
		n := len(keeper.out.queue)
		keeper.out.Unlock()
		if n > calls+1 {
			t.Errorf("%d answers are kept", n)
		}
	}
	<-keeper.Done()
	if err := keeper.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
}

// Replies get through while all calls of the peer are in progress, and while it cancels others.
func TestReplies_get_through_while_the_peer_is_busy(t *testing.T) {
	begun := make(chan bool)
	keeper, peer := against(t, Options{MaxCalls: 2,
		Handler: func(ctx context.Context, _ string, _ []byte, _ osFiles) (any, osFiles, error) {
			begun <- true
			<-ctx.Done()
			return nil, nil, nil
		}}, stall)
	for i := range uint64(2) {
		if err := peer.send(packet(kindCall, i, "a", 0, 0, "")); err != nil {
			t.Fatal(err)
		}
		<-begun
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		var n int
		if _, err := keeper.Call(t.Context(), "a", nil, &n); err != nil || n != 7 {
			t.Error(n, err)
		}
	})
	if _, err := unix.Read(peer.fd, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(4) {
		if err := peer.send(packet(kindCancel, 100+i, "", 0, 0, "")); err != nil {
			t.Fatal(err)
		}
	}
	if err := peer.send(packet(kindReply, 1, "", 0, 1, "7")); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
}

func TestPeer_that_closes_in_the_middle_ends_calls(t *testing.T) {
	sameFDs(t)
	keeper, peer := against(t, Options{}, stall)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if _, err := keeper.Call(t.Context(), "a", nil, nil, temp(t, "")); !errors.Is(err, ErrPeerClosed) {
				t.Error(err)
			}
		})
	}
	if _, err := unix.Read(peer.fd, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	peer.close() // with calls that it has not read
	wg.Wait()
}

// The peer takes nothing any more, so what it has sent is read, and nothing later is waited for.
func TestPeer_that_shuts_its_reading_side_ends_the_connection(t *testing.T) {
	keeper, peer := against(t, Options{}, stall)
	if err := unix.Shutdown(peer.fd, unix.SHUT_RD); err != nil {
		t.Fatal(err)
	}
	if _, err := keeper.Call(t.Context(), "a", nil, nil); !errors.Is(err, ErrPeerClosed) {
		t.Error(err)
	}
}
