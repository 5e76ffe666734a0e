package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
)

const (
	layerFlags    = os.O_RDWR | os.O_CREATE | os.O_TRUNC
	snapshotFlags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
)

// A phase is a state of a capture. It has the orders that must not be refused in it, beside those of the phase idle.
type phase struct {
	name    string
	enter   func(t testing.TB, s *store)
	allowed func(s *store) []fileOrder
}

func open(flags int, names ...string) (out []fileOrder) {
	for _, n := range names {
		out = append(out, fileOrder{Op: fileOpen, Name: n, Flags: flags})
	}
	return out
}

func do(op string, names ...string) (out []fileOrder) {
	for _, n := range names {
		out = append(out, fileOrder{Op: op, Name: n})
	}
	return out
}

func join(lists ...[]fileOrder) (out []fileOrder) {
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// files are the files that may be in the directory of a snapshot.
func files(dir string) []string {
	return []string{dir + "/manifest", dir + "/memory", dir + "/memory-" + fromID, dir + "/memory-" + otherID}
}

func (s *store) idle() []fileOrder {
	reads := append([]string{s.image, s.kernel, s.page, s.lower, s.old}, files(s.from)...)
	return join(open(os.O_RDONLY, reads...), open(unix.O_CLOEXEC|unix.O_NOFOLLOW, reads...),
		do(fileStat, append(reads, s.from)...), do(fileSyncDir, s.in("layers")))
}

func (s *store) layer() []fileOrder {
	return join(open(layerFlags, s.topTemp), []fileOrder{{Op: fileRename, Name: s.topTemp, To: s.top}},
		do(fileRemove, s.top, s.topTemp), do(fileStat, s.top, s.topTemp))
}

func (s *store) capturing() []fileOrder {
	return join(do(fileStat, append(files(s.final), s.final)...), do(fileFree, s.in("snapshots")),
		do(fileSyncDir, s.in("snapshots")))
}

func (s *store) writing() []fileOrder {
	f := files(s.temp)
	return join(s.capturing(), do(fileStat, f...), do(fileRemove, f...), do(fileRemoveAll, append(f, s.temp)...),
		do(fileSyncDir, s.temp), do(fileLock, s.temp), open(snapshotFlags, s.temp+"/memory", s.temp+"/manifest"),
		[]fileOrder{
			{Op: fileLink, Name: s.from + "/memory", To: s.temp + "/memory-" + fromID},
			{Op: fileLink, Name: s.from + "/memory", To: s.temp + "/memory-" + otherID},
			{Op: fileLink, Name: s.from + "/memory-" + otherID, To: s.temp + "/memory-" + otherID},
			{Op: fileLink, Name: s.from + "/memory-" + fromID, To: s.temp + "/memory-" + fromID},
		})
}

func (s *store) sealed() []fileOrder {
	return join(do(fileStat, s.top, s.topTemp), open(os.O_RDONLY, s.top), open(unix.O_CLOEXEC|unix.O_NOFOLLOW, s.top))
}

var phases = []phase{
	{"no capture", func(testing.TB, *store) {}, func(*store) []fileOrder { return nil }},
	{"a capture has begun", func(t testing.TB, s *store) { s.begin(t, s.options(), false) },
		func(s *store) []fileOrder {
			return join(s.layer(), s.capturing(), do(fileMkdir, s.temp))
		}},
	{"only of the disk", func(t testing.TB, s *store) { s.begin(t, s.options(), true) },
		func(s *store) []fileOrder { return s.layer() }},
	{"the snapshot has a directory", func(t testing.TB, s *store) {
		s.begin(t, s.options(), false)
		s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	}, func(s *store) []fileOrder { return join(s.layer(), s.writing()) }},
	{"the disk is sealed", func(t testing.TB, s *store) {
		s.seal(t, s.begin(t, s.options(), false))
		s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	}, func(s *store) []fileOrder { return join(s.sealed(), s.writing()) }},
	{"the snapshot is there", func(t testing.TB, s *store) { s.finish(t) }, func(s *store) []fileOrder {
		return join(s.sealed(), s.capturing(), open(os.O_RDONLY, files(s.final)...))
	}},
	{"after the capture", func(t testing.TB, s *store) {
		s.v.endCapture(s.finish(t))
		s.v.grants.link(s.final)
	}, func(s *store) []fileOrder {
		reads := append(files(s.final), s.top)
		return join(open(os.O_RDONLY, reads...), open(unix.O_CLOEXEC|unix.O_NOFOLLOW, reads...),
			do(fileStat, append(reads, s.final)...))
	}},
}

// seal makes the new layer.
func (s *store) seal(t testing.TB, c *capture) {
	t.Helper()
	s.must(t, fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags})
	s.must(t, fileOrder{Op: fileRename, Name: s.topTemp, To: s.top})
	if err := s.v.sealed(c); err != nil {
		t.Fatal(err)
	}
}

