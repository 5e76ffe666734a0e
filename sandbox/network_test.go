package sandbox_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// sender sends data to the host as ordered, and answers with the length of the echo and whether it is the same. It
// starts once, which takes long where the guest's kernel is interpreted, and then sleeps, wakes and is forked with
// its guest.
const sender = `
import hashlib, socket
while True:
    port, word, size, timeout = open('/run/order').read().split()
    data, back = hashlib.shake_128(word.encode()).digest(int(size)), b''
    try:
        with socket.create_connection(('172.31.255.1', int(port)), timeout=int(timeout)) as s:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            while True:
                p = s.recv(65536)
                if not p:
                    break
                back += p
        answer = '%d %s' % (len(back), back == data)
    except OSError as e:
        answer = str(e)
    with open('/run/answer', 'w') as f:
        f.write(answer + '\n')
`

// taps returns the TAP devices of a store's links, and those that no process has. Tests that run in parallel have
// others.
func taps(t *testing.T, e *guesttest.Env) []string {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		mine, nobodys := heldTAPs(t, e)
		// A device has no process for a moment when it is made or removed.
		if len(nobodys) == 0 || time.Now().After(deadline) {
			return append(mine, nobodys...)
		}
	}
}

func heldTAPs(t *testing.T, e *guesttest.Env) (mine, nobodys []string) {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	holders := make(map[string]string)
	infos, err := filepath.Glob("/proc/[0-9]*/fdinfo/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range infos {
		text, _ := os.ReadFile(path) // the process may have ended
		if _, after, ok := strings.Cut(string(text), "\niff:\t"); ok {
			tap, _, _ := strings.Cut(after, "\n")
			args, _ := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(path)), "cmdline"))
			// The confined process of a VM has the device as well, and does not say of which store it is.
			if holders[tap] == "" || !strings.Contains(string(args), "\x00"+jail.Argument+"\x00") {
				holders[tap] = string(args)
			}
		}
	}
	for _, i := range all {
		if !strings.HasPrefix(i.Name, "drowse") || strings.HasPrefix(i.Name, "drowse-waker") {
			continue
		}
		if args, ok := holders[i.Name]; !ok {
			nobodys = append(nobodys, i.Name)
		} else if strings.Contains(args, e.Store.State.Dir()) {
			mine = append(mine, i.Name)
		}
	}
	return mine, nobodys
}

