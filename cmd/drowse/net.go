//go:build linux

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
		Use: "net", Short: "Set up the host's network for VMs",
		Long: `Set up how packets of VMs leave this host. What a VM may reach is in its policy, see "drowse
policy". VMs have addresses in 10.200.0.0/16 ($DROWSE_AGENT_RANGE) and fd64:726f:7773:2::/64
($DROWSE_AGENT_RANGE6).`,
	}, a.netSetupCommand(), a.netStatusCommand(), a.netRemoveCommand(), a.netHelperCommand())
}

func (a *app) netSetupCommand() *cobra.Command {
	var forward, forward6 bool
	cmd := &cobra.Command{
		Use: "setup", Short: "Translate the VMs' addresses into the host's, in a table of nftables", Args: cobra.NoArgs,
		Long: `Translate the VMs' addresses into the host's, in the nftables tables "ip drowse" and, for IPv6,
"ip6 drowse". A VM whose policy allows addresses beyond the host does this by itself when it
starts. The tables also drop packets with a VM's source address that arrive at another device,
and limit the tracked connections of each VM. Repeating the command changes nothing.

--forward switches on net.ipv4.ip_forward if it is off. This lets a host route packets between
all its interfaces, so drowse first adds a rule that drops those that are neither from nor to a
VM. "drowse net remove" switches it off again. If it was on already, drowse adds nothing and
leaves the decision to the host's firewall.

--forward6 does the same for IPv6 and net.ipv6.conf.all.forwarding. Interfaces that accept router
advertisements (accept_ra 1) keep doing so (accept_ra 2).`,
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
		Use: "status", Short: "Show what is set up", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.printNet() },
	}
}

func (a *app) netRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove", Short: "Remove the tables, and switch forwarding off if setup switched it on", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := hostnet.Remove(); err != nil {
				return err
			}
			return a.printNet()
		},
	}
}

// printNet prints the host's network setup, after the settings that were switched on.
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
