package state

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ranVM makes a VM that ran a command that has ended, and one that has not.
func ranVM(t *testing.T, s *Store, name string, m spec.Metadata) *Record {
	t.Helper()
	r := &Record{
		Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name, Services: []spec.Service{{Name: "web", Env: []string{"KEY=secret"}}}},
		Phase: Stopped, Sleeps: []SleepRecord{{Snapshot: spec.NewID(), Asleep: time.Now().UTC()}}, metadata: &m,
	}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	begin := func(kind audit.Kind, word string) *audit.Pending {
		p, err := audit.Open(s.AuditPath(name)).Begin(t.Context(), audit.Action{Kind: kind, Argv: []string{word}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	exit := 3
	begin(audit.KindExec, "ended").End(audit.Outcome{Exit: &exit, Changes: &audit.Changes{Added: []string{"/x"}}})
	begin(audit.KindCopyIn, "").End(audit.Outcome{})
	begin(audit.KindShell, "runs")
	return r
}

// histories1 returns the names of the files below removed/.
func histories1(t *testing.T, s *Store) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(s.removedDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestRemoved_VM_leaves_its_history_and_an_ephemeral_one_nothing(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	first := ranVM(t, s, "a", spec.Metadata{Owner: "build"})
	if err := s.remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	second := ranVM(t, s, "a", spec.Metadata{})
	short := ranVM(t, s, "short", spec.Metadata{Class: lifetime.Ephemeral})
	for _, name := range []string{"a", "short"} {
		if freed, err := s.Remove(t.Context(), name, false); err != nil || len(freed.Problems) != 0 {
			t.Fatal(freed, err)
		}
	}
	for name, want := range map[string]string{"a": second.ID, first.ID: first.ID, second.ID: second.ID} {
		got, err := s.Removed(name)
		if err != nil {
			t.Fatal(err)
		}
		if got.Record.ID != want || len(got.Record.Sleeps) != 1 || time.Since(got.Time) > time.Minute || len(got.Runs) != 2 {
			t.Errorf("of %s there is %+v", name, got)
			continue
		}
		if e := got.Runs[0]; e.Status != audit.Ended || *e.Outcome.Exit != 3 || e.Outcome.Changes != nil || e.Argv[0] != "ended" {
			t.Errorf("the command that had ended is %+v", e)
		}
		if e := got.Runs[1]; e.Status != audit.Unknown || e.Argv[0] != "runs" {
			t.Errorf("the shell that had not ended is %+v: want status unknown", e)
		}
	}
	if got, err := s.Removed(first.ID); err != nil || got.Metadata.Owner != "build" {
		t.Errorf("the owner of the first is %+v (%v)", got, err)
	}
	for _, nobody := range []string{"short", short.ID, "nobody", "", "../vms"} {
		if _, err := s.Removed(nobody); !errors.Is(err, spec.ErrNotFound) {
			t.Errorf("%q: got %v, want ErrNotFound", nobody, err)
		}
	}
	for _, name := range histories1(t, s) {
		path := filepath.Join(s.removedDir(), name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil || st.Mode() != 0o600 || strings.Contains(string(text), "secret") {
			t.Errorf("%s has mode %v (%v), and says %s", name, st.Mode(), err, text)
		}
	}
}

func TestRemoval_that_is_repeated_after_it_was_cut_short_keeps_one_history(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := ranVM(t, s, "a", spec.Metadata{})
	if err := s.keepHistory(t.Context(), r); err != nil { // and then the process was killed
		t.Fatal(err)
	}
	if err := s.remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Removed("a"); err != nil || len(got.Runs) != 2 || len(histories1(t, s)) != 1 {
		t.Errorf("it leaves %+v (%v), in %q", got, err, histories1(t, s))
	}
	r = ranVM(t, s, "b", spec.Metadata{})
	if err := s.keepHistory(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SetMetadata(t.Context(), "b", func(m *spec.Metadata, _ error) error { m.Class = lifetime.Ephemeral; return nil }); err != nil {
		t.Fatal(err)
	}
	if err := s.remove(t.Context(), "b", false); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Removed("b"); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("of one that has become ephemeral since there is %+v (%v)", got, err)
	}
}

func TestHistory_that_cannot_be_kept_does_not_keep_the_VM(t *testing.T) {
	for name, spoil := range map[string]func(s *Store, r *Record) error{
		"no directory can be made": func(s *Store, _ *Record) error { return os.WriteFile(s.removedDir(), nil, 0o600) },
		"the trail is damaged":     func(s *Store, r *Record) error { return os.WriteFile(s.AuditPath(r.Spec.Name), []byte("x\n"), 0o600) },
		"the metadata is damaged": func(s *Store, r *Record) error {
			return os.WriteFile(filepath.Join(s.VMDir(r.Spec.Name), metadataFile), []byte("{"), 0o600)
		},
		"its id is a path": func(s *Store, r *Record) error { r.ID = "../../x"; return s.Save(r) },
	} {
		t.Run(name, func(t *testing.T) {
			s, err := OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			r := ranVM(t, s, "a", spec.Metadata{})
			if err := spoil(s, r); err != nil {
				t.Fatal(err)
			}
			freed, err := s.Remove(t.Context(), "a", false)
			if err != nil || len(freed.Problems) == 0 || !strings.Contains(freed.Problems[0], "history of a") {
				t.Errorf("it says %q (%v)", freed.Problems, err)
			}
			if _, err := s.Get("a"); !errors.Is(err, spec.ErrNotFound) {
				t.Errorf("it is still there: %v", err)
			}
		})
	}
}

func TestHistory_that_is_damaged_or_newer_is_an_error(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ranVM(t, s, "a", spec.Metadata{})
	if err := s.remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.removedDir(), histories1(t, s)[0])
	for _, text := range []string{"", "{", "{}", `{"version":2,"record":{}}`, `{"version":1}`, "null"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Removed("a"); !errors.Is(err, spec.ErrRecord) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: got %+v, %v, want ErrRecord with the path", text, got, err)
		}
	}
}

func TestSweep_forgets_histories_that_are_old_or_too_many(t *testing.T) {
	now := time.Now()
	for name, tt := range map[string]struct {
		sizes []int64         // from the newest on
		ages  []time.Duration // the same
		left  int
	}{
		"young and few":  {[]int64{1, 1}, []time.Duration{0, HistoryTime - time.Hour}, 2},
		"one too old":    {[]int64{1, 1}, []time.Duration{0, HistoryTime + time.Hour}, 1},
		"too many bytes": {[]int64{MaxHistoryBytes / 2, MaxHistoryBytes / 2, 1}, []time.Duration{0, 1, 2}, 2},
		"too many":       {make([]int64, MaxHistories+3), nil, MaxHistories},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(s.removedDir(), 0o700); err != nil {
				t.Fatal(err)
			}
			for i, size := range tt.sizes {
				age := time.Duration(i)
				if tt.ages != nil {
					age = tt.ages[i]
				}
				path := s.historyPath(now.Add(-age).UTC(), &Record{ID: spec.NewID(), Spec: spec.VM{Name: "a-b"}})
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				if err := os.Truncate(path, size); err != nil {
					t.Fatal(err)
				}
			}
			all, err := s.histories()
			if err != nil || len(all) != len(tt.sizes) {
				t.Fatal(len(all), err)
			}
			n, err := s.ForgetRemoved(now.Add(-HistoryTime))
			if left := histories1(t, s); err != nil || int(n) != len(tt.sizes)-tt.left || len(left) != tt.left {
				t.Errorf("%d are forgotten, %d left (%v), want %d left", n, len(left), err, tt.left)
			}
			for i, h := range all {
				if _, err := os.Lstat(h.path); (err == nil) != (i < tt.left) {
					t.Errorf("history %d: %v", i, err)
				}
			}
		})
	}
}

