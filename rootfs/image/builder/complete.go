package builder

import (
	"fmt"
	"io/fs"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// addVMFiles adds what a VM needs. Existing mount points and files of a directory source stay as they are, except
// for the machine id: all VMs share the image, so addVMFiles empties it, which systemd and dbus take as "make one
// at the first boot" (machine-id(5)). Debian images have host name and resolver configuration of the build host;
// it replaces them.
func addVMFiles(t *fstree.Tree, replace bool) error {
	for _, d := range []struct {
		name string
		perm fs.FileMode
	}{
		{"dev", 0o755}, {"proc", 0o555}, {"sys", 0o555}, {"run", 0o755}, {"tmp", 0o777 | fs.ModeSticky},
	} {
		if t.Lookup(d.name) != nil {
			continue
		}
		if err := t.Add(d.name, &fstree.Inode{Mode: fs.ModeDir | d.perm, Mtime: t.Root.Mtime}); err != nil {
			return fmt.Errorf("add /%s: %w", d.name, err)
		}
	}
	if n := t.Lookup("etc"); n != nil && !n.IsDir() {
		return nil // not a root filesystem to complete
	}
	for _, f := range []struct{ name, text string }{{"etc/hostname", "localhost\n"}, {"etc/resolv.conf", ""}} {
		if replace || t.Lookup(f.name) == nil {
			if err := t.SetFile(f.name, f.text); err != nil {
				return err
			}
		}
	}
	return t.SetFile("etc/machine-id", "")
}

// Limits of dpkg's database, which is not trusted. With what is taken from it, the record of an image must stay
// below maxRecordBytes. Debian's whole archive has 65,000 packages, and no system a tenth of them.
const (
	maxStatusBytes   = 32 << 20 // it is read into memory
	maxInstalled     = 32 << 10 // packages
	maxInstalledText = 1 << 20  // bytes of their names, versions and architectures
)

var archRE = lazyregexp.New(`^[a-z0-9][a-z0-9-]{0,31}$`)

// describePackages takes the list of installed packages and the architecture from the tree's dpkg database, if it
// has one.
func describePackages(t *fstree.Tree, img *image.Image) error {
	status, err := t.ReadText("var/lib/dpkg/status", maxStatusBytes)
	if err != nil {
		return err
	}
	if img.Packages, err = parseDpkgStatus(status); err != nil {
		return err
	}
	arch, err := t.ReadText("var/lib/dpkg/arch", maxStatusBytes)
	if err != nil {
		return err
	}
	// For an image of layers, the configuration has given the architecture.
	if native, _, _ := strings.Cut(strings.TrimSpace(arch), "\n"); img.Platform == "" && archRE.MatchString(native) {
		img.Architecture = native
	}
	return nil
}

// parseDpkgStatus returns the installed packages of a dpkg status file, in its order.
func parseDpkgStatus(text string) (out []image.Package, err error) {
	total := 0
	for f := range artifact.Stanzas(text, "package", "status", "version", "architecture") {
		if s := f["status"]; s != "install ok installed" && s != "hold ok installed" {
			continue
		}
		p := image.Package{Name: f["package"], Version: f["version"], Architecture: f["architecture"]}
		total += len(p.Name) + len(p.Version) + len(p.Architecture)
		if len(out) >= maxInstalled || total > maxInstalledText {
			return nil, fmt.Errorf("%w: its dpkg database names more than %d packages, or has more than %d bytes of names", image.ErrTooLarge, maxInstalled, maxInstalledText)
		}
		out = append(out, p)
	}
	return out, nil
}
