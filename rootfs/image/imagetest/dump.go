package imagetest

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	goerofs "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// Entry is all that an image must keep of one path.
type Entry struct {
	Mode     fs.FileMode
	Uid, Gid uint32
	Mtime    time.Time
	Size     int64
	Hash     string
	Target   string
	Major    uint32
	Minor    uint32
	Xattrs   string
	Nlink    uint64 // of files other than directories
}

func (e Entry) String() string {
	return fmt.Sprintf("%v %d:%d %s size %d sha256 %.12s -> %q dev %d:%d xattrs %s nlink %d", e.Mode, e.Uid, e.Gid,
		e.Mtime.UTC().Format(time.RFC3339Nano), e.Size, e.Hash, e.Target, e.Major, e.Minor, e.Xattrs, e.Nlink)
}

func XattrText(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%x;", k, m[k])
	}
	return b.String()
}

func HashOf(t *testing.T, r io.Reader) string {
	t.Helper()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// DumpTar reads a tar stream without the code under test.
func DumpTar(t *testing.T, r io.Reader) map[string]Entry {
	t.Helper()
	out, group := map[string]Entry{}, map[string][]string{}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := path.Clean(h.Name)
		if h.Typeflag == tar.TypeLink {
			first := path.Clean(h.Linkname)
			for f, names := range group {
				if slices.Contains(names, first) {
					first = f
				}
			}
			if group[first] == nil {
				group[first] = []string{first}
			}
			group[first] = append(group[first], name)
			continue
		}
		e := Entry{Mode: h.FileInfo().Mode(), Uid: uint32(h.Uid), Gid: uint32(h.Gid), Mtime: h.ModTime}
		x := map[string]string{}
		for k, v := range h.PAXRecords {
			if k, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok {
				x[k] = v
			}
		}
		e.Xattrs = XattrText(x)
		switch h.Typeflag {
		case tar.TypeReg:
			e.Size, e.Hash = h.Size, HashOf(t, tr)
		case tar.TypeSymlink:
			e.Mode, e.Target = fs.ModeSymlink|0o777, h.Linkname
		case tar.TypeChar, tar.TypeBlock:
			e.Major, e.Minor = uint32(h.Devmajor), uint32(h.Devminor)
		}
		if !e.Mode.IsDir() {
			e.Nlink = 1
		}
		out[name] = e
	}
	for first, names := range group {
		e := out[first]
		e.Nlink = uint64(len(names))
		for _, n := range names {
			out[n] = e
		}
	}
	return out
}

// DumpImage reads an image with go-erofs. inodes gives the inode number of each path.
func DumpImage(t *testing.T, name string) (out map[string]Entry, inodes map[string]int64) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := goerofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	out, inodes = map[string]Entry{}, map[string]int64{}
	err = fs.WalkDir(img, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*goerofs.Stat)
		e := Entry{Mode: info.Mode()&(fs.ModeType|fs.ModePerm) | specialBits(t, f, st.Ino), Uid: st.UID, Gid: st.GID, Mtime: time.Unix(int64(st.Mtime), int64(st.MtimeNs)),
			Xattrs: XattrText(erofs.UnixXattrs(st.Xattrs))}
		switch {
		case info.Mode().IsRegular():
			r, err := img.Open(p)
			if err != nil {
				return err
			}
			e.Size, e.Hash = info.Size(), HashOf(t, r)
			if err := r.Close(); err != nil {
				return err
			}
		case info.Mode()&fs.ModeSymlink != 0:
			if e.Target, err = fs.ReadLink(img, p); err != nil {
				return err
			}
		case info.Mode()&fs.ModeDevice != 0:
			e.Major, e.Minor = st.Rdev>>8&0xfff, st.Rdev&0xff|st.Rdev>>12&0xfff00
		}
		if !info.IsDir() {
			e.Nlink = uint64(st.Nlink)
		}
		out[p], inodes[p] = e, st.Ino
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out, inodes
}

// specialBits gives setuid, setgid and sticky of an inode, which the reader of go-erofs does not tell.
func specialBits(t *testing.T, f *os.File, nid int64) (m fs.FileMode) {
	t.Helper()
	const metaBlockAt, unit = 1024 + 40, 32 // of the format, in bytes
	var sb, mode [4]byte
	if _, err := f.ReadAt(sb[:], metaBlockAt); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(mode[:], int64(binary.LittleEndian.Uint32(sb[:]))*sparse.BlockSize+nid*unit+4); err != nil {
		t.Fatal(err)
	}
	for bit, b := range map[uint16]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if binary.LittleEndian.Uint16(mode[:])&bit != 0 {
			m |= b
		}
	}
	return m
}

