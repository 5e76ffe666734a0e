package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// errNoModule says that the initramfs has no module of that name or alias.
var errNoModule = errors.New("no such module in the initramfs")

type index struct{ wire.ModuleIndex }

// load inserts a module after those it depends on. One that is loaded already is no error.
func (ix *index) load(dir, name string) error {
	m, ok := ix.Modules[name]
	if !ok {
		return fmt.Errorf("module %s: %w", name, errNoModule)
	}
	for _, d := range m.Deps {
		if err := ix.insert(dir, d); err != nil {
			return err
		}
	}
	return ix.insert(dir, name)
}

func (ix *index) insert(dir, name string) error {
	f, err := os.Open(filepath.Join(dir, name+".ko"))
	if err != nil {
		return fmt.Errorf("module %s: %w", name, err)
	}
	defer f.Close()
	if err := finitModule(f, ix.Modules[name].Params); err != nil && !errors.Is(err, syscall.EEXIST) {
		return fmt.Errorf("insert module %s: %w", name, err)
	}
	return nil
}

// find returns the modules that a request names: by name, or by alias, which may fit several.
func (ix *index) find(request string) []string {
	name := strings.ReplaceAll(request, "-", "_")
	if _, ok := ix.Modules[name]; ok {
		return []string{name}
	}
	var found []string
	for n, m := range ix.Modules {
		for _, a := range m.Aliases {
			if ok, err := path.Match(a, request); err == nil && ok {
				found = append(found, n)
				break
			}
		}
	}
	return found
}

// modprobe answers a request of the kernel, "modprobe -q -- ALIAS" (kernel/kmod.c).
func modprobe(dir string, args []string) error {
	ix, err := readIndex(dir)
	if err != nil {
		return err
	}
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			continue
		}
		names := ix.find(a)
		if len(names) == 0 {
			return fmt.Errorf("%s: %w", a, errNoModule)
		}
		for _, n := range names {
			if err := ix.load(dir, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// staticNode is a device node whose opening makes the kernel load the module behind it.
type staticNode struct {
	path         string
	major, minor uint32
}

// staticNodes derives the nodes from the aliases "devname:NAME" and "char-major-MAJOR-MINOR" of one module, as
// "kmod static-nodes" does.
func staticNodes(aliases []string) []staticNode {
	var n staticNode
	var named, numbered bool
	for _, a := range aliases {
		if rest, ok := strings.CutPrefix(a, "devname:"); ok && filepath.IsLocal(rest) {
			n.path, named = "/dev/"+rest, true
		}
		if c, err := fmt.Sscanf(a, "char-major-%d-%d", &n.major, &n.minor); err == nil && c == 2 {
			numbered = true
		}
	}
	if !named || !numbered {
		return nil
	}
	return []staticNode{n}
}

func makeStaticNodes(ix *index) error {
	for _, m := range ix.Modules {
		for _, n := range staticNodes(m.Aliases) {
			if err := os.MkdirAll(filepath.Dir(n.path), 0o755); err != nil {
				return err
			}
			dev := int(n.minor&0xff | n.major<<8 | (n.minor&^0xff)<<12) // makedev(3) for majors below 4096
			err := syscall.Mknod(n.path, syscall.S_IFCHR|0o600, dev)
			if err != nil && !errors.Is(err, syscall.EEXIST) {
				return fmt.Errorf("make %s: %w", n.path, err)
			}
		}
	}
	return nil
}
