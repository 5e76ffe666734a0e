package jail

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

func TestA_passed_file_is_taken_once_and_has_its_name(t *testing.T) {
	sameFDs(t)
	var asked []fileOrder
	p := &passedFS{ask: func(o fileOrder) (fileInfo, []*os.File, error) {
		asked = append(asked, o)
		return fileInfo{}, nil, unix.EACCES
	}}
	defer p.close()
	dir := t.TempDir()
	name := filepath.Join(dir, "a")
	if err := os.WriteFile(name, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	pass := func(as string) {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		p.add([]string{as}, []*os.File{f})
	}
	pass("/x/a")
	pass("/x/a")
	pass("rw:/x/a")
	pass("never taken")
	for _, flags := range []int{os.O_RDONLY, os.O_RDONLY, os.O_RDWR} {
		f, err := p.OpenFile("/x//a", flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(io.NewSectionReader(f, 0, 10))
		if err != nil || string(body) != "text" || f.Name() != "/x/a" {
			t.Errorf("%s: %q, %v", f.Name(), body, err)
		}
		f.Close()
	}
	for _, flags := range []int{os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREATE} {
		_, err := p.OpenFile("/x/a", flags, 0)
		var perr *fs.PathError
		if !errors.Is(err, fs.ErrPermission) || !errors.As(err, &perr) || perr.Path != "/x/a" {
			t.Errorf("with flags %#x: %v", flags, err)
		}
	}
	if len(asked) != 3 || asked[2] != (fileOrder{Op: fileOpen, Name: "/x/a", Flags: os.O_RDWR | os.O_CREATE}) {
		t.Errorf("the keeper was asked for %+v", asked)
	}
}

func TestA_keeper_that_answers_without_a_file_or_with_two_has_opened_none(t *testing.T) {
	sameFDs(t)
	for n := range 3 {
		if n == 1 {
			continue
		}
		p := &passedFS{ask: func(fileOrder) (fileInfo, []*os.File, error) {
			r, w, err := os.Pipe()
			return fileInfo{}, []*os.File{r, w}[:n:n], errors.Join(err, closeAll([]*os.File{r, w}[n:]))
		}}
		if _, err := p.OpenFile("/a", os.O_RDONLY, 0); !errors.Is(err, errNoFile) {
			t.Errorf("%d files: %v", n, err)
		}
	}
}

func TestStat_of_the_keeper_tells_files_apart(t *testing.T) {
	s := newStore(t)
	p := &passedFS{ask: s.ask}
	if err := os.Remove(s.kernel); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(s.image, s.kernel); err != nil {
		t.Fatal(err)
	}
	stat := func(name string) fs.FileInfo {
		t.Helper()
		i, err := p.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	here, err := os.Stat(s.image)
	if err != nil {
		t.Fatal(err)
	}
	image := stat(s.image)
	if !osfile.SameFile(image, stat(s.kernel)) || !osfile.SameFile(image, here) || osfile.SameFile(image, stat(s.lower)) {
		t.Error("files are taken for others")
	}
	if image.Name() != "root.erofs" || image.Size() != here.Size() || !image.ModTime().Equal(here.ModTime()) ||
		image.IsDir() || !image.Mode().IsRegular() || !stat(s.from).IsDir() || !stat(s.from).Mode().IsDir() {
		t.Errorf("%+v", image)
	}
	if _, err := p.Stat(s.from + "/memory-" + newID); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	for what, err := range map[string]error{
		"exchange": p.Exchange(s.image, s.kernel), "remove": p.Remove(s.image), "rename": p.Rename(s.image, s.kernel),
		"link": p.Link(s.image, s.kernel), "mkdir": p.Mkdir(s.in("x"), 0o700), "remove-all": p.RemoveAll(s.root),
	} {
		if !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := p.ReadDir(s.root); !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
}

func TestPassedFS_what_is_known_is_asked_for_from_the_second_time_on(t *testing.T) {
	asked := 0
	p := passedFS{ask: func(fileOrder) (fileInfo, []*os.File, error) {
		asked++
		return fileInfo{Size: 2}, nil, fs.ErrPermission
	}}
	p.know(map[string]*fileInfo{"/missing": nil, "/dir": {Dir: true, Inode: 7}})
	if _, err := p.OpenFile("/missing", os.O_RDONLY, 0); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if i, err := p.Stat("/dir/"); err != nil || !i.IsDir() || i.Name() != "dir" {
		t.Errorf("%v %v", i, err)
	}
	if asked != 0 {
		t.Errorf("%d times", asked)
	}
	if _, err := p.OpenFile("/missing", os.O_RDONLY, 0); !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
	if _, err := p.Stat("/dir"); !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
	if asked != 2 {
		t.Errorf("%d times", asked)
	}
}
