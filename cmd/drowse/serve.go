//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/metrics"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// defaultPool is how many processes "drowse serve" keeps prebuilt.
const defaultPool = 2

func (a *app) serveCommand() *cobra.Command {
	var (
		processes, conns int
		confined         bool
		web              apiFlags
		gate             gatewayFlags
		wire             e2bFlags
		exit             exitFlags
		hooks            webhookFlags
		others           clusterFlags
	)
	cmd := &cobra.Command{
		Use: "serve", Annotations: makesState, Short: "Run the supervisor: activation, timers, expiry, HTTP API, webhooks", Args: cobra.NoArgs,
		Long: `Run the supervisor until it is interrupted. VMs do not depend on it: they run on when it ends, but
connections that it carries end. With --on-exit sleep it puts all VMs to sleep first. It

- keeps processes with prebuilt VMs of the sizes that were started last, for wakes, restores and
  forks by all commands with the same --state;
- listens on the ports that policies publish ("publish", see "drowse policy"). A connection or
  datagram wakes a sleeping VM, waits for it and keeps it awake; UDP, for a minute after the last
  datagram. A packet to the address of a sleeping VM wakes it if its policy would let it in;
- carries out timers, and removes what has expired;
- sends events to webhooks, in order, each until it is accepted, also across restarts;
- serves the HTTP API on the Unix socket ` + "`api.sock`" + ` of the state directory, to root and its own
  user, and with --listen over TCP, to callers with a token (docs/guides/api.md), with a web page
  (docs/guides/web.md);
- with --gateway, carries HTTP, WebSocket, gRPC and TLS connections to ports in sandboxes, and wakes
  them (docs/guides/access.md);
- with --cluster, shares sandboxes with other hosts, each of which can wake what sleeps in the
  store; with --cluster-address, each answers for what another one has (docs/guides/snapshots.md);
- sends traces to the collector of OTEL_EXPORTER_OTLP_ENDPOINT (docs/guides/monitoring.md).`,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			l, err := a.launcher()
			if err != nil {
				return err
			}
			l.Secrets = a.secretsFrom(s, true)
			if processes < 0 || processes > pool.MaxSize {
				return usageError{fmt.Errorf("a pool of %d processes: use 0 to %d", processes, pool.MaxSize)}
			}
			if conns < 1 {
				return usageError{fmt.Errorf("%d connections at once: use 1 or more", conns)}
			}
			if err := errors.Join(web.check(&wire), gate.check(), wire.check(), exit.check(), others.check()); err != nil {
				return err
			}
			if err := requireJail(confined); err != nil {
				return err
			}
			webhooks, err := hooks.hooks()
			if err != nil {
				return err
			}
			o := supervisor.Options{Pool: processes, MaxConns: conns, Webhooks: webhooks, Log: a.log}
			return a.serve(cmd.Context(), s, l, o, &web, &gate, &wire, &exit, &others)
		}),
	}
	cmd.Flags().IntVar(&processes, "pool", defaultPool, "processes to keep ready, each with some 17 MiB of memory; 0 is none")
	cmd.Flags().IntVar(&conns, "max-connections", supervisor.DefaultMaxConns, "simultaneous connections, or UDP senders, of one port")
	cmd.Flags().BoolVar(&confined, "require-jail", false,
		"start no VM whose process cannot be confined; by default, such a VM runs unconfined, and its log says so")
	web.add(cmd)
	gate.add(cmd)
	wire.add(cmd)
	exit.add(cmd)
	hooks.add(cmd)
	others.add(cmd)
	return cmd
}

// requireJail has VMs started by this process fail if they cannot be confined, and says so now if none can.
func requireJail(flag bool) error {
	if !flag && os.Getenv(control.RequireJailEnv) == "" {
		return nil
	}
	if how := os.Getenv(control.SeccompEnv); how != "" {
		return fmt.Errorf("%s=%s confines no VM: unset it, or serve without --require-jail and %s", control.SeccompEnv, how, control.RequireJailEnv)
	}
	if err := lacking(confine.Probe()); err != nil {
		return err
	}
	return os.Setenv(control.RequireJailEnv, "1")
}

func lacking(s confine.Support) error {
	var errs []error
	for _, w := range s.Missing(true) {
		errs = append(errs, fmt.Errorf("VMs cannot be confined: %s is missing: %s", w.Name, w.Detail))
	}
	if errs == nil {
		return nil
	}
	return errors.Join(append(errs,
		fmt.Errorf("add what is missing, or serve without --require-jail and %s", control.RequireJailEnv))...)
}

// serve supervises and answers until ctx ends.
func (a *app) serve(ctx context.Context, s *sandbox.Host, l pool.Launcher, o supervisor.Options, web *apiFlags, gate *gatewayFlags, wire *e2bFlags, exit *exitFlags, others *clusterFlags) (err error) {
	if web.tcp.Identities, err = web.identities(a); err != nil {
		return err
	}
	defer web.tcp.Identities.Close()
	listeners, err := web.listeners(a, s)
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
	of, err := others.join(ctx, a, s)
	if err != nil {
		return err
	}
	s = of.host
	ended := make(chan error, 1)
	go func() { ended <- of.run() }()
	defer func() {
		of.leave()
		err = errors.Join(err, <-ended)
	}()
	passed := map[string]http.Handler{}
	carry, err := gate.open(a, of, passed)
	if err != nil {
		return err
	}
	clients, err := wire.open(a, of, web, &o, passed)
	if err != nil {
		return err
	}
	works := goesRound(o.Counters, time.Now())
	var resolvers []netip.AddrPort
	if dns, err := hostDNS(); err == nil { // without it, clients name servers themselves
		resolvers = dns.Upstreams
	}
	server := api.New(api.Options{
		Host: s, Version: version(), Tokens: tokensOf(web.tokens, s), Identities: web.tcp.Identities, Sources: a.sources(s), Hosts: web.hosts, Live: []api.Check{works}, Ready: readiness(s), Log: a.log, Resolvers: resolvers,
		Mounts:  append(mounts, api.Mount{Pattern: "GET /metrics", Scope: api.ScopeRead, AllOwners: true, Handler: figures.Handler()}),
		Context: traceContext(spans), Peers: of.peers, Cluster: of.list, OwnersPrivate: web.private,
	})
	passed[api.PeerService] = server
	a.log.Info("serving", "state", s.State.Dir(), "pool", o.Pool)
	group, run := errgroup.WithContext(ctx)
	group.Go(func() error { return supervisor.Run(run, s, l, o) })
	if len(listeners) > 0 {
		for _, l := range listeners {
			a.log.Info("answering", "at", l.Addr().String())
		}
		group.Go(func() error { return server.Serve(run, listeners...) })
	}
	group.Go(func() error { return of.serve(run, passed) })
	if carry != nil {
		group.Go(func() error { return carry(run) })
	}
	if clients != nil {
		group.Go(func() error { return clients(run) })
	}
	group.Go(func() error { return a.watchdog(run, works) })
	a.notify(daemon.SdNotifyReady)
	err = group.Wait()
	a.notify(daemon.SdNotifyStopping)
	if ctx.Err() != nil {
		// It was told to end. The supervisor has ended, so sandboxes that go to sleep now stay asleep.
		err = errors.Join(err, exit.do(context.WithoutCancel(ctx), a.log, s))
	}
	return err
}
