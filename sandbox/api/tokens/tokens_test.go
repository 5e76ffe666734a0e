package tokens

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestTokens_are_read_strictly(t *testing.T) {
	sum := strings.Repeat("ab", sha256.Size)
	for name, tc := range map[string]struct {
		text string
		n    int
		ok   bool
	}{
		"empty":             {"", 0, true},
		"comments":          {"# a\n\n  # b\n", 0, true},
		"two":               {"a " + sum + " read\nb " + sum + " write\n", 2, true},
		"no end of line":    {"a " + sum + " read", 1, true},
		"no scope":          {"a " + sum, 0, false},
		"a field too many":  {"a " + sum + " read x", 0, false},
		"another scope":     {"a " + sum + " all", 0, false},
		"scopes":            {"a " + sum + " admin,read", 1, true},
		"an empty scope":    {"a " + sum + " read,", 0, false},
		"all of it":         {"a " + sum + " exec owner=a+%C3%A9 expires=2030-01-01T00:00:00Z rate=5", 1, true},
		"an owner, admin":   {"a " + sum + " admin owner=o", 0, false},
		"no owner":          {"a " + sum + " exec owner=", 0, false},
		"a bad owner":       {"a " + sum + " exec owner=%0a", 0, false},
		"a bad rate":        {"a " + sum + " exec rate=-1", 0, false},
		"a bad time":        {"a " + sum + " exec expires=tomorrow", 0, false},
		"a short hash":      {"a abcd read", 0, false},
		"no hash":           {"a " + strings.Repeat("zz", sha256.Size) + " read", 0, false},
		"a name twice":      {"a " + sum + " read\na " + sum + " write", 0, false},
		"a name with slash": {"a/b " + sum + " read", 0, false},
		"too large":         {strings.Repeat("#\n", 600<<10), 0, false},
	} {
		path := filepath.Join(t.TempDir(), "tokens")
		if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := Open(path).Read()
		if (err == nil) != tc.ok || len(got) != tc.n || err != nil && !errors.Is(err, ErrTokens) {
			t.Errorf("%s: %d tokens, %v", name, len(got), err)
		}
	}
}

func TestTokens_the_file_has_hashes_and_is_its_owners_alone(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "tokens"))
	token, err := f.Create(Token{Name: "a", Scopes: All()})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(f.Path())
	if err != nil || strings.Contains(string(text), token) || string(text) != fmt.Sprintf("a %x read,exec,files,create,admin\n", sha256.Sum256([]byte(token))) {
		t.Errorf("it says %q, %v", text, err)
	}
	if st, err := os.Stat(f.Path()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("it is %v, %v", st.Mode(), err)
	}
	if _, err := f.Create(Token{Name: "a", Scopes: Scopes{ScopeRead}}); !errors.Is(err, ErrTokens) {
		t.Errorf("a name twice: %v", err)
	}
	if err := f.Remove("b"); !errors.Is(err, ErrTokens) {
		t.Errorf("one that is not there: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(f.Path(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(link).Read(); !errors.Is(err, ErrTokens) {
		t.Errorf("a symbolic link: %v", err)
	}
}

