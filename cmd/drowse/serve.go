package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/metrics"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// defaultPool is how many processes "drowse serve" keeps ready.
const defaultPool = 2

func (a *app) serveCommand() *cobra.Command {
	var (
		processes, conns int
		web              apiFlags
		exit             exitFlags
		hooks            webhookFlags
	)
	cmd := &cobra.Command{
		Use: "serve", Annotations: makesState, Short: "Wake VMs for connections, and keep processes ready for those that wake", Args: cobra.NoArgs,
		Long: `Keep processes ready in which VMs wake, with what KVM has of a VM, so that a wake, a
restore or a fork need not start one. They are made for VMs of the sizes that were
started last. Commands with the same --state find them, and do without when there are none.

Listen at the addresses where policies publish ports of VMs ("publish", see "drowse
policy"). A connection, or a datagram, wakes a VM that sleeps, waits until it is there, and
keeps it awake; with UDP, until a minute after the last datagram. A packet to the address of
a VM that sleeps wakes it if its policy would let it in.

Send events to webhooks, in their order, each until it is taken; where it is, it goes on
when it is started again.

Answer requests of the HTTP API at the Unix socket ` + "`api.sock`" + ` of the state directory, to root and
to the user that it runs as, and with --listen over TCP, to callers with a token. See docs/guides/api.md.
There is a page for browsers at the same address: docs/guides/web.md.

Send traces of what it does to a collector that OTEL_EXPORTER_OTLP_ENDPOINT names: docs/guides/monitoring.md.

VMs do not depend on it: when it ends, they run on, but connections that it carries end; with
--on-exit sleep it puts all to sleep before. It goes on until it is interrupted.`,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			l, err := a.launcher()
			if err != nil {
				return err
			}
			if processes < 0 || processes > pool.MaxSize {
				return usageError{fmt.Errorf("a pool of %d processes: use 0 to %d", processes, pool.MaxSize)}
			}
			if conns < 1 {
				return usageError{fmt.Errorf("%d connections at once: use 1 or more", conns)}
			}
			if err := errors.Join(web.check(), exit.check()); err != nil {
				return err
			}
			webhooks, err := hooks.hooks()
			if err != nil {
				return err
			}
			o := supervisor.Options{Pool: processes, MaxConns: conns, Webhooks: webhooks, Log: a.log}
			return a.serve(cmd.Context(), s, l, o, &web, &exit)
		}),
	}
	cmd.Flags().IntVar(&processes, "pool", defaultPool, "processes that are ready, each with some 24 MiB of memory; 0 is none")
	cmd.Flags().IntVar(&conns, "max-connections", supervisor.DefaultMaxConns, "connections, or senders of UDP, that are carried at once for one port")
	web.add(cmd)
	exit.add(cmd)
	hooks.add(cmd)
	return cmd
}

// serve supervises and answers until ctx ends.
func (a *app) serve(ctx context.Context, s *sandbox.Host, l pool.Launcher, o supervisor.Options, web *apiFlags, exit *exitFlags) error {
	listeners, err := web.listeners(s)
	if err != nil {
		return err
	}
	mounts, err := pageMounts()
	if err != nil {
		return err
	}
	o.Counters = &supervisor.Counters{}
	figures := metrics.New(s, o.Counters, version())
	spans, err := a.traces(ctx)
	if err != nil {
		return err
	}
	s = s.With(l).WithObservers(figures.Observe)
	if spans != nil {
		s = s.WithObservers(spans.Observe)
	}
	works := goesRound(o.Counters, time.Now())
	server := api.New(api.Options{
		Host: s, Version: version(), Tokens: tokensOf(web.tokens, s), Hosts: web.hosts, Live: []api.Check{works}, Ready: readiness(s), Log: a.log,
		Mounts: append(mounts, api.Mount{Pattern: "GET /metrics", Scope: api.ScopeRead, Handler: figures.Handler()},
			api.Mount{Pattern: "GET /v1/events", Scope: api.ScopeRead, Handler: eventsOver(s.State.Events()), Long: true}),
		Context: traceContext(spans),
	})
	a.log.Info("serving", "state", s.State.Dir(), "pool", o.Pool)
	group, run := errgroup.WithContext(ctx)
	group.Go(func() error { return supervisor.Run(run, s, l, o) })
	if len(listeners) > 0 {
		for _, l := range listeners {
			a.log.Info("answering", "at", l.Addr().String())
		}
		group.Go(func() error { return server.Serve(run, listeners...) })
	}
	group.Go(func() error { return a.watchdog(run, works) })
	a.notify(daemon.SdNotifyReady)
	err = group.Wait()
	a.notify(daemon.SdNotifyStopping)
	if ctx.Err() != nil {
		// It was told to end. Nothing wakes sandboxes any more that are put to sleep now.
		err = errors.Join(err, exit.do(context.WithoutCancel(ctx), a.log, s))
	}
	return err
}
