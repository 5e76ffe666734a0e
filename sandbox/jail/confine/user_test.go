package confine

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// userOfTests has no other processes, and is no id of children.
const userOfTests = FirstID - 7

// userEnv is set in the round of the tests that belongs to a user.
const userEnv = "DROWSE_TEST_CONFINE_USER"

// asUser reports whether the keeper is not root.
func asUser() bool { return os.Geteuid() != 0 }

func rootOnly(t *testing.T) {
	t.Helper()
	if asUser() {
		t.Skip("only root can")
	}
}

// limitedRound waits until this process is in a cgroup that its user may divide.
func limitedRound() {
	if os.Getenv(userEnv) != "" {
		_, _ = io.ReadAll(os.Stdin)
	}
}

// delegate makes a cgroup that belongs to the user of the tests, and returns what moves a process there.
func delegate(t *testing.T) (enter func(pid int)) {
	t.Helper()
	h, err := findHierarchies()
	if err != nil {
		t.Fatal(err)
	}
	procs := map[string]bool{}
	for i, parent := range h.parent {
		if parent == "" {
			continue
		}
		dir := filepath.Join(parent, "drowse-test-"+strconv.Itoa(os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		} else if err == nil {
			t.Cleanup(func() {
				if err := removeCgroup(dir); err != nil {
					t.Error(err)
				}
			})
		}
		for _, name := range []string{"", "cgroup.procs", "tasks", "cgroup.subtree_control"} {
			if err := os.Chown(filepath.Join(dir, name), userOfTests, userOfTests); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
		if h.v2[i] { // children are beside the keeper's
			_ = put(filepath.Join(parent, "cgroup.subtree_control"), "+"+controllerNames[i])
			dir = filepath.Join(dir, "keeper")
			if err := os.Mkdir(dir, 0o755); err == nil {
				t.Cleanup(func() {
					if err := removeCgroup(dir); err != nil {
						t.Error(err)
					}
				})
			}
		}
		procs[filepath.Join(dir, "cgroup.procs")] = true
	}
	return func(pid int) {
		for file := range procs {
			if err := put(file, strconv.Itoa(pid)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestAttack_and_all_else_by_the_child_of_a_user runs the tests of this package once more, as a user without rights.
func TestAttack_and_all_else_by_the_child_of_a_user(t *testing.T) {
	confinable(t)
	rootOnly(t)
	dir, err := os.MkdirTemp("", "confine-user")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chown(dir, userOfTests, userOfTests); err != nil {
		t.Fatal(err)
	}
	enter := delegate(t)
	cmd := exec.Command("/proc/self/exe", "-test.v", "-test.skip=^TestPage")
	cmd.Dir = dir
	cmd.Env = []string{"TMPDIR=" + dir, "PATH=" + os.Getenv("PATH"), userEnv + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: userOfTests, Gid: userOfTests}}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	enter(cmd.Process.Pid)
	in.Close()
	err = cmd.Wait()
	var n [4]int64
	for line := range strings.Lines(out.String()) {
		_, _ = fmt.Sscanf(line, "tried %d, refused %d, allowed by the list %d, gained %d", &n[0], &n[1], &n[2], &n[3])
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "--- ") || strings.HasPrefix(line, "tried") {
			t.Logf("as a user: %s", strings.Replace(line, "--- ", "", 1))
		}
	}
	for i, c := range []interface{ Add(int64) int64 }{&tried, &refused, &permitted, &gained} {
		c.Add(n[i])
	}
	switch {
	case err != nil:
		t.Errorf("%v:\n%s", err, strings.ReplaceAll(out.String(), "--- ", ""))
	case n[0] == 0:
		t.Skipf("this host confines nothing for users:\n%s", strings.ReplaceAll(out.String(), "--- ", ""))
	}
}

func TestStart_gives_the_child_of_a_user_no_shares_and_says_why(t *testing.T) {
	if !asUser() {
		return // the round of a user has this test
	}
	if _, err := Start(t.Context(), Profile{Program: self("share"), Shares: true}); !errors.Is(err, ErrUserShares) {
		t.Errorf("got %v", err)
	}
}

func TestChildren_of_a_user_are_in_different_namespaces_of_users(t *testing.T) {
	confinable(t)
	if !asUser() {
		return // the round of a user has this test
	}
	seen := map[string]bool{}
	for range 2 {
		c, _ := idle(t, Profile{})
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", c.PID()))
		if err != nil || seen[ns] {
			t.Errorf("namespace %s is another child's, %v", ns, err)
		}
		seen[ns] = true
		ids, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", c.PID()))
		if own := strconv.Itoa(os.Getuid()); err != nil || strings.Join(strings.Fields(string(ids)), " ") != own+" "+own+" 1" {
			t.Errorf("its user ids are %s, %v", ids, err)
		}
	}
}

func TestUser_namespace_that_is_forbidden_is_a_missing_wall(t *testing.T) {
	if !asUser() {
		return // the round of a user has this test
	}
	for _, w := range Probe() {
		switch w.Name {
		case "own user id":
			if w.Present || w.Required {
				t.Errorf("%+v", w)
			}
		case "user namespace":
			if !w.Required || w.Present != (probeUser() == nil) {
				t.Errorf("%+v", w)
			}
		}
	}
}

func TestUser_has_a_limit_of_threads_also_without_a_cgroup(t *testing.T) {
	confinable(t)
	if !asUser() {
		return // the round of a user has this test
	}
	_, wait := start(t, Profile{Program: self("threads", strconv.Itoa(userThreads))})
	if out, err := wait(); err == nil || !strings.Contains(out, "failed to create new OS thread") {
		t.Errorf("it has got more threads than its limit: %v, %s", err, out)
	}
}