func TestTokens_one_more_than_there_may_be_is_refused(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), File))
	line := func(i int) string { return fmt.Sprintf("t%d %x read\n", i, sha256.Sum256([]byte(fmt.Sprint(i)))) }
	var file strings.Builder
	for i := range Max - 1 {
		file.WriteString(line(i))
	}
	write := func() {
		t.Helper()
		if err := os.WriteFile(f.Path(), []byte(file.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if _, err := f.Create(Token{Name: "last", Scopes: Scopes{ScopeRead}}); err != nil {
		t.Fatalf("token %d: %v", Max, err)
	}
	if _, err := f.Create(Token{Name: "one-more", Scopes: Scopes{ScopeRead}}); !errors.Is(err, ErrTokens) {
		t.Errorf("token %d: %v, want ErrTokens", Max+1, err)
	}
	if all, err := f.Read(); err != nil || len(all) != Max {
		t.Errorf("%d tokens, %v", len(all), err)
	}
	for i := range 2 {
		file.WriteString(line(Max + i))
	}
	write()
	if _, err := f.Read(); !errors.Is(err, ErrTokens) {
		t.Errorf("a file with one more: %v, want ErrTokens", err)
	}
}

func TestTokens_come_back_as_they_were_made_and_old_files_are_kept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	old := fmt.Sprintf("w %x write\nr %x read\n", sha256.Sum256([]byte("w")), sha256.Sum256([]byte("r")))
	if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	f := Open(path)
	want := Token{Name: "x", Scopes: Scopes{ScopeExec, ScopeFiles}, Owner: "a b=c é%", Expires: time.Now().Add(time.Hour).UTC().Truncate(time.Second), Rate: 3}
	secret, err := f.Create(want)
	if err != nil {
		t.Fatal(err)
	}
	want.Hash = sha256.Sum256([]byte(secret))
	if got, err := f.Find(secret); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if got, err := f.Find("w"); err != nil || !reflect.DeepEqual(got.Scopes, All()) {
		t.Errorf("one of an old file may %s, %v", got.Scopes, err)
	}
	if got, err := f.Find("r"); err != nil || got.Scopes.Has(ScopeExec) || !got.Scopes.Has(ScopeRead) {
		t.Errorf("one of an old file may %s, %v", got.Scopes, err)
	}
	if _, err := f.Find("R"); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
}

func TestTokens_end_at_their_time_and_when_removed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	f := Open(path)
	over := fmt.Sprintf("x %x read expires=2020-01-01T00:00:00Z\ny %x read\n", sha256.Sum256([]byte("x")), sha256.Sum256([]byte("y")))
	if err := os.WriteFile(path, []byte(over), 0o600); err != nil {
		t.Fatal(err)
	}
	is, err := f.Find("x")
	if !errors.Is(err, ErrExpired) || is.Name != "x" {
		t.Errorf("%+v, %v", is, err)
	}
	if err := f.Valid(is); !errors.Is(err, ErrExpired) {
		t.Error(err)
	}
	y, err := f.Find("y")
	if err != nil || f.Valid(y) != nil {
		t.Error(err)
	}
	if err := f.Remove("y"); err != nil {
		t.Fatal(err)
	}
	if err := f.Valid(y); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
	if _, err := f.Create(Token{Name: "z", Scopes: All(), Expires: time.Now().Add(-time.Second)}); !errors.Is(err, ErrTokens) {
		t.Error(err)
	}
}

func TestTokens_have_as_many_requests_as_their_rate_and_no_other_pays_for_it(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "tokens"))
	slow, err := f.Create(Token{Name: "slow", Scopes: All(), Rate: 2})
	if err != nil {
		t.Fatal(err)
	}
	free, err := f.Create(Token{Name: "free", Scopes: All()})
	if err != nil {
		t.Fatal(err)
	}
	limited := 0
	for range 1000 {
		if _, wait, err := f.Admit(slow); errors.Is(err, ErrRate) {
			if limited++; wait <= 0 || wait > time.Second {
				t.Fatalf("wait %v", wait)
			}
		} else if err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.Admit(free); err != nil {
			t.Fatal(err)
		}
	}
	if limited == 0 {
		t.Error("1000 requests at once are no more than two a second")
	}
}

func FuzzTokens(f *testing.F) {
	f.Add([]byte("a " + strings.Repeat("ab", 32) + " read,exec owner=x expires=2030-01-01T00:00:00Z rate=1\n"))
	f.Add([]byte("# comment\na " + strings.Repeat("ab", 32) + " write"))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := parseTokens(text)
		if err != nil {
			return
		}
		var again strings.Builder
		for _, one := range all {
			if one.Owner != "" && one.Scopes.Has(ScopeAdmin) {
				t.Fatalf("%+v", one)
			}
			again.WriteString(one.line())
		}
		second, err := parseTokens([]byte(again.String()))
		if err != nil || len(second) != len(all) {
			t.Fatalf("%q is written as %q: %v", text, again.String(), err)
		}
		for i := range all {
			if all[i].line() != second[i].line() {
				t.Fatalf("%q, then %q", all[i].line(), second[i].line())
			}
		}
	})
}
