package sandbox_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
)

// This program makes a sandbox, runs a command in it, puts it to sleep and runs another command, which wakes it.
// It needs root, /dev/kvm, an image from `drowse image build` and a kernel from `drowse kernel build`.
func Example() {
	ctx := context.Background()
	host, err := sandbox.Open("/var/lib/drowse")
	if err != nil {
		log.Fatal(err)
	}
	// Each VM gets its own process, which outlives this program. Its program is drowse-vmm, or any other whose
	// main calls process.ServeProcess.
	host = host.With(pool.Launcher{
		Command: []string{"/usr/local/bin/drowse-vmm"},
		Agent:   "/usr/local/bin/drowse-agent",
	})
	worker, err := host.Create(ctx, sandbox.Spec{Name: "worker", Image: "debian-python", MemoryMiB: 512}, sandbox.CreateOptions{})
	if err != nil {
		log.Fatal(err)
	}
	hello := guest.Cmd{Argv: []string{"python3", "-c", "print('hello')"}, IO: guest.IO{Stdout: os.Stdout}}
	if _, err := worker.Exec(ctx, hello); err != nil {
		log.Fatal(err)
	}
	// The sleeping sandbox has no process and no memory, only files.
	slept, err := worker.Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("asleep in snapshot", slept.Snapshot)
	if _, err := worker.Exec(ctx, hello); err != nil {
		log.Fatal(err)
	}
	// Three children continue from this moment.
	forked, err := worker.Fork(ctx, sandbox.ForkOptions{Count: 3, Name: "child"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(forked.Children), "children after", forked.Stages["ready"], "ms")
	if err := worker.Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
		log.Fatal(err)
	}
}
