//go:build linux

package audit_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/audit"
)

// With these the test binary acts as another process instead of running tests.
const (
	helperEnv  = "DROWSE_AUDIT_HELPER"
	helperPath = "DROWSE_AUDIT_PATH"
)

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "write":
		t := audit.OpenSized(os.Getenv(helperPath), smallFile)
		for i := range helperLines {
			p, err := t.Begin(context.Background(), audit.Action{Kind: audit.KindExec, Argv: []string{fmt.Sprint(os.Getpid()), fmt.Sprint(i)}})
			if err != nil || p == nil {
				fmt.Fprintln(os.Stderr, p, err)
				os.Exit(1)
			}
			p.End(audit.Outcome{BytesOut: int64(i)})
		}
		return
	case "begin":
		if p, err := audit.Open(os.Getenv(helperPath)).Begin(context.Background(), audit.Action{Kind: audit.KindExec, Argv: []string{"left"}}); err != nil || p == nil {
			fmt.Fprintln(os.Stderr, p, err)
			os.Exit(1)
		}
		fmt.Println("begun")
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const (
	smallFile   = 20 << 10 // bytes; more than the lines of one helper
	helperLines = 20
)

func newTrail(t *testing.T) string {
	t.Helper()
	path := audit.Path(filepath.Join(t.TempDir(), "vsock.sock"))
	if err := audit.Ensure(t.Context(), path, audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	return path
}

func begin(t *testing.T, tr *audit.Trail, a audit.Action) *audit.Pending {
	t.Helper()
	p, err := tr.Begin(t.Context(), a)
	if err != nil || p == nil {
		t.Fatalf("not recorded: %v, %v", p, err)
	}
	return p
}

func entries(t *testing.T, path string, o audit.ReadOptions) (out []audit.Entry, is audit.Trailer) {
	t.Helper()
	is, err := audit.Read(t.Context(), path, o, func(e audit.Entry) error {
		out = append(out, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out, is
}

func helper(t *testing.T, what, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"="+what, helperPath+"="+path)
	cmd.Stderr = os.Stderr
	return cmd
}

func TestTrail_gives_back_what_was_recorded(t *testing.T) {
	path := newTrail(t)
	tr := audit.Open(path)
	before := time.Now()
	p := begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"sh", "-c", "echo <&>\x1b\n"}, User: "root", Dir: "/srv", Pty: true})
	q, err := tr.Begin(audit.WithVia(t.Context(), "ssh"), audit.Action{Kind: audit.KindCopyIn, Path: "/a", HostPath: "/b"})
	if err != nil {
		t.Fatal(err)
	}
	code := 137
	p.End(audit.Outcome{Exit: &code, ExitSignal: 9, BytesIn: 3, BytesOut: 4})
	p.End(audit.Outcome{Error: "a second end"})
	got, is := entries(t, path, audit.ReadOptions{})
	if is.VM != "0123" || is.Name != "vm" || is.Part != 1 || is.First != 1 || is.Version != audit.Version {
		t.Errorf("the trail is %+v", is)
	}
	if len(got) != 2 {
		t.Fatalf("%d entries: %+v", len(got), got)
	}
	e := got[0]
	if e.Status != audit.Ended || e.Kind != audit.KindExec || e.Argv[2] != "echo <&>\x1b\n" || e.User != "root" || e.Dir != "/srv" || !e.Pty {
		t.Errorf("got %+v", e)
	}
	if e.Begin.Before(before) || e.End.Before(e.Begin) || e.Elapsed < 0 {
		t.Errorf("from %v to %v in %v ms", e.Begin, e.End, e.Elapsed)
	}
	if o := e.Outcome; o == nil || o.Exit == nil || *o.Exit != 137 || o.ExitSignal != 9 || o.BytesIn != 3 || o.BytesOut != 4 || o.Error != "" {
		t.Errorf("its end is %+v", o)
	}
	comm, _ := os.ReadFile("/proc/self/comm")
	if e.By == nil || e.By.PID != os.Getpid() || e.By.UID != os.Geteuid() || e.By.GID != os.Getegid() || e.By.Comm != strings.TrimSpace(string(comm)) || e.By.PPID != os.Getppid() {
		t.Errorf("it is said to be by %+v", e.By)
	}
	if e := got[1]; e.Status != audit.Running || e.Via != "ssh" || e.Path != "/a" || e.HostPath != "/b" || e.Outcome != nil || !e.End.IsZero() {
		t.Errorf("what goes on is %+v", e)
	}
	q.End(audit.Outcome{})
}

