package guestmem

import "golang.org/x/sys/unix"

func mincore(mem, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, addressOf(mem), uintptr(len(mem)), addressOf(vec))
	if errno != 0 {
		return errno
	}
	return nil
}
