package cluster_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// realHost is a host whose guests are real.
func realHost(t *testing.T, name string, store blob.Store, o cluster.Options) *host {
	t.Helper()
	e := guesttest.New(t)
	return (&host{t: t, name: name, bare: e.Store.With(e.Launcher), store: store, o: o}).begin()
}

// says runs a shell command in a sandbox, which may be on another host.
func (h *host) says(name, script string) string {
	h.t.Helper()
	var out strings.Builder
	_, err := h.Sandbox(name).Exec(h.t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, IO: guest.IO{Stdout: &out}})
	must(h.t, err)
	return strings.TrimSpace(out.String())
}

func (h *host) number(name, file string) int {
	h.t.Helper()
	n, err := strconv.Atoi(h.says(name, "cat "+file))
	must(h.t, err)
	return n
}

// A guest goes from host to host with its memory, its processes and its disk, and goes on elsewhere when its host dies.
func TestGuest_goes_on_where_it_was_on_any_host(t *testing.T) {
	store := dir(t)
	const ttl = 40 * time.Second // a busy machine may take 20 s to publish a snapshot; eventually waits a minute
	a, b := realHost(t, "a", store, cluster.Options{TTL: ttl}), realHost(t, "b", store, cluster.Options{TTL: ttl})
	_, err := a.Create(t.Context(), sandbox.Spec{Name: "box", Image: guesttest.ImageTag}, sandbox.CreateOptions{Boot: true})
	must(t, err)
	const counter = "while :; do i=$((i+1)); echo $i > /dev/shm/new; mv /dev/shm/new /dev/shm/n; sleep 0.1; done"
	c, err := a.Sandbox("box").Agent(t.Context())
	must(t, err)
	s, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", counter}, Detach: true, NoStdin: true, ID: "counter"})
	must(t, err)
	must(t, s.Close())
	must(t, c.Close())
	a.says("box", "echo from-a > /root/file; while ! test -e /dev/shm/n; do sleep 0.1; done")
	boot, pid := a.says("box", "cat /proc/sys/kernel/random/boot_id"), s.PID()
	here, there := a, b
	for range 3 {
		before := here.number("box", "/dev/shm/n")
		here.sleep("box")
		now := there.number("box", "/dev/shm/n")
		if is := there.says("box", "cat /proc/sys/kernel/random/boot_id; cat /proc/"+strconv.Itoa(pid)+"/comm; cat /root/file"); is != boot+"\nsh\nfrom-a" {
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
	if got := there.says("box", "cat /root/file"); got != "from-a" {
		t.Errorf("after the death of its host the file has %q", got)
	}
	if now := there.number("box", "/dev/shm/n"); now < durable {
		t.Errorf("after the death of its host the counter goes back from %d to %d", durable, now)
	}
	if here.phase("box") == state.Running {
		t.Error("it runs on both hosts")
	}
}
