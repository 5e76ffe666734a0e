package proc

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// endOfTransmission is the character that ends input of a terminal in its usual mode: VEOF of termios(3).
const endOfTransmission = 0x04

// openPty opens a pseudo-terminal of the given size and modes for an account. It returns the master, non-blocking,
// for the agent, and the slave for the process.
func openPty(p *agentpb.Pty, a account) (master, slave int, err error) {
	master, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("open a terminal (is devpts mounted?): %w", err)
	}
	if slave, err = openSlave(master, p, a); err != nil {
		unix.Close(master)
		return -1, -1, err
	}
	return master, slave, nil
}

func openSlave(master int, p *agentpb.Pty, a account) (int, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, fmt.Errorf("unlock a terminal: %w", err)
	}
	if err := setWindowSize(master, p.Size); err != nil {
		return -1, err
	}
	if err := setModes(master, p.Modes); err != nil {
		return -1, err
	}
	// TIOCGPTPEER (Linux 4.13) opens the slave without a path: devpts may be mounted anywhere.
	slave, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return -1, fmt.Errorf("open a terminal's other end: %w", errno)
	}
	if a.uid != 0 {
		if err := unix.Fchown(int(slave), int(a.uid), -1); err != nil {
			unix.Close(int(slave))
			return -1, fmt.Errorf("give a terminal to uid %d: %w", a.uid, err)
		}
	}
	return int(slave), nil
}

func setWindowSize(fd int, size *agentpb.WindowSize) error {
	rows, cols := size.GetRows(), size.GetCols()
	if rows == 0 && cols == 0 {
		return nil
	}
	const limit = 1<<16 - 1
	ws := unix.Winsize{Row: uint16(min(rows, limit)), Col: uint16(min(cols, limit))}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &ws); err != nil {
		return fmt.Errorf("set the size of a terminal: %w", err)
	}
	return nil
}
