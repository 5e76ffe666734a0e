// Command drowse-vmm is the process of one VM. drowse, and programs that embed the library, start it with the order for
// its VM as arguments; it is of no use by itself. It has only what a VM needs, since what it has is within reach of a
// guest that breaks out of its VM.
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
	// Hanging up is what ends terminals, not VMs.
	signal.Ignore(syscall.SIGHUP)
	if err := process.ServeProcess(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "drowse-vmm:", err)
		os.Exit(1)
	}
}
