package sandbox_test

import (
	"bytes"
	"context"
	"fmt"
	"log"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
)

// A program that makes a VM, runs a command in it, puts it to sleep and wakes it. It
// needs root and /dev/kvm; image and kernel have been made with `drowse image build`
// and `drowse kernel build`.
func Example() {
	ctx := context.Background()
	store, err := sandbox.OpenStore("/var/lib/drowse")
	if err != nil {
		log.Fatal(err)
	}
	// Each VM gets a process of its own, which outlives this program. drowse-vmm is
	// its program; one whose main calls ServeProcess is another.
	launcher := pool.Launcher{
		Command: []string{"/usr/local/bin/drowse-vmm"},
		Agent:   "/usr/local/bin/drowse-agent",
	}
	spec := sandbox.Spec{Name: "worker", Image: "debian-python", MemoryMiB: 512}
	if _, err := store.Run(ctx, launcher, spec); err != nil {
		log.Fatal(err)
	}
	if err := hello(ctx, store, "worker"); err != nil {
		log.Fatal(err)
	}

	// Now it has no process and no memory any more, only files.
	slept, err := store.Sleep(ctx, "worker")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("asleep in snapshot", slept.Snapshot)

	woken, err := store.Wake(ctx, launcher, "worker")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready after", woken.Stages["resume_ready"], "ms")
	if err := hello(ctx, store, "worker"); err != nil {
		log.Fatal(err)
	}
	if err := store.Remove(ctx, "worker", true); err != nil {
		log.Fatal(err)
	}
}

// hello runs a command in a VM that runs.
func hello(ctx context.Context, store *sandbox.Store, name string) error {
	client, err := store.Agent(ctx, name)
	if err != nil {
		return err
	}
	defer client.Close()
	var out bytes.Buffer
	// A command that fails is a *guest.ExitError.
	_, err = client.Exec(ctx, guest.Cmd{
		Argv: []string{"python3", "-c", "print('hello')"},
		IO:   guest.IO{Stdout: &out},
	})
	fmt.Print(out.String())
	return err
}
