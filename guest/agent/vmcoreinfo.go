package agent

import (
	"fmt"
	"os"
	"strings"
)

// vmcoreinfo returns where the kernel describes itself, or zeros if it does not. It also returns zeros where the
// kernel checks free pages for a pattern: snapshots have to store them there.
func vmcoreinfo() (at, size uint64) {
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil || strings.Contains(string(cmdline), "page_poison") || strings.Contains(string(cmdline), "debug_pagealloc") {
		return 0, 0
	}
	// The kernel prints "%pa %x\n".
	text, err := os.ReadFile("/sys/kernel/vmcoreinfo")
	if err != nil {
		return 0, 0
	}
	if n, err := fmt.Sscanf(string(text), "0x%x %x\n", &at, &size); n != 2 || err != nil {
		return 0, 0
	}
	return at, size
}
