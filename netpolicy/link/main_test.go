package link_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	. "github.com/drowse-vm/drowse/netpolicy/link"
)

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		os.Exit(helper())
	}
	before := openFiles()
	code := m.Run()
	if oneEngine != nil {
		oneEngine.Close()
	}
	if err := CloseTestPrograms(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	// The process opens these once: the kernel's BTF, epoll and its event.
	if after := openFiles(); code == 0 && after > before+6 {
		fmt.Fprintf(os.Stderr, "%d files were open at the start, %d at the end\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(entries)
}
