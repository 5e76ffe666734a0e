package sandbox_test

import (
	"os"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == lifeArg {
		guesttest.EndWithTest()
		os.Exit(lifeProcess(os.Args[2], os.Args[3]))
	}
	guesttest.Process.HostHooks = []hosthooks.Func{{Name: "notes", Run: noteInProcess}}
	guesttest.Main(m)
}
