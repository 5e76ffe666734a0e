package sources

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store returns a store with sources, and what it logs.
func store(t *testing.T, list ...Source) (*Store, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	s := Open(filepath.Join(t.TempDir(), File), slog.New(slog.NewTextHandler(&log, nil)))
	for _, one := range list {
		if err := s.Add(one); err != nil {
			t.Fatal(err)
		}
	}
	return s, &log
}

// sh returns a command.
func sh(script string) []string { return []string{"/bin/sh", "-c", script} }

func TestParse_takes_one_origin_with_an_absolute_path(t *testing.T) {
	for name, tc := range map[string]struct {
		words []string // name, origin, arguments
		ok    bool
	}{
		"a file":                     {[]string{"a", "file:/etc/x"}, true},
		"a file with a colon":        {[]string{"a", "file:/etc/x:y"}, true},
		"a relative file":            {[]string{"a", "file:x"}, false},
		"no file":                    {[]string{"a", "file:"}, false},
		"a command":                  {[]string{"a", "command:/bin/x", "-y", "z"}, true},
		"a command without a path":   {[]string{"a", "command:x"}, false},
		"a long command":             {[]string{"a", "command:/x", strings.Repeat("y", MaxCommand)}, false},
		"a zero byte":                {[]string{"a", "command:/x", "\x00"}, false},
		"a variable":                 {[]string{"a", "env:X"}, true},
		"a variable with a value":    {[]string{"a", "env:X=Y"}, false},
		"arguments of a variable":    {[]string{"a", "env:X", "y"}, false},
		"a credential":               {[]string{"a", "credential:x.y"}, true},
		"a credential that is above": {[]string{"a", "credential:.."}, false},
		"a credential elsewhere":     {[]string{"a", "credential:../x"}, false},
		"a value":                    {[]string{"a", "swordfish"}, false},
		"another kind":               {[]string{"a", "url:http://x"}, false},
		"a bad name":                 {[]string{"a/b", "env:X"}, false},
	} {
		if _, err := Parse(tc.words[0], tc.words[1], tc.words[2:]...); (err == nil) != tc.ok || err != nil && !errors.Is(err, spec.ErrSecrets) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSources_are_for_their_owners_and_nobody_learns_of_others(t *testing.T) {
	t.Setenv("DROWSE_TEST_SOURCE", "value")
	s, _ := store(t,
		Source{Name: "host", Env: "DROWSE_TEST_SOURCE"},
		Source{Name: "alice", Env: "DROWSE_TEST_SOURCE", Owners: []string{"alice", "carol"}},
		Source{Name: "all", Env: "DROWSE_TEST_SOURCE", AllOwners: true},
	)
	for owner, want := range map[string][]string{"": {"host", "alice", "all"}, "alice": {"alice", "all"}, "bob": {"all"}} {
		for _, name := range []string{"host", "alice", "all"} {
			value, err := s.Value(t.Context(), name, owner)
			if may := slices.Contains(want, name); (err == nil) != may || may && string(value) != "value" {
				t.Errorf("%q gets %q of %s, %v", owner, value, name, err)
			}
		}
	}
	_, hidden := s.Value(t.Context(), "host", "bob")
	_, missing := s.Value(t.Context(), "none", "bob")
	if hidden == nil || strings.ReplaceAll(fmt.Sprint(hidden), "host", "none") != fmt.Sprint(missing) {
		t.Errorf("one of others: %v; none: %v", hidden, missing)
	}
}

func TestValue_of_each_kind_is_bounded_and_errors_hide_paths_and_output(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, size int) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), size), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(file("linked", 3), link); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_TEST_SOURCE", "value")
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	for name, tc := range map[string]struct {
		src  Source
		want string // "" is an error
		size int
	}{
		"a file":                        {src: Source{File: file("a", 5)}, want: "xxxxx"},
		"a link to a file":              {src: Source{File: link}, want: "xxx"},
		"the largest file":              {src: Source{File: file("b", spec.MaxSecret)}, size: spec.MaxSecret},
		"a larger file":                 {src: Source{File: file("c", spec.MaxSecret+1)}},
		"an empty file":                 {src: Source{File: file("d", 0)}},
		"no file":                       {src: Source{File: filepath.Join(dir, "secret-path")}},
		"a pipe that nobody writes to":  {src: Source{File: fifo}},
		"a device":                      {src: Source{File: "/dev/zero"}},
		"a directory":                   {src: Source{File: dir}},
		"a variable":                    {src: Source{Env: "DROWSE_TEST_SOURCE"}, want: "value"},
		"no variable":                   {src: Source{Env: "DROWSE_TEST_NONE"}},
		"a credential":                  {src: Source{Credential: "a"}, want: "xxxxx"},
		"no credential":                 {src: Source{Credential: "secret-path"}},
		"a command":                     {src: Source{Command: sh("echo x")}, want: "x\n"},
		"a command that reads stdin":    {src: Source{Command: sh("cat; echo x")}, want: "x\n"},
		"its words are not a shell's":   {src: Source{Command: []string{"/bin/echo", "-n", "$(id) *"}}, want: "$(id) *"},
		"a command that fails":          {src: Source{Command: sh("echo secret-path; echo secret-path >&2; exit 3")}},
		"a command without output":      {src: Source{Command: sh("exit 0")}},
		"a command that is not there":   {src: Source{Command: []string{"/nonexistent/secret-path"}}},
		"the largest output":            {src: Source{Command: sh(fmt.Sprintf("head -c %d /dev/zero", spec.MaxSecret))}, size: spec.MaxSecret},
		"larger output":                 {src: Source{Command: sh(fmt.Sprintf("head -c %d /dev/zero", spec.MaxSecret+1))}},
		"one that others outlive":       {src: Source{Command: sh("sleep 1000 & echo x")}, want: "x\n"},
		"much to say about a failure":   {src: Source{Command: sh("head -c 300000 /dev/zero >&2; exit 1")}},
		"a command that a signal ended": {src: Source{Command: sh("kill -9 $$")}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.src.Name = "s"
			s, log := store(t, tc.src)
			got, err := s.Value(t.Context(), "s", "")
			if tc.want == "" && tc.size == 0 {
				if !errors.Is(err, spec.ErrSecrets) || strings.Contains(err.Error(), "secret-path") || strings.Contains(err.Error(), dir) {
					t.Fatalf("got %d bytes, %v", len(got), err)
				}
				if log.Len() == 0 || log.Len() > 8*maxComplaint {
					t.Errorf("%d bytes in the log", log.Len())
				}
				return
			}
			if err != nil || tc.size == 0 && string(got) != tc.want || tc.size > 0 && len(got) != tc.size {
				t.Errorf("got %d bytes, %v", len(got), err)
			}
		})
	}
}