// echo echoes connections from the guest behind a TAP device.
func echo(t *testing.T, tap string) (port uint16) {
	t.Helper()
	// The same address is behind other devices for other guests.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bound error
		err := c.Control(func(fd uintptr) { bound = unix.BindToDevice(int(fd), tap) })
		return errors.Join(err, bound)
	}}
	l, err := lc.Listen(t.Context(), "tcp4", "172.31.255.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

func TestNetwork_of_a_guest_leads_to_the_host_and_goes_with_its_process(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	one := func(rep control.Report, n int) string {
		t.Helper()
		if names := taps(t, e); len(names) != n || rep.Network == nil || !slices.Contains(names, rep.Network.TAP) {
			t.Fatalf("TAP devices %v, want %d, and that of %+v", names, n, rep.Network)
		}
		return rep.Network.TAP
	}
	policy := mustPolicy(t, `
rules: [{direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [any]}]
`)
	rep := e.Run(sandbox.Spec{Name: "net", Network: spec.NetworkTAP, IPv6: true, Policy: policy})
	e.Do("net", "mkfifo", "/run/order", "/run/answer")
	p, err := e.Agent("net").Start(t.Context(), guest.Cmd{Argv: []string{"python3", "-S", "-E", "-c", sender}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	send := func(name string, port uint16, word string, size, seconds int) string {
		t.Helper()
		return order(e, name, fmt.Sprintf("%d %s %d %d", port, word, size, seconds), "/run/order", "/run/answer")
	}
	exchange := func(name, word, device string) {
		t.Helper()
		const n = 60_000
		if got := send(name, echo(t, device), word, n, 300); got != fmt.Sprintf("%d True", n) {
			t.Errorf("%s: of %d bytes came back: %s", word, n, got)
		}
	}
	exchange("net", "booted", one(rep, 1))
	e.Sleep("net")
	if names := taps(t, e); len(names) != 0 {
		t.Errorf("while the VM sleeps there are the TAP devices %v", names)
	}
	rep = e.Wake("net")
	exchange("net", "woken", one(rep, 1))

	// A fork has the policy of its VM or one given, its own address, and the VM's tags of that moment.
	if res, err := e.Store.Sandbox("net").SetTags(t.Context(), []string{"db", "old"}, nil); err != nil || !res.Live {
		t.Fatalf("%+v, %v", res, err)
	}
	if res, err := e.Store.Sandbox("net").SetTags(t.Context(), nil, []string{"old"}); err != nil || !res.Live {
		t.Fatalf("%+v, %v", res, err)
	}
	forks, err := e.Store.With(e.Launcher).Sandbox("net").Fork(t.Context(), sandbox.ForkOptions{Name: "fork"})
	if err != nil {
		t.Fatal(err)
	}
	child := forks.Children[0]
	if device := one(child, 2); device == rep.Network.TAP || child.Network.Address == rep.Network.Address {
		t.Errorf("the fork has %+v, its VM %+v", child.Network, rep.Network)
	}
	exchange("fork", "forked", child.Network.TAP)
	if r, err := e.Store.State.Get("fork"); err != nil || !slices.Equal(r.Spec.Tags, []string{"db"}) {
		t.Errorf("the fork has the tags %q, %v", r.Spec.Tags, err)
	}
	if p, err := e.Store.Sandbox("fork").Policy(); err != nil || len(p.Rules) != 1 {
		t.Errorf("the fork has the policy %+v, %v", p, err)
	}
	if err := e.Store.Sandbox("fork").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	closed, err := e.Store.With(e.Launcher).Sandbox("net").Fork(t.Context(), sandbox.ForkOptions{Name: "closed", Policy: &netpolicy.Policy{}})
	if err != nil {
		t.Fatal(err)
	}
	if p, err := e.Store.Sandbox("closed").Policy(); err != nil || len(p.Rules) != 0 {
		t.Errorf("a fork with an empty policy has %+v, %v", p, err)
	}
	if got := send("closed", echo(t, one(closed.Children[0], 2)), "nothing", 1, 3); got != "timed out" {
		t.Errorf("a fork with an empty policy connects to its host: %s", got)
	}
	if err := e.Store.Sandbox("closed").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}

	publishedPortWakes(t, e, "net")

	r, err := e.Store.State.Get("net")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.WaitPhase("net", state.Crashed, time.Minute)
	if names := taps(t, e); len(names) != 0 {
		t.Errorf("the killed VM has left the TAP devices %v", names)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), e.Store.State.Dir()) {
		t.Errorf("the killed VM has left a mount: %s", mounts)
	}
	if sockets, err := filepath.Glob(filepath.Join(filepath.Dir(e.Store.State.VsockPath("net")), "*.sock")); err != nil || len(sockets) != 0 {
		t.Errorf("the killed VM has left the sockets %v (%v)", sockets, err)
	}

	// A VM takes a prebuilt link. It ends with the VM's process or with the pool.
	pool, err := pool.New(e.Store.State, e.Launcher, pool.Options{Processes: 1, Shapes: []spec.Shape{{MemoryMiB: spec.DefaultMemoryMiB, VCPUs: 1, Network: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := pool.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	ahead := taps(t, e)
	if len(ahead) != 1 {
		t.Fatalf("with a pool of one there are the TAP devices %v", ahead)
	}
	if _, err := e.Store.Sandbox("net").SetPolicy(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	if rep, err = e.Store.With(pool.Launcher()).Sandbox("net").Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !rep.Pooled || !slices.Contains(ahead, rep.Network.TAP) {
		t.Errorf("the VM has %s, and there was %v", rep.Network.TAP, ahead)
	}
	exchange("net", "pooled", rep.Network.TAP)
	if err := pool.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names := taps(t, e); len(names) != 2 {
		t.Errorf("with the next of the pool there are %v", names)
	}
	if err := pool.Close(); err != nil {
		t.Error(err)
	}
	one(rep, 1)
	if r, err = e.Store.State.Get("net"); err != nil || !strings.HasSuffix(rep.Network.TAP, r.NetworkID[:9]) {
		t.Fatalf("its record says %q, %v", r.NetworkID, err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.WaitPhase("net", state.Crashed, time.Minute)
	// If the last process that held them was still ending, the next sweep takes its pins.
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		names, err := link.Endpoints("")
		if err == nil && len(taps(t, e)) == 0 && !slices.Contains(names, r.NetworkID) {
			break
		}
		if err != nil || time.Now().After(end) {
			t.Fatalf("killed, it has left %v of %v, %v", taps(t, e), names, err)
		}
		if err := state.SweepNetworks(); err != nil {
			t.Fatal(err)
		}
	}
}

func mustPolicy(t *testing.T, text string) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}