func TestTrail_without_a_file_records_nothing_and_makes_none(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	p, err := audit.Open(path).Begin(t.Context(), audit.Action{Kind: audit.KindExec})
	if p != nil || err != nil {
		t.Errorf("got %v, %v", p, err)
	}
	p.End(audit.Outcome{})
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a file: %v", err)
	}
	if _, err := audit.Read(t.Context(), path, audit.ReadOptions{}, nil); !errors.Is(err, audit.ErrNone) {
		t.Errorf("reading gives %v", err)
	}
}

func TestTrail_of_many_processes_has_whole_lines_and_bounds(t *testing.T) {
	path := newTrail(t)
	const helpers = 6
	var wg sync.WaitGroup
	pids := make([]int, helpers)
	for i := range helpers {
		wg.Go(func() {
			cmd := helper(t, "write", path)
			if err := cmd.Run(); err != nil {
				t.Error(err)
				return
			}
			pids[i] = cmd.Process.Pid
		})
	}
	// A concurrent reader never sees damage.
	stop := make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := audit.Read(t.Context(), path, audit.ReadOptions{}, func(e audit.Entry) error {
				if e.Status == audit.Damaged {
					return errors.New("damaged")
				}
				return nil
			}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	wg.Wait()
	close(stop)
	reading.Wait()
	if t.Failed() {
		return
	}
	got, is := entries(t, path, audit.ReadOptions{})
	if is.Part < 2 || is.Part-is.First > audit.KeptFiles {
		t.Errorf("files %d to %d", is.First, is.Part)
	}
	seen := map[string]bool{}
	next := map[string]int{}
	for _, e := range got {
		if e.Status != audit.Ended || seen[e.ID] {
			t.Fatalf("got %+v, seen before: %v", e, seen[e.ID])
		}
		seen[e.ID] = true
		if len(e.Argv) == 0 {
			continue // its begin entry is gone
		}
		var i int
		if _, err := fmt.Sscan(e.Argv[1], &i); err != nil || int64(i) != e.Outcome.BytesOut {
			t.Fatalf("%+v has the end %+v", e, e.Outcome)
		}
		if i < next[e.Argv[0]] {
			t.Fatalf("%v comes after %d", e.Argv, next[e.Argv[0]]-1)
		}
		next[e.Argv[0]] = i + 1
	}
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) > 1+audit.KeptFiles {
		t.Errorf("there are %v, %v", files, err)
	}
	for _, name := range files {
		if fi, err := os.Stat(name); err != nil || fi.Size() > smallFile || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
	}
	for _, pid := range pids {
		if is.First == 1 && next[fmt.Sprint(pid)] != helperLines {
			t.Errorf("process %d: %d actions of %d", pid, next[fmt.Sprint(pid)], helperLines)
		}
	}
}

func TestRead_action_whose_process_is_killed_is_unknown(t *testing.T) {
	path := newTrail(t)
	cmd := helper(t, "begin", path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "begun\n" {
		t.Fatalf("it said %q, %v", line, err)
	}
	if got, _ := entries(t, path, audit.ReadOptions{}); len(got) != 1 || got[0].Status != audit.Running {
		t.Errorf("while it lives: %+v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var followed []audit.Status
	followErr := make(chan error, 1)
	first := make(chan struct{})
	go func() {
		_, err := audit.Read(ctx, path, audit.ReadOptions{Follow: true, Poll: time.Millisecond}, func(e audit.Entry) error {
			followed = append(followed, e.Status)
			if len(followed) == 1 {
				close(first)
			} else {
				cancel()
			}
			return nil
		})
		followErr <- err
	}()
	<-first
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got, _ := entries(t, path, audit.ReadOptions{}); len(got) != 1 || got[0].Status != audit.Unknown || got[0].Argv[0] != "left" {
		t.Errorf("after its death: %+v", got)
	}
	// An action that began earlier and has no end is not listed as one since now.
	if got, _ := entries(t, path, audit.ReadOptions{Since: time.Now()}); len(got) != 0 {
		t.Errorf("since now: %+v", got)
	}
	if err := <-followErr; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	cancel()
	if fmt.Sprint(followed) != "[running unknown]" {
		t.Errorf("who follows sees %v", followed)
	}
}

func TestRead_follows_across_new_files_to_the_removal(t *testing.T) {
	path := newTrail(t)
	tr := audit.OpenSized(path, 1<<10)
	got := make(chan audit.Entry)
	done := make(chan error, 1)
	go func() {
		_, err := audit.Read(t.Context(), path, audit.ReadOptions{Follow: true, Poll: time.Millisecond}, func(e audit.Entry) error {
			got <- e
			return nil
		})
		done <- err
	}()
	for i := range 20 {
		p := begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{fmt.Sprint(i)}})
		if e := <-got; e.Status != audit.Running || e.Argv[0] != fmt.Sprint(i) {
			t.Fatalf("%d: got %+v", i, e)
		}
		p.End(audit.Outcome{})
		if e := <-got; e.Status != audit.Ended || e.Argv[0] != fmt.Sprint(i) {
			t.Fatalf("%d: got %+v", i, e)
		}
	}
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRead_since_keeps_what_was_under_way(t *testing.T) {
	path := newTrail(t)
	tr := audit.Open(path)
	begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"over"}}).End(audit.Outcome{})
	long := begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"long"}})
	open := begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"open"}})
	defer open.End(audit.Outcome{})
	since := time.Now()
	long.End(audit.Outcome{})
	begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"new"}}).End(audit.Outcome{})
	got, _ := entries(t, path, audit.ReadOptions{Since: since})
	var names []string
	for _, e := range got {
		names = append(names, e.Argv[0])
	}
	if fmt.Sprint(names) != "[long open new]" {
		t.Errorf("got %v", names)
	}
}

