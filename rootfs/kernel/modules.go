package kernel

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	maxModules     = 20_000   // in one kernel's folder; Debian's cloud kernel has 1,121
	maxModinfo     = 1 << 20  // bytes of a module's .modinfo section
	maxModuleDepth = 64       // of dependencies
	maxBuiltinList = 16 << 20 // bytes of modules.builtin
)

// wantedModules are the modules that a guest needs before it has a root, or for its host. Those that are built
// into the kernel are left out; dependencies are added. A guest can load others later, from ModulesDir.
var wantedModules = []string{
	"virtio_mmio",                // the transport, found by ACPI HID LNRO0005
	"virtio_blk",                 // disks
	"virtio_net",                 //
	"vmw_vsock_virtio_transport", // the connection to the host
	"virtio_balloon",             //
	"virtio_console",             //
	"virtio_rng",                 //
	"erofs", "ext4", "overlay",   // root: a shared image, and a writable disk over it
	"pvpanic_mmio", // reports a panic to the host
	"fuse",         // secrets, see guest/agent/secretfs: nothing in a guest loads it
}

// optionalModules are those of wantedModules that a guest can do without. Any other that is neither a file nor
// built in is an error.
var optionalModules = []string{"pvpanic_mmio", "virtio_console", "fuse"}

// moduleSet has the modules of one kernel.
type moduleSet struct {
	files   map[string]string // module name -> absolute path of the .ko file
	builtin map[string]bool   // names of built-in modules
	info    func(path string) (moduleInfo, error)
}

// moduleInfo is a module's description of itself.
type moduleInfo struct {
	depends []string // names of the modules whose symbols it uses
	softPre []string // names of modules or aliases that should be loaded before
}

// moduleName returns the kernel's name of a module file, in which '-' and '_' are the same (modprobe.d(5)).
func moduleName(file string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".ko"), "-", "_")
}

// readModules finds the modules under dir, which is lib/modules/VERSION of a kernel.
func readModules(dir string) (*moduleSet, error) {
	s := &moduleSet{files: map[string]string{}, builtin: map[string]bool{}, info: readModuleInfo}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.Type().IsRegular() {
			return nil
		}
		switch ext := filepath.Ext(p); ext {
		case ".ko":
		case ".xz", ".gz", ".zst":
			return fmt.Errorf("%w: %s is compressed, and the modules of Debian 12 are not", ErrUnsupported, p)
		default:
			return nil
		}
		if len(s.files) == maxModules {
			return fmt.Errorf("more than %d modules in %s", maxModules, dir)
		}
		name := moduleName(p)
		if old, ok := s.files[name]; ok {
			return fmt.Errorf("two modules of the name %s: %s and %s", name, old, p)
		}
		s.files[name] = p
		return nil
	})
	if err != nil {
		return nil, err
	}
	data, err := artifact.ReadFile(filepath.Join(dir, "modules.builtin"), maxBuiltinList)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" {
			s.builtin[moduleName(line)] = true
		}
	}
	return s, nil
}

// order returns the paths of the wanted modules and their dependencies, each after its dependencies: the order to
// load them in. The same modules always give the same order.
func (s *moduleSet) order(wanted, optional []string) ([]string, error) {
	var out []string
	state := map[string]int{} // 1: being visited, 2: in out
	var visit func(name, by string, depth int) error
	visit = func(name, by string, depth int) error {
		path, isFile := s.files[name]
		switch {
		case state[name] == 2, !isFile && s.builtin[name]:
			return nil
		case state[name] == 1:
			return fmt.Errorf("module %s depends on itself, by way of %s", name, by)
		case depth > maxModuleDepth:
			return fmt.Errorf("dependencies of modules more than %d deep, at %s", maxModuleDepth, name)
		case !isFile:
			return fmt.Errorf("%w: the kernel has no module %s, which %s needs", ErrUnsupported, name, by)
		}
		state[name] = 1
		info, err := s.info(path)
		if err != nil {
			return err
		}
		for _, d := range info.depends {
			if err := visit(d, name, depth+1); err != nil {
				return err
			}
		}
		for _, d := range info.softPre {
			// A soft dependency may be missing, and may name an alias that a built-in driver serves (crc32c, say).
			if _, ok := s.files[d]; ok && state[d] == 0 {
				if err := visit(d, name, depth+1); err != nil {
					return err
				}
			}
		}
		state[name] = 2
		out = append(out, path)
		return nil
	}
	for _, name := range wanted {
		name = moduleName(name)
		_, isFile := s.files[name]
		if !isFile && !s.builtin[name] && slices.Contains(optional, name) {
			continue
		}
		if err := visit(name, "the guest", 0); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readModuleInfo reads the section .modinfo of a module: strings "key=value", each ended by a zero byte
// (include/linux/module.h). Debian's packages have no modules.dep; depmod(8) makes it from the same data at
// installation.
func readModuleInfo(path string) (moduleInfo, error) {
	f, err := elf.Open(path)
	if err != nil {
		return moduleInfo{}, fmt.Errorf("module %s: %w", path, err)
	}
	defer f.Close()
	sec := f.Section(".modinfo")
	if sec == nil || sec.Size > maxModinfo {
		return moduleInfo{}, fmt.Errorf("module %s: %w", path, errors.New("no section .modinfo, or one that is too long"))
	}
	data, err := sec.Data()
	if err != nil {
		return moduleInfo{}, fmt.Errorf("module %s: %w", path, err)
	}
	return parseModinfo(data), nil
}

func parseModinfo(data []byte) moduleInfo {
	var info moduleInfo
	for entry := range bytes.SplitSeq(data, []byte{0}) {
		key, value, _ := strings.Cut(string(entry), "=")
		switch key {
		case "depends":
			for d := range strings.SplitSeq(value, ",") {
				if d != "" {
					info.depends = append(info.depends, moduleName(d))
				}
			}
		case "softdep": // "pre: a b post: c"
			pre := false
			for word := range strings.FieldsSeq(value) {
				switch {
				case word == "pre:":
					pre = true
				case word == "post:":
					pre = false
				case pre:
					info.softPre = append(info.softPre, moduleName(word))
				}
			}
		}
	}
	return info
}
