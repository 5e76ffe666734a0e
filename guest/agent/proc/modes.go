package proc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// errModes means that the bytes are not encoded terminal modes.
var errModes = errors.New("not encoded terminal modes (RFC 4254, section 8)")

// Opcodes of RFC 4254, section 8, that are neither a character nor a flag.
const (
	modeEnd        = 0
	modeFirstOther = 160 // opcodes from here on have arguments of unknown size; they end the list
)

// controlChars maps opcodes to the index of their character in c_cc. Linux has no VDSUSP (11), VFLUSH (15) or
// VSTATUS (17); VSWTCH (16) is its VSWTC.
var controlChars = map[byte]int{
	1: unix.VINTR, 2: unix.VQUIT, 3: unix.VERASE, 4: unix.VKILL, 5: unix.VEOF, 6: unix.VEOL, 7: unix.VEOL2,
	8: unix.VSTART, 9: unix.VSTOP, 10: unix.VSUSP, 12: unix.VREPRINT, 13: unix.VWERASE, 14: unix.VLNEXT,
	16: unix.VSWTC, 18: unix.VDISCARD,
}

// inputFlags, localFlags and outputFlags map opcodes to bits of termios. ctrlFlags maps them to the bits to set
// and the mask to clear first.
var (
	inputFlags = map[byte]uint32{
		30: unix.IGNPAR, 31: unix.PARMRK, 32: unix.INPCK, 33: unix.ISTRIP, 34: unix.INLCR, 35: unix.IGNCR, 36: unix.ICRNL,
		37: unix.IUCLC, 38: unix.IXON, 39: unix.IXANY, 40: unix.IXOFF, 41: unix.IMAXBEL, 42: unix.IUTF8,
	}
	localFlags = map[byte]uint32{
		50: unix.ISIG, 51: unix.ICANON, 52: unix.XCASE, 53: unix.ECHO, 54: unix.ECHOE, 55: unix.ECHOK, 56: unix.ECHONL,
		57: unix.NOFLSH, 58: unix.TOSTOP, 59: unix.IEXTEN, 60: unix.ECHOCTL, 61: unix.ECHOKE, 62: unix.PENDIN,
	}
	outputFlags = map[byte]uint32{
		70: unix.OPOST, 71: unix.OLCUC, 72: unix.ONLCR, 73: unix.OCRNL, 74: unix.ONOCR, 75: unix.ONLRET,
	}
	ctrlFlags = map[byte]struct{ set, mask uint32 }{
		90: {unix.CS7, unix.CSIZE}, 91: {unix.CS8, unix.CSIZE}, 92: {unix.PARENB, unix.PARENB}, 93: {unix.PARODD, unix.PARODD},
	}
)

// vdisable is _POSIX_VDISABLE, which disables a character. The protocol says 255 for that.
const vdisable = 0

// applyModes changes t as encoded terminal modes say. It skips what Linux does not know, and speeds, which mean
// nothing to a pseudo-terminal.
func applyModes(t *unix.Termios, p []byte) error {
	if len(p) > agentpb.MaxTerminalModes {
		return fmt.Errorf("%w: %d bytes, at most %d", errModes, len(p), agentpb.MaxTerminalModes)
	}
	flag := func(field *uint32, set, mask uint32, on bool) {
		if on {
			*field = *field&^mask | set
		} else {
			*field &^= set
		}
	}
	for len(p) > 0 && p[0] != modeEnd && p[0] < modeFirstOther {
		if len(p) < 5 {
			return fmt.Errorf("%w: they end within one", errModes)
		}
		op, v := p[0], binary.BigEndian.Uint32(p[1:])
		p = p[5:]
		if i, ok := controlChars[op]; ok {
			if v >= 255 {
				v = vdisable
			}
			t.Cc[i] = byte(v)
		} else if bit, ok := inputFlags[op]; ok {
			flag(&t.Iflag, bit, bit, v != 0)
		} else if bit, ok := localFlags[op]; ok {
			flag(&t.Lflag, bit, bit, v != 0)
		} else if bit, ok := outputFlags[op]; ok {
			flag(&t.Oflag, bit, bit, v != 0)
		} else if c, ok := ctrlFlags[op]; ok && (v != 0 || c.mask != unix.CSIZE) { // a size cannot be cleared
			flag(&t.Cflag, c.set, c.mask, v != 0)
		}
	}
	return nil
}

// setModes applies encoded terminal modes to a terminal.
func setModes(fd int, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return fmt.Errorf("read the modes of a terminal: %w", err)
	}
	if err := applyModes(t, p); err != nil {
		return err
	}
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, t); err != nil {
		return fmt.Errorf("set the modes of a terminal: %w", err)
	}
	return nil
}
