// Embed is a program that embeds drowse: it makes a sandbox behind a network policy, runs a command in it, puts it to
// sleep and wakes it, and forks it. It needs root, /dev/kvm, a kernel and an image: `make example` has all of them
// made.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func main() {
	state, program := flag.String("state", "/var/lib/drowse", "state directory"), flag.String("drowse", "/usr/local/bin/drowse", "the drowse command, beside its agent")
	flag.Parse()
	if err := run(context.Background(), *state, *program); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, state, program string) error {
	host, err := sandbox.Open(state)
	if err != nil {
		return err
	}
	host = host.With(pool.Launcher{Command: []string{program + "-vmm"}, Agent: program + "-agent"})
	policy, err := netpolicy.Parse([]byte("rules: [{name: web, direction: egress, verdict: allow, cidrs: [192.0.2.0/24], protocols: [tcp], ports: [443]}]\n"))
	if err != nil {
		return err
	}
	if _, err := host.Create(ctx, sandbox.Spec{Name: "embed", Image: "debian-python", Network: spec.NetworkTAP, Policy: policy}, nil); err != nil {
		return err
	}
	parent, child := host.Sandbox("embed"), host.Sandbox("embed-fork")
	if err := say(ctx, parent, "echo written before the sleep > /root/note"); err != nil {
		return err
	}
	slept, err := parent.Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		return err
	}
	fmt.Println("asleep, with", slept.BytesStored, "bytes on disk")
	if _, err := parent.Wake(ctx); err != nil { // so would the next command
		return err
	}
	if _, err := parent.Fork(ctx, sandbox.ForkOptions{Name: child.Name()}); err != nil {
		return err
	}
	for _, b := range []*sandbox.Sandbox{parent, child} {
		if err := say(ctx, b, "read note < /root/note; echo $note"); err != nil {
			return err
		}
		if err := b.Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
			return err
		}
	}
	return nil
}

// say runs a shell command and prints what it says.
func say(ctx context.Context, b *sandbox.Sandbox, script string) error {
	var out bytes.Buffer
	if _, err := b.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, IO: guest.IO{Stdout: &out}}); err != nil {
		return fmt.Errorf("%s: %w", b.Name(), err)
	}
	if out.Len() > 0 {
		fmt.Printf("%s: %s", b.Name(), out.Bytes())
	}
	return nil
}
