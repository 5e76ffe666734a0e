package guesttest

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

	"golang.org/x/sys/unix"
)

// User is a user id without rights, processes and files.
const User = 0x70fffff8

// userEnv names the directory of a test that runs as User, until it does.
const userEnv = "DROWSE_TEST_AS_USER"

// helperEnv is hostnet.HelperEnv.
const helperEnv = "DROWSE_NET_SOCKET"

// AsUser runs the calling test once more, in a process of User, who has copies of the images and kernels and may open
// /dev/kvm and /dev/userfaultfd. In that process AsUser returns true. Then the rest of the test is for that process.
func AsUser(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() == User {
		return true
	}
	New(t) // skips the test where there is no state
	dir, err := os.MkdirTemp("", "du")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	carried, err := os.Open(agent(t))
	if err != nil {
		t.Fatal(err)
	}
	defer carried.Close()
	for name, from := range map[string]*os.File{"test": self, "agent": carried} {
		to, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_WRONLY, 0o755)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(to, from)
		if err := errors.Join(err, to.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range []string{"", "tmp", "state", "state/images", "state/kernels", "state/cache"} {
		path := filepath.Join(dir, sub)
		err := os.MkdirAll(path, 0o700)
		if err := errors.Join(err, os.Chown(path, User, User)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "test"), "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir = dir
	cmd.Env = []string{
		userEnv + "=" + dir, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + filepath.Join(dir, "tmp"), "CI=" + os.Getenv("CI"),
		StateEnv + "=" + os.Getenv(StateEnv), AgentEnv + "=" + filepath.Join(dir, "agent"),
		processEnv + "=" + strconv.Itoa(os.Getpid()),
		helperEnv + "=" + os.Getenv(helperEnv),
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	// As reports of this test's own, its lines would confuse.
	t.Logf("as user %d:\n%s", User, strings.ReplaceAll(string(out), "--- ", ""))
	if err != nil {
		t.Error(err)
	}
	return false
}

// becomeUser makes this process one of User if AsUser has started it for that. Only its own namespace of mounts shows
// the images and kernels there, and devices that everybody may open.
func becomeUser() error {
	dir := os.Getenv(userEnv)
	if dir == "" || os.Geteuid() != 0 {
		return nil
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount(MS_PRIVATE)", err)
	}
	devices := filepath.Join(dir, "tmp")
	if err := unix.Mount("drowse", devices, "tmpfs", 0, "mode=0755"); err != nil {
		return os.NewSyscallError("mount(tmpfs)", err)
	}
	binds := map[string]string{}
	for _, sub := range []string{"images", "kernels"} {
		binds[filepath.Join(os.Getenv(StateEnv), sub)] = filepath.Join(dir, "state", sub)
	}
	for _, name := range []string{"kvm", "userfaultfd"} {
		var st unix.Stat_t
		if err := unix.Stat("/dev/"+name, &st); err != nil {
			return fmt.Errorf("/dev/%s: %w", name, err)
		}
		copied := filepath.Join(devices, name)
		if err := errors.Join(unix.Mknod(copied, unix.S_IFCHR, int(st.Rdev)), os.Chmod(copied, 0o666)); err != nil {
			return err
		}
		binds[copied] = "/dev/" + name
	}
	for from, to := range binds {
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting %s at %s: %w", from, to, err)
		}
	}
	if err := unix.Unmount(devices, unix.MNT_DETACH); err != nil { // the devices stay where they are mounted
		return os.NewSyscallError("umount", err)
	}
	for _, err := range []error{
		os.Unsetenv(userEnv), os.Setenv(StateEnv, filepath.Join(dir, "state")),
		syscall.Setgroups(nil), syscall.Setresgid(User, User, User), syscall.Setresuid(User, User, User),
	} {
		if err != nil {
			return err
		}
	}
	// A program that has changed its user cannot be looked at (prctl(2), PR_SET_DUMPABLE). Its successor can.
	return unix.Exec(filepath.Join(dir, "test"), os.Args, os.Environ())
}
