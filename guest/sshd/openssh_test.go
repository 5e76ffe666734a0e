package sshd_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func exitCode(err error) int {
	if e, ok := err.(*exec.ExitError); ok {
		return e.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

func TestOpenSSH_commands_have_streams_and_status(t *testing.T) {
	h := start(t)
	out, errs, err := h.run(t, "in\n", "ssh", "vm", "cat; echo out; echo err >&2; exit 7")
	if out != "in\nout\n" || errs != "err\n" || exitCode(err) != 7 {
		t.Errorf("got %q, %q, %v", out, errs, err)
	}
	if out := h.must(t, "", "ssh", "vm", "--", "echo", "'a  b'", "$HOME"); !strings.HasPrefix(out, "a  b /") {
		t.Errorf("got %q", out)
	}
	// ssh exits with status 255 if a signal has ended the command.
	if _, _, err := h.run(t, "", "ssh", "vm", "kill -9 $$"); exitCode(err) != 255 {
		t.Errorf("a command that a signal has ended: %v", err)
	}
	if _, errs, err := h.run(t, "", "ssh", "vm", "no-such-command"); exitCode(err) != 127 || !strings.Contains(errs, "not found") {
		t.Errorf("got %q, %v", errs, err)
	}
	if out := h.must(t, "", "ssh", "-tt", "vm", "tty; stty size"); !strings.Contains(out, "/dev/pts/") {
		t.Errorf("with a terminal: %q", out)
	}
	if out := h.must(t, "echo $0; exit\n", "ssh", "vm"); !strings.HasPrefix(out, "-") {
		t.Errorf("a shell calls itself %q, want a login shell", out)
	}
	if _, errs, err := h.run(t, "", "ssh", "-l", "nobody-at-all", "vm", "true"); exitCode(err) != 255 || !strings.Contains(errs, "nobody-at-all") {
		t.Errorf("an unknown user: %q, %v", errs, err)
	}
}

func TestOpenSSH_sftp_has_the_rights_of_its_user(t *testing.T) {
	h := start(t)
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	sftp := func(batch string) error {
		_, _, err := h.run(t, batch+"\n", "sftp", "-b", "-", "nobody@vm")
		return err
	}
	// All users must be able to pass through t.TempDir's parents.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := sftp("put " + file + " " + open + "/mine"); err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(open+"/mine", &st); err != nil || st.Uid == 0 {
		t.Errorf("the file belongs to uid %d, %v", st.Uid, err)
	}
	for _, batch := range []string{"get " + file + " " + dir + "/stolen", "put " + file + " " + dir + "/denied", "chown 0 " + open + "/mine"} {
		if sftp(batch) == nil {
			t.Errorf("%q succeeds", batch)
		}
	}
}

func TestOpenSSH_a_VM_that_sleeps_ends_the_session_without_a_status(t *testing.T) {
	h := start(t)
	cmd := exec.CommandContext(t.Context(), "ssh", "-F", h.config, "vm", "echo up; exec sleep 1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	h.guest.Cut()
	if err := cmd.Wait(); exitCode(err) != 255 {
		t.Errorf("got %v, want 255", err)
	}
}

// tree makes files of many kinds.
func tree(t *testing.T, dir string) {
	t.Helper()
	big := make([]byte, 5<<20+3)
	rand.NewChaCha8([32]byte{9}).Read(big)
	for name, text := range map[string][]byte{"empty": nil, "small": []byte("text\n"), "sub/big": big, "sub/a b ü": []byte("x"), "sub/deeper/exec": []byte("#!/bin/sh\n")} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		when := time.Unix(1_600_000_000, 0)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "sub/deeper/exec"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// same compares two trees: names, modes, sizes, times and contents.
func same(t *testing.T, a, b string) {
	t.Helper()
	list := func(dir string) string {
		out, err := exec.Command("sh", "-c", `cd "$1" && find . -type f -printf '%P %m %s %T@\n' | sort && find . -type f -print0 | sort -z | xargs -0 sha256sum`, "sh", dir).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if x, y := list(a), list(b); x != y {
		t.Errorf("the trees differ:\n%s\n%s", x, y)
	}
}

func TestOpenSSH_scp_copies_trees_both_ways(t *testing.T) {
	h := start(t)
	dir := t.TempDir()
	tree(t, filepath.Join(dir, "src"))
	h.must(t, "", "scp", "-s", "-rpq", filepath.Join(dir, "src"), "vm:"+dir+"/in")
	same(t, filepath.Join(dir, "src"), filepath.Join(dir, "in"))
	h.must(t, "", "scp", "-s", "-rpq", "vm:"+dir+"/in", filepath.Join(dir, "out"))
	same(t, filepath.Join(dir, "src"), filepath.Join(dir, "out"))
	if _, errs, err := h.run(t, "", "scp", "-s", "-q", "vm:/nowhere", dir); err == nil || !strings.Contains(errs, "No such file") {
		t.Errorf("a file that does not exist: %q, %v", errs, err)
	}
	// The old protocol runs scp in the guest.
	h.must(t, "", "scp", "-O", "-rpq", filepath.Join(dir, "src"), "vm:"+dir+"/old")
	same(t, filepath.Join(dir, "src"), filepath.Join(dir, "old"))
}

func TestOpenSSH_sftp_does_what_its_commands_say(t *testing.T) {
	h := start(t)
	dir := t.TempDir()
	tree(t, filepath.Join(dir, "src"))
	batch := fmt.Sprintf(`lcd %[1]s
cd %[1]s
mkdir made
put -Rp src made
rename made/src/small made/src/renamed
symlink renamed made/src/link
ln made/src/renamed made/src/hard
chmod 600 made/src/empty
mkdir made/gone
rmdir made/gone
rm made/src/hard
ls -la made/src
df made
pwd
get -Rp made/src back
reget made/src/sub/big again
`, dir)
	out := h.must(t, batch, "sftp", "-b", "-", "vm")
	for _, want := range []string{"renamed", "lrwxrwxrwx", "-rw-------", "Remote working directory: " + dir} {
		if !strings.Contains(out, want) {
			t.Errorf("the output has no %q: %s", want, out)
		}
	}
	if target, err := os.Readlink(filepath.Join(dir, "made/src/link")); err != nil || target != "renamed" {
		t.Errorf("the link: %q, %v", target, err)
	}
	a, _ := os.ReadFile(filepath.Join(dir, "src/sub/big"))
	for _, name := range []string{"back/sub/big", "again"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	for _, bad := range []string{"rename %[1]s/src/small %[1]s/src/empty/x", "chmod 644 %[1]s/nothing"} {
		if _, _, err := h.run(t, fmt.Sprintf(bad, dir)+"\n", "sftp", "-b", "-", "vm"); err == nil {
			t.Errorf("%q succeeds", bad)
		}
	}
}

func TestOpenSSH_rsync_copies_trees_both_ways_and_then_only_what_has_changed(t *testing.T) {
	h := start(t)
	dir := t.TempDir()
	tree(t, filepath.Join(dir, "src"))
	h.must(t, "", "rsync", "-a", filepath.Join(dir, "src")+"/", "vm:"+dir+"/in/")
	same(t, filepath.Join(dir, "src"), filepath.Join(dir, "in"))
	h.must(t, "", "rsync", "-a", "vm:"+dir+"/in/", filepath.Join(dir, "out")+"/")
	same(t, filepath.Join(dir, "src"), filepath.Join(dir, "out"))
	if err := os.WriteFile(filepath.Join(dir, "src/small"), []byte("changed\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := h.must(t, "", "rsync", "-ai", "--delete", filepath.Join(dir, "src")+"/", "vm:"+dir+"/in/"); strings.Count(out, "<f") != 1 {
		t.Errorf("sent: %q", out)
	}
}

func TestOpenSSH_W_reaches_a_port(t *testing.T) {
	h := start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		fmt.Fprintln(c, "hello")
		c.Close()
	}()
	if out := h.must(t, "", "ssh", "-W", l.Addr().String(), "vm"); out != "hello\n" {
		t.Errorf("got %q", out)
	}
	if _, _, err := h.run(t, "", "ssh", "-W", "127.0.0.1:1", "vm"); err == nil {
		t.Error("a port at which nobody listens")
	}
}
