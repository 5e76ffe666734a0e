// Command testreport turns the output of `go test -json` into what people read: a line
// for each package as soon as it is done, and for each test that took long, all that was
// printed by a package that has failed, every test that was skipped, with its reason, and
// how each test named TestAttack... has ended, which does what an attacker would do.
// When the tests are ended from outside, it says what those that had not finished have
// printed: it does not heed SIGINT and SIGTERM, but goes on to the end of its input.
//
// Its exit status is 1 if a test has failed or if nothing was tested. With $CI set
// it is 1 as well if a test was skipped: a machine for checking changes
// must have everything that tests need, or else a change can break what nobody sees.
// A test that cannot run there for a reason that lies in itself is named with -allow.
// One that says that there is no /dev/kvm is believed on a machine that has none, where
// .ci/run has guests run on an emulated KVM.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// event is a line of `go test -json`, see `go doc test2json`.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// Bounds on what is kept: the last lines of a test, and of a package.
const (
	maxLine  = 1 << 20
	maxLines = 20_000
)

// slow is how long a test takes that gets a line of its own.
const slow = 20 * time.Second

// attack begins the names of tests that do what an attacker would do; attackEnds says what came of it.
const attack = "TestAttack"

var attackEnds = map[string]string{"pass": "attack held off", "fail": "ATTACK SUCCEEDED", "skip": "attack not tried"}

type skip struct{ name, reason string }

type report struct {
	w       io.Writer
	allow   *regexp.Regexp // nil allows none
	noKVM   bool           // the machine has no /dev/kvm
	output  map[string][]string
	running map[string]bool
	tests   map[string]int // by package
	passed  int
	failed  []string
	skipped []skip
	attacks []string // how each has ended
	tested  int      // packages with tests
}

func main() {
	allow := flag.String("allow", "", "`regexp` of tests, as package.Test, that may be skipped even with $CI set")
	flag.Parse()
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM)
	_, err := os.Stat(kvmDevice)
	os.Exit(run(os.Stdin, os.Stdout, *allow, os.Getenv("CI") != "", errors.Is(err, os.ErrNotExist)))
}

const kvmDevice = "/dev/kvm"

func run(in io.Reader, w io.Writer, allow string, strict, noKVM bool) int {
	r := &report{w: w, noKVM: noKVM, output: map[string][]string{}, running: map[string]bool{}, tests: map[string]int{}}
	if allow != "" {
		re, err := regexp.Compile(allow)
		if err != nil {
			fmt.Fprintln(w, "testreport:", err)
			return 2
		}
		r.allow = re
	}
	if err := r.read(in); err != nil {
		fmt.Fprintln(w, "testreport: reading the output of go test:", err)
		return 1
	}
	return r.finish(strict)
}

func (r *report) read(in io.Reader) error {
	br := bufio.NewReader(in)
	for {
		line, err := br.ReadString('\n')
		if len(line) > maxLine {
			line = line[:maxLine] + "...\n"
		}
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				fmt.Fprint(r.w, line) // not of a test: go itself
			} else {
				r.take(e)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) take(e event) {
	key := e.Package
	if e.ImportPath != "" {
		key = e.ImportPath // building
	}
	if e.Test != "" {
		key += "." + e.Test
	}
	switch e.Action {
	case "output", "build-output":
		if lines := r.output[key]; len(lines) < maxLines {
			r.output[key] = append(lines, e.Output)
		}
		return
	case "start", "run":
		r.running[key] = true
		return
	case "build-fail":
		r.print(key)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	delete(r.running, key)
	if e.Test != "" {
		r.test(e, key)
		return
	}
	switch {
	case e.Action == "fail":
		r.failed = append(r.failed, e.Package)
		r.print(key)
		fmt.Fprintf(r.w, "FAIL  %s  %v\n", e.Package, e.elapsed())
	case r.tests[e.Package] > 0:
		r.tested++
		fmt.Fprintf(r.w, "ok    %s  %v, %d tests\n", e.Package, e.elapsed(), r.tests[e.Package])
	}
	delete(r.output, key)
}

func (e event) elapsed() time.Duration {
	return time.Duration(e.Elapsed * float64(time.Second)).Round(10 * time.Millisecond)
}

func (r *report) test(e event, key string) {
	top := !strings.Contains(e.Test, "/")
	if top {
		r.tests[e.Package]++
		if strings.HasPrefix(e.Test, attack) {
			r.attacks = append(r.attacks, fmt.Sprintf("%s  %s", attackEnds[e.Action], key))
		}
		if e.elapsed() >= slow {
			fmt.Fprintf(r.w, "%s  %s  %v\n", e.Action, key, e.elapsed())
		}
	}
	switch e.Action {
	case "pass":
		if top {
			r.passed++
		}
	case "fail":
		r.failed = append(r.failed, key)
		r.print(key)
	case "skip":
		r.skipped = append(r.skipped, skip{key, reason(r.output[key])})
	}
	delete(r.output, key)
}

// reason is what a test said when it was skipped.
func reason(lines []string) string {
	for _, l := range lines {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "===") && !strings.HasPrefix(l, "---") {
			return l
		}
	}
	return "no reason given"
}

func (r *report) print(key string) {
	for _, l := range r.output[key] {
		fmt.Fprint(r.w, l)
	}
	delete(r.output, key)
}

func (r *report) finish(strict bool) int {
	unfinished := slices.Sorted(maps.Keys(r.running))
	for _, key := range unfinished {
		fmt.Fprintf(r.w, "UNFINISHED  %s\n", key)
		r.print(key)
	}
	for _, a := range slices.Sorted(slices.Values(r.attacks)) {
		fmt.Fprintln(r.w, a)
	}
	refused := 0
	for _, s := range r.skipped {
		word := "skip"
		allowed := r.allow != nil && r.allow.MatchString(s.name) || r.noKVM && strings.Contains(s.reason, kvmDevice)
		if strict && !allowed {
			word = "SKIP"
			refused++
		}
		fmt.Fprintf(r.w, "%s  %s: %s\n", word, s.name, s.reason)
	}
	fmt.Fprintf(r.w, "%d tests passed in %d packages, %d failed, %d skipped\n", r.passed, r.tested, len(r.failed), len(r.skipped))
	switch {
	case len(r.failed) > 0 || len(unfinished) > 0:
		for _, name := range r.failed {
			fmt.Fprintln(r.w, "failed:", name)
		}
		return 1
	case r.tested == 0:
		fmt.Fprintln(r.w, "nothing was tested")
		return 1
	case refused > 0:
		fmt.Fprintf(r.w, "%d tests were skipped, which counts as failure here ($CI is set)\n", refused)
		return 1
	}
	return 0
}
