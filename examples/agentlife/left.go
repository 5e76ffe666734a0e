package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy/link"
)

// costs returns the processes of the store's VMs, and their private host RAM plus their share of the rest (Pss,
// proc(5)).
func (l *life) costs() (pids []int, ram int64, err error) {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, 0, err
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(line, []byte(l.store.State.Dir()+"\x00")) {
			continue // it has ended, or is another process
		}
		dir := filepath.Dir(path)
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, 0, err
		}
		text, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		pids = append(pids, pid)
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "Pss:" {
				kib, err := strconv.ParseInt(f[1], 10, 64)
				if err != nil {
					return nil, 0, err
				}
				ram += kib << 10
			}
		}
	}
	return pids, ram, nil
}

// nothing checks that no trace of any sandbox is left.
func (l *life) nothing(ctx context.Context) error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := l.store.State.Sweep(ctx); err != nil {
		return err
	}
	if pids, _, err := l.costs(); err != nil || len(pids) > 0 {
		wrong("processes %v are left (%v)", pids, err)
	}
	for _, sub := range []string{"vms", "snapshots", "layers", "pages"} {
		left, err := os.ReadDir(filepath.Join(l.store.State.Dir(), sub))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		// An empty file system of a disk's size stays, for the next sandbox with such a disk.
		left = slices.DeleteFunc(left, func(d fs.DirEntry) bool { return sub == "layers" && strings.HasPrefix(d.Name(), "ext4-") })
		if err != nil || len(left) > 0 {
			wrong("in %s there are left %v (%v)", sub, left, err)
		}
	}
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, id := range l.ids {
		for _, link := range links {
			if strings.Contains(link.Name, id[:9]) {
				wrong("the device %s is left", link.Name)
			}
		}
		if _, err := os.Stat(filepath.Join(link.DefaultRoot, id)); !errors.Is(err, fs.ErrNotExist) {
			wrong("the pins of %s are left (%v)", id, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || bytes.Contains(mounts, []byte(l.store.State.Dir())) {
		wrong("there are mounts in %s (%v)", l.store.State.Dir(), err)
	}
	l.say("   of %d sandboxes no process, file, device, pin or mount is left", len(l.ids))
	return errors.Join(errs...)
}
