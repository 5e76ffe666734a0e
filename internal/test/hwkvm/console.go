package hwkvm

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"sync"
)

const (
	consoleKept  = 64 << 10 // bytes of console output kept for diagnosis
	consoleLines = 25       // lines of it shown in an error
)

// console keeps the end of what the machine, or QEMU, prints. It is safe for concurrent use.
type console struct {
	mu  sync.Mutex // guards buf and tee
	buf []byte
	tee io.Writer // gets a copy if not nil
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buf = append(c.buf, p...)
	if extra := len(c.buf) - consoleKept; extra > 0 {
		c.buf = append(c.buf[:0], c.buf[extra:]...)
	}
	if c.tee != nil {
		if _, err := c.tee.Write(p); err != nil {
			c.tee = nil // the diagnosis must not suffer from the copy
		}
	}
	return len(p), nil
}

func (c *console) lines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lines []string
	for _, l := range strings.Split(string(bytes.ToValidUTF8(c.buf, []byte("?"))), "\n") {
		if l = strings.TrimRight(l, "\r \t"); l != "" {
			lines = append(lines, l)
		}
	}
	return lines
}

// excerpt returns the lines to show in an error: QEMU's last, and the guest's last or those from a panic on.
func excerpt(guest, qemu []string) string {
	from := max(0, len(guest)-consoleLines)
	for i, l := range guest {
		if strings.Contains(l, markPanic) {
			from = i
			break
		}
	}
	guest = guest[from:min(len(guest), from+consoleLines)]
	qemu = qemu[max(0, len(qemu)-consoleLines):]
	return strings.Join(append(slices.Clone(qemu), guest...), "\n")
}

// Marks in the console output, and what they mean (kernel/panic.c, mm/oom_kill.c, and our init).
const (
	markPanic = "Kernel panic - not syncing"
	markOOM   = "Out of memory: Killed process"
	markInit  = "hwkvm-init: "
)

// lastWith returns the last line that contains mark, from mark on.
func lastWith(lines []string, mark string) string {
	for i := len(lines) - 1; i >= 0; i-- {
		if j := strings.Index(lines[i], mark); j >= 0 {
			return lines[i][j:]
		}
	}
	return ""
}

// diagnose returns a phrase that says why a machine ended before its command.
func diagnose(guest, qemu []string) string {
	if l := lastWith(guest, markPanic); l != "" {
		if oom := lastWith(guest, "Out of memory"); oom != "" {
			return "the kernel inside panicked (" + l + ") after " + oom + "; give it more memory"
		}
		return "the kernel inside panicked: " + l
	}
	if l := lastWith(guest, markInit); l != "" {
		return strings.TrimPrefix(l, markInit)
	}
	for _, l := range slices.Backward(qemu) {
		if !strings.Contains(l, "warning:") {
			return "QEMU failed: " + l
		}
	}
	return "the machine turned itself off, or something killed QEMU"
}