// finish makes a whole snapshot.
func (s *store) finish(t testing.TB) *capture {
	t.Helper()
	c := s.begin(t, s.options(), false)
	s.seal(t, c)
	if err := s.write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	return c
}

// names are what a process may try.
func (s *store) names() (out []string) {
	known := join(s.idle(), s.layer(), s.writing(), do(fileMkdir, s.temp))
	seen := map[string]bool{"": true}
	add := func(names ...string) {
		for _, n := range names {
			if !seen[n] {
				seen[n] = true
				out = append(out, n)
			}
		}
	}
	for _, o := range known {
		add(o.Name, o.To)
	}
	for _, n := range []string{s.image, s.from + "/memory", s.top, s.topTemp, s.temp, s.final + "/memory"} {
		dir, base := filepath.Split(n)
		add(n+"/", dir+"./"+base, dir+"/"+base, dir+"x/../"+base, strings.TrimPrefix(n, "/"), n+"\x00", n+"\x00x", base,
			dir+strings.Repeat("a", 5000), n+"/../"+base, "./"+n, n+".", strings.ToUpper(n))
	}
	add("/", ".", "..", "/..", "\x00", s.root, s.in("layers"), s.in("snapshots"), s.in("pages"), s.in("vms/one"),
		s.otherLayer, s.otherSnapshot, s.in("layers/.other.tmp"), s.in("layers/"+oneID+"-3"), s.in("layers/new"),
		s.in("pages/other"), s.in("pages/new"), s.in("vms/one/vm.json"), s.in("vms/one/audit.jsonl"), s.in("vms/one/lock"),
		s.in("vms/one/vsock.sock"), s.in("vms/other/vm.json"), s.in("hooks.d/hook"), s.in("hooks.d/new"),
		s.in("events/lock"), s.in("import.lock"), s.from+"/notes", s.final+"/notes", s.temp+"/notes", s.temp+"/sub/memory",
		s.temp+"/memory-x", s.temp+"/memory-"+strings.Repeat("A", 32), s.in("snapshots/.drowse-snapshot-other"),
		s.in("snapshots/.drowse-snapshot-other/memory"), s.in("snapshots/"+fromID+"x"), "/etc/passwd", "/proc/self/mem",
		"/proc/self/exe", "/dev/kvm", "/dev/mem")
	add(files(s.otherSnapshot)...)
	return out
}

// orders are all operations with all names, except one that makes a directory with any name of a temporary one.
func (s *store) orders() (out []fileOrder) {
	flags := []int{os.O_RDONLY, unix.O_CLOEXEC | unix.O_NOFOLLOW, os.O_WRONLY, os.O_RDWR, layerFlags, snapshotFlags,
		layerFlags | os.O_EXCL, layerFlags | os.O_APPEND, os.O_RDONLY | os.O_TRUNC, os.O_RDONLY | os.O_CREATE, unix.O_PATH,
		unix.O_TMPFILE | os.O_RDWR, unix.O_DIRECTORY, unix.O_ACCMODE, os.O_WRONLY | os.O_APPEND, -1, 1 << 40}
	names := s.names()
	targets := []string{"", s.top, s.topTemp, s.final, s.temp, s.temp + "/memory", s.temp + "/memory-" + fromID,
		s.temp + "/memory-" + otherID, s.temp + "/manifest", s.temp + "/../x", s.otherLayer, s.otherSnapshot,
		s.from + "/memory-" + newID, s.in("vms/one/vm.json"), s.in("hooks.d/new"), "x", s.root}
	for _, n := range names {
		for _, f := range flags {
			out = append(out, fileOrder{Op: fileOpen, Name: n, Flags: f})
		}
		for _, op := range []string{fileRename, fileRenameNew, fileLink} {
			for _, to := range targets {
				out = append(out, fileOrder{Op: op, Name: n, To: to})
			}
		}
		for _, op := range []string{fileMkdir, fileRemove, fileRemoveAll, fileStat, fileSyncDir, fileLock, fileFree,
			"exchange", ""} {
			out = append(out, fileOrder{Op: op, Name: n})
		}
	}
	return append(out, fileOrder{}, fileOrder{Op: fileOpen})
}

