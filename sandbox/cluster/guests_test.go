package cluster_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// realHost is a host whose guests are real.
func realHost(t *testing.T, name string, store blob.Store, o cluster.Options) *host {
	t.Helper()
	return hostOf(t, guesttest.New(t), name, store, o)
}

func hostOf(t *testing.T, e *guesttest.Env, name string, store blob.Store, o cluster.Options) *host {
	t.Helper()
	return (&host{t: t, name: name, bare: e.Store.With(e.Launcher), store: store, o: o}).begin()
}

// booted is the directory of a store in which the sandbox "box" sleeps. It is booted once for all tests.
var booted struct {
	sync.Once
	dir string
}

// bootedBox returns a store of a test's own in which the sandbox "box" sleeps.
func bootedBox(t *testing.T) blob.Store {
	t.Helper()
	guesttest.New(t) // skips the test, and not only the boot, where there are no guests
	booted.Do(func() {
		at, err := os.MkdirTemp("", "booted-")
		must(t, err)
		t.Run("boot", func(t *testing.T) {
			e := guesttest.New(t)
			box := sandbox.Spec{Name: "box", Image: guesttest.ImageTag, MemoryMiB: 256, DiskMiB: 256}
			e.Template(box)
			h := hostOf(t, e, "first", sealedDir(t, at), cluster.Options{})
			_, err := h.Create(t.Context(), box, sandbox.CreateOptions{})
			must(t, err)
			h.sleep("box")
			booted.dir = at
		})
	})
	if booted.dir == "" {
		t.Fatal("the sandbox could not be booted: the first test that needs it says why")
	}
	own := t.TempDir()
	must(t, os.CopyFS(own, os.DirFS(booted.dir)))
	return sealedDir(t, own)
}

// says runs a shell command in a sandbox, which may be on another host.
func (h *host) says(name, script string) string {
	h.t.Helper()
	var out strings.Builder
	_, err := h.Sandbox(name).Exec(h.t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, IO: guest.IO{Stdout: &out}})
	must(h.t, err)
	return strings.TrimSpace(out.String())
}

// read returns a file of a sandbox, which it wakes. It starts no process there, which takes an interpreted kernel a
// second.
func (h *host) read(name, file string) string {
	h.t.Helper()
	var out strings.Builder
	_, err := h.Sandbox(name).Files().ReadFile(h.t.Context(), file, &out)
	must(h.t, err)
	return strings.TrimSpace(out.String())
}

// awaits waits until a sandbox has a file.
func (h *host) awaits(name, file string) {
	h.t.Helper()
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		_, err := h.Sandbox(name).Files().Stat(h.t.Context(), file)
		if err == nil {
			return
		}
		if !errors.Is(err, fs.ErrNotExist) || time.Now().After(end) {
			h.t.Fatal(err)
		}
	}
}

// starts starts a command in a sandbox, which goes on.
func (h *host) starts(name string, argv ...string) (pid int) {
	h.t.Helper()
	return h.startsAs("lasting", name, argv...)
}

func (h *host) startsAs(id, name string, argv ...string) (pid int) {
	h.t.Helper()
	c, err := h.Sandbox(name).Agent(h.t.Context())
	must(h.t, err)
	s, err := c.Start(h.t.Context(), guest.Cmd{Argv: argv, Detach: true, NoStdin: true, ID: id})
	must(h.t, err)
	pid = s.PID()
	must(h.t, s.Close())
	must(h.t, c.Close())
	return pid
}

func (h *host) number(name, file string) int {
	h.t.Helper()
	n, err := strconv.Atoi(h.read(name, file))
	must(h.t, err)
	return n
}

