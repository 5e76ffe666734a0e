//go:build workloads

package sandbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

var (
	lifeFor      = flag.Duration("life-for", 10*time.Second, "how long clients work on sandboxes, without a kill")
	lifeAsleep   = flag.Int("life-asleep", 8, "how many sandboxes they work on, which sleep in between")
	lifeRecorded = flag.Int("life-recorded", 50, "how many are recorded, those included")
	lifeClients  = flag.Int("life-clients", 8, "how many clients there are")
	lifeKills    = flag.Int("life-kills", 10, "how many processes are killed then")
	lifeSeed     = flag.Uint64("life-seed", 1, "what chance begins with")
	lifePatience = flag.Duration("life-patience", 3*time.Minute, "how long one operation may take: more where the machine may stand still")
)

// tally counts in the guest's memory and in a file. It answers '+', which adds one, and '=' with both counts.
const tally = `
import os, socket
s = socket.create_server(('127.0.0.1', 8000), backlog=64)
f = os.open('/root/tally', os.O_RDWR | os.O_CREAT)
n = 0
os.pwrite(f, b'%012d' % n, 0)
open('/run/tally.listens', 'w').close()
while True:
    c, _ = s.accept()
    try:
        while True:
            d = c.recv(1)
            if not d:
                break
            if d == b'+':
                n += 1
                os.pwrite(f, b'%012d' % n, 0)
            c.sendall(b'%d %s\n' % (n, os.pread(f, 12, 0)))
    except OSError:
        pass
    c.close()
`

// startTally starts the program in a guest, and waits until it listens.
func startTally(ctx context.Context, s *sandbox.Host, name string) error {
	c, err := s.Sandbox(name).Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.WriteFile(ctx, "/root/tally.py", strings.NewReader(tally), guest.WriteOptions{}); err != nil {
		return err
	}
	p, err := c.Start(ctx, guest.Cmd{Argv: []string{"python3", "-S", "-E", "/root/tally.py"}, Detach: true})
	if err != nil {
		return err
	}
	if err := p.Close(); err != nil {
		return err
	}
	for {
		if _, err := c.Stat(ctx, "/run/tally.listens"); err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// A life is one run of the test.
type life struct {
	*guesttest.Env
	dir   lifeFiles
	run   lifeRun
	rand  *rand.Rand
	procs map[string]*lifeProc
}

// lifeProc is a client or the supervisor.
type lifeProc struct {
	cmd   *exec.Cmd
	log   *os.File
	ended chan struct{}
	err   error // valid once ended is closed
}

// Many clients at once wake, use, fork and remove sandboxes and put them to sleep, later while supervisor, VM
// processes and clients are killed. No count may be lost or doubled, and nothing may be left.
func TestLife_of_many_sandboxes_under_load(t *testing.T) {
	e := guesttest.New(t)
	dir, err := os.MkdirTemp("", "dl")
	if err != nil {
		t.Fatal(err)
	}
	v := &life{Env: e, dir: lifeFiles(dir), rand: rand.New(rand.NewPCG(*lifeSeed, 0)), procs: map[string]*lifeProc{}}
	t.Cleanup(v.keep)
	e.Run(sandbox.Spec{Name: "base", MemoryMiB: 256, Network: spec.NetworkTAP})
	if err := startTally(t.Context(), e.Store, "base"); err != nil {
		t.Fatal(err)
	}
	e.Sleep("base")
	e.Wake("base")
	snap := e.Sleep("base").Snapshot
	v.run = lifeRun{Store: e.Store.State.Dir(), Agent: e.Launcher.Agent, Snapshot: snap, Sandboxes: *lifeAsleep, Seed: *lifeSeed, Patience: *lifePatience}
	v.configure(false)
	v.recordOthers(max(0, *lifeRecorded-*lifeAsleep))

	begin := time.Now()
	c := lifeClient{lifeRun: v.run, store: e.Store, l: e.Launcher, dir: v.dir}
	v.each(func(i int) error { return c.make(lifeName(i)) })
	if t.Failed() {
		return
	}
	list, err := e.Store.State.List()
	if err != nil {
		t.Fatal(err)
	}
	asleep := 0
	for _, r := range list {
		if r.Phase == state.Asleep {
			asleep++
		}
	}
	t.Logf("%d sandboxes are recorded and %d asleep after %v", len(list), asleep, time.Since(begin).Round(time.Second))

	watching, stopWatching := context.WithCancel(t.Context())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		v.watch(watching)
	}()
	v.countAnew()
	begin = time.Now()
	v.start("serve")
	for i := range *lifeClients {
		v.start(strconv.Itoa(i))
	}
	for time.Since(begin) < *lifeFor && !v.anyEnded() {
		time.Sleep(100 * time.Millisecond)
	}
	v.stopAll()
	v.figures("without a kill", time.Since(begin))
	v.checkAll("without a kill")

	if *lifeKills > 0 && !t.Failed() {
		v.configure(true)
		v.countAnew()
		begin = time.Now()
		v.start("serve")
		for i := range *lifeClients {
			v.start(strconv.Itoa(i))
		}
		killed := map[string]int{}
		for n := 0; n < *lifeKills && !t.Failed(); {
			time.Sleep(time.Duration(v.rand.IntN(1000)) * time.Millisecond)
			if kind := v.killOne(); kind != "" {
				killed[kind]++
				n++
			}
		}
		v.stopAll()
		v.figures(fmt.Sprintf("with kills %v", killed), time.Since(begin))
		v.checkAll("after the kills")
	}
	stopWatching()
	<-watched
	v.nothingLeft(snap)
}

// lifeLogs are the files of a VM that show what happened to it.
var lifeLogs = []string{"vm.json", "vmm.log", "console.log"}

// keep removes the files of a run that passed. For one that failed it adds logs and events of the store, which
// itself is removed.
func (v *life) keep() {
	if !v.T.Failed() {
		if err := os.RemoveAll(string(v.dir)); err != nil {
			v.T.Error(err)
		}
		return
	}
	to := filepath.Join(string(v.dir), "kept")
	for _, what := range append([]string{filepath.Join("events", "*")}, lifeLogs...) {
		if !strings.HasPrefix(what, "events") {
			what = filepath.Join("vms", "*", what)
		}
		files, err := filepath.Glob(filepath.Join(v.Store.State.Dir(), what))
		if err != nil {
			v.T.Error(err)
		}
		for _, path := range files {
			rel, err := filepath.Rel(v.Store.State.Dir(), path)
			var b []byte
			if err == nil {
				b, err = os.ReadFile(path)
			}
			if err == nil {
				err = os.MkdirAll(filepath.Join(to, filepath.Dir(rel)), 0o700)
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(to, rel), b, 0o600)
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				v.T.Error(err)
			}
		}
	}
	v.T.Logf("the logs of VMs, the events, and what clients knew are kept in %s", v.dir)
}

