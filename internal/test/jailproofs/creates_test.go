//go:build workloads

package jailproofs

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var (
	creates = flag.Int("creates", 8, "how many sandboxes are created from one template")
	clients = flag.Int("clients", 8, "how many clients create them at once")
)

// whoAmI prints what must be a guest's own, each as name=value, and then path=hash of each file, where identities are
// kept, that has been written since the moment $1.
const whoAmI = `
for f in /etc/machine-id /etc/hostname /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid; do echo "$f=$(cat $f)"; done
echo "getrandom=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')"
for f in /etc/ssh/ssh_host_*_key.pub; do test -e $f && echo "$f=$(cat $f)"; done
find /etc /root /run /tmp /home /var/lib/dbus /var/lib/systemd -xdev -type f -newermt "@$1" -exec sha256sum {} + 2>/dev/null | while read sum file; do echo "file:$file=$sum"; done
`

// Clients create sandboxes of one template at once. Each is somebody, and none has a file in which the template's VM
// wrote who that was.
func TestCreates_by_clients_at_once_share_no_identity_and_none_of_the_template(t *testing.T) {
	e := guesttest.New(t)
	host := e.Store.With(e.Launcher)
	want := sandbox.Spec{Image: guesttest.ImageTag, MemoryMiB: 128, DiskMiB: 256, Network: spec.NetworkTAP}
	since := time.Now()
	made, err := host.MakeTemplates(t.Context(), want)
	if err != nil || len(made) != 1 {
		t.Fatalf("%d templates (%v), want 1", len(made), err)
	}
	var next atomic.Int64
	var mu sync.Mutex // guards what follows
	values := map[string]map[string]int{}
	var took []time.Duration
	one := func(ctx context.Context, name string) error {
		w := want
		w.Name = name
		begun := time.Now()
		box, err := host.Create(ctx, w, sandbox.CreateOptions{})
		if err != nil {
			return err
		}
		var out strings.Builder
		argv := []string{"/bin/sh", "-c", whoAmI, "sh", fmt.Sprint(since.Unix())}
		if _, err := box.Exec(ctx, guest.Cmd{Argv: argv, IO: guest.IO{Stdout: &out}}); err != nil {
			return err
		}
		r, err := e.Store.State.Get(name)
		if err != nil {
			return err
		}
		if r.Template == "" {
			return fmt.Errorf("%s has booted because %q", name, r.Booted)
		}
		mu.Lock()
		took = append(took, time.Since(begun))
		for line := range strings.Lines(fmt.Sprintf("%sid=%s\n", out.String(), r.ID)) {
			kind, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			if values[kind] == nil {
				values[kind] = map[string]int{}
			}
			values[kind][value]++
		}
		mu.Unlock()
		return box.Delete(ctx, sandbox.DeleteOptions{Force: true})
	}
	var wg sync.WaitGroup
	for c := range *clients {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(*creates) && !t.Failed(); i = next.Add(1) {
				if err := one(t.Context(), fmt.Sprintf("created-%d-%d", c, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, kind := range slices.Sorted(maps.Keys(values)) {
		t.Logf("%d different of %s", len(values[kind]), kind)
		of, isFile := strings.CutPrefix(kind, "file:")
		if shared := len(values[kind]) < *creates; shared && (!isFile || slices.Contains(identityFiles, of)) {
			t.Errorf("%d sandboxes have %d different of %s", *creates, len(values[kind]), kind)
		}
	}
	for _, kind := range []string{"id", "getrandom", "/etc/machine-id", "/etc/hostname", "/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/random/uuid"} {
		if len(values[kind]) != *creates {
			t.Errorf("%d sandboxes have %d different of %s", *creates, len(values[kind]), kind)
		}
	}
	slices.Sort(took)
	if n := len(took); n > 0 {
		t.Logf("create and its script: %v in the middle, %v at most", took[n/2].Round(time.Millisecond), took[n-1].Round(time.Millisecond))
	}
	// The template gone, a sandbox of it goes on.
	if _, err := host.Create(t.Context(), sandbox.Spec{Name: "last", Image: want.Image, MemoryMiB: want.MemoryMiB, DiskMiB: want.DiskMiB, Network: want.Network}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.Write("last", "kept", "/root/file", "/run/file")
	if err := e.Store.State.RemoveTemplates(t.Context(), made...); err != nil {
		t.Fatal(err)
	}
	e.Sleep("last")
	e.Wake("last")
	if got := e.Read("last", "/root/file", "/run/file"); got != "kept\nkept" {
		t.Errorf("without its template it has %q", got)
	}
}

// identityFiles are those that say who a machine is.
var identityFiles = []string{"/etc/machine-id", "/etc/hostname", "/etc/hosts", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed", "/root/.rnd"}
