package cluster_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/s3server"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/s3"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Hosts are processes of their own here, with their VMs, and are killed at any moment: of a call of the store, of a
// local file, of a start or a sleep.

// What a child gets in its environment.
const (
	childState = "DROWSE_TEST_CLUSTER_STATE" // the directory of the host
	childStore = "DROWSE_TEST_CLUSTER_STORE" // that of the store, or the URL of an S3 server
	childName  = "DROWSE_TEST_CLUSTER_NAME"
	childRuns  = "DROWSE_TEST_CLUSTER_RUNS"  // the file that guests write to when they count
	childFacts = "DROWSE_TEST_CLUSTER_FACTS" // what the hosts' snapshots say of their machines
	crashTTL   = 3 * time.Second
)

// An ask is what a child is to do.
type ask struct {
	ID           int
	Op, Name, To string
}

type said struct {
	ID    int
	Count int
	Err   string
	Code  string // of the error
}

// ran is a line of the file of counts.
type ran struct {
	Name, Host string
	Fence      uint64
	Count      int
}

func openStore(at string) (blob.Store, error) {
	if !strings.HasPrefix(at, "http") {
		return blob.OpenDir(at)
	}
	return s3.Open(s3.Options{
		Endpoint: at, Region: s3server.Region, Bucket: s3server.Bucket, Prefix: "hosts", PathStyle: true,
		Credentials: credentials.NewStaticV4(s3server.AccessKey, s3server.SecretKey, ""),
	})
}

// child is a host. It never ends by itself.
func child() {
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "the child:", err)
			os.Exit(1)
		}
	}
	dir, name := os.Getenv(childState), os.Getenv(childName)
	instance.NoteGoodFacts(os.Getenv(childFacts))
	vms := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{"count": func(_ context.Context, p *fakeguest.Process) int {
		// One after the other on all hosts.
		f, err := osfile.OpenLocked(context.Background(), os.Getenv(childRuns), os.O_APPEND|os.O_RDWR|os.O_CREATE, 0o600, osfile.Exclusive)
		check(err)
		defer f.Close()
		was, _ := p.Guest.ReadFile("/root/count")
		box, err := p.Guest.ReadFile("/root/name")
		check(err)
		c, err := lease.In(dir).Claim(string(box))
		check(err)
		fence := uint64(0)
		if c != nil {
			fence = c.Fence
		}
		line, err := json.Marshal(ran{string(box), name, fence, len(was) + 1})
		check(err)
		check(p.Guest.WriteFile("/root/count", append(was, 'x')))
		_, err = f.Write(append(line, '\n'))
		check(err)
		fmt.Fprint(p.Stdout, len(was)+1)
		return 0
	}}}
	store, err := openStore(os.Getenv(childStore))
	check(err)
	bare, err := vms.Open(dir)
	check(err)
	id, err := peer.NewIdentity(name)
	check(err)
	at, address, err := peer.Listen("127.0.0.1:0")
	check(err)
	n, err := cluster.Join(context.Background(), bare, cluster.Options{
		Store: store, Name: name, TTL: crashTTL, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Address: address, Key: id.Key(),
	})
	check(err)
	peers := peer.New(peer.Options{Identity: id, Directory: n})
	n.Reach(peers)
	go func() { check(peers.Serve(context.Background(), at, n.PeerHandlers())) }()
	h := *bare
	h.Cluster = n
	go func() { check(n.Run(context.Background())) }()
	var mu sync.Mutex
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var a ask
		check(json.Unmarshal(in.Bytes(), &a))
		go func() {
			count, err := do(&h, n, vms, a)
			s := said{ID: a.ID, Count: count}
			if err != nil {
				s.Err = err.Error()
				for _, c := range spec.ErrorCodes {
					if errors.Is(err, c.Err) {
						s.Code = c.Code
						break
					}
				}
			}
			line, err := json.Marshal(s)
			check(err)
			mu.Lock()
			defer mu.Unlock()
			_, _ = os.Stdout.Write(append(line, '\n'))
		}()
	}
}

func do(h *sandbox.Host, n *cluster.Node, vms *sandboxtest.VMs, a ask) (count int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	b := h.Sandbox(a.Name)
	switch a.Op {
	case "create":
		if _, err := h.Create(ctx, sandbox.Spec{Name: a.Name, Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
			return 0, err
		}
		return 0, vms.Guest(a.Name).WriteFile("/root/name", []byte(a.Name))
	case "count", "durably", "moves":
		var out strings.Builder
		if _, err := b.Exec(ctx, guest.Cmd{Argv: []string{"count"}, IO: guest.IO{Stdout: &out}}); err != nil {
			return 0, err
		}
		if count, err = strconv.Atoi(out.String()); err != nil || a.Op == "count" {
			return count, err
		}
		if a.Op == "moves" {
			_, err := n.Migrate(ctx, a.Name, spec.MigrateOptions{To: a.To})
			return count, err
		}
		if _, err := b.Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return 0, err
		}
		return count, n.Publish(ctx, a.Name)
	case "sleep":
		_, err := b.Sleep(ctx, sandbox.SleepOptions{})
		return 0, err
	}
	return 0, errors.New("what?")
}