// A guest goes from host to host with its memory, its processes and its disk, and goes on elsewhere when its host dies.
func TestGuest_goes_on_where_it_was_on_any_host(t *testing.T) {
	store := bootedBox(t)
	const ttl = 40 * time.Second // a busy machine may take 20 s to publish a snapshot; eventually waits a minute
	a, b := realHost(t, "a", store, cluster.Options{TTL: ttl}), realHost(t, "b", store, cluster.Options{TTL: ttl})
	a.wake("box")
	pid := a.starts("box", "python3", "-I", "-S", "-c", counter)
	a.says("box", "echo from-a > /root/file")
	a.awaits("box", "/dev/shm/n")
	boot := a.read("box", bootID)
	here, there := a, b
	for range 3 {
		before := here.number("box", "/dev/shm/n")
		here.sleep("box")
		now := there.number("box", "/dev/shm/n")
		if is := there.says("box", "cat "+bootID+" /proc/"+strconv.Itoa(pid)+"/comm /root/file"); is != boot+"\npython3\nfrom-a" {
			t.Errorf("on %s it says %q", there.name, is)
		}
		if now < before {
			t.Errorf("the counter goes back from %d to %d", before, now)
		}
		here, there = there, here
	}
	// The host that runs it dies: its node and the VM's process at once.
	durable := here.number("box", "/dev/shm/n")
	here.sleep("box")
	here.says("box", "echo lost > /root/file")
	r, err := here.State.Get("box")
	must(t, err)
	must(t, unix.Kill(r.PID, unix.SIGKILL))
	here.stop()
	here.stop = nil
	eventually(t, "the other host wakes it", func() bool {
		_, err := there.Sandbox("box").Wake(t.Context())
		return err == nil
	})
	if got := there.read("box", "/root/file"); got != "from-a" {
		t.Errorf("after the death of its host the file has %q", got)
	}
	if now := there.number("box", "/dev/shm/n"); now < durable {
		t.Errorf("after the death of its host the counter goes back from %d to %d", durable, now)
	}
	if here.phase("box") == state.Running {
		t.Error("it runs on both hosts")
	}
}

// still checks that a hoarder has what it had, and counts on.
func (h *host) still(name, sum string, count *int) {
	h.t.Helper()
	must(h.t, h.Sandbox(name).Files().WriteFile(h.t.Context(), "/dev/shm/ask", strings.NewReader(""), guest.WriteOptions{}))
	h.awaits(name, "/dev/shm/again")
	is := h.read(name, "/dev/shm/again")
	must(h.t, h.Sandbox(name).Files().Remove(h.t.Context(), "/dev/shm/again", false))
	if is != sum {
		h.t.Errorf("on %s it has %q, and had %q", h.name, is, sum)
	}
	now := h.number(name, "/dev/shm/n")
	if now < *count {
		h.t.Errorf("on %s it counts back from %d to %d", h.name, *count, now)
	}
	*count = now
}

// wakesEnv has the test compare wakes that wait for all memory with those that do not.
const wakesEnv = "DROWSE_TEST_WAKES"

// bootID is a file in which each boot of a guest has something else.
const bootID = "/proc/sys/kernel/random/boot_id"

// counter counts.
const counter = `
import os, time
i = 0
while True:
    i += 1
    with open("/dev/shm/new", "w") as f: f.write(str(i))
    os.rename("/dev/shm/new", "/dev/shm/n")
    time.sleep(0.2)
`

// hoarder has memory that does not compress, counts, and says what it has when it is asked.
const hoarder = `
import hashlib, os, time
d, i = "/dev/shm/", 0
b = [hashlib.shake_128(b"%d" % k).digest(1 << 20) for k in range(24)]
def say(name):
    h = hashlib.sha256()
    for p in b: h.update(p)
    put(name, h.hexdigest())
def put(name, text):
    with open(d + "new", "w") as f: f.write(text)
    os.rename(d + "new", d + name)
say("sum")
while True:
    i += 1
    put("n", str(i))
    if os.path.exists(d + "ask"):
        os.remove(d + "ask")
        say("again")
    time.sleep(0.2)
`

