package controller

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/kubernetes/agents"
)

// maxMade is how many sandboxes a pool makes at once.
const maxMade = 50

// seenTime is for how long a pool counts what it has made and its cache does not show.
const seenTime = 30 * time.Second

// byController is an index of Sandboxes by the UID of the object that has them.
const byController = ".metadata.controller"

func controllerOf(o kube.Object) []string {
	if c := metav1.GetControllerOf(o); c != nil {
		return []string{string(c.UID)}
	}
	return nil
}

// Pools reconciles SandboxWarmPool objects.
type Pools struct {
	kube.Client

	mu   sync.Mutex // guards made
	made map[types.UID]map[string]time.Time
}

// Reconcile implements reconcile.Reconciler.
func (r *Pools) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var p agents.SandboxWarmPool
	if err := r.Get(ctx, req.NamespacedName, &p); err != nil {
		return ctrl.Result{}, kube.IgnoreNotFound(err)
	}
	if !p.DeletionTimestamp.IsZero() {
		r.mu.Lock()
		delete(r.made, p.UID)
		r.mu.Unlock()
		return ctrl.Result{}, nil
	}
	var until time.Duration
	if ttl := p.Spec.TTLAfterCreated; ttl != nil {
		if until = untilOld(&p, *ttl); until <= 0 {
			return ctrl.Result{}, kube.IgnoreNotFound(r.Delete(ctx, &p, kube.Preconditions{UID: &p.UID}))
		}
	}
	var t agents.SandboxTemplate
	switch err := r.Get(ctx, kube.ObjectKey{Namespace: p.Namespace, Name: p.Spec.TemplateRef.Name}, &t); {
	case apierrors.IsNotFound(err): // its event comes here
		const missing = "TemplateNotFound"
		if c := meta.FindStatusCondition(p.Status.Conditions, agents.ConditionAvailable); c != nil && c.Reason == missing {
			return ctrl.Result{RequeueAfter: until}, nil
		}
		was := p.DeepCopy()
		available(&p, false, missing, fmt.Sprintf("SandboxTemplate %q not found", p.Spec.TemplateRef.Name))
		return ctrl.Result{RequeueAfter: until}, kube.IgnoreNotFound(r.Status().Patch(ctx, &p, kube.MergeFrom(was)))
	case err != nil:
		return ctrl.Result{}, err
	}
	if !is(&t.Spec.Blueprint) {
		return ctrl.Result{}, nil
	}
	var all agents.SandboxList
	if err := r.List(ctx, &all, kube.InNamespace(p.Namespace), kube.MatchingFields{byController: string(p.UID)}); err != nil {
		return ctrl.Result{}, err
	}
	digest, err := digestOf(&t)
	if err != nil {
		return ctrl.Result{}, err
	}
	var have []*agents.Sandbox
	for i := range all.Items {
		s := &all.Items[i]
		switch {
		case !s.DeletionTimestamp.IsZero():
			continue
		case (s.Annotations[AnnotationTemplate] != digest || s.Annotations[agents.TemplateAnnotation] != t.Name) && p.Spec.UpdateStrategy != nil && p.Spec.UpdateStrategy.Type == agents.Recreate:
			if err := r.drop(ctx, s); err != nil {
				return ctrl.Result{}, ignoreConflict(err)
			}
			continue
		}
		have = append(have, s)
		if s.Spec.OperatingMode != agents.Suspended && meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionReady) {
			// It has run. A claim that takes it meanwhile is the first to write, and this fails.
			was := s.DeepCopy()
			s.Spec.OperatingMode = agents.Suspended
			if err := r.Patch(ctx, s, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{})); ignoreConflict(kube.IgnoreNotFound(err)) != nil {
				return ctrl.Result{}, err
			}
		}
	}
	slices.SortFunc(have, func(a, b *agents.Sandbox) int {
		return cmp.Or(boolean(warm(b))-boolean(warm(a)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	err = r.fit(ctx, &p, &t, digest, have)
	was := p.DeepCopy()
	p.Status = agents.WarmPoolStatus{Replicas: int32(len(have)), Conditions: p.Status.Conditions, Selector: agents.PoolLabel + "=" + agents.NameHash(p.Name)}
	for _, s := range have {
		if warm(s) {
			p.Status.ReadyReplicas++
		}
	}
	if ready := p.Status.ReadyReplicas; ready >= p.Spec.Replicas {
		available(&p, true, "MinimumReplicasAvailable", "all sandboxes can be claimed")
	} else {
		available(&p, false, "MinimumReplicasUnavailable", fmt.Sprintf("not all of %d sandboxes can be claimed yet", p.Spec.Replicas))
	}
	if err == nil && !equality.Semantic.DeepEqual(was.Status, p.Status) {
		err = kube.IgnoreNotFound(r.Status().Patch(ctx, &p, kube.MergeFrom(was)))
	}
	after := until
	if r.unseen(p.UID, have) > 0 && (after == 0 || seenTime < after) {
		after = seenTime // if an event of theirs is missed
	}
	return ctrl.Result{RequeueAfter: after}, ignoreConflict(err)
}

func available(p *agents.SandboxWarmPool, is bool, reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	p.Status.ObservedGeneration = p.Generation
	meta.SetStatusCondition(&p.Status.Conditions, metav1.Condition{
		Type: agents.ConditionAvailable, Status: status, Reason: reason, Message: message, ObservedGeneration: p.Generation,
	})
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// warm reports whether a sandbox can be claimed: it has run, and sleeps.
func warm(s *agents.Sandbox) bool {
	return s.Annotations[AnnotationStarted] != "" && s.Spec.OperatingMode == agents.Suspended && meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionSuspended)
}

// fit makes what a pool lacks, or removes what it has too much of: the last of have first.
func (r *Pools) fit(ctx context.Context, p *agents.SandboxWarmPool, t *agents.SandboxTemplate, digest string, have []*agents.Sandbox) error {
	want, n := int(p.Spec.Replicas), len(have)+r.unseen(p.UID, have)
	for n > want && len(have) > 0 {
		last := have[len(have)-1]
		have, n = have[:len(have)-1], n-1
		if err := r.drop(ctx, last); err != nil {
			return err
		}
	}
	for range min(want-n, maxMade) {
		s := fromTemplate(t)
		s.Name = cut(p.Name, 57) + "-" + rand.String(5)
		s.Namespace = p.Namespace
		s.Labels[agents.LaunchLabel], s.Labels[agents.PoolLabel] = agents.LaunchWarm, agents.NameHash(p.Name)
		s.Annotations[AnnotationTemplate] = digest
		s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(p, agents.Extensions.WithKind("SandboxWarmPool"))}
		if err := r.Create(ctx, s); err != nil {
			return fmt.Errorf("making a sandbox of pool %s: %w", p.Name, err)
		}
		r.mu.Lock()
		if r.made == nil {
			r.made = map[types.UID]map[string]time.Time{}
		}
		if r.made[p.UID] == nil {
			r.made[p.UID] = map[string]time.Time{}
		}
		r.made[p.UID][s.Name] = time.Now()
		r.mu.Unlock()
	}
	return nil
}

// unseen returns how many sandboxes were made that the cache does not show yet.
func (r *Pools) unseen(pool types.UID, have []*agents.Sandbox) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	made := r.made[pool]
	maps.DeleteFunc(made, func(name string, at time.Time) bool {
		return time.Since(at) > seenTime || slices.ContainsFunc(have, func(s *agents.Sandbox) bool { return s.Name == name })
	})
	return len(made)
}

// drop removes a sandbox of a pool, unless somebody has changed it.
func (r *Pools) drop(ctx context.Context, s *agents.Sandbox) error {
	err := r.Delete(ctx, s, kube.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// fromTemplate returns a sandbox as a template wants it.
func fromTemplate(t *agents.SandboxTemplate) *agents.Sandbox {
	s := &agents.Sandbox{Spec: agents.SandboxSpec{Blueprint: t.Spec.Blueprint.DeepCopy(), OperatingMode: agents.Running}}
	s.Labels = map[string]string{agents.TemplateHashLabel: agents.NameHash(t.Name)}
	s.Annotations = map[string]string{agents.TemplateAnnotation: t.Name}
	return s
}

// checkTemplate returns errUnsupported for what a template wants beside what its sandboxes tell.
func checkTemplate(t *agents.SandboxTemplate) error {
	switch {
	case t.Spec.NetworkPolicy != nil && t.Spec.NetworkPolicyManagement != "Unmanaged":
		return fmt.Errorf("%w networkPolicy: a VM has no network unless the annotation %s gives it one with a policy", errUnsupported, AnnotationSpec)
	case len(t.Spec.GeneratedSecrets) > 0:
		return fmt.Errorf("%w generatedSecrets", errUnsupported)
	}
	return nil
}

// digestOf is of what a VM is made with: what a template says of pods changes none.
func digestOf(t *agents.SandboxTemplate) (string, error) {
	text, err := json.Marshal([]any{t.Spec.PodTemplate.Spec, t.Spec.PodTemplate.Annotations[AnnotationSpec]})
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8]), err
}

func cut(s string, n int) string { return s[:min(n, len(s))] }