// crashHost is a host that dies and comes back.
type crashHost struct {
	t     *testing.T
	name  string
	dir   string
	env   []string
	store string

	mu    sync.Mutex
	other string // where it moves sandboxes
	cmd   *exec.Cmd
	in    io.WriteCloser
	next  int
	waits map[int]chan said
	log   *os.File
}

var errDied = errors.New("the host has died")

func (h *crashHost) start() {
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), append(h.env, childState+"="+h.dir, childStore+"="+h.store, childName+"="+h.name)...)
	cmd.Stderr = h.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	must(h.t, err)
	out, err := cmd.StdoutPipe()
	must(h.t, err)
	must(h.t, cmd.Start())
	waits := map[int]chan said{}
	h.mu.Lock()
	h.cmd, h.in, h.waits = cmd, in, waits
	h.mu.Unlock()
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var s said
			if json.Unmarshal(lines.Bytes(), &s) != nil {
				continue // cut
			}
			h.mu.Lock()
			c := waits[s.ID]
			delete(waits, s.ID)
			h.mu.Unlock()
			if c != nil {
				c <- s
			}
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		for id, c := range waits {
			delete(waits, id)
			close(c)
		}
		waits[-1] = nil // closed
	}()
}

func (h *crashHost) kill() {
	h.mu.Lock()
	cmd := h.cmd
	h.mu.Unlock()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

func (h *crashHost) do(op, name string) (said, error) {
	h.mu.Lock()
	if _, closed := h.waits[-1]; closed {
		h.mu.Unlock()
		return said{}, errDied
	}
	h.next++
	c := make(chan said, 1)
	h.waits[h.next] = c
	line, err := json.Marshal(ask{h.next, op, name, h.other})
	if err == nil {
		_, err = h.in.Write(append(line, '\n'))
	}
	h.mu.Unlock()
	if err != nil {
		return said{}, errDied
	}
	s, ok := <-c
	if !ok {
		return s, errDied
	}
	if s.Err != "" {
		return s, errors.New(s.Err)
	}
	return s, nil
}

// crashes kills hosts n times while they use shared sandboxes, and checks that
//
//   - what was durable is never lost: nobody counts from less;
//   - none runs twice: no guest counts under a claim after one has under a later claim;
//   - none is stuck: in the end each host in turn can use each, also one that ran on a host that died and came back,
//     and each can move.
func crashes(t *testing.T, stores [2]string, kills int) {
	dir, err := os.MkdirTemp("", "cl") // it contains Unix sockets
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	runs := filepath.Join(dir, "runs")
	vms := &sandboxtest.VMs{}
	env := []string{childRuns + "=" + runs, childFacts + "=" + factsOf(t, vms.Host(t))}
	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	var hosts [2]*crashHost
	for i := range hosts {
		hosts[i] = &crashHost{t: t, name: fmt.Sprintf("h%d", i), other: fmt.Sprintf("h%d", 1-i), dir: filepath.Join(dir, strconv.Itoa(i)), env: env, store: stores[i], log: log}
		must(t, os.Mkdir(hosts[i].dir, 0o700))
		hosts[i].start()
		t.Cleanup(hosts[i].kill)
	}
	defer func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s", text[max(0, len(text)-20_000):])
			lines, _ := os.ReadFile(runs)
			t.Logf("%s", lines[max(0, len(lines)-3000):])
		}
	}()
	boxes := []string{"box0", "box1"}
	var mu sync.Mutex
	floor := map[string]int{} // what was durable
	done, codes := map[string]int{}, map[string]int{}
	// use does one thing on one host and checks what it says.
	use := func(h *crashHost, op, box string) error {
		mu.Lock()
		least := floor[box]
		mu.Unlock()
		s, err := h.do(op, box)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			if s.Code == "" {
				s.Code = shorten(err.Error())
			}
			codes[s.Code]++
			return err
		}
		done[op]++
		if s.Count > 0 && s.Count <= least {
			t.Errorf("%s counts to %d on %s, and %d was durable before", box, s.Count, h.name, least)
		}
		if op != "count" && op != "sleep" {
			floor[box] = max(floor[box], s.Count)
		}
		return nil
	}
	for i, box := range boxes {
		_, err := hosts[i].do("create", box)
		must(t, err)
		must(t, use(hosts[i], "durably", box))
	}
	stop := make(chan struct{})
	var users sync.WaitGroup
	for i, h := range hosts {
		for j, box := range boxes {
			rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
			users.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Duration(rng.IntN(100)) * time.Millisecond):
					}
					_ = use(h, []string{"count", "count", "durably", "sleep", "durably", "moves", "moves"}[rng.IntN(7)], box)
				}
			})
		}
	}
	rng := rand.New(rand.NewPCG(1, uint64(kills)))
	for range kills {
		time.Sleep(time.Duration(rng.IntN(1000+2000*rng.IntN(2))) * time.Millisecond) // a move takes a second or two
		h := hosts[rng.IntN(len(hosts))]
		h.kill()
		down := time.Duration(rng.IntN(300)) * time.Millisecond
		if rng.IntN(4) == 0 {
			down = crashTTL + time.Duration(rng.IntN(2000))*time.Millisecond // so that the other takes what it had
		}
		time.Sleep(down)
		h.start()
	}
	close(stop)
	users.Wait()
	// One was running on a host that died, and is back under the same session before anybody else could claim it.
	left := 600
	for ; use(hosts[0], "count", boxes[1]) != nil && left > 0; left-- {
		_ = use(hosts[1], "durably", boxes[1])
		time.Sleep(100 * time.Millisecond)
	}
	if left == 0 {
		t.Errorf("%s is stuck: %s cannot use it", boxes[1], hosts[0].name)
	}
	hosts[0].kill()
	hosts[0].start()
	for round := range 3 {
		for i, box := range boxes {
			h := hosts[(i+round)%len(hosts)]
			var err error
			for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
				// The one that has it puts it to sleep. One that died with its host is first used there, as it is passed on to
				// where a host has an address.
				other := hosts[(i+round+1)%len(hosts)]
				if s, err := other.do("sleep", box); err != nil && s.Code == "not-running" {
					_ = use(other, "durably", box)
				}
				if err = use(h, "durably", box); err == nil {
					break
				}
				if time.Now().After(end) {
					t.Errorf("%s is stuck: %s cannot use it: %v", box, h.name, err)
					break
				}
			}
		}
	}
	// Nobody dies any more: each can move, from wherever it is.
	for _, box := range boxes {
		for end := time.Now().Add(time.Minute); use(hosts[0], "moves", box) != nil && use(hosts[1], "moves", box) != nil; time.Sleep(100 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%s is stuck: neither host can move it", box)
				break
			}
		}
	}
	counts := checkRuns(t, runs)
	t.Logf("%d kills: %v done, %v refused or cut, %d counts", kills, done, codes, counts)
	if done["durably"] < kills/10 {
		t.Error("hardly anything was done")
	}
}

