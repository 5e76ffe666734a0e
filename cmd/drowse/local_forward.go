//go:build linux

package main

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/forward"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func (l *local) forward(ctx context.Context, name string, o forwardOptions) error {
	d := l.a.newAgentAccess(l.h, name)
	defer d.close()
	if o.reverse {
		return l.a.reverseForwards(ctx, d, o.specs, o.conns)
	}
	return l.a.forwards(ctx, d, o.specs, o.conns, o.idle)
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
