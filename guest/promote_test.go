package guest_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// promote looks at paths and promotes them, each to the directory of the same index.
func promote(t *testing.T, c *guest.Client, items ...guest.Promotion) ([]guest.Promoted, error) {
	t.Helper()
	var paths []string
	for _, i := range items {
		paths = append(paths, i.Path)
	}
	seen, err := c.Look(t.Context(), paths)
	if err != nil {
		t.Fatal(err)
	}
	return c.Promote(t.Context(), "vm", items, seen, math.MaxInt64)
}

// names returns the names below a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	out := []string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			p, err = filepath.Rel(dir, p)
			out = append(out, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	out := []string{}
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}

func TestPromote_copies_a_tree_and_a_file_whole_and_harmless(t *testing.T) {
	c := startVM(t).dial(t)
	in, host := t.TempDir(), t.TempDir()
	write := func(name string, mode fs.FileMode) {
		t.Helper()
		p := filepath.Join(in, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o777), os.WriteFile(p, []byte(name), 0o600), os.Chmod(p, mode)); err != nil {
			t.Fatal(err)
		}
	}
	write("out/a", 0o666)
	write("out/d/b", 0o755|fs.ModeSetuid)
	write("log", 0o640)
	if err := errors.Join(os.Symlink("/etc/passwd", in+"/out/leads"), os.Symlink("a", in+"/out/stays"), unix.Mkfifo(in+"/out/pipe", 0o600), os.Chmod(in+"/out/d", 0o777)); err != nil {
		t.Fatal(err)
	}
	got, err := promote(t, c, guest.Promotion{Path: in + "/out", Dir: host}, guest.Promotion{Path: in + "/log", Dir: host}, guest.Promotion{Path: in + "/none", Dir: host})
	if err != nil || len(got) != 2 {
		t.Fatalf("promoted %+v, %v", got, err)
	}
	times := entries(t, host+"/vm")
	if len(times) != 1 {
		t.Fatalf("there are %q, want one copy", times)
	}
	at := filepath.Join(host, "vm", times[0])
	if got[0].At != at+in+"/out" || got[1].At != at+in+"/log" || got[1].Bytes != 3 || got[0].SkippedCount != 1 {
		t.Errorf("promoted %+v", got)
	}
	if list, want := names(t, at+in), []string{"log", "out/a", "out/d/b", "out/stays"}; !slices.Equal(list, want) {
		t.Errorf("copied %q, want %q", list, want)
	}
	for name, mode := range map[string]fs.FileMode{"out/a": 0o644, "out/d": 0o755 | fs.ModeDir, "out/d/b": 0o755, "log": 0o640} {
		if fi, err := os.Lstat(filepath.Join(at+in, name)); err != nil || fi.Mode() != mode {
			t.Errorf("%s has mode %v, want %v: %v", name, fi.Mode(), mode, err)
		}
	}
	if b, err := os.ReadFile(at + in + "/out/d/b"); err != nil || string(b) != "out/d/b" {
		t.Errorf("a file has %q, %v", b, err)
	}
	if fi, err := os.Lstat(at); err != nil || fi.Mode() != 0o755|fs.ModeDir {
		t.Errorf("the copy has mode %v, %v", fi.Mode(), err)
	}
	if _, err := promote(t, c, guest.Promotion{Path: in + "/out", Dir: host}); err != nil || len(entries(t, host+"/vm")) != 2 {
		t.Errorf("a second one: %v, there are %q", err, entries(t, host+"/vm"))
	}
}

func TestPromote_of_nothing_makes_nothing(t *testing.T) {
	c := startVM(t).dial(t)
	in, host := t.TempDir(), t.TempDir()
	got, err := promote(t, c, guest.Promotion{Path: in, Dir: host}, guest.Promotion{Path: in + "/none", Dir: "/none/at/all"})
	if err != nil || len(got) != 0 || len(entries(t, host)) != 0 {
		t.Errorf("promoted %+v, %v, and made %q", got, err, entries(t, host))
	}
}