func (v *life) configure(kills bool) {
	v.T.Helper()
	v.run.Kills = kills
	b, err := json.Marshal(v.run)
	if err == nil {
		err = os.WriteFile(filepath.Join(string(v.dir), "run.json"), b, 0o600)
	}
	if err != nil {
		v.T.Fatal(err)
	}
}

// recordOthers writes n records of stopped sandboxes: copies of the base's with their own names and ids.
func (v *life) recordOthers(n int) {
	v.T.Helper()
	b, err := os.ReadFile(filepath.Join(v.Store.State.Dir(), "vms", "base", "vm.json"))
	if err != nil {
		v.T.Fatal(err)
	}
	for i := range n {
		var r state.Record
		if err := json.Unmarshal(b, &r); err != nil {
			v.T.Fatal(err)
		}
		r.Spec.Name, r.ID, r.Phase, r.Snapshot, r.Sleeps = fmt.Sprintf("recorded-%d", i), fmt.Sprintf("%032x", i+1), state.Stopped, "", nil
		r.Disk.Layers, r.NextLayer = nil, 0
		dir := filepath.Join(v.Store.State.Dir(), "vms", r.Spec.Name)
		out, err := json.Marshal(r)
		if err = errors.Join(err, os.Mkdir(dir, 0o700)); err == nil {
			err = os.WriteFile(filepath.Join(dir, "vm.json"), out, 0o600)
		}
		if err != nil {
			v.T.Fatal(err)
		}
	}
}

