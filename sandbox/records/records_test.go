package records

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// writerEnv makes the test binary a writer of a directory's records.
const writerEnv = "DROWSE_RECORDS_WRITER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerEnv); dir != "" {
		os.Exit(writer(dir, os.Args[1]))
	}
	goleak.VerifyTestMain(m)
}

// writer writes rows until it is killed, and says of each when it is committed.
func writer(dir, who string) int {
	ctx := context.Background()
	db, err := Open(ctx, dir, Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	for i := 0; ; i++ {
		name := fmt.Sprintf("%s-%d", who, i)
		err := db.Update(ctx, func(tx *Tx) error {
			if err := tx.Put(row(name), "1"); err != nil {
				return err
			}
			return tx.PutRuns("id-"+name, []Run{{ID: "run", State: "ended", Begun: time.Now()}})
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println(name)
	}
}

func row(name string) Sandbox {
	return Sandbox{ID: "id-" + name, Name: name, Class: lifetime.Resumable, Status: Asleep, Tags: []string{}, Created: time.Unix(1, 0).UTC()}
}

func open1(t *testing.T, dir string, o Options) *DB {
	t.Helper()
	db, err := Open(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() }) // tests that care close it themselves
	return db
}

func put(t *testing.T, db *DB, rows ...Sandbox) {
	t.Helper()
	err := db.Update(t.Context(), func(tx *Tx) error {
		for _, r := range rows {
			if err := tx.Put(r, "1"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, db *DB, f Filter) []string {
	t.Helper()
	f.Limit = MaxPage
	p, err := db.List(t.Context(), f, time.Unix(1000, 0))
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, s := range p.Sandboxes {
		out = append(out, s.Name)
	}
	return out
}

func TestMigrationFromEveryEarlierVersionKeepsItsRows(t *testing.T) {
	// What each version can hold, as a build of that version wrote it.
	rows := []string{
		`INSERT INTO sandboxes VALUES ('id-a', 'a', 'resumable', 'build', 'asleep', 0, 0, 'stamp', '{"id":"id-a","name":"a","class":"resumable","owner":"build","status":"asleep","tags":["x"]}');
		 INSERT INTO tags VALUES ('x', 'id-a');`,
		`INSERT INTO sleeps VALUES ('id-a', 'snap', 5, '{"snapshot":"snap","asleep":"1970-01-01T00:00:00.000000005Z","stored_bytes":7}');`,
		`INSERT INTO runs VALUES ('id-a', 'run', 5, 0, '{"id":"run","command":["true"],"state":"ended","begun":"1970-01-01T00:00:00.000000005Z","in_bytes":0,"out_bytes":1}');`,
	}
	if len(rows) != len(migrations) {
		t.Fatalf("there are rows for %d versions and %d versions: add some that the last one can hold", len(rows), len(migrations))
	}
	for version := range len(migrations) + 1 {
		t.Run(fmt.Sprintf("from version %d", version), func(t *testing.T) {
			dir := t.TempDir()
			if version > 0 {
				old := open1(t, dir, Options{steps: migrations[:version]})
				for _, q := range rows[:version] {
					if _, err := old.sql.ExecContext(t.Context(), q); err != nil {
						t.Fatal(err)
					}
				}
				if err := old.Close(); err != nil {
					t.Fatal(err)
				}
			}
			db := open1(t, dir, Options{Check: true})
			if db.Moved != nil {
				t.Fatalf("it was put aside: %v", db.Moved.Cause)
			}
			var is int
			if err := db.sql.QueryRowContext(t.Context(), "PRAGMA user_version").Scan(&is); err != nil || is != Version {
				t.Errorf("it has version %d (%v), want %d", is, err, Version)
			}
			count := func(ok bool) int {
				if ok {
					return 1
				}
				return 0
			}
			if got := names(t, db, Filter{Owner: "build", Tags: []string{"x"}}); len(got) != count(version >= 1) {
				t.Errorf("sandboxes %v", got)
			}
			if got, err := db.Sleeps(t.Context(), "id-a", Span{}); err != nil || len(got) != count(version >= 2) || len(got) == 1 && got[0].Stored != 7 {
				t.Errorf("sleeps %v (%v)", got, err)
			}
			if got, err := db.Runs(t.Context(), "id-a", Span{}); err != nil || len(got) != count(version >= 3) {
				t.Errorf("runs %v (%v)", got, err)
			}
			put(t, db, row("b"))
		})
	}
}

var update = flag.Bool("update", false, "write the golden database of this version anew; those of others are never changed")

// The files are what builds of those versions wrote, and not what this one makes of their statements.
func TestGoldenDatabaseOfEveryVersionIsMigrated(t *testing.T) {
	golden := func(version int) string { return filepath.Join("testdata", "golden", fmt.Sprintf("v%d.db", version)) }
	doc := `{"id":"id-a","name":"a","class":"resumable","owner":"build","status":"asleep","tags":["x"]}`
	rows := []string{
		`INSERT INTO sandboxes VALUES ('id-a', 'a', 'resumable', 'build', 'asleep', 0, 0, 'stamp', '` + doc + `'); INSERT INTO tags VALUES ('x', 'id-a');`,
		`INSERT INTO sleeps VALUES ('id-a', 'snap', 5, '{"snapshot":"snap","asleep":"1970-01-01T00:00:00.000000005Z","stored_bytes":7}')`,
		`INSERT INTO runs VALUES ('id-a', 'run', 5, 0, '{"id":"run","command":["true"],"state":"ended","begun":"1970-01-01T00:00:00.000000005Z","in_bytes":0,"out_bytes":1}')`,
	}
	for version := 1; *update && version <= Version; version++ {
		if _, err := os.Stat(golden(version)); err == nil && version < Version {
			continue
		}
		dir := t.TempDir()
		db := open1(t, dir, Options{steps: migrations[:version]})
		for _, q := range rows[:version] {
			if _, err := db.sql.ExecContext(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.MkdirAll(filepath.Dir(golden(1)), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := db.sql.ExecContext(t.Context(), "VACUUM INTO '"+filepath.Join(dir, "out")+"'"); err != nil {
			t.Fatal(err)
		}
		write(t, golden(version), read(t, filepath.Join(dir, "out")))
	}
	for version := 1; version <= Version; version++ {
		t.Run(fmt.Sprintf("version %d", version), func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, fileName), read(t, golden(version)))
			db := open1(t, dir, Options{Check: true})
			if db.Moved != nil {
				t.Fatalf("it was put aside: %v", db.Moved.Cause)
			}
			var is int
			if err := db.sql.QueryRowContext(t.Context(), "PRAGMA user_version").Scan(&is); err != nil || is != Version {
				t.Errorf("it has version %d (%v), want %d", is, err, Version)
			}
			if got := names(t, db, Filter{Owner: "build", Tags: []string{"x"}}); len(got) != 1 || got[0] != "a" {
				t.Errorf("sandboxes %v", got)
			}
			if got, err := db.Sleeps(t.Context(), "id-a", Span{}); err != nil || (version >= 2) != (len(got) == 1 && got[0].Stored == 7) {
				t.Errorf("sleeps %v (%v)", got, err)
			}
			if got, err := db.Runs(t.Context(), "id-a", Span{}); err != nil || (version >= 3) != (len(got) == 1) {
				t.Errorf("runs %v (%v)", got, err)
			}
			put(t, db, row("b"))
		})
	}
}

func TestMigrationThatFailsLeavesTheVersionBefore(t *testing.T) {
	dir := t.TempDir()
	old := open1(t, dir, Options{})
	put(t, old, row("a"))
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	bad := append(slices.Clone(migrations), "CREATE TABLE more (x INTEGER) STRICT; CREATE TABLE sandboxes (x INTEGER) STRICT;")
	if _, err := Open(t.Context(), dir, Options{steps: bad}); err == nil {
		t.Fatal("a migration that cannot be done has been done")
	}
	db := open1(t, dir, Options{Check: true})
	var more int
	if err := db.sql.QueryRowContext(t.Context(), "SELECT count(*) FROM sqlite_schema WHERE name = 'more'").Scan(&more); err != nil || more != 0 {
		t.Errorf("half of it is there: %d (%v)", more, err)
	}
	if got := names(t, db, Filter{}); !slices.Equal(got, []string{"a"}) {
		t.Errorf("there are %v", got)
	}
}

func TestNewerVersionIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	db := open1(t, dir, Options{steps: append(slices.Clone(migrations), "CREATE TABLE more (x INTEGER) STRICT")})
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), dir, Options{Check: true})
	if !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "newer build") {
		t.Errorf("got %v, want ErrNewer with the remedy", err)
	}
	if after, err := os.ReadFile(filepath.Join(dir, fileName)); err != nil || string(after) != string(before) {
		t.Errorf("the file has changed (%v)", err)
	}
}

// damage are ways in which a database may be damaged, given its path.
var damage = map[string]func(t *testing.T, path string){
	"not a database": func(t *testing.T, path string) { write(t, path, []byte(strings.Repeat("no database ", 1000))) },
	"pages of zeros in the middle": func(t *testing.T, path string) {
		data := read(t, path)
		for i := 4096; i < min(len(data), 4*4096); i++ {
			data[i] = 0
		}
		write(t, path, data)
	},
	"cut off": func(t *testing.T, path string) { write(t, path, read(t, path)[:5000]) },
	"flipped bits in every page but the first": func(t *testing.T, path string) {
		data := read(t, path)
		for i := 4096; i+8 < len(data); i += 4096 {
			for j := range 8 {
				data[i+j] ^= 0xff
			}
		}
		write(t, path, data)
	},
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedDatabaseIsPutAsideAndSaid(t *testing.T) {
	for what, spoil := range damage {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			db := open1(t, dir, Options{})
			for i := range 100 {
				put(t, db, row(fmt.Sprint("s", i)))
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, fileName)
			spoil(t, path)
			spoilt := read(t, path)
			db = open1(t, dir, Options{Check: true})
			if db.Moved == nil {
				t.Fatal("it was taken for whole")
			}
			if got := read(t, db.Moved.To); string(got) != string(spoilt) || db.Moved.Cause == nil {
				t.Errorf("what was put aside is not what was there, or nothing says why: %v", db.Moved.Cause)
			}
			if got := names(t, db, Filter{}); len(got) != 0 {
				t.Errorf("the new one has %v", got)
			}
			put(t, db, row("a"))
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			if db = open1(t, dir, Options{Check: true}); db.Moved != nil || len(names(t, db, Filter{})) != 1 {
				t.Error("the new one does not last")
			}
		})
	}
}

func TestDamagedDatabaseThatIsOpenIsNotMoved(t *testing.T) {
	dir := t.TempDir()
	db := open1(t, dir, Options{})
	other, err := lockFile(t.Context(), dir, osfile.Shared, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	put(t, db, row("a"))
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, fileName), []byte(strings.Repeat("no database ", 1000)))
	if _, err := Open(t.Context(), dir, Options{aside: 50 * time.Millisecond}); !errors.Is(err, ErrDamaged) {
		t.Errorf("got %v, want ErrDamaged", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*"+damagedInfix+"*")); len(left) != 0 {
		t.Errorf("it was moved to %v", left)
	}
	other.Close()
	if db := open1(t, dir, Options{}); db.Moved == nil {
		t.Error("nobody has it open, and it is not put aside")
	}
}

func TestKilledWritersLoseNothingThatTheyHaveCommitted(t *testing.T) {
	dir := t.TempDir()
	const writers, rounds = 4, 8
	var mu sync.Mutex
	committed := map[string]bool{}
	for round := range rounds {
		var wg sync.WaitGroup
		for w := range writers {
			cmd := exec.Command(os.Args[0], fmt.Sprintf("w%d-%d", round, w))
			cmd.Env = append(os.Environ(), writerEnv+"="+dir)
			var complaint strings.Builder
			cmd.Stderr = &complaint
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			after := rand.IntN(40) // lines, and then at once, wherever it is
			wg.Go(func() {
				lines := bufio.NewScanner(out)
				for n := 0; lines.Scan(); n++ {
					mu.Lock()
					committed[lines.Text()] = true
					mu.Unlock()
					if n == after {
						if err := cmd.Process.Kill(); err != nil {
							t.Error(err)
						}
					}
				}
				if err := cmd.Wait(); cmd.ProcessState.ExitCode() >= 0 {
					t.Errorf("a writer has ended by itself: %v: %s", err, complaint.String())
				}
			})
		}
		wg.Wait()
	}
	db := open1(t, dir, Options{Check: true})
	if db.Moved != nil {
		t.Fatalf("the database is damaged: %v", db.Moved.Cause)
	}
	for name := range committed {
		s, err := db.Find(t.Context(), name, time.Now())
		if err != nil {
			t.Errorf("%s was committed: %v", name, err)
			continue
		}
		if runs, err := db.Runs(t.Context(), s.ID, Span{}); err != nil || len(runs) != 1 {
			t.Errorf("of %s only half is there: %v (%v)", name, runs, err)
		}
	}
	if len(committed) < writers*rounds {
		t.Errorf("only %d rows were committed: the test has tested nothing", len(committed))
	}
	t.Logf("%d committed updates of %d killed writers are there", len(committed), writers*rounds)
}

// tmpfs mounts a small file system at a new directory.
func tmpfs(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("mounting a file system needs root")
		}
		t.Skip("mounting a file system needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestFullDiskRefusesAndLosesNothing(t *testing.T) {
	dir := tmpfs(t)
	db := open1(t, dir, Options{})
	var kept []string
	big := row("")
	big.Purpose = strings.Repeat("x", MaxPurpose)
	for i := 0; ; i++ {
		big.ID, big.Name = fmt.Sprint("id-", i), fmt.Sprintf("s%05d", i)
		err := db.Update(t.Context(), func(tx *Tx) error { return tx.Put(big, "1") })
		if err != nil {
			if Damaged(err) {
				t.Fatalf("a full disk counts as damage: %v", err)
			}
			t.Logf("after %d rows: %v", i, err)
			break
		}
		if kept = append(kept, big.Name); i > 10_000 {
			t.Fatal("the disk is never full")
		}
	}
	if got := names(t, db, Filter{}); !slices.Equal(got[:min(len(got), len(kept))], kept[:min(len(kept), MaxPage)]) {
		t.Errorf("%d rows are there, %d were committed", len(got), len(kept))
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=16m"); err != nil {
		t.Fatal(err)
	}
	put(t, db, row("later"))
	if err := db.Check(t.Context()); err != nil {
		t.Error(err)
	}
	for _, name := range kept {
		if _, err := db.Find(t.Context(), name, time.Now()); err != nil {
			t.Error(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
}

func TestReadOnlyFileSystemIsAnErrorAndNoDamage(t *testing.T) {
	dir := tmpfs(t)
	db := open1(t, dir, Options{})
	put(t, db, row("a"))
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, Options{Check: true}); !errors.Is(err, unix.EROFS) || Damaged(err) {
		t.Errorf("got %v, want EROFS", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	if db := open1(t, dir, Options{Check: true}); db.Moved != nil || len(names(t, db, Filter{})) != 1 {
		t.Error("the row is gone")
	}
}

func TestWriterThatHoldsTheLockIsWaitedForAsLongAsTheContextLasts(t *testing.T) {
	dir := t.TempDir()
	a, b := open1(t, dir, Options{}), open1(t, dir, Options{})
	held, let := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- a.Update(context.Background(), func(tx *Tx) error {
			close(held)
			<-let
			return tx.Put(row("a"), "1")
		})
	}()
	<-held
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if err := b.Update(ctx, func(tx *Tx) error { return nil }); err == nil {
		t.Error("two write at once")
	}
	if got := names(t, b, Filter{}); len(got) != 0 {
		t.Errorf("what is not committed is read: %v", got)
	}
	close(let)
	if err := <-done; err != nil {
		t.Error(err)
	}
	put(t, b, row("b"))
	if got := names(t, a, Filter{}); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("there are %v", got)
	}
}

func TestUpdateThatFailsChangesNothing(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	no := errors.New("no")
	err := db.Update(t.Context(), func(tx *Tx) error {
		if err := tx.Put(row("a"), "1"); err != nil {
			return err
		}
		return no
	})
	if !errors.Is(err, no) || len(names(t, db, Filter{})) != 0 {
		t.Errorf("got %v, and there are %v", err, names(t, db, Filter{}))
	}
}

func TestTextsAreBounded(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	long := strings.Repeat("\x01ü", 1<<14)
	s := Sandbox{ID: "id", Name: "s", Owner: long, Purpose: long, Problem: long, Image: long, ImageID: long, Kernel: long, Network: long, Policy: long, Hooks: long,
		Parent: long, ParentID: long, ForkPoint: long, Snapshot: long, Tags: slices.Repeat([]string{long}, 2*MaxTags)}
	for i := range s.Tags {
		s.Tags[i] = strconv.Itoa(i) + s.Tags[i]
	}
	r := Run{ID: "run", Command: slices.Repeat([]string{long}, 2*maxArgs), User: long, State: long, Error: long, Begun: time.Now()}
	err := db.Update(t.Context(), func(tx *Tx) error {
		return errors.Join(tx.Put(s, long), tx.PutRuns("id", []Run{r}), tx.PutSleeps("id", []Sleep{{Snapshot: "snap"}}))
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := db.Find(t.Context(), "s", time.Now())
	if err != nil || len(got.Owner) > MaxOwner || len(got.Purpose) > MaxPurpose || len(got.Problem) > maxField || len(got.Tags) != MaxTags || len(got.Tags[0]) > MaxTag {
		t.Errorf("it is kept with %d bytes of owner, %d tags (%v)", len(got.Owner), len(got.Tags), err)
	}
	runs, err := db.Runs(t.Context(), "id", Span{})
	if err != nil || len(runs) != 1 || len(strings.Join(runs[0].Command, "")) > maxCommand {
		t.Errorf("the run: %v", err)
	}
	for _, bad := range []Sandbox{{}, {ID: "x"}, {Name: "x"}, {ID: long, Name: "x"}, {ID: "x", Name: long}} {
		if err := db.Update(t.Context(), func(tx *Tx) error { return tx.Put(bad, "") }); !errors.Is(err, ErrInvalid) {
			t.Errorf("got %v, want ErrInvalid", err)
		}
	}
}

func TestFiltersAreChecked(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	for name, f := range map[string]Filter{
		"a page too long":       {Limit: MaxPage + 1},
		"a page of less than 0": {Limit: -1},
		"an owner too long":     {Owner: strings.Repeat("x", MaxOwner+1)},
		"an owner in two lines": {Owner: "a\nb"},
		"no class":              {Class: "eternal"},
		"no status":             {Statuses: []Status{"dead"}},
		"too many tags":         {Tags: slices.Repeat([]string{"x"}, MaxTags+1)},
		"an empty tag":          {Tags: []string{""}},
		"a tag of two":          {Tags: []string{"a,b"}},
		"after a long name":     {After: strings.Repeat("x", 100)},
	} {
		if _, err := db.List(t.Context(), f, time.Now()); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	if _, err := db.Runs(t.Context(), "x", Span{Limit: -1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a span: got %v, want ErrInvalid", err)
	}
}

// The list of the database and that of the files, PageOf, have to be the same.
func TestListsOfDatabaseAndFilesAreTheSame(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	now := time.Unix(1000, 0)
	var all []Sandbox
	for i := range 60 {
		s := row(fmt.Sprintf("s%02d", i))
		s.Owner = []string{"", "build", "tests"}[i%3]
		s.Class = lifetime.Classes[i%len(lifetime.Classes)]
		s.Status = Statuses[i%(len(Statuses)-1)]
		s.Tags = append(s.Tags, []string{"a", "b", "c"}[:i%4]...)
		if i%5 == 0 {
			s.Expires = now.Add(time.Duration(i-30) * time.Second).UTC()
		}
		all = append(all, s)
	}
	put(t, db, all...)
	for i := range all {
		all[i] = all[i].At(now)
	}
	n := 0
	for _, owner := range []string{"", "build", "nobody"} {
		for _, class := range []lifetime.Class{"", lifetime.Ephemeral} {
			for _, tags := range [][]string{nil, {"a"}, {"a", "b"}} {
				for _, statuses := range [][]Status{nil, {Expired}, {Asleep, Running}} {
					for _, limit := range []int{0, 1, 7} {
						f := Filter{Owner: owner, Class: class, Tags: tags, Statuses: statuses, Limit: limit}
						for {
							got, err := db.List(t.Context(), f, now)
							want := PageOf(all, f)
							if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
								t.Fatalf("%+v: the database has %+v (%v), the files %+v", f, got, err, want)
							}
							n += len(got.Sandboxes)
							if f.After = got.Next; f.After == "" {
								break
							}
						}
					}
				}
			}
		}
	}
	if n < 500 {
		t.Errorf("only %d rows were compared", n)
	}
}

func TestHistoriesKeepTheNewest(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	put(t, db, row("a"))
	err := db.Update(t.Context(), func(tx *Tx) error {
		var runs []Run
		for i := range MaxRuns + 10 {
			runs = append(runs, Run{ID: strconv.Itoa(i), State: "ended", Begun: time.Unix(int64(i), 0)})
		}
		return tx.PutRuns("id-a", runs)
	})
	if err != nil {
		t.Fatal(err)
	}
	var n int
	var least int64
	if err := db.sql.QueryRowContext(t.Context(), "SELECT count(*), min(begun) FROM runs").Scan(&n, &least); err != nil || n != MaxRuns || least != 10*int64(time.Second) {
		t.Errorf("%d runs are kept, from %d on (%v)", n, least, err)
	}
}

func TestRunThatHasEndedDoesNotBeginAgain(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	put(t, db, row("a"))
	exit := 3
	begun := time.Unix(5, 0).UTC()
	for _, step := range []struct {
		r     Run
		since time.Time
		state string
	}{
		{Run{ID: "r", State: "running", Begun: begun}, begun, "running"},
		{Run{ID: "later", State: "ended", Begun: begun.Add(time.Hour)}, begun, "running"},
		{Run{ID: "r", State: "ended", Begun: begun, Exit: &exit}, begun.Add(time.Hour), "ended"},
		{Run{ID: "r", State: "running", Begun: begun}, begun.Add(time.Hour), "ended"},
	} {
		err := db.Update(t.Context(), func(tx *Tx) error {
			if err := tx.PutRuns("id-a", []Run{step.r}); err != nil {
				return err
			}
			since, err := tx.RunsSince("id-a")
			if err == nil && !since.Equal(step.since) {
				t.Errorf("runs are wanted since %v, want %v", since, step.since)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		runs, err := db.Runs(t.Context(), "id-a", Span{})
		i := slices.IndexFunc(runs, func(r Run) bool { return r.ID == "r" })
		if err != nil || i < 0 || runs[i].State != step.state {
			t.Errorf("the runs are %+v (%v)", runs, err)
		}
	}
}

func TestWhatIsGoneKeepsItsHistoryUnlessItIsEphemeral(t *testing.T) {
	db := open1(t, t.TempDir(), Options{})
	lasting, short := row("lasting"), row("short")
	short.Class = lifetime.Ephemeral
	put(t, db, lasting, short)
	at := time.Unix(2000, 0).UTC()
	err := db.Update(t.Context(), func(tx *Tx) error {
		known, err := tx.Known()
		if err != nil {
			return err
		}
		for _, k := range known {
			if err := errors.Join(tx.PutRuns(k.ID, []Run{{ID: "r", Begun: at}}), tx.Gone(k, at), tx.Gone(k, at.Add(time.Hour))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := db.Find(t.Context(), "lasting", at); err != nil || !got.Removed.Equal(at) {
		t.Errorf("the lasting one is %+v (%v)", got, err)
	}
	if _, err := db.Find(t.Context(), "short", at); !errors.Is(err, ErrNotFound) {
		t.Errorf("the ephemeral one: %v, want ErrNotFound", err)
	}
	var runs, tags int
	if err := db.sql.QueryRowContext(t.Context(), "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM tags)").Scan(&runs, &tags); err != nil || runs != 1 {
		t.Errorf("%d runs are left (%v)", runs, err)
	}
	// A new one gets its name, and it comes back: an import, or a clock that was wrong.
	put(t, db, Sandbox{ID: "id-new", Name: "lasting", Status: Running})
	if got, err := db.Find(t.Context(), "lasting", at); err != nil || got.ID != "id-new" {
		t.Errorf("by its name there is %+v (%v)", got, err)
	}
	err = db.Update(t.Context(), func(tx *Tx) error {
		n, err := tx.ForgetRemovedBefore(at.Add(time.Second))
		if n != 1 {
			t.Errorf("%d were forgotten", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Find(t.Context(), "id-lasting", at); !errors.Is(err, ErrNotFound) {
		t.Errorf("what was forgotten: %v", err)
	}
}

func TestFilesAreForTheirOwnerAlone(t *testing.T) {
	dir := t.TempDir()
	db := open1(t, dir, Options{})
	put(t, db, row("a"))
	files := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if files++; info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil || files < 3 {
		t.Errorf("%d files (%v)", files, err)
	}
}

func TestManyOpenANewDatabaseAtOnce(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			db, err := Open(t.Context(), dir, Options{Check: true})
			if err != nil {
				t.Error(err)
				return
			}
			if err := db.Update(t.Context(), func(tx *Tx) error { return tx.Put(row(fmt.Sprint("s", i)), "1") }); err != nil {
				t.Error(err)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := names(t, open1(t, dir, Options{Check: true}), Filter{}); len(got) != 12 {
		t.Errorf("there are %v", got)
	}
}