// realGate is a real host that other hosts reach, with a gateway.
func realGate(t *testing.T, name string, store blob.Store) *gate {
	t.Helper()
	id, err := peer.NewIdentity(name)
	must(t, err)
	at, address, err := peer.Listen("127.0.0.1:0")
	must(t, err)
	g := &gate{door: &door{id: id}}
	g.host = realHost(t, name, store, cluster.Options{TTL: 2 * time.Minute, Address: address, Key: id.Key()})
	g.peers = peer.New(peer.Options{Identity: id, Directory: g.node})
	g.node.Reach(g.peers)
	g.passed = g.node.PeerHandlers()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	t.Cleanup(func() {
		cancel()
		must(t, <-done)
		g.peers.Close()
	})
	g.serve(t)
	go func() { done <- g.peers.Serve(ctx, at, g.passed) }()
	return g
}

// answers is a server in a guest: it appends each line that it gets to a file, and then answers it.
const answers = `
import _socket, _thread, os
log = os.open("/root/answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def serve(fd):
    try:
        while line := os.read(fd, 100):
            os.write(log, line)
            os.write(fd, line)
    except OSError:
        pass
    os.close(fd)
s = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
s.bind(("127.0.0.1", 7000))
s.listen(9)
while True:
    _thread.start_new_thread(serve, (s._accept()[0],))
`

// asker is a client of that server that asks through the gateway of a host: one number after the other, and one
// whose answer was cut off again.
type asker struct {
	answered, connections int             // connections after the first answer's
	pauses                []time.Duration // from the last answer of a connection to the first of the next one
	longest               time.Duration   // time from one answer to the next
}

func (a *asker) ask(ctx context.Context, g *gate, server string, pause time.Duration) error {
	_, pool := gateTLS()
	d := tls.Dialer{Config: &tls.Config{ServerName: server + "." + gateDomain, RootCAs: pool}}
	last := time.Now()
	for ctx.Err() == nil {
		c, err := d.DialContext(ctx, "tcp", g.raw)
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if a.answered > 0 { // before, the server may not be there
			a.connections++
		}
		stop := context.AfterFunc(ctx, func() { c.Close() })
		in := bufio.NewReader(c)
		for first := true; ; first = false {
			if _, err := fmt.Fprintln(c, a.answered+1); err != nil {
				break
			}
			line, err := in.ReadString('\n')
			if err != nil {
				break
			}
			if line != fmt.Sprintln(a.answered+1) {
				return fmt.Errorf("asked %d, it answers %q", a.answered+1, line)
			}
			if a.answered++; a.answered > 1 {
				a.longest = max(a.longest, time.Since(last))
				if first {
					a.pauses = append(a.pauses, time.Since(last))
				}
			}
			last = time.Now()
			time.Sleep(pause)
		}
		stop()
		c.Close()
	}
	return nil
}

// movesEnv is how often TestGuest_moves moves its guest; twice by default, and with less to do: it would take a
// processor. It looks at its files after each tenth of many moves.
const movesEnv = "DROWSE_TEST_MOVES"