func TestA_process_may_do_exactly_what_is_listed_to_files(t *testing.T) {
	for _, p := range phases {
		t.Run(strings.ReplaceAll(p.name, " ", "_"), func(t *testing.T) {
			sameFDs(t)
			s := newStore(t)
			p.enter(t, s)
			allowed := map[fileOrder]bool{}
			for _, o := range join(s.idle(), p.allowed(s)) {
				allowed[o] = true
			}
			before, n := s.tree(t), 0
			for _, o := range s.orders() {
				if allowed[o] || o.Op == fileMkdir && p.name == "a capture has begun" && s.temporary(o.Name) ||
					// What is allowed with one name or flags more is the same.
					allowed[fileOrder{Op: o.Op, Name: o.Name, Flags: o.flags()}] && o.To == "" {
					continue
				}
				n++
				i, files, err := s.ask(o)
				if !errors.Is(err, errRefused) || len(files) > 0 || i != (fileInfo{}) {
					t.Errorf("%.300q: %v, %v", fmt.Sprintf("%+v", o), i, err)
				}
				_ = closeAll(files)
			}
			s.unchanged(t, before)
			t.Logf("%d refused, %d allowed", n, len(allowed))

			for o := range allowed {
				s := s
				if !o.looks() {
					s = newStore(t)
					p.enter(t, s)
					o = s.own(o)
				}
				before := s.tree(t)
				_, files, err := s.ask(o)
				if errors.Is(err, errRefused) {
					t.Errorf("%+v is refused: %v", o, err)
				}
				if (o.Op == fileOpen) != (len(files) == 1) && err == nil {
					t.Errorf("%+v: %d descriptors", o, len(files))
				}
				_ = closeAll(files)
				s.unchanged(t, before)
			}
		})
	}
}

// temporary reports whether a name is one of those that a snapshot may have until it is finished.
func (s *store) temporary(name string) bool {
	return plain(name) && filepath.Dir(name) == s.in("snapshots") && snapshot.IsTemp(filepath.Base(name))
}

// looks reports whether an order changes nothing on disk.
func (o fileOrder) looks() bool {
	return o.Op == fileOpen && o.flags() == os.O_RDONLY || o.Op == fileStat || o.Op == fileFree || o.Op == fileSyncDir
}

// own translates an order for another store.
func (s *store) own(o fileOrder) fileOrder {
	swap := func(name string) string {
		for _, dir := range []string{"/images/", "/kernels/", "/pages/", "/layers", "/snapshots"} {
			if i := strings.Index(name, dir); i >= 0 {
				return s.root + name[i:]
			}
		}
		return name
	}
	o.Name = swap(o.Name)
	if o.To != "" {
		o.To = swap(o.To)
	}
	return o
}

