package sandbox_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
)

// sender sends what it is told to the host, and prints what comes back: its length and
// checksum.
const sender = `
import hashlib, socket, sys
s = socket.create_connection(('172.31.255.1', int(sys.argv[1])), timeout=300)
data = hashlib.shake_128(sys.argv[2].encode()).digest(int(sys.argv[3]))
s.sendall(data)
s.shutdown(socket.SHUT_WR)
back = b''
while True:
    p = s.recv(65536)
    if not p:
        break
    back += p
print(len(back), back == data)
`

// taps are the TAP devices with the host's end of a guest's link.
func taps(t *testing.T) (names []string) {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if strings.HasPrefix(i.Name, "drowse") {
			names = append(names, i.Name)
		}
	}
	return names
}

// echo answers connections from the guest behind a TAP device with what they bring.
func echo(t *testing.T, tap string) (port uint16) {
	t.Helper()
	// Other guests have the same address behind other devices.
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

func TestNetworkOfAGuestLeadsToTheHostAndGoesWithItsProcess(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	before := len(taps(t))
	one := func() string {
		t.Helper()
		names := taps(t)
		if len(names) != before+1 {
			t.Fatalf("TAP devices %v, want %d", names, before+1)
		}
		return names[len(names)-1]
	}
	e.Run(sandbox.Spec{Name: "net", Network: sandbox.NetworkTAP, Policy: mustPolicy(t, `
rules: [{direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [any]}]
`)})
	if err := e.Agent("net").WriteFile(t.Context(), "/root/sender.py", strings.NewReader(sender), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	exchange := func(word string) {
		t.Helper()
		const n = 300_000
		port := echo(t, one())
		if got := e.Sh("net", fmt.Sprintf("python3 -S -E /root/sender.py %d %s %d", port, word, n)); got != fmt.Sprintf("%d True", n) {
			t.Errorf("%s: of %d bytes came back: %s", word, n, got)
		}
	}
	exchange("booted")
	e.Sleep("net")
	if names := taps(t); len(names) != before {
		t.Errorf("while the VM sleeps there are the TAP devices %v", names)
	}
	e.Wake("net")
	exchange("woken")

	r, err := e.Store.Get("net")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.WaitPhase("net", sandbox.Crashed, time.Minute)
	if names := taps(t); len(names) != before {
		t.Errorf("the killed VM has left the TAP devices %v", names)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), e.Store.Dir()) {
		t.Errorf("the killed VM has left a mount: %s", mounts)
	}
	if sockets, err := filepath.Glob(filepath.Join(filepath.Dir(e.Store.VsockPath("net")), "*.sock")); err != nil || len(sockets) != 0 {
		t.Errorf("the killed VM has left the sockets %v (%v)", sockets, err)
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
