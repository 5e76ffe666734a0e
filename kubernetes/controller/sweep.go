package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/records"
)

const (
	// sweepTime bounds the list and the removals of one node.
	sweepTime = time.Minute
	// allEvery is at which sweeps nodes list what sleeps as well: far more than what is awake.
	allEvery = 10
	// maxSwept is how many VMs of a node one sweep removes or has sleep.
	maxSwept = 1000
)

// Sweep finds on the nodes the VMs of this cluster that no Sandbox accounts for, and removes them; and those that run
// without a reservation, as traffic wakes a VM that sleeps, and notes that they are to sleep again. Without all it
// looks only at what runs. It needs no other state than the objects and the nodes' lists, so that it also finds what
// went while no controller ran.
func (r *Sandboxes) Sweep(ctx context.Context, all bool, wake func(*agents.Sandbox)) error {
	var nodes corev1.NodeList
	if err := r.List(ctx, &nodes, kube.MatchingLabels{NodeLabel: NodeLabelValue}); err != nil {
		return err
	}
	var errs []error
	shared := all && r.Durable // what sleeps in the store alone is in the list of any node
	for _, n := range nodes.Items {
		err := r.sweepNode(ctx, n.Name, all, shared, wake)
		shared = shared && err != nil
		if err != nil && !errors.Is(err, errUnreachable) && !errors.Is(err, errBusy) && !errors.Is(err, errNodeGone) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (r *Sandboxes) sweepNode(ctx context.Context, node string, all, shared bool, wake func(*agents.Sandbox)) error {
	f := records.Filter{Tags: []string{r.tag()}, Limit: records.MaxPage}
	if !all {
		f.Statuses = []records.Status{records.Creating, records.Running, records.Waiting}
	}
	// Each look is a request of its own: it waits for no other.
	ask := func(do func(context.Context, *client.Client) error) error {
		return r.Fleet.call(ctx, node, "", sweepTime, do)
	}
	for swept := 0; swept < maxSwept; {
		var l records.List
		list := func(ctx context.Context, c *client.Client) (err error) {
			if !shared {
				c = c.Here()
			}
			l, err = c.List(ctx, f)
			return err
		}
		if err := ask(list); err != nil {
			return err
		}
		for i := range l.Sandboxes {
			row := &l.Sandboxes[i]
			if row.Host != "" && row.Host != node {
				continue // its own node tells
			}
			s, gone, err := r.accounts(ctx, row)
			switch {
			case err != nil:
				return err
			case gone:
				swept++
				log.FromContext(ctx).Info("removing a VM whose Sandbox is gone", "vm", row.Name, "node", node, "purpose", row.Purpose)
				if err := ask(func(ctx context.Context, c *client.Client) error { _, err := c.Delete(ctx, row.Name); return err }); err != nil {
					return err
				}
			case s != nil && row.Status.Live() && (s.Spec.OperatingMode == agents.Suspended || s.Annotations[AnnotationNode] != node):
				swept++
				r.awake.Store(s.UID, node)
				wake(s)
			}
		}
		if l.Next == "" || l.Next <= f.After {
			return nil
		}
		f.After = l.Next
	}
	return nil
}

// ours returns the Sandbox that a VM was made for, by what it was made with; none for VMs of others.
func (r *Sandboxes) ours(row *records.Sandbox) (key kube.ObjectKey) {
	what, is := strings.CutPrefix(row.Purpose, purposePrefix)
	namespace, name, two := strings.Cut(what, "/")
	for _, t := range row.Tags {
		if t == r.tag() && is && two && row.Owner == ownerPrefix+namespace && strings.HasPrefix(row.Name, namePrefix) {
			return kube.ObjectKey{Namespace: namespace, Name: name}
		}
	}
	return key
}

// accounts returns the Sandbox that a VM is of, as the cache has it, or that it is gone: then the API server says so
// too.
func (r *Sandboxes) accounts(ctx context.Context, row *records.Sandbox) (s *agents.Sandbox, gone bool, err error) {
	key := r.ours(row)
	if key.Name == "" {
		return nil, false, nil
	}
	is := func(s *agents.Sandbox) bool {
		left, expires := untilShutdown(s.Spec.ShutdownTime)
		expired := expires && left <= 0 && s.Annotations[AnnotationNode] == "" // and its VM was to be removed
		return namePrefix+string(s.UID) == row.Name && !expired
	}
	s = &agents.Sandbox{}
	if err := r.Get(ctx, key, s); err == nil && is(s) {
		return s, false, nil
	}
	switch err := r.Live.Get(ctx, key, s); {
	case apierrors.IsNotFound(err):
		return nil, true, nil
	case err != nil:
		return nil, false, err
	}
	return s, !is(s), nil
}

// sweep sweeps now and then until ctx ends.
func (r *Sandboxes) sweep(ctx context.Context, again chan<- event.GenericEvent) error {
	for i := 0; ; i++ {
		err := r.Sweep(ctx, i%allEvery == 0, func(s *agents.Sandbox) {
			select {
			case again <- event.GenericEvent{Object: s}:
			case <-ctx.Done():
			}
		})
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "sweeping nodes")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(r.nextCheck()):
		}
	}
}
