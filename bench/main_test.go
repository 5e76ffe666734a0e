package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"
)

// attachHelperEnv makes the test binary a process of policy_attach.
const attachHelperEnv = "DROWSE_BENCH_ATTACH"

func TestMain(m *testing.M) {
	if os.Getenv(attachHelperEnv) != "" {
		os.Exit(attachHelper(os.Args[1:]))
	}
	if how, ok := os.LookupEnv(fakeFCEnv); ok {
		if how == "ok" {
			how = ""
		}
		fmt.Fprintln(os.Stderr, fakeFirecracker(how, os.Args[1:]))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

func attachHelper(args []string) int {
	if len(args) != 3 {
		fmt.Fprintln(os.Stderr, "want a root, a device and a number of rules, got", args)
		return 2
	}
	rules, err := strconv.Atoi(args[2])
	if err == nil {
		var times any
		if times, err = PolicyAttachHelper(args[0], args[1], rules); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(times)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