func TestA_changed_file_is_read_again(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	s, _ := store(t, Source{Name: "s", File: path})
	for _, want := range []string{"old", "new"} {
		if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Value(t.Context(), "s", ""); err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	}
}

func TestA_late_command_is_killed_with_its_group(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var pid int
	go func() {
		// Its time is up when it is known to run.
		for {
			data, err := os.ReadFile(dir + "/pid")
			if err == nil {
				pid, _ = strconv.Atoi(strings.TrimSpace(string(data)))
				cancel(errors.New("time is up"))
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	_, err := run(ctx, sh("sleep 1000 & echo $! >"+dir+"/new; mv "+dir+"/new "+dir+"/pid; wait"))
	if err == nil || !strings.HasPrefix(err.Error(), "time is up") {
		t.Errorf("got %v", err)
	}
	for unix.Kill(pid, 0) == nil && !zombie(pid) {
		time.Sleep(time.Millisecond)
	}
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestCallers_at_once_share_a_command_and_not_its_value(t *testing.T) {
	dir := t.TempDir()
	// It ends when all wait for it.
	s, _ := store(t, Source{Name: "s", Command: sh("echo >>" + dir + "/runs; until test -e " + dir + "/go; do sleep 0.01; done; echo value")})
	const callers = 20
	var all, ready sync.WaitGroup
	ready.Add(callers)
	for range callers {
		all.Go(func() {
			ready.Done()
			value, err := s.Value(t.Context(), "s", "")
			if err != nil || string(value) != "value\n" {
				t.Errorf("got %q, %v", value, err)
			}
			clear(value)
		})
	}
	ready.Wait()
	time.Sleep(50 * time.Millisecond) // one that is later may start its own
	if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	if runs, err := os.ReadFile(dir + "/runs"); err != nil || len(runs) >= callers {
		t.Errorf("%d callers made %d runs, %v", callers, len(runs), err)
	}
}

func TestThe_file_is_refused_if_others_may_write_to_it(t *testing.T) {
	s, _ := store(t, Source{Name: "s", Env: "X"})
	if st, err := os.Stat(s.path); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatal(st, err)
	}
	for mode, ok := range map[os.FileMode]bool{0o600: true, 0o644: true, 0o620: false, 0o602: false} {
		if err := os.Chmod(s.path, mode); err != nil {
			t.Fatal(err)
		}
		if list, err := s.Read(); (err == nil) != ok {
			t.Errorf("%o: %v, %v", mode, list, err)
		}
	}
	if err := errors.Join(os.Rename(s.path, s.path+"2"), os.Symlink(s.path+"2", s.path)); err != nil {
		t.Fatal(err)
	}
	if list, err := s.Read(); err == nil {
		t.Errorf("a link: %v", list)
	}
	if _, err := s.Find("s", ""); !errors.Is(err, spec.ErrSecrets) || strings.Contains(err.Error(), s.path) {
		t.Errorf("got %v", err)
	}
}

func TestSources_are_replaced_and_removed(t *testing.T) {
	s, _ := store(t, Source{Name: "b", Env: "X"}, Source{Name: "a", File: "/x"}, Source{Name: "b", Env: "Y"})
	if list, err := s.Read(); err != nil || len(list) != 2 || list[0].Origin() != "file:/x" || list[1].Origin() != "env:Y" {
		t.Errorf("got %+v, %v", list, err)
	}
	if err := s.Remove("b"); err != nil {
		t.Error(err)
	}
	if err := s.Remove("b"); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	err := s.change(func(all []Source) ([]Source, error) {
		for i := len(all); i < Max; i++ {
			all = append(all, Source{Name: fmt.Sprintf("m%d", i), Env: "X"})
		}
		return all, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Add(Source{Name: "more", Env: "X"}); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("one too many: %v", err)
	}
	if err := s.Add(Source{Name: "a", Env: "Z"}); err != nil {
		t.Errorf("replacing one: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"sources":[{"name":"a","file":"/x","owners":["o"]},{"name":"b","command":["/x","y"],"all_owners":true}]}`))
	f.Add([]byte(`{"version":1,"sources":[{"name":"a","env":"X"},{"name":"a","credential":"x"}]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := parse(text)
		if err != nil {
			return
		}
		names := map[string]bool{}
		for _, one := range list {
			if one.check() != nil || names[one.Name] {
				t.Fatalf("%+v", list)
			}
			names[one.Name] = true
		}
	})
}