func TestPromote_that_fails_leaves_no_copy_behind(t *testing.T) {
	c := startVM(t).dial(t)
	in := t.TempDir()
	if err := errors.Join(os.WriteFile(in+"/f", []byte("x"), 0o600), os.Symlink(in, in+"/link"), unix.Mkfifo(in+"/pipe", 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		path   string
		second func(t *testing.T, dir string) string
		want   error
	}{
		{"to a directory that is not there", "/f", func(_ *testing.T, dir string) string { return dir + "/none" }, guest.ErrPromoteDir},
		{"to a file", "/f", func(t *testing.T, dir string) string {
			if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return dir + "/file"
		}, guest.ErrPromoteDir},
		{"to where others may write", "/f", func(t *testing.T, dir string) string {
			if err := errors.Join(os.Mkdir(dir+"/vm", 0o700), os.Chmod(dir+"/vm", 0o777)); err != nil {
				t.Fatal(err)
			}
			return dir
		}, guest.ErrPromoteDir},
		{"to where a link leads", "/f", func(t *testing.T, dir string) string {
			if err := os.Symlink(".", dir+"/vm"); err != nil {
				t.Fatal(err)
			}
			return dir
		}, guest.ErrPromoteDir},
		{"to where there are too many", "/f", func(t *testing.T, dir string) string {
			for i := range guest.MaxPromoteCopies {
				if err := os.MkdirAll(dir+"/vm/"+strings.Repeat("a", i%200+1)+string(rune('a'+i/200)), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			return dir
		}, guest.ErrPromoteDir},
		{"of a link", "/link", func(_ *testing.T, dir string) string { return dir }, guest.ErrNotPromotable},
		{"below a link", "/link/f", func(_ *testing.T, dir string) string { return dir }, guest.ErrNotPromotable},
		{"of a pipe", "/pipe", func(_ *testing.T, dir string) string { return dir }, guest.ErrNotPromotable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first := t.TempDir()
			got, err := promote(t, c, guest.Promotion{Path: in + "/f", Dir: first}, guest.Promotion{Path: in + tt.path, Dir: tt.second(t, t.TempDir())})
			if !errors.Is(err, tt.want) || got != nil {
				t.Errorf("got %+v, %v; want %v", got, err, tt.want)
			}
			if left := entries(t, first+"/vm"); len(left) != 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

func TestPromote_removes_what_a_killed_one_has_left_and_leaves_one_under_way(t *testing.T) {
	c := startVM(t).dial(t)
	in, host := t.TempDir(), t.TempDir()
	for _, d := range []string{host + "/vm/.part-killed/deep", host + "/vm/.part-busy"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	busy, err := os.Open(host + "/vm/.part-busy")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	if err := errors.Join(unix.Flock(int(busy.Fd()), unix.LOCK_EX), os.WriteFile(in+"/f", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	got, err := promote(t, c, guest.Promotion{Path: in, Dir: host})
	if err != nil || len(got) != 1 {
		t.Fatalf("promoted %+v, %v", got, err)
	}
	if left := entries(t, host+"/vm"); len(left) != 2 || left[0] != ".part-busy" {
		t.Errorf("there are %q", left)
	}
}

func TestPromote_of_a_hostile_guest_makes_nothing_outside_and_no_half_copy(t *testing.T) {
	archive := func(hs ...tar.Header) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range hs {
			h.Format = tar.FormatPAX
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
		}
		_ = w.Flush()
		return b.Bytes()
	}
	done := data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}})
	end := make([]byte, 1024)
	for name, sent := range map[string][]byte{
		"above":          archive(tar.Header{Name: "out/../../../up", Typeflag: tar.TypeReg}),
		"absolute":       archive(tar.Header{Name: "/up", Typeflag: tar.TypeReg}),
		"by a hard link": archive(tar.Header{Name: "out/passwd", Typeflag: tar.TypeLink, Linkname: "../../../../etc/passwd"}),
		"by a link": archive(tar.Header{Name: "out", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "out/l", Typeflag: tar.TypeSymlink, Linkname: "."},
			tar.Header{Name: "out/l/../../up", Typeflag: tar.TypeReg}),
		"too much":    archive(tar.Header{Name: "out/bomb", Typeflag: tar.TypeReg, Size: 1 << 50}),
		"half a file": archive(tar.Header{Name: "out/f", Typeflag: tar.TypeReg, Size: 100}),
		"nothing":     end,
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			host := filepath.Join(top, "a", "b")
			if err := os.MkdirAll(host, 0o755); err != nil {
				t.Fatal(err)
			}
			c := hostileGuest(t, data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: sent}}), done)
			got, err := c.Promote(t.Context(), "vm", []guest.Promotion{{Path: "/work/out", Dir: host}}, []guest.Seen{{State: guest.DropDirectory}}, math.MaxInt64)
			if err == nil {
				// Promote may keep the part that is allowed.
				t.Logf("promoted %+v", got)
			}
			if list := entries(t, top); !slices.Equal(list, []string{"a"}) {
				t.Errorf("outside there are %q", list)
			}
			if list := entries(t, host); !slices.Equal(list, []string{"vm"}) {
				t.Errorf("outside there are %q", list)
			}
			if list := entries(t, host+"/vm"); err != nil && len(list) > 0 || err == nil && name != "by a link" {
				t.Errorf("there are %q, %v", list, err)
			}
		})
	}
}

func TestAttack_promotion_makes_a_link_that_leads_out_of_its_tree(t *testing.T) {
	host := t.TempDir()
	c := hostileGuest(t,
		data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: linkThroughLink("out")}}),
		data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}}))
	got, err := c.Promote(t.Context(), "vm", []guest.Promotion{{Path: "/work/out", Dir: host}}, []guest.Seen{{State: guest.DropDirectory}}, math.MaxInt64)
	if !errors.Is(err, guest.ErrUnsafe) {
		t.Errorf("promoted %+v, %v; want ErrUnsafe", got, err)
	}
	if left := names(t, host); len(left) > 0 {
		t.Errorf("these are there: %q", left)
	}
}

// The guest says that the second path is a directory. With the first it has made a link of that path's parent.
func TestAttack_promotion_goes_through_a_link_that_another_one_has_made(t *testing.T) {
	host := t.TempDir()
	sent := func(hs ...*tar.Header) [][]byte {
		return [][]byte{
			data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: hostileTar(hs...)}}),
			data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}}),
		}
	}
	c := hostileGuest(t, sent(&tar.Header{Name: "work", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "work/kept", Typeflag: tar.TypeDir, Mode: 0o755},
		&tar.Header{Name: "work/kept/out", Typeflag: tar.TypeReg}, &tar.Header{Name: "work/a", Typeflag: tar.TypeSymlink, Linkname: "kept"})...)
	items := []guest.Promotion{{Path: "/work", Dir: host}, {Path: "/work/a/out", Dir: host}}
	got, err := c.Promote(t.Context(), "vm", items, []guest.Seen{{State: guest.DropDirectory}, {State: guest.DropDirectory}}, math.MaxInt64)
	if !errors.Is(err, guest.ErrNotPromotable) {
		t.Errorf("promoted %+v, %v; want ErrNotPromotable", got, err)
	}
	if left := names(t, host); len(left) > 0 {
		t.Errorf("these are there: %q", left)
	}
}
