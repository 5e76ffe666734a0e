package doctor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/kernel"
)

// tool is a program or header of the host, and its Debian package.
type tool struct {
	name string
	pkg  string
}

// builders are the tools that `drowse kernel build` runs or includes.
var builders = []tool{
	{"gcc", "gcc"}, {"ld", "binutils"}, {"make", "make"}, {"flex", "flex"}, {"bison", "bison"}, {"bc", "bc"},
	{"patch", "patch"}, {"perl", "perl-base"}, {"tar", "tar"}, {"xz", "xz-utils"},
	{"/usr/include/gelf.h", "libelf-dev"}, {"/usr/include/openssl/ssl.h", "libssl-dev"},
}

// find looks for a program in PATH and in Debian's directories for root.
func (h host) find(name string) (string, bool) {
	if strings.HasPrefix(name, "/") {
		_, err := os.Stat(h.path(name))
		return name, err == nil
	}
	if p, err := exec.LookPath(name); err == nil {
		return p, true
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		p := filepath.Join(h.root, dir, name)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0 {
			return p, true
		}
	}
	return "", false
}

func (h host) tools(g *group) {
	one := func(name, program, pkg, consequence string) {
		if p, ok := h.find(program); ok {
			g.add(name, OK, p, "")
			return
		}
		g.add(name, Missing, program+" is not installed", consequence+": apt-get install "+pkg)
	}
	one("mkfs_ext4", "mkfs.ext4", "e2fsprogs", "no writable disk of a size not used before can be made")
	one("mmdebstrap", "mmdebstrap", "mmdebstrap", "no images can be built from Debian packages; from directories they can")
	var lacking, pkgs []string
	for _, t := range builders {
		if _, ok := h.find(t.name); !ok {
			lacking, pkgs = append(lacking, t.name), append(pkgs, t.pkg)
		}
	}
	if len(lacking) == 0 {
		g.add("kernel_build", OK, "all that building the kernel needs is installed", "")
	} else {
		g.add("kernel_build", Missing, "not installed: "+strings.Join(lacking, ", "),
			"`drowse kernel build` needs --install-deps, or: apt-get install "+strings.Join(pkgs, " "))
	}
	one("qemu", "qemu-system-x86_64", "qemu-system-x86", "none for VMs: only drowse's own tests use it, for a KVM of the hardware kind")
}

// stores checks what VMs are made from.
func stores(g *group, o Options) {
	for _, program := range []struct{ name, path, remedy string }{
		{"agent", o.Agent, "build it with `make build`, put it beside drowse, or name it in $DROWSE_AGENT"},
		{"vmm", o.VMM, "build it with `make build`, and put it beside drowse"},
	} {
		switch st, err := os.Stat(program.path); {
		case program.path == "":
			g.require(program.name, Unknown, "it was not said where it is", "no VM can start")
		case err != nil:
			g.require(program.name, Missing, oneLine(err.Error()), "no VM can start: "+program.remedy)
		case !st.Mode().IsRegular():
			g.require(program.name, Missing, program.path+" is not a regular file", "no VM can start: "+program.remedy)
		default:
			g.require(program.name, OK, fmt.Sprintf("%s, %s", program.path, bytesText(uint64(st.Size()))), "")
		}
	}
	storedKernels(g, o.StateDir)
	storedImages(g, o.StateDir)
}

func storedKernels(g *group, dir string) {
	list, err := kernel.List(dir)
	switch {
	case err != nil:
		g.add("kernels", Unknown, oneLine(err.Error()), "")
	case len(list) == 0:
		g.add("kernels", Missing, "none", "no VM can start yet: `drowse kernel build`, or on KVM of the hardware kind `drowse kernel fetch`")
	default:
		ids := make([]string, 0, len(list))
		for _, k := range list {
			ids = append(ids, k.ID)
		}
		g.add("kernels", OK, strings.Join(ids, ", "), "")
	}
}

func storedImages(g *group, dir string) {
	const none = "no VM can start yet: `drowse image build --from debian:bookworm --include python3`"
	// Opening a store would make its directories.
	if _, err := os.Stat(filepath.Join(dir, "images")); errors.Is(err, os.ErrNotExist) {
		g.add("images", Missing, "none", none)
		return
	}
	s, err := image.OpenStore(dir)
	if err != nil {
		g.add("images", Unknown, oneLine(err.Error()), "")
		return
	}
	list, err := s.List()
	names := make([]string, 0, len(list))
	for _, i := range list {
		if len(i.Tags) > 0 {
			names = append(names, i.Tags[0])
		} else {
			names = append(names, i.ShortID())
		}
	}
	switch {
	case err != nil:
		g.add("images", Degraded, strings.Join(append(names, oneLine(err.Error())), ", "), "the damaged ones cannot be used: remove them")
	case len(list) == 0:
		g.add("images", Missing, "none", none)
	default:
		g.add("images", OK, strings.Join(names, ", "), "")
	}
}