// DumpHost reads a directory of the host, which may be a mounted image.
func DumpHost(t *testing.T, root string) (out map[string]Entry, inodes map[string]int64) {
	t.Helper()
	out, inodes = map[string]Entry{}, map[string]int64{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		e := Entry{Mode: info.Mode(), Uid: st.Uid, Gid: st.Gid, Mtime: info.ModTime(), Xattrs: XattrText(hostXattrs(t, p))}
		switch {
		case info.Mode().IsRegular():
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			e.Size, e.Hash = info.Size(), HashOf(t, f)
			if err := f.Close(); err != nil {
				return err
			}
		case info.Mode()&fs.ModeSymlink != 0:
			if e.Target, err = os.Readlink(p); err != nil {
				return err
			}
		case info.Mode()&fs.ModeDevice != 0:
			e.Major, e.Minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
		}
		if !info.IsDir() {
			e.Nlink = st.Nlink
		}
		out[rel], inodes[rel] = e, int64(st.Ino)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out, inodes
}

func hostXattrs(t *testing.T, p string) map[string]string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(p, buf)
	if errors.Is(err, unix.ENOTSUP) || n == 0 {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, k := range strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		v := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(p, k, v)
		if err != nil {
			t.Fatal(err)
		}
		out[k] = string(v[:n])
	}
	return out
}

// Compare fails for each path that is not the same in both. Paths in ignore are left out.
func Compare(t *testing.T, what string, want, got map[string]Entry, ignore ...string) {
	t.Helper()
	const maxShown = 20
	bad := 0
	report := func(format string, args ...any) {
		if bad++; bad <= maxShown {
			t.Errorf(what+": "+format, args...)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(want)) {
		w := want[p]
		g, ok := got[p]
		switch {
		case slices.Contains(ignore, p):
		case !ok:
			report("%q is missing", p)
		case !w.Mtime.Equal(g.Mtime) || w.String() != g.String():
			report("%q:\nwant %v\n got %v", p, w, g)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[p]; !ok && !slices.Contains(ignore, p) {
			report("%q is in the image and should not be", p)
		}
	}
	if bad > maxShown {
		t.Errorf("%s: %d differences in all", what, bad)
	}
}

// Fsck runs fsck.erofs over an image, where it is installed.
func Fsck(t *testing.T, name string) {
	t.Helper()
	bin, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Logf("fsck.erofs is not installed (package erofs-utils): not run")
		return
	}
	if out, err := exec.Command(bin, name).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

// MountImage mounts an image with the host's kernel, or says why that is not possible here.
func MountImage(t *testing.T, name string) (dir string, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		return "", "mounting needs root"
	}
	filesystems, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(filesystems), "\terofs\n") {
		return "", "the host's kernel has no erofs"
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return "", "the host has no loop devices"
	}
	dir = t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", name, dir).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v\n%s", err, out)
		}
	})
	return dir, ""
}

// CheckImage compares an image with what it should hold: as go-erofs reads it, and as the host's kernel does.
func CheckImage(t *testing.T, name string, want map[string]Entry, ignore ...string) {
	t.Helper()
	Fsck(t, name)
	got, inodes := DumpImage(t, name)
	Compare(t, "read by go-erofs", want, got, ignore...)
	dir, why := MountImage(t, name)
	if why != "" {
		t.Logf("not compared by a mount: %s", why)
		return
	}
	mounted, kernelInodes := DumpHost(t, dir)
	Compare(t, "mounted", want, mounted, ignore...)
	for p, ino := range kernelInodes {
		if ino == 0 || ino != inodes[p] {
			t.Errorf("%q has inode number %d mounted, %d by go-erofs; wanted the same, not 0", p, ino, inodes[p])
		}
	}
}

// Sketch draws a tree as one line: directories end in a slash, symlinks show their target, files their content.
func Sketch(t *testing.T, tr *fstree.Tree) string {
	t.Helper()
	var out []string
	err := tr.Walk(func(p string, n *fstree.Inode) error {
		switch {
		case p == ".":
		case n.IsDir():
			out = append(out, p+"/")
		case n.Target != "":
			out = append(out, p+"->"+n.Target)
		default:
			text, err := tr.ReadText(p, 1<<20)
			if err != nil {
				return err
			}
			out = append(out, p+"="+text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, " ")
}