func TestSweep_deletes_what_removals_and_earlier_versions_have_left(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ranVM(t, s, "there", spec.Metadata{})
	ranVM(t, s, "held", spec.Metadata{})
	l, err := s.Lock("held")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	old, young := time.Now().Add(-2*graceTime), time.Now()
	for path, want := range map[string]struct {
		at   time.Time
		left bool
	}{
		"vms/cut/audit.jsonl":                {old, false},
		"vms/cut-now/audit.jsonl":            {young, true},
		"vms/there/audit.jsonl":              {old, true},
		"vms/held/audit.jsonl":               {old, true},
		"removed/" + osfile.TempPrefix + "1": {old, false},
		"removed/" + osfile.TempPrefix + "2": {young, true},
		"removed/somebody's":                 {old, true},
		"records.db":                         {young, false},
		"records.db-wal":                     {young, false},
		"records.db-shm":                     {young, false},
		"records.db.damaged-20261122T1200Z":  {young, false},
		"records.lock":                       {young, false},
		"records.dbase":                      {old, true},
	} {
		path = filepath.Join(s.Dir(), path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := errors.Join(os.Chtimes(path, want.at, want.at), os.Chtimes(filepath.Dir(path), want.at, want.at)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := os.Lstat(path); (err == nil) != want.left {
				t.Errorf("%s: %v, want it left: %v", path, err, want.left)
			}
		})
	}
	if err := os.Remove(s.RecordPath("held")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(s.VMDir("held"), old, old); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// removerEnv makes the test binary a process that makes and removes VMs in a store until it is killed.
const removerEnv = "DROWSE_STATE_REMOVER"

func TestRemoval_that_is_killed_leaves_a_whole_VM_or_a_whole_history(t *testing.T) {
	if dir := os.Getenv(removerEnv); dir != "" {
		s, err := OpenStore(dir)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 1 << 20 {
			name := fmt.Sprint("v", i)
			r := ranVM(t, s, name, spec.Metadata{})
			fmt.Println("made", name, r.ID)
			if freed, err := s.Remove(t.Context(), name, false); err != nil || len(freed.Problems) != 0 {
				t.Fatal(freed, err)
			}
		}
	}
	whole, gone := 0, 0
	for round := range 8 {
		s, err := OpenStore(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), removerEnv+"="+s.Dir())
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var made [][]string
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if f := strings.Fields(lines.Text()); len(f) == 3 && f[0] == "made" {
				if made = append(made, f); len(made) == 5 {
					time.AfterFunc(time.Duration(round)*time.Millisecond, func() { _ = cmd.Process.Kill() })
				}
			} else {
				t.Error(lines.Text())
			}
		}
		_ = cmd.Wait()
		for _, f := range made {
			name, id := f[1], f[2]
			if _, err := s.Get(name); err == nil {
				whole++
				if _, all := auditOf(t, s, name); len(all) != 3 {
					t.Errorf("round %d: %s is there with a trail of %d actions", round, name, len(all))
				}
				if err := s.remove(t.Context(), name, false); err != nil {
					t.Error(err)
				}
			} else {
				gone++
			}
			got, err := s.Removed(id)
			if err != nil || got.Record.Spec.Name != name || len(got.Runs) != 2 {
				t.Errorf("round %d: %s leaves %+v (%v)", round, name, got, err)
			}
		}
	}
	t.Logf("%d VMs were removed, %d were still whole", gone, whole)
}

func TestHistory_is_as_format_says(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := ranVM(t, s, "a-b", spec.Metadata{})
	if err := s.remove(t.Context(), "a-b", false); err != nil {
		t.Fatal(err)
	}
	names := histories1(t, s)
	if len(names) != 1 || !strings.HasSuffix(names[0], "Z-"+r.ID+"-a-b.json") {
		t.Fatalf("the files are %q", names)
	}
	text, err := os.ReadFile(filepath.Join(s.removedDir(), names[0]))
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"version", "removed", "record", "metadata", "runs"} {
		if doc[field] == nil {
			t.Errorf("it has no %s: %s", field, text)
		}
	}
}
