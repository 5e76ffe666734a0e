package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// health is a gRPC service with a call, a stream, and errors in trailers.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
}

// Check implements the service.
func (health) Check(_ context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if r.Service == "missing" {
		return nil, status.Error(codes.NotFound, "as told")
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// Watch implements the service.
func (health) Watch(_ *grpc_health_v1.HealthCheckRequest, s grpc_health_v1.Health_WatchServer) error {
	for i := range 3 {
		if err := s.Send(&grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_ServingStatus(i)}); err != nil {
			return err
		}
	}
	return status.Error(codes.Aborted, "the end")
}

func TestGateway_gRPC_passes_with_and_without_TLS(t *testing.T) {
	for name, c := range map[string]struct{ encrypted, https bool }{"h2c": {}, "TLS": {encrypted: true}, "h2c and TLS in the guest": {https: true}} {
		t.Run(name, func(t *testing.T) {
			cert, key, pool := certificate(t, t.TempDir(), 1, "*."+domain)
			w := begin(t, func(o *gateway.Options, l *gateway.Listeners) {
				o.Authorizer = authorizer(func(http.Header) (gateway.Grant, error) { return gateway.Grant{Wake: true, HTTPS: c.https}, nil })
				if !c.encrypted {
					return
				}
				var err error
				if l.TLS, err = gateway.Certificates(cert, key, nil); err != nil {
					t.Fatal(err)
				}
			})
			w.create("g", nil, spec.Idle{})
			l := listen(t)
			var o []grpc.ServerOption
			if c.https {
				own, err := credentials.NewServerTLSFromFile(cert, key)
				if err != nil {
					t.Fatal(err)
				}
				o = append(o, grpc.Creds(own))
			}
			s := grpc.NewServer(o...)
			grpc_health_v1.RegisterHealthServer(s, health{})
			go func() { _ = s.Serve(l) }()
			t.Cleanup(s.Stop)
			w.listens("g", "127.0.0.1:50051", l.Addr().String())
			w.sleep("g")
			creds := insecure.NewCredentials()
			if c.encrypted {
				creds = credentials.NewTLS(&tls.Config{RootCAs: pool})
			}
			c, err := grpc.NewClient("passthrough:///50051-g."+domain, grpc.WithTransportCredentials(creds),
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, "tcp", w.addr)
				}))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			h := grpc_health_v1.NewHealthClient(c)
			if a, err := h.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil || a.Status != grpc_health_v1.HealthCheckResponse_SERVING {
				t.Error(a, err)
			}
			if _, err := h.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "missing"}); status.Code(err) != codes.NotFound {
				t.Error(err)
			}
			stream, err := h.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for ; err == nil; n++ {
				_, err = stream.Recv()
			}
			if n != 4 || status.Code(err) != codes.Aborted {
				t.Error(n, err)
			}
		})
	}
}

var many = flag.Int("websockets", 500, "how many WebSockets to open at once")

// mostOfOne bounds the memory of a WebSocket with its client, the gateway, the guest and its server, in bytes.
const mostOfOne = 384 << 10