// A guest moves while its process works and answers a client of a gateway: that goes on, and its memory and its disk
// are what they were.
func TestGuest_moves_while_it_works(t *testing.T) {
	guesttest.Long(t)
	store := bootedBox(t)
	moves, large, pause, works := 2, 1<<20, 500*time.Millisecond, worker
	if text := os.Getenv(movesEnv); text != "" {
		var err error
		moves, err = strconv.Atoi(text)
		must(t, err)
		large, pause, works = 8<<20, 20*time.Millisecond, strings.ReplaceAll(worker, "sleep(0.2)", "sleep(0.05)")
	}
	a, b := realGate(t, "a", store), realGate(t, "b", store)
	a.wake("box")
	a.starts("box", "python3", "-I", "-S", "-c", works)
	a.says("box", fmt.Sprintf(`python3 -I -S -c "import hashlib; open('/root/large', 'wb').write(hashlib.shake_128(b'x').digest(%d))"
		sha256sum /root/large > /root/sum`, large))
	a.awaits("box", "/dev/shm/n")
	_, err := a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Gateway = spec.Gateway{AllPublic: true}; return nil })
	must(t, err)
	a.startsAs("server", "box", "python3", "-I", "-S", "-c", answers)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var client asker
	asked := make(chan error, 1)
	go func() { asked <- client.ask(ctx, a, "7000-box", pause) }()
	boot, sum := a.read("box", bootID), a.read("box", "/dev/shm/sum")
	count := 0
	from, to := a, b
	var downtimes []float64
	for i := range moves {
		// Of many moves, some are looked at.
		look := moves < 10 || i%10 == 9
		if look {
			from.says("box", "rm -f /dev/shm/gap")
		}
		res, err := from.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: to.name})
		must(t, err)
		downtimes = append(downtimes, res.Downtime)
		if res.BytesPause > res.BytesAhead/2 {
			t.Errorf("%d bytes were sent while it did not run, and %d before: what had not changed was sent again", res.BytesPause, res.BytesAhead)
		}
		if from.phase("box") == state.Running {
			t.Error("it runs on both hosts")
		}
		if look {
			gap := to.read("box", "/dev/shm/gap")
			t.Logf("downtime %.0f ms, by its own clock %s ms; stages %v; %d bytes ahead, %d in the pause", res.Downtime, gap, res.Stages, res.BytesAhead, res.BytesPause)
			to.still("box", sum, &count)
			if is := to.says("box", "cat "+bootID+"; sha256sum -c /root/sum"); is != boot+"\n/root/large: OK" {
				t.Errorf("on %s it says %q", to.name, is)
			}
			// Each number that its process has written is on the disk.
			if is := to.says("box", "awk '$1 != NR { print \"line\", NR, \"is\", $1; exit }' /root/log"); is != "" {
				t.Errorf("on %s: %s", to.name, is)
			}
		}
		from, to = to, from
	}
	cancel()
	must(t, <-asked)
	// What is there twice was written, and its answer was cut off.
	is := strings.Fields(from.read("box", "/root/answered"))
	next := 1
	for _, n := range is {
		if n == strconv.Itoa(next) {
			next++
		} else if n != strconv.Itoa(next-1) {
			t.Fatalf("after %d the server was asked %s", next-1, n)
		}
	}
	t.Logf("downtime in ms: %s", quantiles(downtimes))
	var waits []float64
	for _, p := range client.pauses {
		waits = append(waits, float64(p.Milliseconds()))
	}
	t.Logf("a client got %d answers over %d connections; it waited %v at most, and in ms from one connection to the next %s",
		client.answered, client.connections, client.longest, quantiles(waits))
	if next <= client.answered || client.connections > 2*moves || len(is)-(next-1) > client.connections {
		t.Errorf("the server has written %d numbers, of which %d are different; the client has %d answers over %d connections", len(is), next-1, client.answered, client.connections)
	}
}

func quantiles(all []float64) string {
	if len(all) == 0 {
		return "none"
	}
	slices.Sort(all)
	at := func(percent int) float64 { return all[(len(all)-1)*percent/100] }
	return fmt.Sprintf("p50 %.0f, p90 %.0f, p99 %.0f, most %.0f of %d", at(50), at(90), at(99), at(100), len(all))
}

// worker is a hoarder that also writes what it counts to the disk, and the longest time between two counts.
var worker = strings.NewReplacer("i += 1\n", `i += 1
    now = time.time()
    if not os.path.exists(d + "gap"): gap = 0
    if i > 1 and now - last > gap:
        gap = now - last
        put("gap", "%d" % (gap * 1000))
    last = now
    log.write("%d\n" % i)
    log.flush()
`, "while True:", `last = gap = 0
log = open("/root/log", "w")
while True:`).Replace(hoarder)
