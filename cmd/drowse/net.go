package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
)

func (a *app) netCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "Set up how packets of VMs leave this host", Args: cobra.NoArgs,
		Long: `Set up how packets of VMs leave this host. What they may reach is said by each VM's
policy, see "drowse policy". The range of VMs' addresses is 10.200.0.0/16 unless
$DROWSE_AGENT_RANGE names another.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.netSetupCommand(), a.netStatusCommand(), a.netRemoveCommand())
	return cmd
}

func (a *app) netSetupCommand() *cobra.Command {
	var forward bool
	cmd := &cobra.Command{
		Use: "setup", Short: "Translate the VMs' addresses into the host's, in a table of nftables of its own", Args: cobra.NoArgs,
		Long: `Translate the VMs' addresses into the host's, in the table "ip drowse" of nftables. A
VM whose policy allows addresses beyond the host does so by itself when it starts. Doing
it again changes nothing.

With --forward, switch on net.ipv4.ip_forward if it is off. It lets a host route packets
between all its interfaces; a rule is added first that drops those that are neither from
nor to a VM. "drowse net remove" switches it off again. Where it was on already, nothing
is added, and a firewall of the host's decides on its own.`,
		RunE: func(*cobra.Command, []string) error {
			in, err := hostnet.Range()
			if err != nil {
				return usageError{err}
			}
			if err := hostnet.Translate(in); err != nil {
				return err
			}
			changed := false
			if forward {
				if changed, err = hostnet.Forward(); err != nil {
					return err
				}
			}
			return a.printNet(func(w io.Writer) {
				if changed {
					fmt.Fprintln(w, "switched on net.ipv4.ip_forward, for VMs alone")
				}
			})
		},
	}
	cmd.Flags().BoolVar(&forward, "forward", false, "switch on net.ipv4.ip_forward if it is off")
	return cmd
}

func (a *app) netStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say what is set up", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.printNet(nil) },
	}
}

func (a *app) netRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove", Short: "Remove the table, and switch forwarding off if setup has switched it on", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := hostnet.Remove(); err != nil {
				return err
			}
			return a.printNet(nil)
		},
	}
}

// printNet prints what is set up.
func (a *app) printNet(before func(io.Writer)) error {
	s, err := hostnet.Look()
	if err != nil {
		return err
	}
	return a.print(s, func(w io.Writer) {
		if before != nil {
			before(w)
		}
		ranges := strings.Join(s.Ranges, ", ")
		if ranges == "" {
			ranges = "nothing"
		}
		forwarding := "off"
		switch {
		case s.Guarded && s.Forwarding:
			forwarding = "on, for VMs alone"
		case s.Forwarding:
			forwarding = "on"
		}
		fmt.Fprintf(w, "translated: %s\nforwarding: %s\n", ranges, forwarding)
	})
}
