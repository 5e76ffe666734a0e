package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

const (
	// knownTime is for how long what the store says of a host, or of who has a sandbox, is taken as it was. A host that
	// does not have a sandbox any more says so, and the store is asked anew.
	knownTime = 5 * time.Second
	// maxKnown bounds what is remembered of each.
	maxKnown = 10_000
	// maxReads is how many records of sandboxes are read at once to see who has them.
	maxReads = 16
)

// known is what a store said a while ago, by name.
type known[T any] map[string]knownOf[T]

type knownOf[T any] struct {
	is T
	at time.Time
}

func (k known[T]) get(name string) (is T, ok bool) {
	have, ok := k[name]
	return have.is, ok && time.Since(have.at) < knownTime
}

func (k known[T]) set(name string, is T) {
	if len(k) >= maxKnown {
		clear(k)
	}
	k[name] = knownOf[T]{is, time.Now()}
}

// Peer implements peer.Directory.
func (n *Node) Peer(ctx context.Context, host string, fresh bool) (peer.Host, error) {
	if host == n.o.Name {
		return peer.Host{}, fmt.Errorf("%w: %.64q is this one", peer.ErrNoHost, host)
	}
	h, err := n.hostOf(ctx, host, fresh)
	if errors.Is(err, ledger.ErrNotFound) || errors.Is(err, ledger.ErrName) || err == nil && (h.Left == 0 || h.Address == "") {
		return peer.Host{}, fmt.Errorf("%w: %.64q", peer.ErrNoHost, host)
	}
	return peer.Host{Name: host, Address: h.Address, Key: h.Key}, err
}

// hostOf returns what the store says of another host.
func (n *Node) hostOf(ctx context.Context, name string, fresh bool) (ledger.Host, error) {
	n.mu.Lock()
	h, ok := n.peers.get(name)
	n.mu.Unlock()
	if ok && !fresh {
		return h, nil
	}
	h, err := n.ledger.Host(ctx, name)
	if err == nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.peers.set(name, h)
	}
	return h, err
}

// Where implements peer.Directory.
func (n *Node) Where(ctx context.Context, name string, fresh bool) (string, error) {
	if err := n.awaitMove(ctx, name); err != nil {
		return "", err
	}
	if !spec.ValidName(name) || n.holds(name) {
		return "", nil
	}
	n.mu.Lock()
	host, ok := n.places.get(name)
	n.mu.Unlock()
	if ok && !fresh {
		return host, nil
	}
	f, err := n.family(ctx, name)
	if errors.Is(err, ledger.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("asking who has %s: %w", name, err)
	}
	if host, err = n.holder(ctx, f, fresh); err != nil {
		return "", fmt.Errorf("asking who has %s: %w", name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if host == "" {
		delete(n.places, name) // it may be claimed at any time
	} else {
		n.places.set(name, host)
	}
	return host, nil
}

// holds reports whether a sandbox is this host's, as far as it knows by itself: it is not shared, or claimed.
func (n *Node) holds(name string) bool {
	if n.claimed(name) != nil {
		return true
	}
	c, err := n.dir.Claim(name)
	if err != nil {
		return true // what uses it says that
	}
	if c == nil {
		_, err := n.state.Load(name)
		return !errors.Is(err, sandbox.ErrNotFound)
	}
	return c.Held && c.Session == n.current().Incarnation()
}

// holder returns the other host that has a sandbox, if it lives and has an address.
func (n *Node) holder(ctx context.Context, f *ledger.Family, fresh bool) (string, error) {
	h := f.Holder
	if h == nil || h.Host == n.o.Name {
		return "", nil
	}
	is, err := n.hostOf(ctx, h.Host, fresh)
	if err == nil && is.Incarnation != h.Incarnation && !fresh {
		is, err = n.hostOf(ctx, h.Host, true)
	}
	if errors.Is(err, ledger.ErrNotFound) {
		return "", nil
	}
	if err != nil || is.Incarnation != h.Incarnation || is.Left == 0 || is.Address == "" {
		return "", err
	}
	return h.Host, nil
}

// family reads the record of a sandbox.
func (n *Node) family(ctx context.Context, name string) (*ledger.Family, error) {
	select {
	case n.reads <- struct{}{}:
		defer func() { <-n.reads }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return n.ledger.Family(ctx, name)
}

// Private implements peer.Directory.
func (n *Node) Private(name string) bool {
	if !spec.ValidName(name) || n.dir.Shared(name) {
		return false
	}
	_, err := n.state.Load(name)
	return !errors.Is(err, sandbox.ErrNotFound)
}

// Known implements peer.Directory.
func (n *Node) Known(ctx context.Context, name string, may func(spec.Metadata) error) error {
	if !spec.ValidName(name) {
		return fmt.Errorf("%w: %.64q", sandbox.ErrNotFound, name)
	}
	if may == nil {
		_, err := n.exists(ctx, name)
		return err
	}
	_, err := n.known(ctx, name, may)
	return err
}

var _ peer.Directory = (*Node)(nil)
