package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/forward"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// maxForwards bounds the forwards of one command.
const maxForwards = 64

func (a *app) portForwardCommand() *cobra.Command {
	var (
		reverse bool
		udp     bool
		conns   int
		idle    time.Duration
	)
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
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			var specs []forward.Spec
			for _, arg := range args[1:] {
				if udp && !strings.HasPrefix(arg, "udp:") {
					arg = "udp:" + arg
				}
				spec, err := forward.Parse(arg)
				if err != nil {
					return usageError{err}
				}
				if reverse && spec.Listen.Network == "udp" {
					return usageError{errors.New("UDP is carried from the host into a VM only")}
				}
				specs = append(specs, spec)
			}
			if idle < time.Second {
				return usageError{errors.New("--udp-idle must be at least 1s")}
			}
			if len(specs) > maxForwards {
				return usageError{fmt.Errorf("%d forwards, at most %d", len(specs), maxForwards)}
			}
			if conns < 1 {
				return usageError{errors.New("--max-connections must be at least 1")}
			}
			if _, err := s.State.Get(args[0]); err != nil {
				return err
			}
			d := a.newAgentAccess(s, args[0])
			defer d.close()
			if reverse {
				return a.reverseForwards(cmd.Context(), d, specs, conns)
			}
			return a.forwards(cmd.Context(), d, specs, conns, idle)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&reverse, "reverse", "R", false, "listen in the VM and connect from the host")
	f.BoolVarP(&udp, "udp", "u", false, "forward UDP")
	f.DurationVar(&idle, "udp-idle", forward.DefaultSessionIdle, "how long a UDP sender keeps its socket in the VM without a datagram")
	f.IntVar(&conns, "max-connections", forward.DefaultMaxConns, "simultaneous connections of each forward; more have to wait")
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

// forwards listens on the host.
func (a *app) forwards(ctx context.Context, d *agentAccess, specs []forward.Spec, conns int, idle time.Duration) error {
	dial := func(ctx context.Context, at forward.Address) (conn *guest.Conn, err error) {
		err = d.use(ctx, func(c *guest.Client) error {
			var err error
			conn, err = c.Dial(ctx, at.Network, at.Address)
			return err
		})
		return conn, err
	}
	var all []serving
	for i := range specs {
		at, to := &specs[i].Listen, specs[i].Dial
		if at.Network == "udp" {
			var lc net.ListenConfig
			c, err := lc.ListenPacket(ctx, "udp", at.Address)
			if err != nil {
				return err
			}
			defer c.Close()
			at.Address = c.LocalAddr().String()
			f := &forward.Datagrams{
				Conn: c, MaxSessions: min(conns, forward.DefaultMaxSessions), Idle: idle, Failed: a.forwardFailed,
				Dial: func(ctx context.Context) (*guest.Conn, error) { return dial(ctx, to) },
			}
			all = append(all, f.Serve)
			continue
		}
		l, err := forward.Listen(ctx, *at)
		if err != nil {
			return err
		}
		defer l.Close()
		at.Address = l.Addr().String()
		f := &forward.Forward{
			MaxConns: conns, Failed: a.forwardFailed, Accept: l.Accept,
			Dial: func(ctx context.Context) (net.Conn, error) { return dial(ctx, to) },
		}
		all = append(all, func(ctx context.Context) error {
			defer context.AfterFunc(ctx, func() { l.Close() })()
			return f.Serve(ctx)
		})
	}
	return a.carry(ctx, specs, all)
}

// reverseForwards listens in the guest.
func (a *app) reverseForwards(ctx context.Context, d *agentAccess, specs []forward.Spec, conns int) error {
	var all []serving
	for i := range specs {
		at, to := specs[i].Listen, specs[i].Dial
		l, err := listenInGuest(ctx, d, at)
		if err != nil {
			return err
		}
		defer l.Close()
		specs[i].Listen.Address = l.Addr().String()
		at = specs[i].Listen
		all = append(all, func(ctx context.Context) error {
			for l := l; ; {
				stop := context.AfterFunc(ctx, func() { l.Close() })
				f := &forward.Forward{
					MaxConns: conns, Failed: a.forwardFailed, Accept: l.Accept,
					Dial: func(ctx context.Context) (net.Conn, error) { return forward.Dial(ctx, to) },
				}
				err := f.Serve(ctx)
				stop()
				l.Close()
				if ctx.Err() != nil || !errors.Is(err, guest.ErrConnectionLost) && !errors.Is(err, guest.ErrUnavailable) {
					return err
				}
				// The VM sleeps, or the agent is new. A listener without a connection must not wake the VM.
				if l, err = a.listenAgain(ctx, d, at); err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
			}
		})
	}
	return a.carry(ctx, specs, all)
}

func listenInGuest(ctx context.Context, d *agentAccess, at forward.Address) (l *guest.Listener, err error) {
	err = d.use(ctx, func(c *guest.Client) error {
		var err error
		l, err = c.Listen(ctx, at.Network, at.Address)
		return err
	})
	return l, err
}

// wakePoll is how often commands look at a VM that sleeps.
const wakePoll = 500 * time.Millisecond

// listenAgain waits until the VM runs, and listens in it.
func (a *app) listenAgain(ctx context.Context, d *agentAccess, at forward.Address) (*guest.Listener, error) {
	tick := time.NewTicker(wakePoll)
	defer tick.Stop()
	for {
		r, err := d.get()
		if err != nil {
			return nil, err
		}
		if r.Phase == state.Running {
			c, err := d.open(ctx)
			if err == nil {
				var l *guest.Listener
				if l, err = c.Listen(ctx, at.Network, at.Address); err == nil {
					return l, nil
				}
			}
			a.log.Debug("listening in the VM again", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
