package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// userCapabilities are what Enter needs in a namespace of users.
var userCapabilities = []uintptr{unix.CAP_SETPCAP, unix.CAP_SYS_ADMIN}

// enterAsUser gives the child of a keeper that is not root what root has without it: capabilities, in a namespace that
// knows the keeper's user and group id and no other. They stay the child's own, so that it is not 0 even in there. Its
// further groups stay too, since such a namespace has no setgroups(2): they matter for opening files alone.
func enterAsUser(a *syscall.SysProcAttr) {
	a.Cloneflags |= unix.CLONE_NEWUSER
	a.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}}
	a.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}}
	a.AmbientCaps = userCapabilities // the others would be lost by execve(2)
}

// probeUser tries to make a namespace of users, and to use a right in it: some hosts allow the first alone.
func probeUser() error {
	const none = "/dev/null/none" // fails last, with ENOTDIR
	c := &exec.Cmd{Path: none, Args: []string{none}, SysProcAttr: &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Chroot: "/"}}
	enterAsUser(c.SysProcAttr)
	c.SysProcAttr.AmbientCaps = append([]uintptr{unix.CAP_SYS_CHROOT}, userCapabilities...)
	err := c.Start()
	if err == nil {
		return errors.Join(errors.New("a program that does not exist has started"), c.Process.Kill(), c.Wait())
	}
	if errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return err
}

// userThreads is a limit on threads for hosts where a user has no cgroup: in a namespace of users of its own,
// RLIMIT_NPROC counts the child alone (Linux 5.14).
const userThreads = 1024

// userCgroups begins the names of cgroups whose keepers are not root: behind it are user, keeper and a number.
const userCgroups = "drowse-u"

var userCgroupsMade atomic.Int64

// userCgroup returns a name for planCgroup.
func userCgroup() string {
	return fmt.Sprintf("u%d-%d-%d", os.Geteuid(), os.Getpid(), userCgroupsMade.Add(1))
}

// sweepTries bounds the wait for a child whose keeper was killed.
const sweepTries = 40

// sweepUser removes the empty cgroups that killed keepers of this user have left. Their children died with them.
func sweepUser() error {
	h, err := findHierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, parent := range h.parent {
		if parent == "" {
			continue
		}
		all, err := filepath.Glob(filepath.Join(parent, userCgroups+strconv.Itoa(os.Geteuid())+"-*"))
		if err != nil {
			return err
		}
		for _, dir := range all {
			f := strings.Split(filepath.Base(dir), "-")
			pid, err := strconv.Atoi(f[2])
			if err != nil || len(f) != 4 || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
				continue
			}
			// The child's end may take a moment. One that stays has a keeper that only a container sees.
			err = os.Remove(dir)
			for n := 0; errors.Is(err, unix.EBUSY) && n < sweepTries; n++ {
				time.Sleep(removePause)
				err = os.Remove(dir)
			}
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
				errs = append(errs, fmt.Errorf("removing the cgroup of a confined process: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}
