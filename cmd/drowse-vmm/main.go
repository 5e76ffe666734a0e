// Command drowse-vmm is the process of one VM. drowse, and programs that embed the library, start it with the
// order for its VM as arguments. It is of no use alone. It contains only what a VM needs, since a guest that
// breaks out of its VM can reach everything in it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/drowse-vm/drowse/sandbox/process"
)

func main() {
	// A hangup of the terminal must not end the VM.
	signal.Ignore(syscall.SIGHUP)
	if err := process.ServeProcess(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "drowse-vmm:", err)
		os.Exit(1)
	}
}
