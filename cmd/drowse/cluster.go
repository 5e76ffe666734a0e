//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// clusterFlags say which hosts a server shares sandboxes with.
type clusterFlags struct {
	in, name, address string
	all               bool
}

func (f *clusterFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.in, "cluster", "", "share sandboxes with the other hosts that meet in this `STORE`: s3://BUCKET/PREFIX (see \"drowse archive\"), or a directory for tests on one machine")
	fl.StringVar(&f.name, "cluster-host", "", "`NAME` of this host among them (default its host name)")
	fl.StringVar(&f.address, "cluster-address", "", "`HOST:PORT` where this host listens for the others, which pass on requests for sandboxes that it has; without it, such requests are refused")
	fl.BoolVar(&f.all, "cluster-all", false, "share each sandbox when it falls asleep; by default those that \"drowse sleep --durable\" names")
}

func (f *clusterFlags) check() error {
	if f.in == "" && (f.name != "" || f.address != "" || f.all) {
		return usageError{errors.New("--cluster-host, --cluster-address and --cluster-all go with --cluster")}
	}
	return nil
}

var notInHostName = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// member is a host's part in its cluster; nothing without one.
type member struct {
	host  *sandbox.Host
	peers *peer.Peers  // nil without a cluster
	at    net.Listener // nil without an address
	log   *slog.Logger
	node  *cluster.Node
	list  fleet.Cluster // nil without a cluster
	done  func()        // closes the store

	life context.Context
	end  context.CancelFunc
}

// join makes a host one of its cluster. run and leave must follow.
func (f *clusterFlags) join(ctx context.Context, a *app, h *sandbox.Host) (m *member, err error) {
	m = &member{host: h, log: a.log}
	if f.in == "" {
		return m, nil
	}
	name := f.name
	if name == "" {
		if name, err = os.Hostname(); err != nil {
			return nil, err
		}
		name = notInHostName.ReplaceAllString(name, "-")
	}
	id, err := peer.NewIdentity(name)
	if err != nil {
		return nil, err
	}
	store, done, err := openBlobs(f.in, true)
	if err != nil {
		return nil, err
	}
	m.done = done
	defer func() {
		if err != nil {
			if m.at != nil {
				m.at.Close()
			}
			done()
		}
	}()
	o := cluster.Options{Store: store, Name: name, All: f.all, Log: a.log}
	if f.address != "" {
		if m.at, o.Address, err = peer.Listen(f.address); err != nil {
			return nil, usageError{err}
		}
		o.Key = id.Key()
	}
	a.log.Info("joining the cluster: after a boot it takes half a minute", "host", name)
	if m.node, err = cluster.Join(ctx, h, o); err != nil {
		return nil, err
	}
	a.log.Info("joined the cluster", "host", name, "address", o.Address)
	with := *h
	with.Cluster = m.node
	m.host, m.peers = &with, peer.New(peer.Options{Identity: id, Directory: m.node, Log: a.log})
	m.node.Reach(m.peers)
	m.list = m.node.Catalog(m.peers)
	m.life, m.end = context.WithCancel(context.WithoutCancel(ctx))
	return m, nil
}

// run is the node's life, until leave.
func (m *member) run() error {
	if m.node == nil {
		return nil
	}
	defer m.done()
	defer m.peers.Close()
	return m.node.Run(m.life)
}

// leave publishes what sleeps, and ends run.
func (m *member) leave() {
	if m.node == nil {
		return
	}
	published, cancel := context.WithTimeout(m.life, publishTime)
	defer cancel()
	if err := m.node.PublishAll(published); err != nil {
		m.log.Warn("not all sandboxes that sleep are published: the next server of this host does that", "error", err)
	}
	m.end()
}

// serve serves what other hosts pass on, until ctx ends.
func (m *member) serve(ctx context.Context, handlers map[string]http.Handler) error {
	if m.at == nil {
		return nil
	}
	maps.Copy(handlers, m.node.PeerHandlers())
	return m.peers.Serve(ctx, m.at, handlers)
}

// publishTime is how long a server that ends goes on publishing.
const publishTime = 30 * time.Second

// asked is a host's cluster for commands: they ask the server for what needs its session.
type asked struct{ state string }

// clusterOf returns the cluster of a state directory; nil if the host has never been in one.
func clusterOf(state string) lease.Cluster {
	if _, err := os.Stat(string(lease.In(state))); err != nil {
		return nil
	}
	return asked{state}
}

func (c asked) server(name string, do func(s *client.Client) error) error {
	return c.any(name, func(s *client.Client) error { return do(s.Here()) }) // what follows is done here
}

func (c asked) any(name string, do func(s *client.Client) error) error {
	s := client.Unix(filepath.Join(c.state, api.SocketFile))
	defer s.Close()
	err := do(s)
	var no *net.OpError
	if errors.As(err, &no) && no.Op == "dial" {
		return fmt.Errorf("%w: %s: no server answers", spec.ErrUnclaimed, name)
	}
	return err
}

// Claim implements lease.Cluster. A change of nothing has the server claim a sandbox, and leaves it asleep.
func (c asked) Claim(ctx context.Context, name string, _ func(spec.Metadata) error) error {
	dir := lease.In(c.state)
	here := true
	if _, err := os.Stat(filepath.Join(c.state, "vms", name, "vm.json")); errors.Is(err, fs.ErrNotExist) {
		here = false
	}
	if _, _, _, err := dir.Left(name); here && err == nil {
		return nil // it is this host's alone, or claimed
	}
	err := c.server(name, func(s *client.Client) error {
		_, err := s.Update(ctx, name, records.Changes{})
		return err
	})
	if !here && errors.Is(err, spec.ErrUnclaimed) {
		return fmt.Errorf("%w: %s: see Host.List; no server answers that could get it from the cluster", spec.ErrNotFound, name)
	}
	return err
}

// Publish implements lease.Cluster.
func (c asked) Publish(ctx context.Context, name string) error {
	return c.server(name, func(s *client.Client) error {
		_, err := s.Sleep(ctx, name, spec.SleepOptions{Durable: true})
		return err
	})
}

// Migrate implements lease.Cluster. The server asks the host that has the sandbox.
func (c asked) Migrate(ctx context.Context, name string, o spec.MigrateOptions) (res spec.MigrateResult, err error) {
	err = c.any(name, func(s *client.Client) error {
		res, err = s.Migrate(ctx, name, o)
		return err
	})
	return res, err
}

// Delete implements lease.Cluster.
func (c asked) Delete(ctx context.Context, name string) (shared bool, freed spec.Freed, err error) {
	if _, err := os.Stat(filepath.Join(c.state, "vms", name)); err == nil && !lease.In(c.state).Shared(name) {
		return false, freed, nil
	}
	err = c.server(name, func(s *client.Client) error {
		freed, err = s.Delete(ctx, name)
		return err
	})
	return true, freed, err
}