// tree has what is on disk, without what a capture may make.
func (s *store) tree(t testing.TB) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(s.root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name == s.final || name == s.temp || name == s.top || name == s.topTemp {
			if e.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		i, err := e.Info()
		if err != nil {
			return err
		}
		text := i.Mode().String()
		switch {
		case e.Type().IsRegular():
			body, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			text += " " + string(body)
		case e.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(name)
			if err != nil {
				return err
			}
			text += " " + to
		}
		out[name] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (s *store) unchanged(t testing.TB, before map[string]string) {
	t.Helper()
	after := s.tree(t)
	for name, text := range before {
		if after[name] != text {
			t.Errorf("%s was %q and is %q", name, text, after[name])
		}
	}
	for name := range after {
		if _, ok := before[name]; !ok {
			t.Errorf("%s is new", name)
		}
	}
}

func TestA_link_at_a_name_that_a_process_may_use_leads_nowhere(t *testing.T) {
	victim := func(s *store) string { return s.in("vms/other/vm.json") }
	for name, at := range map[string]func(s *store) (string, fileOrder){
		"the unfinished layer": func(s *store) (string, fileOrder) {
			return s.topTemp, fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags}
		},
		"the memory": func(s *store) (string, fileOrder) {
			return s.temp + "/memory", fileOrder{Op: fileOpen, Name: s.temp + "/memory", Flags: snapshotFlags}
		},
		"a file to read": func(s *store) (string, fileOrder) {
			name := s.from + "/memory-" + newID
			return name, fileOrder{Op: fileOpen, Name: name}
		},
		"the layer's name": func(s *store) (string, fileOrder) {
			return s.top, fileOrder{Op: fileRename, Name: s.topTemp, To: s.top}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			c := s.begin(t, s.options(), false)
			s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
			link, o := at(s)
			if o.Op == fileRename {
				s.must(t, fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags})
			}
			if err := os.Symlink(victim(s), link); err != nil {
				t.Fatal(err)
			}
			before := s.tree(t)
			_, files, err := s.ask(o)
			if err == nil || len(files) > 0 {
				t.Errorf("%+v: %v, %d descriptors", o, err, len(files))
			}
			_ = closeAll(files)
			if o.Op == fileRename && s.v.sealed(c) == nil {
				t.Error("the link was taken for the new layer")
			}
			s.unchanged(t, before)
		})
	}
}

func TestOnly_regular_files_are_opened_for_a_process(t *testing.T) {
	s := newStore(t)
	err := errors.Join(os.Remove(s.page), unix.Mkfifo(s.page, 0o600), os.Remove(s.image), os.Mkdir(s.image, 0o700))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{s.page, s.image} {
		_, files, err := s.ask(fileOrder{Op: fileOpen, Name: name})
		if err == nil {
			t.Errorf("%s is opened", name)
		}
		_ = closeAll(files)
	}
}

func TestA_snapshot_has_a_bounded_number_of_files(t *testing.T) {
	s := newStore(t)
	s.begin(t, s.options(), false)
	s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	n := 0
	for i := range 1000 {
		o := fileOrder{Op: fileLink, Name: s.from + "/memory", To: fmt.Sprintf("%s/memory-%032x", s.temp, i)}
		if _, _, err := s.ask(o); err == nil {
			n++
		}
	}
	if n == 0 || n > 64 {
		t.Errorf("%d links were made", n)
	}
}

func TestThe_last_snapshots_of_a_VM_and_its_first_may_be_linked_to(t *testing.T) {
	s := newStore(t)
	g := s.v.grants
	for i := range maxLinks + 10 {
		g.link(fmt.Sprintf("/snapshots/%d/", i))
	}
	for dir, want := range map[string]bool{s.from: true, "/snapshots/9": false, "/snapshots/10": true,
		fmt.Sprint("/snapshots/", maxLinks+9): true, "": false, ".": false} {
		if got := g.mayLink(dir); got != want {
			t.Errorf("%q: %v", dir, got)
		}
	}
	if booted := newGrants(s.v.parts, ""); booted.mayLink("") || booted.mayLink(".") {
		t.Error("a VM that has booted may link to a directory without a name")
	}
}

// FuzzFileOrder has a process send any body. ROOT stands for the state directory.
func FuzzFileOrder(f *testing.F) {
	s := newStore(f)
	for _, o := range join(s.layer(), s.writing(), do(fileMkdir, s.temp)) {
		body, err := json.Marshal(o)
		if err != nil {
			f.Fatal(err)
		}
		f.Add([]byte(strings.ReplaceAll(string(body), s.root, "ROOT")), uint8(1))
	}
	f.Add([]byte(`{"op":"open","name":"ROOT/vms/one/../other/vm.json","flags":577}`), uint8(4))
	f.Add([]byte(`{"op":"remove-all","name":"ROOT/"}`), uint8(3))
	f.Add([]byte(`null`), uint8(0))
	f.Fuzz(func(t *testing.T, body []byte, in uint8) {
		s := newStore(t)
		phases[int(in)%len(phases)].enter(t, s)
		before := s.tree(t)
		_, files, _ := s.v.serve(t.Context(), callFile, []byte(strings.ReplaceAll(string(body), "ROOT", s.root)), nil)
		_ = closeAll(files)
		// It may choose the name of the directory of a snapshot.
		if c := s.v.capture; c != nil && c.temp != "" && s.temporary(c.temp) {
			s.temp = c.temp
		}
		s.unchanged(t, before)
	})
}
