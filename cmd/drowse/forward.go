package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/guest/forward"
)

// maxForwards bounds the forwards of one command. forwardConns and forwardIdle are defaults: of connections at once,
// and of how long a sender of datagrams has its socket.
const (
	maxForwards  = 64
	forwardConns = 256
	forwardIdle  = time.Minute
)

// forwardOptions say what to forward.
type forwardOptions struct {
	specs   []forward.Spec
	reverse bool
	conns   int
	idle    time.Duration
}

func (a *app) portForwardCommand() *cobra.Command {
	var o forwardOptions
	var udp bool
	cmd := &cobra.Command{
		Use:   "port-forward [--reverse] NAME [udp:][BIND:]PORT:[HOST:]PORT...",
		Short: "Forward ports between the host and a VM",
		Long: `Forward ports between the host and a VM until the command is interrupted. The host listens on
the first port; for each connection to it, the agent connects to the second port in the VM. With
--reverse the VM listens and the host connects. Addresses are 127.0.0.1 by default. unix:PATH is
a Unix socket, on either side. Port 0 is a free port. The prefix udp:, or --udp for all forwards,
carries UDP: each sender has a socket in the VM until nothing comes for --udp-idle.

A connection wakes a sleeping VM. Open connections are reset when the VM falls asleep. With
--reverse, the VM listens again as soon as something else wakes it.`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			var specs []forward.Spec
			for _, arg := range args[1:] {
				if udp && !strings.HasPrefix(arg, "udp:") {
					arg = "udp:" + arg
				}
				spec, err := forward.Parse(arg)
				if err != nil {
					return usageError{err}
				}
				if o.reverse && spec.Listen.Network == "udp" {
					return usageError{errors.New("UDP is carried from the host into a VM only")}
				}
				specs = append(specs, spec)
			}
			if o.idle < time.Second {
				return usageError{errors.New("--udp-idle must be at least 1s")}
			}
			if len(specs) > maxForwards {
				return usageError{fmt.Errorf("%d forwards, at most %d", len(specs), maxForwards)}
			}
			if o.conns < 1 {
				return usageError{errors.New("--max-connections must be at least 1")}
			}
			if _, err := p.Get(cmd.Context(), args[0]); err != nil {
				return err
			}
			o.specs = specs
			return p.forward(cmd.Context(), args[0], o)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.reverse, "reverse", "R", false, "listen in the VM and connect from the host")
	f.BoolVarP(&udp, "udp", "u", false, "forward UDP")
	f.DurationVar(&o.idle, "udp-idle", forwardIdle, "how long a UDP sender keeps its socket in the VM without a datagram")
	f.IntVar(&o.conns, "max-connections", forwardConns, "simultaneous connections of each forward; more have to wait")
	return cmd
}

// forwarded describes a forward to the user.
type forwarded struct {
	Listen string `json:"listen"`
	Dial   string `json:"dial"`
}

func (a *app) printForwards(specs []forward.Spec) error {
	var out []forwarded
	for _, s := range specs {
		out = append(out, forwarded{s.Listen.String(), s.Dial.String()})
	}
	return a.print(out, func(w io.Writer) {
		for _, s := range specs {
			fmt.Fprintln(w, s)
		}
	})
}

func (a *app) forwardFailed(err error) { a.log.Warn("a connection was not carried", "error", err) }

// serving serves one forward.
type serving func(context.Context) error

// carry prints the forwards and serves them all until each has ended. The first error ends the others.
func (a *app) carry(ctx context.Context, specs []forward.Spec, all []serving) error {
	if err := a.printForwards(specs); err != nil {
		return err
	}
	group, run := errgroup.WithContext(ctx)
	for _, serve := range all {
		group.Go(func() error { return serve(run) })
	}
	return group.Wait()
}