func TestGateway_many_WebSockets_cost_little_and_slow_readers_stall_themselves_alone(t *testing.T) {
	const ofOne, slow, flood = 500, 4, 64 << 20
	files(t, *many*6+1000)
	w := begin(t, func(_ *gateway.Options, l *gateway.Listeners) { l.ConnsOf = *many + 10 })
	boxes := (*many + ofOne - 1) / ofOne
	for i := range boxes {
		name := fmt.Sprintf("ws%d", i)
		w.create(name, nil, spec.Idle{})
		w.serves(name, 80, echoes)
		w.sleep(name)
	}
	var written [slow]atomic.Int64
	w.serves("ws0", 81, func(rw http.ResponseWriter, r *http.Request) {
		i, _ := strconv.Atoi(r.URL.Query().Get("i"))
		c, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		// Hosts may let their kernels keep much of a connection.
		if err := c.(*net.TCPConn).SetWriteBuffer(64 << 10); err != nil {
			t.Error(err)
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for written[i].Load() < flood {
			n, err := c.Write(bytes.Repeat([]byte{byte('a' + i)}, 64<<10))
			if written[i].Add(int64(n)); err != nil {
				return
			}
		}
	})
	stack := func() (heap, stacks uint64) {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, m.StackInuse
	}
	fds := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	heap, stacks := stack()
	opened, routines := fds(), runtime.NumGoroutine()
	begun := time.Now()
	conns := make([]net.Conn, *many)
	var all sync.WaitGroup
	room := make(chan struct{}, 64)
	for i := range conns {
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			c, r := w.upgrade(fmt.Sprintf("80-ws%d.%s", i%boxes, domain))
			if _, err := io.WriteString(c, "x\n"); err != nil {
				t.Error(err)
			}
			if line, err := r.ReadString('\n'); line != "x\n" {
				t.Error(line, err)
			}
			conns[i] = c
		})
	}
	all.Wait()
	heap2, stacks2 := stack()
	n := uint64(*many)
	t.Logf("%d WebSockets to %d sandboxes, open and answered after %.1f s, with clients, gateway, guests and their servers in one process: %d bytes of heap, %d of stacks, %.1f descriptors, %.1f goroutines each",
		n, boxes, time.Since(begun).Seconds(), (heap2-heap)/n, (max(stacks2, stacks)-stacks)/n, float64(fds()-opened)/float64(n), float64(runtime.NumGoroutine()-routines)/float64(n))
	if got := w.gate.Stats(); got.Open != *many || got.Sessions != boxes {
		t.Errorf("%+v", got)
	}
	if each := (heap2 - min(heap, heap2) + max(stacks2, stacks) - stacks) / n; each > mostOfOne {
		t.Errorf("a WebSocket has %d bytes, want at most %d", each, mostOfOne)
	}

	// Some clients of one of the sandboxes do not read what it sends.
	var stalled [slow]*bufio.Reader
	for i := range stalled {
		c, r := w.say(fmt.Sprintf("GET /?i=%d HTTP/1.1\r\nHost: 81-ws0.%s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", i, domain))
		if a, err := http.ReadResponse(r, nil); err != nil || a.StatusCode != http.StatusSwitchingProtocols {
			t.Fatal(a, err)
		}
		if err := c.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
			t.Error(err)
		}
		stalled[i], conns = r, append(conns, c)
	}
	for i := range written {
		// Nothing tells that a write waits. If this looks too early, the server goes on, and what counts is where it is
		// when the others have been served.
		last := int64(-1)
		until(t, "a writer waits for its reader", func() bool {
			was := last
			last = written[i].Load()
			time.Sleep(20 * time.Millisecond)
			return last > 0 && last == was
		})
		if last >= flood {
			t.Errorf("%d bytes lie between a server and a client that does not read", last)
		}
	}
	heap3, _ := stack()
	// A hundredth is what other connections may have come to hold.
	if each := (heap3 - min(heap2+heap2/100, heap3)) / slow; each > 1<<20 {
		t.Errorf("a client that does not read has %d bytes of heap", each)
	}
	took := make([]time.Duration, *many) // the longest of each
	for i, c := range conns[:*many] {
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			for range 3 {
				begun := time.Now()
				want, got := fmt.Sprintf("again %d\n", i), make([]byte, len(fmt.Sprintf("again %d\n", i)))
				if _, err := io.WriteString(c, want); err != nil {
					t.Error(err)
				}
				if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
					t.Errorf("%q, %v, want %q", got, err, want)
				}
				took[i] = max(took[i], time.Since(begun))
			}
		})
	}
	all.Wait()
	slices.Sort(took)
	t.Logf("each answered three times beside %d clients that do not read, 64 at once: the slowest of three in %v / %v / %v (p50 / p99 / most)",
		slow, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	for i, r := range stalled {
		if written[i].Load() >= flood {
			t.Errorf("client %d has not stalled", i)
		}
		n := 0
		buf := make([]byte, 64<<10)
		for {
			m, err := r.Read(buf)
			if bytes.Count(buf[:m], []byte{byte('a' + i)}) != m {
				t.Fatalf("client %d has bytes of others", i)
			}
			if n += m; err != nil {
				break
			}
		}
		if n != flood {
			t.Errorf("client %d has %d bytes, want %d", i, n, flood)
		}
	}
	// A sleep cuts them; the others end by their clients.
	w.sleep("ws0")
	for i, c := range conns[:*many] {
		if i%boxes == 0 {
			if _, err := c.Read(make([]byte, 1)); err == nil {
				t.Errorf("connection %d goes on over a sleep", i)
			}
		}
		c.Close()
	}
	for _, c := range conns[*many:] {
		c.Close()
	}
	until(t, "all have left", func() bool { return w.gate.Stats().Open == 0 && w.gate.Stats().Sessions == 0 })
	for i := 1; i < boxes; i++ {
		w.sleep(fmt.Sprintf("ws%d", i)) // as at the beginning
	}
	until(t, "descriptors are closed", func() bool { return fds() <= opened+20 })
	until(t, "goroutines have ended", func() bool { return runtime.NumGoroutine() <= routines+20 })
}

// files makes sure that this process may open so many files.
func files(t *testing.T, n int) {
	t.Helper()
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		t.Fatal(err)
	}
	want := uint64(n)
	if r.Max >= want {
		return // the runtime has raised the limit in force
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: want, Max: want}); err != nil {
		t.Fatalf("this many WebSockets need %d descriptors, and this process may have %d: raise the limit, or open fewer: %v", n, r.Max, err)
	}
}

// BenchmarkGateway compares requests through the gateway with requests to the guest's server by Sandbox.Dial without
// it, on a VM in memory: it shows what the gateway adds, and says nothing of a VM. "asleep" is with a wake.
func BenchmarkGateway(b *testing.B) {
	w := begin(b, nil)
	box := w.create("a", nil, spec.Idle{})
	w.serves("a", 80, func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "x") })
	ask := func(b *testing.B, c *http.Client, host string) {
		a, err := c.Get("http://" + host + "/")
		if err != nil || a.StatusCode != 200 {
			b.Fatal(a, err)
		}
		_, _ = io.Copy(io.Discard, a.Body)
		a.Body.Close()
	}
	direct := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return box.Dial(ctx, "tcp", "127.0.0.1:80")
	}}}
	defer direct.CloseIdleConnections()
	through := w.client(nil)
	run := func(name string, before func(), do func(b *testing.B)) {
		b.Run(name, func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				if before != nil {
					b.StopTimer()
					before()
					b.StartTimer()
				}
				begun := time.Now()
				do(b)
				took = append(took, time.Since(begun))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
	asleep := func() {
		direct.CloseIdleConnections()
		w.sleep("a")
	}
	run("awake/direct", nil, func(b *testing.B) { ask(b, direct, "a") })
	run("awake/gateway", nil, func(b *testing.B) { ask(b, through, "80-a."+domain) })
	run("asleep/direct", asleep, func(b *testing.B) { ask(b, direct, "a") })
	run("asleep/gateway", asleep, func(b *testing.B) { ask(b, through, "80-a."+domain) })
}
