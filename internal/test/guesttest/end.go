package guesttest

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// processEnv holds the PID of the process that this one must not outlive: make, for a test; the test, for its
// children. It does not begin with DROWSE_, so hwkvm does not pass it on: the PID means nothing in a guest.
const processEnv = "GUESTTEST_PROCESS"

// endedStatus is the exit status of a process that ends with its test.
const endedStatus = 3

// EndWithTest ends this process when its test's process has ended for any reason. The end of the parent does not
// show that: a VM's process has its own session, and tests kill processes that start VMs. Main calls it. A test
// binary that was started for another purpose must call it first.
func EndWithTest() { endWith(os.Getenv(processEnv)) }

func endWith(process string) {
	pid, err := strconv.Atoi(process)
	if err != nil {
		return // a test that was started by hand
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		os.Exit(endedStatus)
	}
	if err != nil {
		return // a kernel before 5.3, or a filter of system calls: the test runs without this protection
	}
	go func() {
		// A pidfd is readable when its process has ended (pidfd_open(2)).
		for {
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != unix.EINTR {
				os.Exit(endedStatus)
			}
		}
	}()
}
