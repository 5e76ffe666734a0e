package builder

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// addVMFiles adds what a VM needs. Mount points and files that a directory source has already stay as they are, except
// for the machine id: all VMs share the image, so it is emptied, which systemd and dbus take as "make one at the first
// boot" (machine-id(5)). In Debian images host name and resolver configuration are those of the build host, and are
// replaced.
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
		return nil // not a root filesystem that we could complete
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

// Limits of dpkg's database, which anybody may have written. The record of an image must stay below maxRecordBytes with
// what is taken from it; Debian's whole archive has 65,000 packages, and no system a tenth of them.
const (
	maxStatusBytes   = 32 << 20 // it is read into memory
	maxInstalled     = 32 << 10 // packages
	maxInstalledText = 1 << 20  // bytes of their names, versions and architectures
)

var archRE = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// describePackages takes the list of installed packages, and the architecture, from the dpkg database of a tree if it
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
	// The configuration of an image of layers has said for what it is.
	if native, _, _ := strings.Cut(strings.TrimSpace(arch), "\n"); img.Platform == "" && archRE.MatchString(native) {
		img.Architecture = native
	}
	return nil
}

// parseDpkgStatus gives the installed packages of a dpkg status file, in its order.
func parseDpkgStatus(text string) ([]image.Package, error) {
	var (
		out    []image.Package
		cur    image.Package
		status string
		total  int
	)
	flush := func() error {
		p := cur
		installed := status == "install ok installed" || status == "hold ok installed"
		cur, status = image.Package{}, ""
		if !installed {
			return nil
		}
		total += len(p.Name) + len(p.Version) + len(p.Architecture)
		if len(out) >= maxInstalled || total > maxInstalledText {
			return fmt.Errorf("%w: its dpkg database names more than %d packages, or has more than %d bytes of names", image.ErrTooLarge, maxInstalled, maxInstalledText)
		}
		// Not as pieces of the text, which would stay.
		out = append(out, image.Package{Name: strings.Clone(p.Name), Version: strings.Clone(p.Version), Architecture: strings.Clone(p.Architecture)})
		return nil
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if strings.TrimSpace(line) == "" {
			if err := flush(); err != nil {
				return nil, err
			}
			continue
		}
		k, v, ok := strings.Cut(line, ":")
		if !ok || line[0] == ' ' || line[0] == '\t' || line[0] == '#' {
			continue // a further line of a field, or a comment
		}
		v = strings.TrimSpace(v)
		switch strings.ToLower(strings.TrimSpace(k)) {
		case "package":
			cur.Name = v
		case "version":
			cur.Version = v
		case "architecture":
			cur.Architecture = v
		case "status":
			status = v
		}
	}
	return out, flush()
}