func (v *life) start(role string) {
	v.T.Helper()
	self, err := os.Executable()
	if err != nil {
		v.T.Fatal(err)
	}
	log, err := os.OpenFile(v.dir.path("process-"+role, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		v.T.Fatal(err)
	}
	p := &lifeProc{cmd: exec.Command(self, lifeArg, string(v.dir), role), log: log, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		v.T.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		log.Close()
		close(p.ended)
	}()
	v.procs[role] = p
}

// anyEnded reports whether a client or the supervisor has given up.
func (v *life) anyEnded() bool {
	for role, p := range v.procs {
		select {
		case <-p.ended:
			said, _ := os.ReadFile(p.log.Name())
			v.T.Errorf("%s has ended: %v: %s", role, p.err, said[max(0, len(said)-2000):])
			return true
		default:
		}
	}
	return false
}

// stopAll stops the clients after their current work, and then the supervisor.
func (v *life) stopAll() {
	v.T.Helper()
	v.anyEnded()
	wait := func(role string, p *lifeProc) {
		select {
		case <-p.ended:
		case <-time.After(*lifePatience + time.Minute):
			_ = p.cmd.Process.Kill()
			<-p.ended
			v.T.Errorf("%s did not end by itself", role)
		}
		// A process that was just started does not catch the signal yet, and has done nothing.
		var exit *exec.ExitError
		early := errors.As(p.err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM
		if p.err != nil && !early {
			said, _ := os.ReadFile(p.log.Name())
			v.T.Errorf("%s ended with %v: %s", role, p.err, said[max(0, len(said)-2000):])
		}
		delete(v.procs, role)
	}
	for role, p := range v.procs {
		if role != "serve" {
			_ = p.cmd.Process.Signal(syscall.SIGTERM)
		}
	}
	for role, p := range v.procs {
		if role != "serve" {
			wait(role, p)
		}
	}
	if p := v.procs["serve"]; p != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		wait("serve", p)
	}
	if b, err := os.ReadFile(v.dir.path("all", "wrong")); err == nil {
		v.T.Errorf("what clients saw:\n%s", b)
	}
}

// lifeCounts are the counters of the clients.
var lifeCounts = []string{"adds", "sleeps", "wakes", "forks", "deletes", "makes", "again"}

// countAnew resets the counters after the sandboxes are made or checked.
func (v *life) countAnew() {
	for _, kind := range lifeCounts {
		_ = os.Remove(v.dir.path("all", kind))
	}
}

func (v *life) figures(what string, took time.Duration) {
	v.T.Helper()
	said := []string{}
	for _, kind := range lifeCounts {
		n, err := v.dir.count("all", kind)
		if err != nil {
			v.T.Error(err)
		}
		said = append(said, fmt.Sprintf("%s %d", kind, n))
	}
	v.T.Logf("%s, in %v with %d clients on %d sandboxes: %s", what, took.Round(time.Second), *lifeClients, *lifeAsleep, strings.Join(said, ", "))
}

// each calls do for every sandbox of the clients, four at once.
func (v *life) each(do func(i int) error) {
	var all sync.WaitGroup
	next := make(chan int)
	for range 4 {
		all.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					v.T.Error(err)
				}
			}
		})
	}
	for i := range *lifeAsleep {
		next <- i
	}
	close(next)
	all.Wait()
}

// checkAll checks the counter of each sandbox.
func (v *life) checkAll(when string) {
	v.T.Helper()
	begin := time.Now()
	c := lifeClient{lifeRun: v.run, store: v.Store, l: v.Launcher, dir: v.dir}
	var total atomic.Int64
	v.each(func(i int) error {
		name := lifeName(i)
		lock, err := v.dir.lock(name, true)
		if err != nil {
			return err
		}
		defer lock.Close()
		m, err := c.settled(name)
		if err != nil {
			return err
		}
		if err := c.add(name, m, false); err != nil {
			return err
		}
		total.Add(int64(m.Now[0]))
		return c.sleep(name, m)
	})
	if b, err := os.ReadFile(v.dir.path("all", "wrong")); err == nil {
		v.T.Errorf("%s: %s", when, b)
	}
	v.T.Logf("%s: the counters of %d sandboxes are what they should be, %d in all; looked at in %v", when, *lifeAsleep, total.Load(), time.Since(begin).Round(time.Second))
}

// killOne kills a random process and returns its kind, or "" if it killed none.
func (v *life) killOne() string {
	v.T.Helper()
	switch n := v.rand.IntN(100); {
	case n < 12:
		p := v.procs["serve"]
		_ = p.cmd.Process.Kill()
		<-p.ended
		v.start("serve")
		return "supervisor"
	case n < 40:
		role := strconv.Itoa(v.rand.IntN(*lifeClients))
		p := v.procs[role]
		select {
		case <-p.ended:
			v.anyEnded()
			return ""
		default:
		}
		_ = p.cmd.Process.Kill()
		<-p.ended
		v.start(role)
		return "client"
	case n < 50:
		// A standby process may become a VM's at this moment.
		if pids := standbys(v.Env); len(pids) > 0 {
			return v.killVMM("", pids[v.rand.IntN(len(pids))])
		}
	}
	list, err := v.Store.State.List()
	if err != nil {
		v.T.Error(err)
		return ""
	}
	list = slices.DeleteFunc(list, func(r *state.Record) bool {
		return r.PID == 0 || r.Phase != state.Running && r.Phase != state.Starting
	})
	if len(list) == 0 {
		return ""
	}
	r := list[v.rand.IntN(len(list))]
	return v.killVMM(r.Spec.Name, r.PID)
}

