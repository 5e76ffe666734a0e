package sandbox_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// serveUsers is the administrator's part of a test that runs as a user.
func serveUsers(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "dn")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "net.sock")
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	for path, mode := range map[string]os.FileMode{dir: 0o711, socket: 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	served, ready := make(chan error, 1), make(chan struct{})
	h := &network.Helper{}
	go func() { served <- h.Serve(ctx, ln, func() { close(ready) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	<-ready
	t.Setenv(hostnet.HelperEnv, socket)
}

func TestUser_without_root_has_a_network_by_a_helper(t *testing.T) {
	if os.Geteuid() == 0 {
		serveUsers(t)
	}
	if !guesttest.AsUser(t) {
		return
	}
	e := guesttest.New(t)
	policy := mustPolicy(t, `rules: [{name: host, direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [7000]}]`)
	ln, err := net.Listen("tcp4", "0.0.0.0:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	came := make(chan netip.Addr, 16)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			at, _ := netip.ParseAddrPort(c.RemoteAddr().String())
			came <- at.Addr()
			_, _ = c.Write([]byte("hello\n"))
			c.Close()
		}
	}()
	connect := "import socket,sys\ns=socket.create_connection((sys.argv[1],7000),20)\nprint(s.recv(9).decode())"
	rep := e.Run(sandbox.Spec{Name: "own", Network: spec.NetworkTAP, Policy: policy})
	if rep.Network == nil || !strings.HasPrefix(rep.Network.TAP, "drowseu") {
		t.Fatalf("it has the network %+v", rep.Network)
	}
	gateway := netpolicy.TheWire.Gateway4.String()
	if got := e.Do("own", "python3", "-I", "-S", "-c", connect, gateway); strings.TrimSpace(got) != "hello" {
		t.Errorf("the host says %q", got)
	}
	if from := <-came; from != rep.Network.Address {
		t.Errorf("it comes from %v, not %v", from, rep.Network.Address)
	}
	e.Sleep("own")
	e.Wake("own")
	if got := e.Do("own", "python3", "-I", "-S", "-c", connect, gateway); strings.TrimSpace(got) != "hello" {
		t.Errorf("after a wake the host says %q", got)
	}
}
