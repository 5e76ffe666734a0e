package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/hosthooks"
)

const (
	// lowSpace is hardly enough for one image and one sleeping VM.
	lowSpace = 2 << 30
	// socketPath is the most that follows the state directory in the path of a Unix socket. maxSocketPath is the
	// kernel's limit (unix(7)).
	socketPath    = len("/vms/") + 40 + len("/control.sock")
	maxSocketPath = 107
	// tryBytes is how much to write to a nameless file to see what its file system does.
	tryBytes = 256 << 10
)

// Names for magic numbers of statfs(2).
var fileSystems = map[int64]string{
	unix.EXT4_SUPER_MAGIC:      "ext2/3/4",
	unix.XFS_SUPER_MAGIC:       "xfs",
	unix.BTRFS_SUPER_MAGIC:     "btrfs",
	unix.TMPFS_MAGIC:           "tmpfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlay",
	unix.NFS_SUPER_MAGIC:       "nfs",
	unix.V9FS_MAGIC:            "9p",
	unix.F2FS_SUPER_MAGIC:      "f2fs",
	unix.FUSE_SUPER_MAGIC:      "fuse",
	0x2fc12fc1:                 "zfs",
}

// state checks the state directory, or where it will be made.
func (h host) state(g *group, dir string) {
	const lack = "VMs cannot be kept: name another directory with --state or $DROWSE_STATE"
	dir, err := filepath.Abs(dir)
	if err != nil {
		g.require("state_dir", Unknown, oneLine(err.Error()), "")
		return
	}
	at, err := existing(dir)
	if err != nil {
		g.require("state_dir", Missing, oneLine(err.Error()), lack)
		return
	}
	detail := dir
	if at != dir {
		detail += " (not there yet, will be made below " + at + ")"
	}
	if err := unix.Access(at, unix.W_OK|unix.X_OK); err != nil {
		g.require("state_dir", Missing, detail+": "+err.Error(), lack)
	} else {
		g.require("state_dir", OK, detail, "")
	}
	if n := len(dir) + socketPath; n > maxSocketPath {
		g.add("socket_path", Degraded, fmt.Sprintf("%d bytes for a VM with the longest name, %d are possible", n, maxSocketPath),
			"VMs with long names cannot start: choose a state directory with a shorter path")
	} else {
		g.add("socket_path", OK, fmt.Sprintf("%d bytes of %d", n, maxSocketPath), "")
	}
	space(g, at)
	features(g, at)
	hooks(g, dir)
}

// hooks checks the hooks of the host as their runner does.
func hooks(g *group, dir string) {
	found, err := hosthooks.In(dir).Look()
	if err != nil {
		g.add(hosthooks.DirName, Degraded, oneLine(err.Error()), "no hook on the host is run, and no VM goes to sleep unless with --hooks ignore or skip")
		return
	}
	detail := "no hooks on the host"
	if len(found.Hooks) > 0 {
		detail = strings.Join(found.Hooks, ", ")
	}
	if len(found.LeftOut) > 0 {
		g.add(hosthooks.DirName, Degraded, oneLine(detail), oneLine(strings.Join(found.LeftOut, ", "))+": not executable, and not run")
		return
	}
	g.add(hosthooks.DirName, OK, oneLine(detail), "")
}

// existing returns the nearest existing directory at or above dir.
func existing(dir string) (string, error) {
	for {
		st, err := os.Stat(dir)
		switch {
		case err == nil && st.IsDir():
			return dir, nil
		case err == nil:
			return "", fmt.Errorf("%s is not a directory", dir)
		case !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir):
			return "", err
		}
		dir = filepath.Dir(dir)
	}
}

func space(g *group, dir string) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		g.add("space", Unknown, oneLine(err.Error()), "")
		return
	}
	name := fileSystems[st.Type]
	if name == "" {
		name = fmt.Sprintf("type %#x", st.Type)
	}
	g.add("file_system", unless(name == "tmpfs", Degraded), name, "sleeping VMs cost memory instead of disk space, and are gone after a reboot")
	free := st.Bavail * uint64(st.Bsize)
	if free < lowSpace {
		g.add("space", Degraded, bytesText(free)+" free", "building kernels and images may fail, and a VM that cannot be saved stays awake: free space, or run `drowse prune`")
	} else {
		g.add("space", OK, bytesText(free)+" free of "+bytesText(st.Blocks*uint64(st.Bsize)), "")
	}
}

// nameless opens a file without a name, or removes its name at once.
func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), dir), nil
	}
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// features tries what drowse does with files.
func features(g *group, dir string) {
	const noHoles = "discarded blocks and zeros in disks keep their space"
	f, err := nameless(dir)
	if err == nil {
		defer f.Close()
		_, err = f.Write(make([]byte, tryBytes))
	}
	if err != nil {
		for _, name := range []string{"punch_hole", "holes", "reflink"} {
			g.add(name, Unknown, "no file can be written in "+dir+": "+oneLine(err.Error()), "")
		}
		return
	}
	fd := int(f.Fd())
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, tryBytes/2, tryBytes/2); err != nil {
		g.add("punch_hole", Missing, "fallocate(2): "+err.Error(), noHoles)
	} else {
		g.add("punch_hole", OK, "holes can be punched", "")
	}
	if err := f.Truncate(4 * tryBytes); err != nil {
		g.add("holes", Unknown, oneLine(err.Error()), "")
	} else if at, err := unix.Seek(fd, 0, unix.SEEK_HOLE); err != nil || at >= 4*tryBytes {
		g.add("holes", Degraded, "the file system does not tell holes from data", "sparse files are read whole when images are built and layers opened")
	} else {
		g.add("holes", OK, "holes are told from data (SEEK_HOLE)", "")
	}
	reflink(g, f, dir)
}

func reflink(g *group, f *os.File, dir string) {
	to, err := nameless(dir)
	if err != nil {
		g.add("reflink", Unknown, oneLine(err.Error()), "")
		return
	}
	defer to.Close()
	if err := unix.IoctlFileClone(int(to.Fd()), int(f.Fd())); err != nil {
		g.add("reflink", OK, "files cannot share blocks ("+err.Error()+"): disks are layered, and do not need it", "")
		return
	}
	g.add("reflink", OK, "files can share blocks", "")
}
