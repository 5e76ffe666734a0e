package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) policyStatsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats NAME", Short: "Show what passed between a running VM and the network, and what did not", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			st, err := p.vm(args[0]).Network(cmd.Context())
			return a.answer(st, err, func(w io.Writer) { writeStats(w, st) })
		}),
	}
}

func writeStats(w io.Writer, st spec.NetworkStats) {
	addresses := st.Address.String()
	if st.Address6.IsValid() {
		addresses += " and " + st.Address6.String()
	}
	fmt.Fprintf(w, "%s has the address %s, on %s\n", st.Name, addresses, st.TAP)
	for _, u := range []struct {
		what string
		netpolicy.Usage
	}{{"sent", st.Egress}, {"received", st.Ingress}} {
		last := "never"
		if u.Idle >= 0 {
			last = u.Idle.Round(time.Millisecond).String() + " ago"
		}
		fmt.Fprintf(w, "%s %s, last %s\n", u.what, bytesText(int64(u.Bytes)), last)
	}
	d := st.DNS
	fmt.Fprintf(w, "names: %d answered, %d refused, %d addresses left out, %d failed, %d dropped\n", d.Answered, d.Refused, d.Rebound, d.Failed, d.Dropped)
	if c := st.Proxy; c != nil {
		fmt.Fprintf(w, "proxy: %d requests, %d tunnels, %d with a secret, %d refused, %d connections too many, %d cut, %d open\n", c.Requests, c.Tunnels, c.Injected, c.Refused, c.Busy, c.Cut, c.Open)
	}
	if c := st.TLS; c != (netpolicy.TLSStats{}) {
		fmt.Fprintf(w, "TLS names: %d connections passed, %d refused, %d cut, %d failed, %d open\n", c.Passed, c.Refused, c.Cut, c.Failed, c.Open)
	}
	if p := st.Process; p.Starts > 0 {
		fmt.Fprintf(w, "network process: %d started, %d killed for a forbidden system call, %d failed, %.2f s of processor time\n", p.Starts, p.Refused, p.Failed, p.CPUSeconds)
	}
	table(w, "DIRECTION\tVERDICT\tREASON\tPACKETS\tBYTES", st.Counters, func(c netpolicy.Counter) []any {
		return []any{c.Direction, c.Verdict, c.Reason, c.Packets, c.Bytes}
	})
}

func (a *app) policyEventsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "events NAME", Short: "Print packets of a running VM that were not let through", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Print the last 1024 packets from and to a running VM that were not let through, as one line of
JSON each, whatever -o says. With --follow, print new ones until the VM sleeps or ends.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			e := json.NewEncoder(a.stdout)
			return followed(follow, p.vm(args[0]).NetworkEvents(cmd.Context(), follow, func(ev spec.NetEvent) error { return e.Encode(ev) }))
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new packets as they come")
	return cmd
}