// shorten returns the end of an error's text, which has its cause.
func shorten(s string) string { return s[max(0, len(s)-60):] }

// checkRuns checks that no guest has counted under a claim after one has under a later claim, and returns how many
// have counted.
func checkRuns(t *testing.T, path string) (n int) {
	text, err := os.ReadFile(path)
	must(t, err)
	last := map[string]ran{}
	for line := range strings.Lines(string(text)) {
		var r ran
		if json.Unmarshal([]byte(line), &r) != nil {
			continue // the host died
		}
		if before := last[r.Name]; r.Fence < before.Fence && r.Fence != 0 {
			t.Errorf("%s runs on %s under the claim %d, and has run on %s under %d before", r.Name, r.Host, r.Fence, before.Host, before.Fence)
		}
		last[r.Name] = r
		n++
	}
	return n
}

// factsOf returns what snapshots of VMs in memory say of their machine.
func factsOf(t *testing.T, h *sandbox.Host) string {
	t.Helper()
	b, err := h.Create(t.Context(), sandbox.Spec{Name: "facts", Image: sandboxtest.Image}, sandbox.CreateOptions{})
	must(t, err)
	res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	m, err := h.State.Manifest(res.Snapshot)
	must(t, err)
	return m.Host[instance.FactsKey]
}

// kills is how often hosts are killed; make test-scale kills more.
func kills(t *testing.T) int {
	if s := os.Getenv("DROWSE_TEST_CLUSTER_KILLS"); s != "" {
		n, err := strconv.Atoi(s)
		must(t, err)
		return n
	}
	return 8
}

func TestCrash_of_hosts_at_any_moment_loses_no_sandbox_and_runs_none_twice(t *testing.T) {
	store := t.TempDir()
	crashes(t, [2]string{store, store}, kills(t))
}
