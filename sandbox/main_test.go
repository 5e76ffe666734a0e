package sandbox_test

import (
	"os"
	"testing"

	"github.com/drowse-vm/drowse/internal/guesttest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == lifeArg {
		os.Exit(lifeProcess(os.Args[2], os.Args[3]))
	}
	guesttest.Main(m)
}
