package jailproofs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/sandbox/jail/confine"
)

// census is all that a host has of some kinds: for each kind a line for each thing. Lines of one kind may be equal.
type census map[string][]string

// kinds are the kinds of a census, in the order of a report.
var kinds = []string{
	"processes", "namespaces", "mounts", "cgroups", "user ids", "links", "routes", "nft rules", "eBPF programs", "eBPF maps",
	"pins", "files", "history", "descriptors", "sockets", "goroutines",
}

// A host is what a census looks at.
type host struct {
	// store is the state directory. dirs are others whose files count.
	store string
	dirs  []string
}

// shared are the parts of a store that all stores of the tests have in common.
var shared = []string{"images", "kernels", "cache"}

// history are the parts of a store that remain of removed sandboxes: a file for each, and the journal.
var history = []string{"removed", "events"}

// count makes a census. It sees what comes and goes meanwhile once or never.
func (h host) count() (census, error) {
	c := census{}
	err := errors.Join(h.processes(c), h.network(c), h.programs(c), h.files(c))
	c.goroutines()
	for _, lines := range c {
		slices.Sort(lines)
	}
	return c, err
}

func (c census) add(kind, format string, args ...any) {
	c[kind] = append(c[kind], fmt.Sprintf(format, args...))
}

// processes counts processes with user space, zombies included, and what they hold: namespaces of all threads, and the
// mounts in each namespace.
func (h host) processes(c census) error {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, dir := range dirs {
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			continue // it has ended
		}
		// "PID (NAME) STATE PPID ...": only the name may have a parenthesis.
		rest := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		name := stat[:bytes.LastIndexByte(stat, ')')+1]
		if pid := filepath.Base(dir); rest[1] == "2" || pid == "2" { // kthreadd and its children
			continue
		}
		line, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		c.add("processes", "%s %s %s", name, rest[0], bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
		spaces, _ := filepath.Glob(filepath.Join(dir, "task/*/ns/*"))
		for _, path := range spaces {
			to, err := os.Readlink(path)
			if err != nil || seen[to] {
				continue
			}
			seen[to] = true
			c.add("namespaces", "%s", to)
			if filepath.Base(path) != "mnt" {
				continue
			}
			mounts, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "..", "mountinfo"))
			for line := range strings.Lines(string(mounts)) {
				if f := strings.Fields(line); len(f) > 5 {
					c.add("mounts", "%s of %s at %s in %s", f[3], f[2], f[4], to)
				}
			}
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, fd := range fds {
		// That of the directory has been closed.
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil {
			c.add("descriptors", "%s", to)
		}
	}
	sockets, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(sockets)) {
		if f := strings.Fields(line); len(f) > 6 && f[0] != "Num" {
			c.add("sockets", "type %s, state %s, %q", f[4], f[5], f[7:])
		}
	}
	return nil
}

// network counts links with their addresses, routes of all tables, and rules of nftables.
func (h host) network(c census) error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		addrs, _ := l.Addrs()
		c.add("links", "%s %v", l.Name, addrs)
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	for _, r := range routes {
		c.add("routes", "%v", r)
	}
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, r := range rules {
		c.add("routes", "%v", r)
	}
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil // a kernel without nftables has no rules
	}
	for _, chain := range chains {
		rules, err := conn.GetRules(chain.Table, chain)
		if err != nil {
			return err
		}
		c.add("nft rules", "chain %s %s", chain.Table.Name, chain.Name)
		for _, r := range rules {
			c.add("nft rules", "%s %s %q", chain.Table.Name, chain.Name, r.UserData)
		}
	}
	return nil
}

// programs counts the eBPF programs and maps of the kernel, whoever holds them.
func (h host) programs(c census) error {
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			break
		}
		if err != nil {
			return err
		}
		id = next
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // it has gone
		}
		info, err := p.Info()
		if err := errors.Join(err, p.Close()); err != nil {
			return err
		}
		c.add("eBPF programs", "%s %s", info.Type, info.Name)
	}
	for id := ebpf.MapID(0); ; {
		next, err := ebpf.MapGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		id = next
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			continue
		}
		info, err := m.Info()
		if err := errors.Join(err, m.Close()); err != nil {
			return err
		}
		c.add("eBPF maps", "%s %s", info.Type, info.Name)
	}
}

// files counts cgroups, pins of eBPF, user ids that are taken, and the files of the store and of other directories.
func (h host) files(c census) error {
	walk := func(root string, found func(path string, d fs.DirEntry)) error {
		return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist): // it has gone, or root does not exist
				return nil
			case err != nil:
				return err
			case path != root:
				found(path, d)
			}
			return nil
		})
	}
	errs := []error{
		walk("/sys/fs/cgroup", func(path string, d fs.DirEntry) {
			if d.IsDir() {
				c.add("cgroups", "%s", path)
			}
		}),
		walk("/sys/fs/bpf", func(path string, _ fs.DirEntry) { c.add("pins", "%s", path) }),
		walk("/run/drowse/uids", func(path string, d fs.DirEntry) {
			if n, err := strconv.Atoi(d.Name()); err == nil && n >= confine.FirstID && n < confine.FirstID+confine.NumIDs {
				c.add("user ids", "%d", n)
			}
		}),
		walk(h.store, func(path string, d fs.DirEntry) {
			top, _, below := strings.Cut(strings.TrimPrefix(path, h.store+"/"), "/")
			switch {
			case slices.Contains(shared, top):
			case slices.Contains(history, top) && below:
				c.add("history", "%s", path)
			default:
				c.add("files", "%s", path)
			}
		}),
	}
	for _, dir := range h.dirs {
		errs = append(errs, walk(dir, func(path string, _ fs.DirEntry) {
			if path != h.store && !strings.HasPrefix(path, h.store+"/") {
				c.add("files", "%s", path)
			}
		}))
	}
	return errors.Join(errs...)
}

// goroutines counts those of this process by what has started them.
func (c census) goroutines() {
	buf := make([]byte, 1<<20)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		_, by, found := strings.Cut(stack, "created by ")
		if !found {
			by = "the runtime"
		}
		by, _, _ = strings.Cut(by, " ")
		c.add("goroutines", "%s", strings.TrimSpace(by))
	}
}

// more returns what a census has and an earlier one had not, or not as often. History does not count.
func (c census) more(before census) (lines []string) {
	for _, kind := range kinds {
		if kind == "history" {
			continue
		}
		had := map[string]int{}
		for _, line := range before[kind] {
			had[line]++
		}
		for _, line := range c[kind] {
			if had[line]--; had[line] < 0 {
				lines = append(lines, kind+": "+line)
			}
		}
	}
	return lines
}

// figures are the sizes of a census, one for each kind.
func (c census) figures() string {
	var b strings.Builder
	for i, kind := range kinds {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%d %s", len(c[kind]), kind)
	}
	return b.String()
}