// killVMM kills the process of a VM or a standby. It notes the kill of each VM concerned, before and after.
func (v *life) killVMM(name string, pid int) string {
	fd, err := os.FindProcess(pid) // uses a pidfd
	if err != nil {
		return ""
	}
	defer fd.Release()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(line, []byte(v.Store.State.Dir())) {
		return ""
	}
	kind, names := "VM's process", []string{name}
	if name == "" {
		// Any VM may be getting this process.
		kind, names = "standby", nil
		for i := range *lifeAsleep {
			names = append(names, lifeName(i), lifeName(i)+"-f")
		}
	}
	note := func() {
		for _, n := range names {
			if err := v.dir.note(n, "kills"); err != nil {
				v.T.Error(err)
			}
		}
	}
	note()
	if err := fd.Signal(syscall.SIGKILL); err != nil {
		return ""
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || len(b) == 0 {
			break
		}
	}
	note()
	return kind
}

// watch looks for two processes with one VM.
func (v *life) watch(ctx context.Context) {
	seen := map[string]int{}
	looks := 0
	for ctx.Err() == nil {
		who := v.machines()
		now := map[string]int{}
		for name, pids := range who {
			if len(pids) < 2 {
				continue
			}
			// One may be exiting, so only the same pair in three looks in a row is an error.
			key := fmt.Sprint(name, pids)
			if now[key] = seen[key] + 1; now[key] == 3 {
				v.T.Errorf("%s has processes %v", name, pids)
			}
		}
		seen = now
		looks++
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	v.T.Logf("it was looked for two processes with one VM %d times", looks)
}

// machines returns the processes that have a KVM machine and files of a VM of the store, by the VM's name.
func (v *life) machines() map[string][]int {
	out := map[string][]int{}
	dirs, _ := filepath.Glob("/proc/[0-9]*/fd")
	prefix := filepath.Join(v.Store.State.Dir(), "vms") + "/"
	for _, dir := range dirs {
		fds, err := os.ReadDir(dir)
		if err != nil {
			continue // the process has ended
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		machine, names := false, map[string]bool{}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(dir, fd.Name()))
			if err != nil {
				continue
			}
			machine = machine || to == "anon_inode:kvm-vm"
			if rest, ok := strings.CutPrefix(to, prefix); ok {
				name, _, _ := strings.Cut(rest, "/")
				names[name] = true
			}
		}
		for name := range names {
			if machine {
				out[name] = append(out[name], pid)
			}
		}
	}
	return out
}

func newLifeLeft(store string) *lifeLeft {
	return &lifeLeft{store: store, ids: map[string]string{}, proc: "/proc", cgroups: "/sys/fs/cgroup", pins: link.DefaultRoot, netns: "/run/netns"}
}

// nothingLeft removes all sandboxes, and checks that nothing of them is left.
func (v *life) nothingLeft(snap string) {
	t := v.T
	t.Helper()
	list, err := v.Store.State.List()
	if err != nil {
		t.Fatal(err)
	}
	asleep := 0
	for _, r := range list {
		if strings.HasPrefix(r.Spec.Name, "life-") {
			if r.Phase != state.Asleep || strings.HasSuffix(r.Spec.Name, "-f") {
				t.Errorf("%s is %s", r.Spec.Name, r.Phase)
			}
			asleep++
		}
	}
	if asleep != *lifeAsleep || len(list) != max(*lifeRecorded, *lifeAsleep)+1 {
		t.Errorf("%d sandboxes are there and %d of them sleep, want %d and %d", len(list), asleep, max(*lifeRecorded, *lifeAsleep)+1, *lifeAsleep)
	}
	if left := v.machines(); len(left) != 0 {
		t.Errorf("all sleep, and these have processes: %v", left)
	}
	look := newLifeLeft(v.Store.State.Dir())
	for _, r := range list {
		look.ids[r.ID] = r.Spec.Name
	}
	if err := look.told(); err != nil {
		t.Error(err)
	}
	// Stopping processes may need a moment.
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		left, err := look.host()
		if err == nil && len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("all sleep, and there are left: %q (%v)", left, err)
			break
		}
	}
	for _, r := range list {
		if err := v.Store.Sandbox(r.Spec.Name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
	// The leftovers of killed processes are younger than the grace period.
	v.Store.State.Grace = 0
	freed, err := v.Store.State.Sweep(t.Context())
	if err != nil {
		t.Error(err)
	}
	t.Logf("after all were removed a sweep has freed %+v", freed)
	if left := look.all(t); len(left) != 0 {
		t.Errorf("all were removed, and there are left: %q", left)
	}
	t.Logf("nothing is left of %d sandboxes", len(look.ids))
}
