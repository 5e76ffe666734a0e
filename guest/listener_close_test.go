package guest_test

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
)

func TestListener_its_address_is_free_when_Close_returns(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	sock := filepath.Join(t.TempDir(), "s")
	for network, first := range map[string]string{"tcp": "127.0.0.1:0", "unix": sock} {
		address := first
		for range 50 {
			l, err := c.Listen(t.Context(), network, address)
			if errors.Is(err, syscall.EADDRINUSE) && network == "tcp" {
				address = first // another process has it now
				continue
			}
			if err != nil {
				t.Fatalf("%s: listening again after Close: %v", network, err)
			}
			if network == "tcp" {
				address = l.Addr().String()
			}
			accepted := make(chan error, 1)
			go func() {
				_, err := l.Accept()
				accepted <- err
			}()
			l.Close()
			if conn, err := net.Dial(network, address); err == nil {
				conn.Close()
				t.Fatalf("%s: the listener is there after Close", network)
			}
			if err := <-accepted; !errors.Is(err, net.ErrClosed) {
				t.Fatalf("%s: Accept says %v, want ErrClosed", network, err)
			}
			l.Close()
		}
	}
}

// listening returns a listener of a fake agent. talk gets the agent's end of its connection.
func listening(t *testing.T, talk func(net.Conn)) *guest.Listener {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	c := clientOf(t, func(_ context.Context, port uint32) (net.Conn, error) {
		host, far := net.Pipe()
		wg.Go(func() {
			defer far.Close()
			if port != agentpb.ForwardPort {
				io.Copy(io.Discard, far)
				return
			}
			var head [agentpb.ForwardRequestSize]byte
			var m agentpb.ForwardRequest
			if _, err := io.ReadFull(far, head[:]); err != nil || m.Decode(&head) != nil {
				t.Errorf("the request: %v", err)
				return
			}
			io.CopyN(io.Discard, far, int64(m.Length))
			far.Write(forwardAnswer(agentpb.CodeOK, "12345678127.0.0.1:80"))
			talk(far)
		})
		return host, nil
	})
	l, err := c.Listen(t.Context(), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestListener_Close_waits_for_the_agent_to_end_it(t *testing.T) {
	var ended atomic.Bool
	l := listening(t, func(far net.Conn) {
		var b [1]byte
		if _, err := io.ReadFull(far, b[:]); err != nil || b[0] != agentpb.EndListener {
			t.Errorf("the host says %q, %v", b, err)
		}
		time.Sleep(20 * time.Millisecond) // the guest is busy
		ended.Store(true)
	})
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if !ended.Load() {
		t.Error("Close has returned before the agent has ended the listener")
	}
}

func TestListener_Close_leaves_an_agent_that_does_not_end_it(t *testing.T) {
	for name, talk := range map[string]func(net.Conn){
		"it takes nothing": func(far net.Conn) {
			// Only a deadline ends the host's write.
			time.Sleep(100 * time.Millisecond)
			io.Copy(io.Discard, far)
		},
		"it takes the word and stays": func(far net.Conn) { io.Copy(io.Discard, far) },
		"it announces without end": func(far net.Conn) {
			go io.Copy(io.Discard, far)
			var b [agentpb.AnnouncementSize]byte
			(&agentpb.Announcement{Token: 7}).Encode(&b)
			for {
				if _, err := far.Write(b[:]); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := listening(t, talk)
			guest.SetCloseTime(l, 50*time.Millisecond)
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("Accept says %v, want ErrClosed", err)
			}
		})
	}
}
