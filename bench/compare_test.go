package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCompare_measures_in_turn_and_gives_ratios(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	// Each run is slower than the one before; the new build takes half of what the old one does.
	build := func(name string, factor int, more string) Build {
		path := filepath.Join(dir, name)
		script := fmt.Sprintf(`#!/bin/sh
echo %[1]s "$@" >> %[2]s
n=$(grep -c ^%[1]s %[2]s)
printf '{"rows":[{"name":"x","params":{"memory_mib":256},"unit":"ms","n":3,"p50":0,"histogram":[[%%d,2],[%%d,1]]}%[4]s]}' $((n*%[3]d)) $((n*%[3]d*10))
`, name, log, factor, more)
		if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
		return Build{path, filepath.Join(dir, "state-"+name)}
	}
	old, current := build("old", 20, ""), build("new", 10, `,{"name":"y","params":{},"unit":"ms","n":1,"p50":5},{"name":"z","unit":"ms","skipped":"no"}`)
	rows, err := Compare(t.Context(), old, current, []string{"x", "--runs", "3"}, 2, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := WriteCompared(&text, rows); err != nil {
		t.Fatal(err)
	}
	if len(rows) < 2 || rows[len(rows)-1].Ratio != 0 || rows[len(rows)-1].Old.N != 0 || rows[len(rows)-1].New.P50 != 5 {
		t.Errorf("the row of one build: %s", text.String())
	}
	if rows[0].Ratio != 0.5 || rows[0].RatioLow != 0.5 || rows[0].RatioHigh != 0.5 || rows[0].Old.N == 0 {
		t.Errorf("the row of both: %+v", rows[0])
	}
	if !strings.Contains(text.String(), "0.50 to 0.50") {
		t.Errorf("no ratios in %s", text.String())
	}
	said, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	args := " bench -o json x --runs 3\n"
	line := func(b Build) string { return filepath.Base(b.Program) + " --state " + b.State + args }
	if want := line(old) + line(current) + line(current) + line(old); string(said) != want {
		t.Errorf("it ran\n%swant\n%s", said, want)
	}
}

func TestCompare_of_a_build_that_fails_says_what_it_said(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drowse")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho no kernel >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Compare(t.Context(), Build{path, "s"}, Build{path, "s"}, []string{"x"}, 1, func(string) {}); err == nil || !strings.Contains(err.Error(), "no kernel") {
		t.Errorf("got %v", err)
	}
}
