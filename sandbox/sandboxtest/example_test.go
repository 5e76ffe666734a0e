package sandboxtest_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// A program that embeds package sandbox can be tested on VMs in memory, which it uses like real ones.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "vms")
	check(err)
	defer os.RemoveAll(dir)
	vms := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{
		"count": func(_ context.Context, p *fakeguest.Process) int {
			was, _ := p.Guest.ReadFile("/run/count") // missing at first
			check(p.Guest.WriteFile("/run/count", append(was, 'x')))
			fmt.Fprintln(p.Stdout, len(was)+1)
			return 0
		},
	}}
	defer vms.Close()
	host, err := vms.Open(dir)
	check(err)

	box, err := host.Create(ctx, sandbox.Spec{Name: "agent", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{})
	check(err)
	count := func(b *sandbox.Sandbox) {
		c, err := b.Agent(ctx)
		check(err)
		defer c.Close()
		_, err = c.Exec(ctx, guest.Cmd{Argv: []string{"count"}, IO: guest.IO{Stdout: os.Stdout}})
		check(err)
	}
	count(box)

	_, err = box.Sleep(ctx, sandbox.SleepOptions{})
	check(err)
	_, err = box.Wake(ctx)
	check(err)
	count(box)

	_, err = box.Fork(ctx, sandbox.ForkOptions{Name: "child"})
	check(err)
	count(host.Sandbox("child"))
	count(box)

	policy, err := netpolicy.Parse([]byte("rules:\n- {direction: egress, verdict: allow, groups: [public], protocols: [tcp], ports: [443]}\n"))
	check(err)
	res, err := box.SetPolicy(ctx, policy)
	check(err)
	fmt.Println("in force:", res.Live)
	// Output:
	// 1
	// 2
	// 3
	// 3
	// in force: true
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
