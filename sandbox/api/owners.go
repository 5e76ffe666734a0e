package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// A caller with an owner reaches that owner's sandboxes, and what belongs to them. Whatever else there is, is
// answered as if it were not there.

// reaches returns sandbox.ErrNotFound if a sandbox is not the caller's.
func (s *Server) reaches(ctx context.Context, c Caller, name string) error {
	if c.Owner == "" {
		return nil
	}
	m, err := s.o.Host.State.Metadata(name)
	if err == nil && m.Owner == c.Owner {
		return nil
	}
	if _, lerr := s.o.Host.State.Load(name); s.o.Peers != nil && errors.Is(lerr, sandbox.ErrNotFound) {
		// It may sleep in the store.
		if err := s.o.Peers.Directory().Known(ctx, name, c.mine(name)); !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	return noSandbox(name)
}

// claim gets a sandbox from the cluster before a request that is not for reading alone: what it changes elsewhere would
// be lost.
func (s *Server) claim(ctx context.Context, rt route, name string) error {
	h, c := s.o.Host, CallerOf(ctx)
	if h.Cluster == nil || rt.scope == ScopeRead || rt.method == http.MethodDelete && rt.path == onOne {
		return nil
	}
	if _, err := h.State.Load(name); !errors.Is(err, sandbox.ErrNotFound) {
		if err := s.reaches(ctx, c, name); err != nil {
			return err
		}
	}
	return h.Cluster.Claim(ctx, name, c.mine(name))
}

// noSandbox is the same error for one that is not there and one of another owner.
func noSandbox(name string) error {
	return fmt.Errorf("%w: %.64q: see Host.List", sandbox.ErrNotFound, name)
}

// reachesSnapshot returns the whole id of a snapshot, or an error if it is not of a sandbox of the caller's.
func (s *Server) reachesSnapshot(ctx context.Context, c Caller, prefix string) (string, error) {
	id, err := s.o.Host.State.FindSnapshot(prefix)
	if c.Owner == "" || prefix == "" {
		return id, err
	}
	missing := own("snapshot-not-found", "list what there is, with GET /v1/snapshots", "snapshot %.64q is not there", prefix)
	if err != nil {
		return "", missing
	}
	all, err := s.snapshots(ctx, c, func(i spec.SnapshotInfo) bool { return i.ID == id })
	if err != nil {
		return "", err
	}
	if len(all.Snapshots) == 0 {
		return "", missing
	}
	return id, nil
}

// ownTags checks the tags that a caller with an owner gives a snapshot. By those of E2B's wire, as package templates
// has them, that wire knows whose template a snapshot is: they stay together as they are, or all go.
func (s *Server) ownTags(c Caller, id string, tags []string) error {
	wires := func(tags []string) []string {
		tags = slices.DeleteFunc(slices.Clone(tags), func(t string) bool { return t != "e2b" && !strings.HasPrefix(t, "e2b-") })
		slices.Sort(tags)
		return slices.Compact(tags)
	}
	want := wires(tags)
	if c.Owner == "" || len(want) == 0 {
		return nil
	}
	is, err := s.o.Host.State.InspectSnapshot(id)
	if err == nil && !slices.Equal(want, wires(is.Tags)) {
		err = own(wire.CodeForbidden, "leave the tags e2b and e2b-... as they are, or out", "%s is for sandboxes of one owner, and these tags say whose a template is", c.Name)
	}
	return err
}

// snapshots lists those of the caller that are wanted.
func (s *Server) snapshots(ctx context.Context, c Caller, want func(spec.SnapshotInfo) bool) (wire.Snapshots, error) {
	all, err := s.o.Host.State.Snapshots()
	out := wire.Snapshots{Version: 1, Snapshots: []spec.SnapshotInfo{}}
	if err != nil {
		return out, err
	}
	owned := func(string) bool { return true }
	if c.Owner != "" {
		if owned, err = s.ownedIDs(ctx, c.Owner); err != nil {
			return out, err
		}
	}
	for _, i := range all {
		if want(i) && owned(i.Owner) {
			out.Snapshots = append(out.Snapshots, i)
		}
	}
	return out, nil
}

// ownedIDs returns a function that says whether a sandbox, which may be gone, is or was the owner's.
func (s *Server) ownedIDs(ctx context.Context, owner string) (func(id string) bool, error) {
	l, err := s.fleet.List(ctx, records.Filter{Limit: records.MaxPage})
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for {
		for _, b := range l.Sandboxes {
			known[b.ID] = b.Owner == owner
		}
		if l.Next == "" {
			break
		}
		if l, err = s.fleet.List(ctx, records.Filter{Limit: records.MaxPage, After: l.Next}); err != nil {
			return nil, err
		}
	}
	return func(id string) bool {
		if is, ok := known[id]; ok || id == "" {
			return is
		}
		gone, err := s.o.Host.State.Removed(id)
		known[id] = err == nil && gone.Record.ID == id && gone.Metadata.Owner == owner
		return known[id]
	}, nil
}

// ownSpec checks what a caller with an owner asks of a sandbox, and sets the sandbox's owner.
func (s *Server) ownSpec(c Caller, want *spec.VM, m *spec.Metadata) error {
	if c.Owner == "" {
		return nil
	}
	if m.Owner == "" {
		m.Owner = c.Owner
	}
	switch {
	case m.Owner != c.Owner:
		return notOwner(c)
	case len(want.Volumes) > 0:
		return own(wire.CodeForbidden, "use a token without an owner", "volumes belong to the host, and %s is for sandboxes of one owner", c.Name)
	case len(want.Tags) > 0:
		// Policies of other owners' sandboxes may let in what has a tag.
		return own(wire.CodeForbidden, "use a token without an owner", "tags of network policies belong to the host, and %s is for sandboxes of one owner", c.Name)
	}
	return spec.InField("policy", s.ownPolicy(c, want.Policy))
}

// ownPolicy checks the network policy that a caller with an owner gives a sandbox.
func (s *Server) ownPolicy(c Caller, p *netpolicy.Policy) error {
	if c.Owner == "" {
		return nil
	}
	if err := p.CheckTenant(s.o.OwnersPrivate); err != nil {
		return own(wire.CodeForbidden, "use a token without an owner, or see `drowse serve --owners-private`", "%s is for sandboxes of one owner: %w", c.Name, err)
	}
	return nil
}

func notOwner(c Caller) error {
	return own(wire.CodeForbidden, "leave the owner out", "%s is for sandboxes of one owner, and cannot give them another", c.Name)
}

// ownChanges checks the changes that a caller with an owner asks for.
func (s *Server) ownChanges(ctx context.Context, c Caller, ch *records.Changes) error {
	if c.Owner == "" {
		return nil
	}
	if ch.Owner != nil && *ch.Owner != c.Owner {
		return notOwner(c)
	}
	if err := s.ownPolicy(c, ch.Spec.Policy); err != nil {
		return spec.InField("policy", err)
	}
	ch.Owner = &c.Owner // also after a reset
	if ch.Rotate != nil && ch.Rotate.To != "" {
		_, err := s.reachesSnapshot(ctx, c, ch.Rotate.To)
		return err
	}
	return nil
}
