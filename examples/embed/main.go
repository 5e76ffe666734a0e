// Embed is a program that embeds drowse: it makes a sandbox behind a network policy, runs a command in it, puts it to
// sleep, wakes it by the next command, and forks it. It needs root, /dev/kvm, a kernel and an image: `make example` has
// all of them made.
package main

import (
	"context"
	"errors"
	"log"
	"os"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
)

const rules = "rules: [{name: web, direction: egress, verdict: allow, cidrs: [192.0.2.0/24], protocols: [tcp], ports: [443]}]"

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: embed STATE-DIRECTORY DROWSE-PROGRAM")
	}
	if err := run(context.Background(), os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

// run uses the state directory of a host, and the programs beside the drowse command.
func run(ctx context.Context, state, drowse string) (err error) {
	host, err := sandbox.Open(state)
	if err != nil {
		return err
	}
	host = host.With(pool.Launcher{Command: []string{drowse + "-vmm"}, Agent: drowse + "-agent"})
	policy, err := netpolicy.Parse([]byte(rules))
	if err != nil {
		return err
	}
	sb, err := host.Create(ctx, sandbox.Spec{Name: "embed", Image: "debian-python", Network: "tap", Policy: policy}, sandbox.CreateOptions{})
	if err != nil {
		return err
	}
	fork := host.Sandbox("embed-fork")
	say := func(b *sandbox.Sandbox, script string) {
		_, failed := b.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, IO: guest.IO{Stdout: os.Stdout}})
		err = errors.Join(err, failed)
	}
	say(sb, "echo written before the sleep > /root/note")
	_, slept := sb.Sleep(ctx, sandbox.SleepOptions{})
	say(sb, "echo the original has what was $(cat /root/note)")
	_, forked := sb.Fork(ctx, sandbox.ForkOptions{Name: fork.Name()})
	say(fork, "echo the fork has what was $(cat /root/note)")
	force := sandbox.DeleteOptions{Force: true}
	return errors.Join(err, slept, forked, fork.Delete(ctx, force), sb.Delete(ctx, force))
}
