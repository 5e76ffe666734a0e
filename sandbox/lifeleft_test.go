package sandbox_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
)

// lifeLeft looks for remains of sandboxes when none runs, and when none exists any more. Each method returns what
// it finds.
type lifeLeft struct {
	store string
	// ids maps the id of each sandbox to its name. Removed ones are included: they can leave something too.
	ids map[string]string
	// proc, cgroups, pins and netns are the directories to look in, so that a test can plant something there.
	proc, cgroups, pins, netns string
}

// lifeShortID is how many digits of an id are in the names of devices.
const lifeShortID = 9

// of returns the sandbox whose id is in a name on the host, or "" if it is none of this store.
func (l *lifeLeft) of(name string) string {
	for id, who := range l.ids {
		if strings.Contains(name, id[:min(lifeShortID, len(id))]) {
			return who
		}
	}
	return ""
}

// told adds the sandboxes from the journal: all that ever ran, removed ones included.
func (l *lifeLeft) told() error {
	files, err := filepath.Glob(filepath.Join(l.store, "events", "*"))
	if err != nil {
		return err
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for line := range bytes.Lines(b) {
			var e struct {
				Sandbox string `json:"sandbox"`
				ID      string `json:"sandbox_id"`
			}
			// Other lines, such as the header, name no sandbox.
			if json.Unmarshal(line, &e) == nil && len(e.ID) >= lifeShortID {
				l.ids[e.ID] = e.Sandbox
			}
		}
	}
	return nil
}

// processes returns the processes that were started for the store.
func (l *lifeLeft) processes() (left []string) {
	lines, _ := filepath.Glob(filepath.Join(l.proc, "[0-9]*", "cmdline"))
	for _, path := range lines {
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(l.store)) {
			left = append(left, filepath.Dir(path)+" "+string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	return left
}

// mounts returns the mounts in or of the store, in the mount namespace of any process.
func (l *lifeLeft) mounts() (left []string) {
	tables, _ := filepath.Glob(filepath.Join(l.proc, "[0-9]*", "mountinfo"))
	for _, path := range tables {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the process has ended
		}
		for line := range bytes.Lines(b) {
			if bytes.Contains(line, []byte(l.store)) && !slices.Contains(left, string(line)) {
				left = append(left, string(line))
			}
		}
	}
	return left
}

// devices returns the network devices of sandboxes.
func (l *lifeLeft) devices() (left []string, err error) {
	links, err := net.Interfaces()
	for _, dev := range links {
		if who := l.of(dev.Name); who != "" && strings.HasPrefix(dev.Name, hostnet.InterfacePrefix) {
			left = append(left, fmt.Sprintf("%s of %s", dev.Name, who))
		}
	}
	return left, err
}

// sockets returns the open Unix sockets in the store, whether or not their files still exist.
func (l *lifeLeft) sockets() (left []string, err error) {
	f, err := os.Open(filepath.Join(l.proc, "net", "unix"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if strings.Contains(lines.Text(), l.store) {
			left = append(left, lines.Text())
		}
	}
	return left, lines.Err()
}

// named returns the entries under a directory of the host, at any depth, that have a sandbox's id in their names.
func (l *lifeLeft) named(root string) (left []string, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // the entry is gone, or root does not exist
		}
		if who := l.of(d.Name()); who != "" && path != root {
			left = append(left, fmt.Sprintf("%s of %s", path, who))
			if d.IsDir() {
				return fs.SkipDir
			}
		}
		return nil
	})
	return left, err
}

// lifeKept are the patterns of top-level files of a store that belong to no sandbox.
var lifeKept = []string{"cache", "images", "kernels", "events", "import.lock", "pool.lock", "removed"}

// files returns the files in a store without sandboxes and snapshots that should not be there.
func (l *lifeLeft) files() (left []string, err error) {
	top, err := os.ReadDir(l.store)
	if err != nil {
		return nil, err
	}
	for _, d := range top {
		if slices.ContainsFunc(lifeKept, func(kept string) bool { ok, _ := filepath.Match(kept, d.Name()); return ok }) {
			continue
		}
		path := filepath.Join(l.store, d.Name())
		if !d.IsDir() {
			left = append(left, path)
			continue
		}
		in, err := os.ReadDir(path)
		if err != nil {
			return left, err
		}
		for _, f := range in {
			// The store keeps an empty file system for the next VM with a disk of its size.
			if d.Name() != "layers" || !strings.HasPrefix(f.Name(), "ext4-") {
				left = append(left, filepath.Join(path, f.Name()))
			}
		}
	}
	return left, nil
}

// host returns what a sandbox that does not run must not have on its host.
func (l *lifeLeft) host() (left []string, err error) {
	dev, derr := l.devices()
	socks, serr := l.sockets()
	left = slices.Concat(l.processes(), l.mounts(), dev, socks)
	err = errors.Join(derr, serr)
	for _, root := range []string{l.cgroups, l.netns} {
		more, nerr := l.named(root)
		left, err = append(left, more...), errors.Join(err, nerr)
	}
	return left, err
}