func TestTrail_after_a_torn_line_goes_on_with_a_line_of_its_own(t *testing.T) {
	path := newTrail(t)
	tr := audit.Open(path)
	begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"a"}}).End(audit.Outcome{})
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"type":"begin","id":"00`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if got, _ := entries(t, path, audit.ReadOptions{}); len(got) != 1 {
		t.Errorf("a line that may still be written is %+v", got[1:])
	}
	begin(t, tr, audit.Action{Kind: audit.KindExec, Argv: []string{"b"}}).End(audit.Outcome{})
	got, _ := entries(t, path, audit.ReadOptions{})
	if len(got) != 3 || got[0].Argv[0] != "a" || got[1].Status != audit.Damaged || got[2].Argv[0] != "b" || got[2].Status != audit.Ended {
		t.Errorf("got %+v", got)
	}
}

func TestTrail_on_a_full_disk_refuses_and_leaves_no_part_of_a_line(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	path := filepath.Join(dir, "audit.jsonl")
	if err := audit.Ensure(t.Context(), path, audit.Head{VM: "0123"}); err != nil {
		t.Fatal(err)
	}
	tr := audit.Open(path)
	fill := filepath.Join(dir, "fill")
	// The file system allocates whole pages, so the line must need another page.
	big := audit.Action{Kind: audit.KindExec, Argv: []string{strings.Repeat("x", 8<<10)}}
	if err := os.WriteFile(fill, make([]byte, 60<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := tr.Begin(t.Context(), big); p != nil || !errors.Is(err, audit.ErrTrail) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v, %v", p, err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("%d bytes are left of what had %d before, %v", len(after), len(before), err)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	begin(t, tr, big).End(audit.Outcome{})
	if got, _ := entries(t, path, audit.ReadOptions{}); len(got) != 1 || got[0].Status != audit.Ended {
		t.Errorf("once there is room: %d entries", len(got))
	}
}

func TestTrail_lock_held_by_another_ends_with_the_context(t *testing.T) {
	path := newTrail(t)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := audit.Open(path).Begin(ctx, audit.Action{Kind: audit.KindExec})
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestTrail_end_is_not_put_into_the_trail_of_another_VM(t *testing.T) {
	path := newTrail(t)
	p := begin(t, audit.Open(path), audit.Action{Kind: audit.KindExec, Argv: []string{"old"}})
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := audit.Ensure(t.Context(), path, audit.Head{VM: "4567", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	p.End(audit.Outcome{})
	if got, is := entries(t, path, audit.ReadOptions{}); len(got) != 0 || is.VM != "4567" {
		t.Errorf("the new VM's trail has %+v", got)
	}
}

func TestEnsure(t *testing.T) {
	head := audit.Head{VM: "0123", Name: "vm", Parent: "old", ParentID: "89ab", Snapshot: "cdef"}
	for name, tt := range map[string]struct {
		there string
		aside bool
	}{
		"nothing there makes one":              {"", false},
		"zeros of a power cut are put aside":   {"\x00\x00\x00\x00", true},
		"another VM's is put aside":            {`{"drowse_audit":1,"vm":"ffff","name":"x","part":3,"time":"2026-01-01T00:00:00Z"}` + "\n", true},
		"another version's is put aside":       {`{"drowse_audit":9,"vm":"0123","name":"x","part":3,"time":"2026-01-01T00:00:00Z"}` + "\n", true},
		"a first line cut short is put aside":  {`{"drowse_audit":1,"vm":"0123"`, true},
		"one of the VM's own is left as it is": {`{"drowse_audit":1,"vm":"0123","name":"was","part":2,"time":"2026-01-01T00:00:00Z"}` + "\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "audit.jsonl")
			if tt.there != "" {
				if err := os.WriteFile(path, []byte(tt.there), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if err := audit.Ensure(t.Context(), path, head); err != nil {
					t.Fatal(err)
				}
			}
			got, err := audit.ReadHead(path)
			if err != nil || got.VM != "0123" {
				t.Errorf("got %+v, %v", got, err)
			}
			if kept := tt.there != "" && !tt.aside; kept != (got.Name == "was") || !kept && (got.Parent != "old" || got.ParentID != "89ab" || got.Snapshot != "cdef" || got.Part != 1) {
				t.Errorf("got %+v", got)
			}
			old, err := os.ReadFile(path + ".damaged")
			if tt.aside && string(old) != tt.there || !tt.aside && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("put aside: %q, %v", old, err)
			}
		})
	}
}

func TestAction_without_bound_is_cut_and_hashed(t *testing.T) {
	path := newTrail(t)
	many := make([]string, 100_000)
	for name, argv := range map[string][]string{
		"one long argument": {"a", strings.Repeat("é", 1<<20), "c"},
		"many arguments":    many,
	} {
		p := begin(t, audit.Open(path), audit.Action{Kind: audit.KindExec, Argv: argv, Dir: strings.Repeat("\x01", 1<<20)})
		p.End(audit.Outcome{Error: strings.Repeat("\x01", 1<<20)})
		got, _ := entries(t, path, audit.ReadOptions{})
		e := got[len(got)-1]
		if e.Status != audit.Ended || len(e.ArgvSHA256) != 64 {
			t.Errorf("%s: %.200s", name, fmt.Sprintf("%+v", e))
		}
		if text, err := json.Marshal(e); err != nil || len(text) > 300<<10 {
			t.Errorf("%s: %d bytes, %v", name, len(text), err)
		}
	}
}

func FuzzRead(f *testing.F) {
	const head = `{"drowse_audit":1,"vm":"0123","name":"vm","part":1,"time":"2026-01-01T00:00:00Z"}` + "\n"
	const one = `{"type":"begin","id":"a","time":"2026-01-01T00:00:00Z","kind":"exec","by":{"pid":1}}` + "\n" + `{"type":"end","id":"a","bytes_in":1}` + "\n"
	f.Add([]byte(head))
	f.Add([]byte(head + one))
	f.Add([]byte(head + one + one + "\n\n{}\nnull\n[1"))
	f.Add([]byte(`{"type":"end"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "audit.jsonl")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		n := 0
		_, err := audit.Read(t.Context(), path, audit.ReadOptions{}, func(audit.Entry) error {
			n++
			return nil
		})
		if err == nil && n > bytes.Count(text, []byte("\n")) {
			t.Errorf("%d entries of %d lines", n, bytes.Count(text, []byte("\n")))
		}
		// Whatever the file holds, the trail appends to it or refuses it.
		tr := audit.Open(path)
		p, berr := tr.Begin(t.Context(), audit.Action{Kind: audit.KindExec, Argv: []string{"mine"}})
		if (p == nil) == (berr == nil) || (err == nil) != (berr == nil) {
			t.Fatalf("reading gives %v, writing %v, %v", err, p, berr)
		}
		if berr != nil {
			return
		}
		p.End(audit.Outcome{})
		var last audit.Entry
		if _, err := audit.Read(t.Context(), path, audit.ReadOptions{}, func(e audit.Entry) error { last = e; return nil }); err != nil {
			t.Fatal(err)
		}
		if last.Status != audit.Ended || len(last.Argv) != 1 || last.Argv[0] != "mine" {
			t.Errorf("the last entry is %+v", last)
		}
	})
}

func BenchmarkBeginAndEnd(b *testing.B) {
	path := filepath.Join(b.TempDir(), "audit.jsonl")
	if err := audit.Ensure(b.Context(), path, audit.Head{VM: "0123"}); err != nil {
		b.Fatal(err)
	}
	tr := audit.Open(path)
	for b.Loop() {
		p, err := tr.Begin(b.Context(), audit.Action{Kind: audit.KindExec, Argv: []string{"sh", "-c", "true"}, User: "root", Dir: "/"})
		if err != nil {
			b.Fatal(err)
		}
		p.End(audit.Outcome{})
	}
}
