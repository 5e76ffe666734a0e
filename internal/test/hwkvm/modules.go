package hwkvm

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ulikunitz/xz"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// bootModules are loaded by init: the machine's device drivers, the file system, KVM, and tap devices.
var bootModules = []string{"virtio_pci", "virtio_console", "9p", "9pnet_virtio", "kvm_amd", "tun"}

// demandModules wait in the initramfs until the kernel asks for them by name or alias. Modules that a kernel does
// not have are left out.
var demandModules = []string{
	"act_bpf", "act_gact", "act_mirred", "bridge", "cls_bpf", "cls_matchall", "cls_u32", "dummy", "erofs", "fuse", "ifb", "loop",
	"overlay", "sch_clsact", "sch_fq", "sch_htb", "sch_ingress", "squashfs", "veth", "vhost_net", "vhost_vsock", "vsock",
	"vsock_loopback",
}

// moduleParams are the parameters that modules are loaded with. npt: nested paging, which QEMU emulates. nested and
// avic are off because drowse's guests use neither, and both cost time on each entry.
var moduleParams = map[string]string{"kvm_amd": "npt=1 nested=0 avic=0"}

// ErrModule means that the kernel lacks a module that is needed.
var ErrModule = errors.New("kernel module not found")

// errCycle means that modules depend on each other.
var errCycle = errors.New("kernel modules depend on each other")

// maxModuleSize is the most bytes of a decompressed module file.
const maxModuleSize = 64 << 20

// moduleInfo is a module's .modinfo section (Documentation/kbuild/modules.rst, include/linux/module.h).
type moduleInfo struct {
	depends []string // depends=, the modules whose symbols it uses
	pre     []string // softdep=pre:, optional modules to load before
	aliases []string // alias=
}

// moduleTree has the modules of one kernel. A Debian kernel package has no modules.dep (depmod(8) makes it at
// installation), so the tree reads the modules themselves.
type moduleTree struct {
	files   map[string]string // module name -> path of the file
	builtin map[string]bool
	info    func(path string) (moduleInfo, error)
	cache   map[string]moduleInfo
}

// moduleName returns the kernel's name of the module for a file name or a spelling like an alias.
func moduleName(s string) string {
	s, _, _ = strings.Cut(filepath.Base(s), ".ko")
	return strings.ReplaceAll(s, "-", "_")
}

// openModuleTree indexes the folder lib/modules/VERSION.
func openModuleTree(dir string) (*moduleTree, error) {
	t := &moduleTree{files: map[string]string{}, builtin: map[string]bool{}, info: readModuleInfo, cache: map[string]moduleInfo{}}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			t.files[moduleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("index kernel modules: %w", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("index kernel modules: %w", err)
	}
	for _, line := range strings.Fields(string(b)) {
		t.builtin[moduleName(line)] = true
	}
	return t, nil
}

func (t *moduleTree) modinfo(name string) (moduleInfo, error) {
	if i, ok := t.cache[name]; ok {
		return i, nil
	}
	i, err := t.info(t.files[name])
	if err != nil {
		return moduleInfo{}, fmt.Errorf("kernel module %s: %w", name, err)
	}
	t.cache[name] = i
	return i, nil
}

// order lists the modules to insert for names, each once and after its dependencies. It leaves out what is built
// into the kernel. A module that is missing and not built in is ErrModule; a cycle is an error.
func (t *moduleTree) order(names ...string) ([]string, error) {
	var out []string
	const visiting, done = 1, 2
	state := map[string]int{}
	var visit func(name, wantedBy string) error
	visit = func(name, wantedBy string) (err error) {
		name = moduleName(name)
		if t.builtin[name] || state[name] == done {
			return nil
		}
		if state[name] == visiting {
			return fmt.Errorf("%s and %s: %w", name, wantedBy, errCycle)
		}
		if _, ok := t.files[name]; !ok {
			return fmt.Errorf("%s (wanted by %s): %w", name, wantedBy, ErrModule)
		}
		state[name] = visiting
		defer func() {
			if err != nil {
				delete(state, name)
			}
		}()
		info, err := t.modinfo(name)
		if err != nil {
			return err
		}
		for _, d := range info.pre {
			// A soft dependency that is missing or leads back is skipped, as modprobe(8) does.
			if err := visit(d, name); err != nil && !errors.Is(err, ErrModule) && !errors.Is(err, errCycle) {
				return err
			}
		}
		for _, d := range info.depends {
			if err := visit(d, name); err != nil {
				return err
			}
		}
		state[name] = done
		out = append(out, name)
		return nil
	}
	for _, n := range names {
		if err := visit(n, "hwkvm"); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// index returns the module index of an initramfs.
func (t *moduleTree) index(boot, demand []string) (wire.ModuleIndex, error) {
	ix := wire.ModuleIndex{Modules: map[string]wire.Module{}}
	var err error
	if ix.Boot, err = t.order(boot...); err != nil {
		return wire.ModuleIndex{}, err
	}
	all := slices.Clone(ix.Boot)
	for _, d := range demand {
		o, err := t.order(d)
		if errors.Is(err, ErrModule) {
			continue
		}
		if err != nil {
			return wire.ModuleIndex{}, err
		}
		all = append(all, o...)
	}
	for _, name := range all {
		deps, err := t.order(name)
		if err != nil {
			return wire.ModuleIndex{}, err
		}
		info, err := t.modinfo(name)
		if err != nil {
			return wire.ModuleIndex{}, err
		}
		ix.Modules[name] = wire.Module{Deps: deps[:len(deps)-1], Aliases: info.aliases, Params: moduleParams[name]}
	}
	return ix, nil
}

// readModule returns the ELF image of a module file. It may be compressed with xz, as in Debian since 13.
func readModule(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(path, ".xz") {
		if r, err = xz.NewReader(f); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	b, err := io.ReadAll(io.LimitReader(r, maxModuleSize+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(b) > maxModuleSize {
		return nil, fmt.Errorf("%s: larger than %d bytes", path, maxModuleSize)
	}
	return b, nil
}

func readModuleInfo(path string) (moduleInfo, error) {
	b, err := readModule(path)
	if err != nil {
		return moduleInfo{}, err
	}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return moduleInfo{}, err
	}
	defer f.Close()
	s := f.Section(".modinfo")
	if s == nil {
		return moduleInfo{}, errors.New("no .modinfo section")
	}
	data, err := s.Data()
	if err != nil {
		return moduleInfo{}, err
	}
	return parseModuleInfo(data), nil
}

// parseModuleInfo reads the NUL-terminated KEY=VALUE strings of a .modinfo section.
func parseModuleInfo(data []byte) moduleInfo {
	var m moduleInfo
	for _, entry := range strings.Split(string(data), "\x00") {
		key, value, _ := strings.Cut(entry, "=")
		switch key {
		case "depends":
			m.depends = append(m.depends, strings.FieldsFunc(value, func(r rune) bool { return r == ',' })...)
		case "alias":
			m.aliases = append(m.aliases, value)
		case "softdep":
			pre := false
			for _, w := range strings.Fields(value) {
				switch {
				case strings.HasSuffix(w, ":"):
					pre = w == "pre:"
				case pre:
					m.pre = append(m.pre, w)
				}
			}
		}
	}
	return m
}
