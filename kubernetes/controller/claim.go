package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/kubernetes/agents"
)

// Claims reconciles SandboxClaim objects.
type Claims struct {
	kube.Client
	// Live reads past the cache.
	Live kube.Reader
}

// Reconcile implements reconcile.Reconciler.
func (r *Claims) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	c := &agents.SandboxClaim{}
	if err := r.Get(ctx, req.NamespacedName, c); err != nil {
		return ctrl.Result{}, kube.IgnoreNotFound(err)
	}
	if !c.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil // the garbage collector removes its sandbox
	}
	p, t, err := r.source(ctx, c)
	if err != nil || t == nil {
		return ctrl.Result{}, err
	}
	was := c.DeepCopy()
	after, err := r.step(ctx, c, p, t)
	var halt *stop
	if errors.As(err, &halt) {
		after, err = halt.retry, nil
		claimReady(c, metav1.ConditionFalse, halt.reason, halt.message)
	}
	if !equality.Semantic.DeepEqual(was.Status, c.Status) {
		was.ObjectMeta = c.ObjectMeta
		if perr := r.Status().Patch(ctx, c, kube.MergeFrom(was)); kube.IgnoreNotFound(perr) != nil {
			err = errors.Join(err, perr)
		}
	}
	if apierrors.IsConflict(err) { // another claim was first
		return ctrl.Result{RequeueAfter: time.Millisecond}, nil
	}
	return ctrl.Result{RequeueAfter: after}, err
}

// source returns a claim's pool and template; nil if they are not of this class, or not there yet.
func (r *Claims) source(ctx context.Context, c *agents.SandboxClaim) (*agents.SandboxWarmPool, *agents.SandboxTemplate, error) {
	var p agents.SandboxWarmPool
	if err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: c.Spec.WarmPoolRef.Name}, &p); err != nil {
		return nil, nil, kube.IgnoreNotFound(err)
	}
	var t agents.SandboxTemplate
	if err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: p.Spec.TemplateRef.Name}, &t); err != nil || !is(&t.Spec.Blueprint) {
		return nil, nil, kube.IgnoreNotFound(err)
	}
	return &p, &t, nil
}

func claimReady(c *agents.SandboxClaim, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&c.Status.Conditions, metav1.Condition{
		Type: agents.ConditionReady, Status: status, Reason: reason, Message: cut(message, 1024), ObservedGeneration: c.Generation,
	})
}

// step does the next thing for a claim. The name of a sandbox is written to the claim first, and then the claim to the
// sandbox: whatever ends in between, a claim has one.
func (r *Claims) step(ctx context.Context, c *agents.SandboxClaim, p *agents.SandboxWarmPool, t *agents.SandboxTemplate) (time.Duration, error) {
	var left time.Duration
	if l := c.Spec.Lifecycle; l != nil && l.ShutdownTime != nil {
		if left = time.Until(l.ShutdownTime.Time); left <= 0 {
			return 0, r.expire(ctx, c)
		}
	}
	if err := cmp.Or(checkTemplate(t), checkEnv(c, t)); err != nil {
		return 0, &stop{ReasonUnsupported, err.Error(), 0}
	}
	s, err := r.assigned(ctx, c)
	if err != nil {
		return 0, err
	}
	if s == nil {
		if s, err = r.pick(ctx, c, p); err != nil {
			return 0, err
		}
		name := c.Name
		if s != nil {
			name = s.Name
		}
		if c.Annotations[agents.SandboxNameAnnotation] != name {
			was := c.DeepCopy()
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, agents.SandboxNameAnnotation, name)
			status := c.Status
			if err := r.Patch(ctx, c, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{})); err != nil {
				return 0, err
			}
			c.Status = status
		}
	}
	switch {
	case s == nil:
		if s, err = r.make(ctx, c, t); err != nil {
			return 0, err
		}
	case !metav1.IsControlledBy(s, c):
		if err := r.adopt(ctx, c, s); err != nil {
			return 0, err
		}
	}
	c.Status.Sandbox.Name = s.Name
	ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if ready == nil || ready.ObservedGeneration != s.Generation {
		ready = &metav1.Condition{Status: metav1.ConditionFalse, Reason: agents.ReasonNotReady, Message: "the sandbox is coming up"}
	}
	claimReady(c, ready.Status, ready.Reason, ready.Message)
	return left, nil
}

// assigned returns the sandbox that a claim has, or has chosen and can have; nil if there is none.
func (r *Claims) assigned(ctx context.Context, c *agents.SandboxClaim) (*agents.Sandbox, error) {
	name := c.Annotations[agents.SandboxNameAnnotation]
	if name == "" {
		return nil, nil
	}
	var s agents.Sandbox
	if err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: name}, &s); err != nil {
		return nil, kube.IgnoreNotFound(err)
	}
	owner := metav1.GetControllerOf(&s)
	if metav1.IsControlledBy(&s, c) || name != c.Name && owner != nil && owner.Kind == "SandboxWarmPool" && s.DeletionTimestamp.IsZero() {
		return &s, nil
	}
	return nil, nil
}

