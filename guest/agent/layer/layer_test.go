package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// upperDir makes a directory that trusted attributes and devices can be made in, as in an overlay's upper directory.
func upperDir(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("whiteouts are devices, which only root can make")
	}
	dir := t.TempDir()
	if err := unix.Setxattr(dir, overlayPrefix+"impure", []byte("y"), 0); err != nil {
		t.Skipf("the file system of %s has no trusted attributes: %v", dir, err)
	}
	return dir
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// list packs a directory and describes each entry in a line.
func list(t *testing.T, dir string) []string {
	t.Helper()
	var b bytes.Buffer
	must(t, Pack(&b, dir))
	var out []string
	for tr := tar.NewReader(&b); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		must(t, err)
		data, err := io.ReadAll(tr)
		must(t, err)
		line := fmt.Sprintf("%c %s %o %d:%d", h.Typeflag, h.Name, h.Mode, h.Uid, h.Gid)
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		if len(data) > 0 {
			line += " =" + string(data)
		}
		for k, v := range h.PAXRecords {
			if strings.HasPrefix(k, paxXattr) {
				line += fmt.Sprintf(" %s=%s", strings.TrimPrefix(k, paxXattr), v)
			}
		}
		out = append(out, line)
	}
}

func TestPack_gives_what_the_upper_directory_means(t *testing.T) {
	dir := upperDir(t)
	p := func(name string) string { return filepath.Join(dir, name) }
	must(t,
		os.Mkdir(p("d"), 0o750), os.Chown(p("d"), 5, 70000), os.Chmod(p("d"), 0o750),
		os.WriteFile(p("d/f"), []byte("text"), 0o600), os.Link(p("d/f"), p("g")),
		unix.Setxattr(p("d/f"), "trusted.kept", []byte("1"), 0), unix.Setxattr(p("d/f"), overlayPrefix+"origin", []byte("x"), 0),
		os.Chmod(p("d/f"), 0o600|os.ModeSetuid),
		os.Symlink("d/f", p("s")),
		unix.Mknod(p("d/gone"), unix.S_IFCHR, 0), os.Link(p("d/gone"), p("gone too")), // overlays share one inode
		unix.Mknod(p("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))), os.Chmod(p("null"), 0o666),
		unix.Mkfifo(p("pipe"), 0o600),
		os.Mkdir(p("new"), 0o755), unix.Setxattr(p("new"), overlayOpaque, []byte("y"), 0), os.WriteFile(p("new/x"), nil, 0o644),
		unix.Mknod(p("sock"), unix.S_IFSOCK|0o600, 0),
	)
	want := []string{
		"5 d/ 750 5:70000",
		"0 d/f 4600 0:0 =text trusted.kept=1",
		"0 d/.wh.gone 0 0:0",
		"1 g 4600 0:0 -> d/f",
		"0 .wh.gone too 0 0:0",
		"5 new/ 755 0:0",
		"0 new/.wh..wh..opq 0 0:0",
		"0 new/x 644 0:0",
		"3 null 666 0:0",
		"6 pipe 600 0:0",
		"2 s 777 0:0 -> d/f",
	}
	if got := list(t, dir); !slices.Equal(got, want) {
		t.Errorf("the layer is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestPack_refuses_what_cannot_be_a_layer(t *testing.T) {
	for name, c := range map[string]struct {
		make func(dir string) error
		want string
	}{
		"a directory that was moved": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+"/d", 0o755), unix.Setxattr(dir+"/d", overlayPrefix+"redirect", []byte("/x"), 0))
		}, "keeps it in parts"},
		"a file of attributes alone": {func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/f", nil, 0o644), unix.Setxattr(dir+"/f", overlayPrefix+"metacopy", nil, 0))
		}, "keeps it in parts"},
		"another kind of opaque": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+"/d", 0o755), unix.Setxattr(dir+"/d", overlayOpaque, []byte("x"), 0))
		}, "keeps it in parts"},
		"a name like that of a whiteout": {func(dir string) error { return os.WriteFile(dir+"/.wh.x", nil, 0o644) }, "means something else"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := upperDir(t)
			must(t, c.make(dir))
			if err := Pack(io.Discard, dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, it should say %q", err, c.want)
			}
		})
	}
}

func TestForeign_mounts_are_those_of_commands_newest_first(t *testing.T) {
	text := `21 1 0:20 / / rw - overlay overlay rw
22 21 0:5 / /dev rw - devtmpfs devtmpfs rw
23 21 0:4 / /proc rw - proc proc rw
24 21 0:21 / /run rw - tmpfs tmpfs rw
25 21 0:22 / /mnt/a\040b rw - tmpfs tmpfs rw
26 24 0:23 / /run rw - tmpfs tmpfs rw
damaged
`
	if got, want := foreignMounts(text), []string{"/run", "/mnt/a b"}; !slices.Equal(got, want) {
		t.Errorf("mounts %q, want %q", got, want)
	}
}
