package guest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

// promoterEnv tells the process of TestPromote_in_a_process where the agent is, what to promote, and where to.
const promoterEnv = "DROWSE_TEST_PROMOTER"

// TestPromote_in_a_process is the process that TestPromote_of_a_process_that_is_killed kills.
func TestPromote_in_a_process(t *testing.T) {
	words := strings.Split(os.Getenv(promoterEnv), ":")
	if len(words) != 4 {
		return // the environment is set only by the other test
	}
	c, err := guest.Dial(context.Background(), guest.UnixDialer(words[0]))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("begins")
	for {
		if _, err := promote(t, c, guest.Promotion{Path: words[1], Dir: words[2]}, guest.Promotion{Path: words[1], Dir: words[3]}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPromote_of_a_process_that_is_killed_leaves_whole_copies_or_none(t *testing.T) {
	v := startVM(t)
	in, hosts := t.TempDir(), []string{t.TempDir(), t.TempDir()}
	const files = 30
	whole := map[string]string{}
	for i := range files {
		name := fmt.Sprintf("d%d/f%d", i%3, i)
		whole[name] = strings.Repeat(name, 1+i*200)
		p := filepath.Join(in, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(whole[name]), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	// check counts the copies, which must be whole, and the parts left without a final name. It removes the
	// copies.
	check := func() (copies, parts int) {
		t.Helper()
		for _, host := range hosts {
			for _, at := range entries(t, filepath.Join(host, "vm")) {
				if strings.HasPrefix(at, ".part-") {
					parts++
					continue
				}
				copies++
				dir := filepath.Join(host, "vm", at)
				got := names(t, filepath.Join(dir, in))
				if len(got) != files || len(names(t, dir)) != files {
					t.Errorf("a copy has %d files, want %d", len(got), files)
				}
				for _, name := range got {
					if b, err := os.ReadFile(filepath.Join(dir, in, name)); err != nil || string(b) != whole[name] {
						t.Errorf("%s has %d bytes, want %d: %v", name, len(b), len(whole[name]), err)
					}
				}
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
		}
		return copies, parts
	}
	copies, parts, kills := 0, 0, 15
	for range kills {
		p := exec.Command(os.Args[0], "-test.run=^TestPromote_in_a_process$")
		p.Env = append(os.Environ(), promoterEnv+"="+strings.Join([]string{v.path, in, hosts[0], hosts[1]}, ":"))
		out, err := p.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		// The process has begun: from here on the test may kill it at any moment.
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Errorf("a process that promotes has ended: %v", err)
		}
		time.Sleep(rand.N(250 * time.Millisecond))
		if err := p.Process.Kill(); err != nil {
			t.Error(err)
		}
		if err := p.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("it has ended by itself: %v", err)
		}
		n, left := check()
		copies, parts = copies+n, parts+left
	}
	t.Logf("%d kills left %d copies, and %d that are not whole", kills, copies, parts)
	c := v.dial(t)
	if _, err := promote(t, c, guest.Promotion{Path: in, Dir: hosts[0]}, guest.Promotion{Path: in, Dir: hosts[1]}); err != nil {
		t.Fatal(err)
	}
	if n, left := check(); n != 2 || left != 0 {
		t.Errorf("after the next one there are %d copies and %d that are not whole, want 2 and 0", n, left)
	}
}