// pick returns a warm sandbox of the pool; nil if there is none. Claims of the same moment tend to pick different ones.
func (r *Claims) pick(ctx context.Context, c *agents.SandboxClaim, p *agents.SandboxWarmPool) (*agents.Sandbox, error) {
	if len(c.Spec.Env) > 0 || c.Annotations[agents.SandboxNameAnnotation] == c.Name {
		return nil, nil
	}
	var all agents.SandboxList
	if err := r.List(ctx, &all, kube.InNamespace(p.Namespace), kube.MatchingFields{byController: string(p.UID)}); err != nil {
		return nil, err
	}
	var best *agents.Sandbox
	var rank uint64
	for i := range all.Items {
		s := &all.Items[i]
		if !s.DeletionTimestamp.IsZero() || !warm(s) {
			continue
		}
		h := fnv.New64a()
		fmt.Fprint(h, c.UID, s.UID)
		if n := h.Sum64(); best == nil || n > rank {
			best, rank = s, n
		}
	}
	return best, nil
}

// adopt makes a pool's sandbox the claim's, and has it run.
func (r *Claims) adopt(ctx context.Context, c *agents.SandboxClaim, s *agents.Sandbox) error {
	was := s.DeepCopy()
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(c, agents.Extensions.WithKind("SandboxClaim"))}
	s.Spec.OperatingMode = agents.Running
	mark(&s.Spec.PodTemplate.PodMetadata, c)
	return r.Patch(ctx, s, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{}))
}

// mark adds to a pod's metadata what a claim wants in it. What is there stays.
func mark(m *agents.PodMetadata, c *agents.SandboxClaim) {
	add := func(to *map[string]string, more map[string]string) {
		all := maps.Clone(more)
		if all == nil {
			all = map[string]string{}
		}
		maps.Copy(all, *to)
		*to = all
	}
	add(&m.Labels, c.Spec.AdditionalPodMetadata.Labels)
	m.Labels[agents.ClaimLabel] = string(c.UID)
	extra := maps.Clone(c.Spec.AdditionalPodMetadata.Annotations)
	delete(extra, AnnotationSpec) // the template says what a VM is like
	add(&m.Annotations, extra)
	if c.Spec.SafeToEvict != nil {
		m.Annotations[agents.SafeToEvictAnnotation] = *c.Spec.SafeToEvict
	}
}

// make makes a sandbox for a claim, of the claim's name.
func (r *Claims) make(ctx context.Context, c *agents.SandboxClaim, t *agents.SandboxTemplate) (*agents.Sandbox, error) {
	s := fromTemplate(t)
	s.Name, s.Namespace = c.Name, c.Namespace
	s.Labels[agents.LaunchLabel] = agents.LaunchCold
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(c, agents.Extensions.WithKind("SandboxClaim"))}
	mark(&s.Spec.PodTemplate.PodMetadata, c)
	if len(c.Spec.Env) > 0 {
		b := &s.Spec.PodTemplate.Spec.Containers[0] // checkEnv
		for _, e := range c.Spec.Env {
			b.Env = slices.DeleteFunc(b.Env, func(v corev1.EnvVar) bool { return v.Name == e.Name })
			b.Env = append(b.Env, corev1.EnvVar{Name: e.Name, Value: e.Value})
		}
	}
	err := r.Create(ctx, s)
	if apierrors.IsAlreadyExists(err) {
		if err := r.Live.Get(ctx, kube.ObjectKeyFromObject(s), s); err != nil {
			return nil, err
		}
		if !metav1.IsControlledBy(s, c) {
			return nil, &stop{"SandboxConflict", fmt.Sprintf("there is a Sandbox %s that is not this claim's: remove it", s.Name), later}
		}
		err = nil
	}
	return s, err
}

// checkEnv returns an error for variables that a claim may not set.
func checkEnv(c *agents.SandboxClaim, t *agents.SandboxTemplate) error {
	for _, e := range c.Spec.Env {
		policy := t.Spec.EnvVarsInjectionPolicy
		if policy != "Allowed" && policy != "Overrides" {
			return fmt.Errorf("template %s has envVarsInjectionPolicy %q: the claim may not set %s", t.Name, cmp.Or(policy, "Disallowed"), e.Name)
		}
		all := t.Spec.PodTemplate.Spec.Containers
		if len(all) != 1 || e.ContainerName != "" && e.ContainerName != all[0].Name {
			return fmt.Errorf("%w variables of container %q: a VM has one container", errUnsupported, e.ContainerName)
		}
		if policy == "Allowed" && slices.ContainsFunc(all[0].Env, func(v corev1.EnvVar) bool { return v.Name == e.Name }) {
			return fmt.Errorf("template %s sets %s, and its envVarsInjectionPolicy is Allowed: the claim may not replace it", t.Name, e.Name)
		}
	}
	return nil
}

// expire ends a claim whose shutdownTime has come.
func (r *Claims) expire(ctx context.Context, c *agents.SandboxClaim) error {
	switch policy := c.Spec.Lifecycle.ShutdownPolicy; policy {
	case agents.Delete, agents.DeleteForeground:
		o := []kube.DeleteOption{kube.Preconditions{UID: ptr.To(c.UID)}}
		if policy == agents.DeleteForeground {
			o = append(o, kube.PropagationPolicy(metav1.DeletePropagationForeground))
		}
		return kube.IgnoreNotFound(r.Delete(ctx, c, o...))
	}
	s, err := r.assigned(ctx, c)
	if err != nil {
		return err
	}
	if s != nil && metav1.IsControlledBy(s, c) && s.DeletionTimestamp.IsZero() {
		if err := r.Delete(ctx, s, kube.Preconditions{UID: &s.UID}); kube.IgnoreNotFound(err) != nil {
			return err
		}
	}
	claimReady(c, metav1.ConditionFalse, agents.ReasonClaimExpired, "its shutdownTime has come")
	return nil
}
