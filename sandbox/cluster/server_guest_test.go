//go:build versitygw

package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/s3server"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
)

// wakesOf is how often a test of wakes wakes a guest on each kind of host.
func wakesOf(t *testing.T) int {
	t.Helper()
	text := os.Getenv(wakesEnv)
	if text == "" {
		return 2
	}
	n, err := strconv.Atoi(text)
	must(t, err)
	return n
}

// A real guest wakes on a host that has nothing, from a real server 20 ms and 100 MB/s away that is busy for one
// request in a hundred, and beside that where it has slept. The figures are printed.
func TestWake_of_a_guest_on_an_empty_host_from_a_bucket_behind_a_network(t *testing.T) {
	server := s3server.Start(t)
	var net s3server.Network
	near, err := openStore(server)
	must(t, err)
	far, err := openStore(net.Stand(t, server))
	must(t, err)
	for _, s := range []blob.Store{near, far} {
		if c, ok := s.(interface{ Close() }); ok {
			t.Cleanup(c.Close)
		}
	}
	copyObjects(t, near, bootedBox(t))
	const ttl = 2 * time.Minute
	a, b := realHost(t, "a", near, cluster.Options{TTL: ttl}), realHost(t, "b", far, cluster.Options{TTL: ttl})
	a.wake("box")
	a.starts("box", "python3", "-I", "-S", "-c", hoarder)
	a.awaits("box", "/dev/shm/n")
	sum, count := a.says("box", "cat /dev/shm/sum"), a.number("box", "/dev/shm/n")
	a.sleep("box")
	net.RTT.Store(int64(20 * time.Millisecond))
	net.BytesPerSec.Store(100e6)
	net.Refused.Store(10)

	var cold, local wakes
	for range wakesOf(t) {
		r, err := a.State.Get("box")
		must(t, err)
		size := headBytes(t, near)
		cold.add(t, b, &net, size)
		eventually(t, "its memory has arrived", func() bool { return !b.State.IsArriving(r.Snapshot) })
		b.still("box", sum, &count)
		b.sleep("box")
		local.add(t, b, &net, size)
		b.sleep("box")
		a.wake("box")
		a.sleep("box")
		// As if it had never been there.
		_, err = b.State.Remove(t.Context(), "box", true)
		must(t, err)
		id := r.Snapshot
		b.stop()
		b.join()
		eventually(t, "it can be had again", func() bool { return !b.State.IsThere(id) })
	}
	fmt.Println("| wakes | awake | first command's end | GETs before | bytes before |\n|---|---|---|---|---|")
	fmt.Println("| from the bucket", &cold)
	fmt.Println("| where it slept", &local)
}

// wakes is what wakes and the first commands after them took.
type wakes struct {
	awake, told        []time.Duration
	gets, bytes, parts []int64 // until awake; parts are bytes of 1,000 of the head's
}

func (w *wakes) add(t *testing.T, h *host, net *s3server.Network, size int64) {
	t.Helper()
	net.Gets.Store(0)
	net.Sent.Store(0)
	begun := time.Now()
	_, err := h.Sandbox("box").Wake(t.Context())
	must(t, err)
	w.awake = append(w.awake, time.Since(begun))
	w.gets, w.bytes, w.parts = append(w.gets, net.Gets.Load()), append(w.bytes, net.Sent.Load()), append(w.parts, 1000*net.Sent.Load()/size)
	_, err = h.Sandbox("box").Exec(t.Context(), guest.Cmd{Argv: []string{"/bin/true"}})
	must(t, err)
	w.told = append(w.told, time.Since(begun))
}

func (w *wakes) String() string {
	ms := func(d []time.Duration) string {
		slices.Sort(d)
		return fmt.Sprintf("%d / %d / %d ms", d[len(d)/2].Milliseconds(), d[len(d)*9/10].Milliseconds(), d[len(d)*99/100].Milliseconds())
	}
	for _, n := range [][]int64{w.gets, w.bytes, w.parts} {
		slices.Sort(n)
	}
	mid := len(w.gets) / 2
	return fmt.Sprintf("| %s | %s | %d | %d, %.1f%% |", ms(w.awake), ms(w.told), w.gets[mid], w.bytes[mid], float64(w.parts[mid])/10)
}

// headBytes returns how many bytes the store has of heads: those that the newest one needs.
func headBytes(t *testing.T, s blob.Store) (size int64) {
	t.Helper()
	must(t, s.List(t.Context(), "data/heads-", func(i blob.Info) error { size += i.Size; return nil }))
	return size
}

// copyObjects copies all objects.
func copyObjects(t *testing.T, to, from blob.Store) {
	t.Helper()
	must(t, from.List(t.Context(), "", func(i blob.Info) error {
		body, _, err := from.Load(t.Context(), i.Key, blob.MaxObject)
		if err == nil {
			_, err = to.Swap(context.WithoutCancel(t.Context()), i.Key, "", body)
		}
		if errors.Is(err, blob.ErrNotFound) {
			return nil
		}
		return err
	}))
}
