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
	"github.com/drowse-vm/drowse/sandbox/fleet"
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

func run(ctx context.Context, state, program string) (err error) {
	store, err := sandbox.OpenStore(state)
	if err != nil {
		return err
	}
	f := fleet.New(fleet.OfStore(store, pool.Launcher{Command: []string{program + "-vmm"}, Agent: program + "-agent"}), fleet.Options{})
	policy, err := netpolicy.Parse([]byte("rules: [{name: web, direction: egress, verdict: allow, cidrs: [192.0.2.0/24], protocols: [tcp], ports: [443]}]\n"))
	if err != nil {
		return err
	}
	s, created, err := f.GetOrCreate(ctx, fleet.Request{Spec: sandbox.Spec{Name: "embed", Image: "debian-python", Network: spec.NetworkTAP, Policy: policy}})
	if err != nil {
		return err
	}
	fmt.Println(s.Name, "is", s.Status, "and new:", created)
	if _, err := f.Start(ctx, "embed"); err != nil { // it may sleep
		return err
	}
	if err := say(ctx, store, "embed", "echo written before the sleep > /root/note"); err != nil {
		return err
	}
	slept, err := f.Sleep(ctx, "embed", sandbox.SleepOptions{})
	if err != nil {
		return err
	}
	fmt.Println("asleep, with", slept.BytesStored, "bytes on disk")
	if _, err := f.Wake(ctx, "embed"); err != nil {
		return err
	}
	if _, err := f.Fork(ctx, "embed", []fleet.Child{{Name: "embed-fork"}}); err != nil {
		return err
	}
	for _, name := range []string{"embed", "embed-fork"} {
		if err := say(ctx, store, name, "read note < /root/note; echo $note"); err != nil {
			return err
		}
		if _, err := f.Delete(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// say runs a shell command and prints what it says.
func say(ctx context.Context, store *sandbox.Store, name, script string) error {
	agent, err := store.Agent(ctx, name)
	if err != nil {
		return err
	}
	defer agent.Close()
	var out bytes.Buffer
	if _, err := agent.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, IO: guest.IO{Stdout: &out}}); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if out.Len() > 0 {
		fmt.Printf("%s: %s", name, out.Bytes())
	}
	return nil
}
