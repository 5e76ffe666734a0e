package guest_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
)

// recordedGuest starts an agent with a trail beside its socket.
func recordedGuest(t *testing.T) (g *agenttest.Guest, trail string) {
	t.Helper()
	g = agenttest.Start(t)
	trail = audit.Path(g.Path)
	if err := audit.Ensure(t.Context(), trail, audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	return g, trail
}

func trailOf(t *testing.T, path string) (out []audit.Entry) {
	t.Helper()
	if _, err := audit.Read(t.Context(), path, audit.ReadOptions{}, func(e audit.Entry) error {
		out = append(out, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// only returns the one entry that was made since the last call.
func only(t *testing.T, path string, seen *int) audit.Entry {
	t.Helper()
	all := trailOf(t, path)
	if len(all) != *seen+1 {
		t.Fatalf("%d entries, after %d: %+v", len(all), *seen, all[min(*seen, len(all)):])
	}
	*seen = len(all)
	return all[len(all)-1]
}

// Each method of a Client is recorded, or belongs to a class below that names what it tells of the guest's
// commands and files.
func TestRecord_every_method_of_a_client_was_thought_of(t *testing.T) {
	classes := map[string][]string{
		"recorded":                     {"Exec", "Start", "Attach", "Kill", "Forget", "ReadFile", "WriteFile", "CopyIn", "CopyOut", "Mkdir", "MkdirFor", "Remove", "Rename", "Symlink", "Dial", "Listen", "SetService", "StopService", "CopyOutTo", "Promote", "Drop", "PackTree", "UnpackTree"},
		"names and sizes only":         {"Stat", "Lstat", "ReadDir", "Readlink", "List", "Services", "Watch", "Changes", "WaitService", "Look"},
		"what a service has printed":   {"ServiceLog"},
		"the machine, not its content": {"Ping", "Resume", "Handover", "Shutdown", "Hooks", "Freeze", "Thaw", "Stats", "ServeSecrets", "Close"},
	}
	class := map[string]string{}
	for c, names := range classes {
		for _, name := range names {
			class[name] = c
		}
	}
	of := reflect.TypeFor[*guest.Client]()
	for i := range of.NumMethod() {
		name := of.Method(i).Name
		if class[name] == "" {
			t.Errorf("%s: decide whether it is recorded in the audit trail", name)
		}
		delete(class, name)
	}
	for name := range class {
		t.Errorf("there is no method %s", name)
	}
}

func TestRecord_commands_by_what_was_asked_and_how_they_ended(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	seen := 0
	var out bytes.Buffer
	cmd := sh("cat; echo err >&2; exit 3")
	cmd.Env, cmd.Dir = []string{"SECRET=in-the-environment"}, t.TempDir()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader("secret-of-stdin"), &out, &out
	if _, err := c.Exec(t.Context(), cmd); err == nil {
		t.Fatal("it ended well")
	}
	e := only(t, trail, &seen)
	if e.Kind != audit.KindExec || e.Status != audit.Ended || strings.Join(e.Argv, "|") != "/bin/sh|-c|cat; echo err >&2; exit 3" || e.User != "root" || e.Dir != cmd.Dir || e.Pty || e.Detach {
		t.Errorf("got %+v", e)
	}
	if o := e.Outcome; o.Exit == nil || *o.Exit != 3 || o.Error != "" || o.BytesIn != 15 || o.BytesOut != 19 {
		t.Errorf("it ended with %+v", o)
	}

	if _, err := c.Exec(t.Context(), sh("kill -9 $$")); err == nil {
		t.Fatal("it ended well")
	}
	if o := only(t, trail, &seen).Outcome; *o.Exit != 137 || o.ExitSignal != 9 {
		t.Errorf("a command that was killed ended with %+v", o)
	}

	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"/no/such/file"}}); err == nil {
		t.Fatal("it ended well")
	}
	if o := only(t, trail, &seen).Outcome; *o.Exit != 127 || o.Error == "" {
		t.Errorf("a command that is not there ended with %+v", o)
	}

	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"true"}, User: "nobody-of-that-name"}); err == nil {
		t.Fatal("it ended well")
	}
	if e := only(t, trail, &seen); e.User != "nobody-of-that-name" || e.Outcome.Error == "" {
		t.Errorf("a user who is not there: %+v, %+v", e, e.Outcome)
	}

	detached := sh("read x; exit 4")
	detached.Detach, detached.ID = true, "job"
	s, err := c.Start(t.Context(), detached)
	if err != nil {
		t.Fatal(err)
	}
	if e := only(t, trail, &seen); e.Status != audit.Running || !e.Detach {
		t.Errorf("what runs is %+v", e)
	}
	s.Close()
	if o := trailOf(t, trail)[seen-1].Outcome; o == nil || o.Exit != nil || o.Started != "job" {
		t.Errorf("what was left to itself has the end %+v", o)
	}
	if s, err = c.Attach(t.Context(), "job", 0, guest.IO{Stdin: strings.NewReader("x\n")}); err != nil {
		t.Fatal(err)
	}
	if st, _ := s.Wait(); st == nil || st.Code != 4 {
		t.Fatalf("it ended with %v", st)
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindAttach || e.Process != "job" || *e.Outcome.Exit != 4 || e.Outcome.BytesIn != 2 {
		t.Errorf("attached: %+v, %+v", e, e.Outcome)
	}
	if err := c.Forget(t.Context(), "job"); err != nil {
		t.Fatal(err)
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindSignal || e.Process != "job" || e.Number != 9 {
		t.Errorf("forgotten: %+v", e)
	}

	ctx, cancel := context.WithCancel(audit.WithVia(t.Context(), "ssh"))
	if s, err = c.Start(ctx, guest.Cmd{Login: true, Pty: &guest.Pty{}}); err != nil {
		t.Fatal(err)
	}
	g.Cut()
	_, err = s.Wait()
	cancel()
	if e := only(t, trail, &seen); err == nil || e.Kind != audit.KindShell || e.Via != "ssh" || !e.Pty || e.Dir != "" || e.Outcome == nil || e.Outcome.Exit != nil || e.Outcome.Error == "" {
		t.Errorf("a shell whose VM slept: %v, %+v, %+v", err, e, e.Outcome)
	}

	text, err := os.ReadFile(trail)
	if err != nil || bytes.Contains(text, []byte("secret-of-stdin")) || bytes.Contains(text, []byte("in-the-environment")) {
		t.Errorf("the trail has what it must not: %v, %s", err, text)
	}
}

func TestRecord_files(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	seen, dir := 0, t.TempDir()
	in := filepath.Join(dir, "in")
	write(t, in, "0123456789", 0o600)
	for _, step := range []struct {
		name string
		do   func() error
		want audit.Action
	}{
		{"mkdir", func() error { return c.Mkdir(t.Context(), dir+"/d", 0, false) }, audit.Action{Kind: audit.KindMkdir, Path: dir + "/d"}},
		{"mkdir for an owner", func() error {
			return c.MkdirFor(t.Context(), dir+"/e/f", guest.Owner{UID: os.Getuid(), GID: os.Getgid()})
		}, audit.Action{Kind: audit.KindMkdir, Path: dir + "/e/f"}},
		{"write", func() error {
			return c.WriteFile(t.Context(), dir+"/d/f", strings.NewReader("12345"), guest.WriteOptions{})
		}, audit.Action{Kind: audit.KindWrite, Path: dir + "/d/f"}},
		{"read", func() error { _, err := c.ReadFile(t.Context(), dir+"/d/f", io.Discard, 1, 3); return err }, audit.Action{Kind: audit.KindRead, Path: dir + "/d/f"}},
		{"rename", func() error { return c.Rename(t.Context(), dir+"/d/f", dir+"/d/g") }, audit.Action{Kind: audit.KindRename, Path: dir + "/d/f", To: dir + "/d/g"}},
		{"symlink", func() error { return c.Symlink(t.Context(), "g", dir+"/d/l") }, audit.Action{Kind: audit.KindSymlink, Path: dir + "/d/l", To: "g"}},
		{"copy in", func() error { _, err := c.CopyIn(t.Context(), in, dir+"/d", guest.CopyOptions{}); return err }, audit.Action{Kind: audit.KindCopyIn, Path: dir + "/d", HostPath: in}},
		{"copy out", func() error {
			_, err := c.CopyOut(t.Context(), dir+"/d/in", dir+"/out", guest.CopyOptions{})
			return err
		}, audit.Action{Kind: audit.KindCopyOut, Path: dir + "/d/in", HostPath: dir + "/out"}},
		{"remove", func() error { return c.Remove(t.Context(), dir+"/d", true) }, audit.Action{Kind: audit.KindRemove, Path: dir + "/d", Recursive: true}},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		e := only(t, trail, &seen)
		if e.Status != audit.Ended || e.Outcome.Error != "" || !reflect.DeepEqual(e.Action, step.want) {
			t.Errorf("%s: %+v, %+v", step.name, e, e.Outcome)
		}
		o := e.Outcome
		switch step.want.Kind {
		case audit.KindWrite:
			if o.BytesIn != 5 {
				t.Errorf("%d bytes were written", o.BytesIn)
			}
		case audit.KindRead:
			if o.BytesOut != 3 {
				t.Errorf("%d bytes were read", o.BytesOut)
			}
		case audit.KindCopyIn:
			if o.BytesIn < 10 || o.BytesOut != 0 {
				t.Errorf("%d bytes went in, %d out", o.BytesIn, o.BytesOut)
			}
		case audit.KindCopyOut:
			if o.BytesOut < 10 || o.BytesIn != 0 {
				t.Errorf("%d bytes went in, %d out", o.BytesIn, o.BytesOut)
			}
		}
	}
	if _, err := c.ReadFile(t.Context(), dir+"/d/f", io.Discard, 0, 0); err == nil {
		t.Fatal("a file that is gone was read")
	}
	if e := only(t, trail, &seen); e.Status != audit.Ended || e.Outcome.Error == "" {
		t.Errorf("a file that is gone: %+v, %+v", e, e.Outcome)
	}
}

func TestRecord_connections_to_one_address_are_one_entry(t *testing.T) {
	g, trail := recordedGuest(t)
	c, err := guest.Dial(t.Context(), guest.UnixDialer(g.Path))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	seen := 0
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindListen || e.Network != "tcp" || e.Address != "127.0.0.1:0" || e.Status != audit.Running {
		t.Errorf("listening: %+v", e)
	}
	addr := l.Addr().String()
	var last *guest.Conn
	for i := range 3 {
		in, err := c.Dial(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		out, err := l.AcceptGuest()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write([]byte("12345")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Write([]byte("123")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(in, make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		out.Close()
		if i < 2 {
			in.Close()
		}
		last = in
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindForward || e.Address != addr || e.Status != audit.Running {
		t.Errorf("connected: %+v", e)
	}
	l.Close()
	if o := trailOf(t, trail)[0].Outcome; o == nil || o.Connections != 3 || o.BytesIn != 9 || o.BytesOut != 15 {
		t.Errorf("the listener ended with %+v", o)
	}
	// A connection that the caller got outlives its client.
	c.Close()
	if e := trailOf(t, trail)[1]; e.Status != audit.Running {
		t.Errorf("a connection is open: %+v, %+v", e, e.Outcome)
	}
	last.Close()
	if o := trailOf(t, trail)[1].Outcome; o == nil || o.Connections != 3 || o.BytesIn != 15 || o.BytesOut != 9 || o.Error != "" {
		t.Errorf("the connections ended with %+v", o)
	}
	if _, err := c.Dial(t.Context(), "tcp", addr); !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("a client that is closed gives %v", err)
	}
	if n := len(trailOf(t, trail)); n != 2 {
		t.Errorf("%d entries", n)
	}
}

func TestRecord_listener_that_the_sleep_has_cut_has_ended(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.Cut()
	if _, err := l.AcceptGuest(); !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("got %v", err)
	}
	if all := trailOf(t, trail); len(all) != 1 || all[0].Status != audit.Ended {
		t.Errorf("got %+v", all)
	}
}

func TestRecord_more_addresses_than_are_kept_open_are_recorded_all(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const addresses = 300 // more than a client keeps
	for i := range addresses {
		// All of 127.0.0.0/8 is on this host.
		conn, err := c.Dial(t.Context(), "tcp", fmt.Sprintf("127.0.%d.%d:%d", i/100, 1+i%100, l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	c.Close()
	all := trailOf(t, trail)
	if len(all) != addresses {
		t.Errorf("%d entries, want %d", len(all), addresses)
	}
	for _, e := range all {
		if e.Status != audit.Ended || e.Outcome.Connections != 1 {
			t.Fatalf("got %+v, %+v", e, e.Outcome)
		}
	}
}

func TestRecord_what_cannot_be_recorded_is_not_done(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	if err := os.WriteFile(trail, []byte("no trail\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, do := range map[string]func() error{
		"exec": func() error { _, err := c.Exec(t.Context(), sh("touch "+dir+"/exec")); return err },
		"write": func() error {
			return c.WriteFile(t.Context(), dir+"/write", strings.NewReader(""), guest.WriteOptions{})
		},
		"mkdir": func() error { return c.Mkdir(t.Context(), dir+"/mkdir", 0, false) },
		"copy":  func() error { _, err := c.CopyIn(t.Context(), trail, dir+"/copy", guest.CopyOptions{}); return err },
		"out":   func() error { _, err := c.CopyOut(t.Context(), trail, dir+"/out", guest.CopyOptions{}); return err },
		"read":  func() error { _, err := c.ReadFile(t.Context(), trail, io.Discard, 0, 0); return err },
		"dial":  func() error { _, err := c.Dial(t.Context(), "tcp", "127.0.0.1:1"); return err },
		"listen": func() error {
			_, err := c.Listen(t.Context(), "unix", dir+"/listen")
			return err
		},
	} {
		if err := do(); !errors.Is(err, guest.ErrNotRecorded) {
			t.Errorf("%s: got %v, want ErrNotRecorded", name, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("it has been done all the same: %v, %v", left, err)
	}
	// Calls that tell nothing of the guest's content still work.
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRecord_drops_and_promotions_by_what_went_and_where_to(t *testing.T) {
	g, trail := recordedGuest(t)
	c := g.Client(t)
	in, host := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(in, "f"), []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	seen := 0
	if _, err := promote(t, c, guest.Promotion{Path: in, Dir: host}); err != nil {
		t.Fatal(err)
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindCopyOut || e.Path != in || e.HostPath != host+"/vm" || e.Outcome.Error != "" {
		t.Errorf("a promotion is %+v", e)
	}
	if _, err := c.Drop(t.Context(), []guest.DropPath{{Path: in}}, time.Minute, false); err != nil {
		t.Fatal(err)
	}
	if e := only(t, trail, &seen); e.Kind != audit.KindRemove || e.Path != in || !e.Recursive || e.Outcome.Error != "" {
		t.Errorf("a drop is %+v", e)
	}
}

func TestRecordedDialer_records_beside_a_path_that_it_does_not_dial(t *testing.T) {
	g := agenttest.Start(t)
	path := filepath.Join(t.TempDir(), "vsock.sock")
	trail := audit.Path(path)
	if err := audit.Ensure(t.Context(), trail, audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	dial := func(_ context.Context, port uint32) (net.Conn, error) {
		c, err := net.Dial("unix", g.Path)
		if err == nil {
			_, err = fmt.Fprintf(c, "CONNECT %d\n", port)
		}
		for b := []byte{0}; err == nil && b[0] != '\n'; {
			_, err = c.Read(b)
		}
		return c, err
	}
	exec := func(path string) {
		c, err := guest.Dial(t.Context(), guest.RecordedDialer(path, dial))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"true"}}); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	exec(path)
	if e := only(t, trail, &seen); e.Kind != audit.KindExec || e.Argv[0] != "true" {
		t.Errorf("recorded %+v", e)
	}
	exec("")
	if n := len(trailOf(t, trail)); n != seen {
		t.Errorf("%d entries after an action without a path, want %d", n, seen)
	}
	no := errors.New("no")
	for _, ctx := range []context.Context{t.Context(), ended(t)} {
		_, err := guest.RecordedDialer(path, func(context.Context, uint32) (net.Conn, error) { return nil, no })(ctx, 1)
		if want := cmp.Or(ctx.Err(), guest.ErrUnavailable); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	_, err := guest.RecordedDialer(path, func(context.Context, uint32) (net.Conn, error) {
		c, _ := net.Pipe()
		return c, nil
	})(t.Context(), 1)
	if err == nil || !strings.Contains(err.Error(), "not recorded") {
		t.Errorf("a connection that cannot be recorded: got %v", err)
	}
}

func ended(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestNew_client_connects_for_what_is_asked_alone_and_records_it(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vsock.sock")
	if err := audit.Ensure(t.Context(), audit.Path(path), audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	asked := make(chan string, 4)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(asked)
				return
			}
			line, _ := bufio.NewReader(c).ReadString('\n')
			asked <- line
			c.Close()
		}
	}()
	c := guest.New(path)
	if _, err := c.Dial(t.Context(), "tcp", "127.0.0.1:80"); !errors.Is(err, guest.ErrUnavailable) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
	if _, err := c.Ping(t.Context()); !errors.Is(err, guest.ErrUnavailable) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
	c.Close()
	l.Close()
	var got []string
	for line := range asked {
		got = append(got, line)
	}
	if want := []string{"CONNECT 1025\n", "CONNECT 1024\n"}; !slices.Equal(got, want) {
		t.Errorf("it asked for %q, want %q", got, want)
	}
	seen := 0
	if e := only(t, audit.Path(path), &seen); e.Kind != audit.KindForward || e.Address != "127.0.0.1:80" || e.Outcome.Error == "" {
		t.Errorf("recorded %+v", e)
	}
}