// Each case leaves one kind of thing. lifeLeft.all must find it, and nothing before.
func TestLifeLeft_finds_what_is_left_of_each_kind(t *testing.T) {
	const id, other = "0a1b2c3d4e5f60718293a4b5c6d7e8f9", "f9e8d7c6b5a493827160f5e4d3c2b1a0"
	for _, c := range []struct {
		kind  string
		root  bool // needs to be root
		leave func(t *testing.T, l *lifeLeft)
	}{
		{"a process", false, func(t *testing.T, l *lifeLeft) {
			l.proc = "/proc"
			cmd := exec.Command("sh", "-c", "read x", l.store)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
		}},
		{"a mount in a namespace of its own", false, func(t *testing.T, l *lifeLeft) {
			lifePlant(t, filepath.Join(l.proc, "77", "mountinfo"), "36 35 98:0 / "+l.store+"/vms/a/mnt rw - ext3 /dev/root rw\n")
		}},
		{"a socket", false, func(t *testing.T, l *lifeLeft) {
			l.proc = "/proc"
			s, err := net.Listen("unix", filepath.Join(l.store, "s.sock"))
			if err != nil {
				t.Fatal(err)
			}
			// Its file is gone, and it is still open.
			if err := os.Remove(filepath.Join(l.store, "s.sock")); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
		}},
		{"a cgroup", false, func(t *testing.T, l *lifeLeft) {
			lifePlant(t, filepath.Join(l.cgroups, "cpu", "drowse-"+id, "tasks"), "")
		}},
		{"a network namespace", false, func(t *testing.T, l *lifeLeft) { lifePlant(t, filepath.Join(l.netns, "drowse"+id[:lifeShortID]), "") }},
		{"a device of a sandbox that was removed", true, func(t *testing.T, _ *lifeLeft) {
			name := hostnet.InterfacePrefix + id[:lifeShortID]
			dev, err := tap.Create(name)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { dev.Close() })
		}},
		{"pins", false, func(t *testing.T, l *lifeLeft) { lifePlant(t, filepath.Join(l.pins, id, "map"), "") }},
		{"a directory of a VM", false, lifeFile("vms/a/vm.json")},
		{"a record that was not finished", false, lifeFile("vms/.tmp-1")},
		{"a snapshot", false, lifeFile("snapshots/1/manifest.json")},
		{"a layer", false, lifeFile("layers/1")},
		{"pages", false, lifeFile("pages/1.pages")},
		{"a lock", false, lifeFile("locks/1")},
		{"a file of tmp", false, lifeFile("tmp/1")},
		{"the pool's socket", false, lifeFile("pool.sock")},
	} {
		t.Run(c.kind, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skip("making a network device needs root")
			}
			dir, err := os.MkdirTemp("", "ll") // short, since the path of a Unix socket is limited
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			l := &lifeLeft{store: filepath.Join(dir, "s"), ids: map[string]string{}}
			for _, at := range []struct {
				at   *string
				path string
			}{{&l.proc, "proc"}, {&l.cgroups, "cgroups"}, {&l.pins, "pins"}, {&l.netns, "netns"}} {
				*at.at = filepath.Join(dir, at.path)
			}
			lifePlant(t, filepath.Join(l.proc, "net", "unix"), "")
			lifePlant(t, filepath.Join(l.cgroups, "cpu", "drowse-"+other, "tasks"), "")
			for _, kept := range []string{"removed/1-2-a.json", "import.lock", "layers/ext4-1024", "cache/agent"} {
				lifePlant(t, filepath.Join(l.store, kept), "")
			}
			if err := os.Mkdir(filepath.Join(l.store, "vms"), 0o700); err != nil {
				t.Fatal(err)
			}
			lifePlant(t, filepath.Join(l.store, "events", "1"), fmt.Sprintf("{\"drowse_events\":1}\n{\"sandbox\":\"a\",\"sandbox_id\":%q}\ntorn", id))
			if err := l.told(); err != nil {
				t.Fatal(err)
			}
			if left := l.all(t); len(left) != 0 {
				t.Fatalf("nothing is left, and it has found %q", left)
			}
			c.leave(t, l)
			if left := l.all(t); len(left) != 1 {
				t.Errorf("it has found %q, want one", left)
			}
		})
	}
}

// all returns the remains of every kind.
func (l *lifeLeft) all(t testing.TB) []string {
	t.Helper()
	left, err := l.host()
	pins, perr := l.named(l.pins)
	files, ferr := l.files()
	if err := errors.Join(err, perr, ferr); err != nil {
		t.Fatal(err)
	}
	return slices.Concat(left, pins, files)
}

func lifeFile(path string) func(*testing.T, *lifeLeft) {
	return func(t *testing.T, l *lifeLeft) {
		t.Helper()
		lifePlant(t, filepath.Join(l.store, path), "")
	}
}

// lifePlant makes a file and its parent directories.
func lifePlant(t *testing.T, path, text string) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = os.WriteFile(path, []byte(text), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
