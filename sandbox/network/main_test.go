package network

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asKeeper is what the test's program is started as to be killed.
const asKeeper = "keeper"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == asKeeper {
		fmt.Fprintln(os.Stderr, keepUntilKilled())
		os.Exit(1)
	}
	if len(os.Args) == 3 && os.Args[1] == asHelper {
		fmt.Fprintln(os.Stderr, helpUntilKilled(os.Args[2]))
		os.Exit(1)
	}
	if len(os.Args) == 2 && os.Args[1] == asUser {
		if err := actAsUser(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == Argument {
		if err := Main(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}
