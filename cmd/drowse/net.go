package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
)

func (a *app) netCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "net", Short: "Set up how packets of VMs leave this host",
		Long: `Set up how packets of VMs leave this host. What they may reach is said by each VM's
policy, see "drowse policy". The range of VMs' addresses is 10.200.0.0/16 unless
$DROWSE_AGENT_RANGE names another, and fd64:726f:7773:2::/64 unless
$DROWSE_AGENT_RANGE6 does.`,
	}, a.netSetupCommand(), a.netStatusCommand(), a.netRemoveCommand())
}

func (a *app) netSetupCommand() *cobra.Command {
	var forward, forward6 bool
	cmd := &cobra.Command{
		Use: "setup", Short: "Translate the VMs' addresses into the host's, in a table of nftables of its own", Args: cobra.NoArgs,
		Long: `Translate the VMs' addresses into the host's, in the table "ip drowse" of nftables. A
VM whose policy allows addresses beyond the host does so by itself when it starts, and
in "ip6 drowse" if it has IPv6. It also has the host drop packets with a VM's address as
their source that come by another device than a VM's, and bounds how many connections
of each VM are tracked. Doing it again changes nothing.

With --forward, switch on net.ipv4.ip_forward if it is off. It lets a host route packets
between all its interfaces; a rule is added first that drops those that are neither from
nor to a VM. "drowse net remove" switches it off again. Where it was on already, nothing
is added, and a firewall of the host's decides on its own.

With --forward6, do the same for IPv6: translate, and switch on
net.ipv6.conf.all.forwarding. Interfaces that take routes from routers (accept_ra 1) go
on with it (accept_ra 2), which a host that forwards would not do by itself.`,
		RunE: func(*cobra.Command, []string) error {
			var switched []string
			for _, v := range []struct {
				addresses         func() (netip.Prefix, error)
				forward           func() (changed bool, err error)
				translates, turns bool
				setting           string
			}{
				{hostnet.Range, hostnet.Forward, true, forward, "net.ipv4.ip_forward"},
				{hostnet.Range6, hostnet.Forward6, forward6, forward6, "net.ipv6.conf.all.forwarding"},
			} {
				if !v.translates {
					continue
				}
				in, err := v.addresses()
				if err != nil {
					return usageError{err}
				}
				if err := errors.Join(hostnet.Own(in), hostnet.Bound(in, netip.Addr{}, netpolicy.DefaultFlows), hostnet.Translate(in)); err != nil {
					return err
				}
				if !v.turns {
					continue
				}
				changed, err := v.forward()
				if err != nil {
					return err
				}
				if changed {
					switched = append(switched, v.setting)
				}
			}
			return a.printNet(switched...)
		},
	}
	cmd.Flags().BoolVar(&forward, "forward", false, "switch on net.ipv4.ip_forward if it is off")
	cmd.Flags().BoolVar(&forward6, "forward6", false, "translate IPv6 as well, and switch on net.ipv6.conf.all.forwarding if it is off")
	return cmd
}

func (a *app) netStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say what is set up", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.printNet() },
	}
}

func (a *app) netRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove", Short: "Remove the tables, and switch forwarding off if setup has switched it on", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := hostnet.Remove(); err != nil {
				return err
			}
			return a.printNet()
		},
	}
}

// printNet prints what is set up, after the settings that were switched on.
func (a *app) printNet(switched ...string) error {
	s, err := hostnet.Look()
	return a.answer(s, err, func(w io.Writer) {
		for _, setting := range switched {
			fmt.Fprintf(w, "switched on %s, for VMs alone\n", setting)
		}
		ranges := cmp.Or(strings.Join(s.Ranges, ", "), "nothing")
		words := func(on, guarded bool) string {
			switch {
			case on && guarded:
				return "on, for VMs alone"
			case on:
				return "on"
			}
			return "off"
		}
		fmt.Fprintf(w, "translated: %s\nforwarding: %s\nforwarding of IPv6: %s\n", ranges, words(s.Forwarding, s.Guarded), words(s.Forwarding6, s.Guarded6))
	})
}
