package supervisor

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns both ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// relayed returns the outer ends of two connections that relay joins. ended is closed when relay returns.
func relayed(t *testing.T) (client, server *net.TCPConn, ended <-chan struct{}) {
	t.Helper()
	client, a := pair(t)
	b, server := pair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		relay(a, b)
	}()
	return client, server, done
}

func TestRelay_an_end_of_one_direction_leaves_the_other_one(t *testing.T) {
	client, server, ended := relayed(t)
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(server); err != nil || string(got) != "question" {
		t.Errorf("the server has %q, %v", got, err)
	}
	if _, err := server.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	server.Close()
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Errorf("the client has %q, %v", got, err)
	}
	<-ended
}

func TestRelay_a_reset_is_never_taken_for_an_end(t *testing.T) {
	for name, cut := range map[string]func(client, server *net.TCPConn) (other *net.TCPConn){
		"by the client": func(client, server *net.TCPConn) *net.TCPConn { reset(client); return server },
		"by the server": func(client, server *net.TCPConn) *net.TCPConn { reset(server); return client },
	} {
		t.Run(name, func(t *testing.T) {
			client, server, ended := relayed(t)
			if _, err := client.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(server, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			other := cut(client, server)
			if _, err := io.ReadAll(other); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the other end reads %v, want a reset", err)
			}
			<-ended
		})
	}
}

func TestPublished_are_ports_of_VMs_with_a_network(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:80")
	p := &netpolicy.Policy{Publish: []netpolicy.Published{
		{Listen: at, Port: 8000, Protocol: netpolicy.TCP}, {Listen: at, Port: 53, Protocol: netpolicy.UDP},
	}}
	for name, tc := range map[string]struct {
		spec sandbox.Spec
		want []port
	}{
		"with a network": {sandbox.Spec{Name: "a", Network: spec.NetworkTAP, Policy: p}, []port{{"a", at, 8000, netpolicy.TCP}, {"a", at, 53, netpolicy.UDP}}},
		"without":        {sandbox.Spec{Name: "a", Network: spec.NetworkNone, Policy: p}, nil},
		"no policy":      {sandbox.Spec{Name: "a", Network: spec.NetworkTAP}, nil},
	} {
		if got := published(tc.spec); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

func TestRun_ends_with_its_context(t *testing.T) {
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, s, pool.Launcher{}, Options{}); err != nil {
		t.Error(err)
	}
	if err := Run(t.Context(), s, pool.Launcher{}, Options{MaxConns: -1}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("a negative number of connections: got %v, want ErrSpec", err)
	}
	if err := Run(t.Context(), s, pool.Launcher{}, Options{Pool: pool.MaxSize + 1}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("too large a pool: got %v, want ErrSpec", err)
	}
}
