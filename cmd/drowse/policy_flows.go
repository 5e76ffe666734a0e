package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
)

func (a *app) policyFlowsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "flows NAME", Short: "Print the flows of a running VM", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Print the recent flows of a running VM: ended, denied and open ones. With --follow, print ended and
denied flows as they come, until the VM sleeps or ends, which ends all flows; open ones are not
printed. With -o json each flow is one line.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			return a.printFlows(follow, func(each func(netpolicy.FlowRecord) error) error {
				return p.vm(args[0]).flows(cmd.Context(), follow, each)
			})
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print flows as they end")
	return cmd
}

// printFlows prints records as they come. Without follow it aligns the columns of all records.
func (a *app) printFlows(follow bool, flows func(each func(netpolicy.FlowRecord) error) error) error {
	t := columns(a.stdout) // writes nothing before Flush
	fmt.Fprintln(t, "FIRST\tLASTED\tEND\tVERDICT\tRULE\tPROTOCOL\tFROM\tTO\tNAME\tSENT\tRECEIVED")
	err := flows(func(r netpolicy.FlowRecord) error {
		if a.json() {
			return a.line(r, "")
		}
		if err := writeFlow(t, r); err != nil || !follow {
			return err
		}
		return t.Flush() // print each record at once
	})
	if err = followed(follow, err); err != nil || a.json() {
		return err
	}
	return t.Flush()
}

func writeFlow(w io.Writer, r netpolicy.FlowRecord) error {
	first := r.First.Local().Format(time.DateTime)
	if r.FlowInfo == nil {
		if l := r.FlowsLost; l != nil {
			_, err := fmt.Fprintf(w, "%s\t\tlost\t%d flows, %d denied packets and %d records are not told of\n", first, l.Flows, l.Denied, l.Records)
			return err
		}
		return nil
	}
	from, to := flowEnd(r.Guest, r.GuestPort), flowEnd(r.Peer, r.PeerPort)
	if r.Direction == netpolicy.Ingress {
		from, to = to, from
	}
	rule := r.Rule
	if rule == "" {
		rule = r.Reason.String()
	}
	_, err := fmt.Fprintln(w, strings.Join([]string{
		first, r.Last.Sub(r.First).Round(time.Millisecond).String(), string(r.End), string(r.Verdict), printable(rule), r.Protocol,
		from, to, printable(r.Name), flowCount(r.Egress), flowCount(r.Ingress),
	}, "\t"))
	return err
}

func flowEnd(a netip.Addr, port uint16) string {
	if port == 0 {
		return a.String()
	}
	return net.JoinHostPort(a.String(), strconv.Itoa(int(port)))
}

func flowCount(c netpolicy.Count) string {
	return fmt.Sprintf("%s in %d", sizeText(c.Bytes), c.Packets)
}
