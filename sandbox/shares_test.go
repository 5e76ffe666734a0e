package sandbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// shared is a pair of host directories that a guest mounts. The VM is that of TestHooks_in_a_guest.
type shared struct {
	e      *guesttest.Env
	rw, ro string
}

const sharedFiles = 300

func newShared(e *guesttest.Env) *shared {
	e.T.Helper()
	s := &shared{e: e, rw: e.T.TempDir(), ro: e.T.TempDir()}
	for i := range sharedFiles {
		s.put(filepath.Join(s.ro, fmt.Sprintf("file-%03d", i)), "")
	}
	s.put(filepath.Join(s.rw, "from-host"), "host\n")
	return s
}

func (s *shared) specs() []spec.Share {
	return []spec.Share{{Source: s.rw, Path: "/srv/rw", Writable: true}, {Source: s.ro, Path: "/srv/ro"}}
}

func (s *shared) put(path, text string) {
	s.e.T.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err == nil {
		_, err = f.WriteString(text)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}
	if err != nil {
		s.e.T.Fatal(err)
	}
}

func (s *shared) want(name, want string) {
	s.e.T.Helper()
	if got, err := os.ReadFile(filepath.Join(s.rw, name)); err != nil || string(got) != want {
		s.e.T.Errorf("%s at the host: %q, %v; want %q", name, got, err, want)
	}
}

// use reads, writes, appends from both sides, renames and lists. It leaves a shell that has a file open and waits
// to continue reading and writing it.
func (s *shared) use(vm string) {
	s.e.T.Helper()
	got := s.e.Sh(vm, `cd /srv/rw; read x <from-host; echo $x; echo guest >>from-host; echo one >made; mv made moved
		set -- /srv/ro/*; echo $#; echo bad 2>&- >/srv/ro/new && echo written; mount -o remount,rw /srv/ro; echo bad 2>&- >/srv/ro/file-000 && echo written
		( exec 3<moved 4>>moved; : >opened; until [ -e /run/go-on ]; do sleep 0.2; done; read x <&3; echo "$x again" >&4; echo end >&4; : >done ) >/dev/null 2>&1 </dev/null &
		until [ -e opened ]; do sleep 0.1; done`)
	if want := fmt.Sprintf("host\n%d", sharedFiles); got != want {
		s.e.T.Errorf("the guest says %q, want %q", got, want)
	}
	s.put(filepath.Join(s.rw, "from-host"), "host again\n")
	s.want("from-host", "host\nguest\nhost again\n")
	s.want("moved", "one\n")
	if _, err := os.Stat(filepath.Join(s.ro, "new")); err == nil {
		s.e.T.Error("a file was made in a share that is read-only")
	}
	if fi, err := os.Stat(filepath.Join(s.ro, "file-000")); err != nil || fi.Size() != 0 {
		s.e.T.Errorf("a file of a share that is read-only has changed: %v", err)
	}
}

// goesOn lets that shell continue, after a sleep.
func (s *shared) goesOn(vm string) {
	s.e.T.Helper()
	s.e.Sh(vm, `: >/run/go-on; until [ -e /srv/rw/done ]; do sleep 0.2; done`)
	s.want("moved", "one\none again\nend\n")
}

// alsoIn writes in a child of that VM.
func (s *shared) alsoIn(vm string) {
	s.e.T.Helper()
	got := s.e.Sh(vm, `cd /srv/rw; echo child >>from-host; while read x; do echo $x; done <from-host`)
	if want := "host\nguest\nhost again\nchild"; strings.TrimSpace(got) != want {
		s.e.T.Errorf("the child reads %q, want %q", got, want)
	}
	s.want("from-host", "host\nguest\nhost again\nchild\n")
}
