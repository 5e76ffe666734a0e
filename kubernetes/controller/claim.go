package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/events"
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
	// Events, if not nil, gets what happens to claims.
	Events events.EventRecorder
}

// errOther means that a claim is another controller's.
var errOther = errors.New("of another class")

// Reconcile implements reconcile.Reconciler.
func (r *Claims) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	c := &agents.SandboxClaim{}
	if err := r.Get(ctx, req.NamespacedName, c); err != nil {
		return ctrl.Result{}, kube.IgnoreNotFound(err)
	}
	if !c.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil // the garbage collector removes its sandbox
	}
	if ttl := c.Spec.TTLAfterCreated; ttl != nil && untilOld(c, *ttl) <= 0 {
		return ctrl.Result{}, kube.IgnoreNotFound(r.Delete(ctx, c, kube.Preconditions{UID: &c.UID}))
	}
	was := c.DeepCopy()
	after, err := r.step(ctx, c)
	if errors.Is(err, errOther) {
		return ctrl.Result{}, nil
	}
	var halt *stop
	if errors.As(err, &halt) {
		after, err = halt.retry, nil
		// Another controller may say so too, in other words.
		if now := claimReason(c); now != halt.reason || !strings.HasSuffix(now, "NotFound") {
			claimReady(c, metav1.ConditionFalse, halt.reason, halt.message)
		}
	}
	if err == nil && halt == nil && was.Status.Sandbox.Name == "" && fresh(c) && claimReason(c) == agents.ReasonNotReady {
		return ctrl.Result{RequeueAfter: soon}, nil // mostly its sandbox is ready before that
	}
	if now := claimReason(c); r.Events != nil && now == agents.ReasonClaimExpired && claimReason(was) != now {
		r.Events.Eventf(c, nil, corev1.EventTypeNormal, now, "Reconcile", "the claim's time has come")
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
	if ttl := c.Spec.TTLAfterCreated; ttl != nil && (after == 0 || untilOld(c, *ttl) < after) {
		after = max(untilOld(c, *ttl), time.Millisecond)
	}
	return ctrl.Result{RequeueAfter: after}, err
}

// untilOld returns how long it is until an object is some seconds old.
func untilOld(o kube.Object, seconds int32) time.Duration {
	return time.Until(o.GetCreationTimestamp().Add(time.Duration(seconds) * time.Second))
}

func claimReason(c *agents.SandboxClaim) string {
	if c := meta.FindStatusCondition(c.Status.Conditions, agents.ConditionReady); c != nil {
		return c.Reason
	}
	return ""
}

// source returns a claim's pool and template. The error is errOther, or a stop if they are not there.
func (r *Claims) source(ctx context.Context, c *agents.SandboxClaim) (*agents.SandboxWarmPool, *agents.SandboxTemplate, error) {
	var p agents.SandboxWarmPool
	switch err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: c.Spec.WarmPoolRef.Name}, &p); {
	case apierrors.IsNotFound(err):
		return nil, nil, &stop{"WarmPoolNotFound", fmt.Sprintf("SandboxWarmPool %q not found", c.Spec.WarmPoolRef.Name), 0}
	case err != nil:
		return nil, nil, err
	}
	var t agents.SandboxTemplate
	switch err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: p.Spec.TemplateRef.Name}, &t); {
	case apierrors.IsNotFound(err):
		return nil, nil, &stop{"TemplateNotFound", fmt.Sprintf("SandboxTemplate %q not found", p.Spec.TemplateRef.Name), 0}
	case err != nil:
		return nil, nil, err
	case !is(&t.Spec.Blueprint):
		return nil, nil, errOther
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
func (r *Claims) step(ctx context.Context, c *agents.SandboxClaim) (time.Duration, error) {
	s, err := r.chosen(ctx, c)
	if err != nil {
		return 0, err
	}
	has := s != nil && metav1.IsControlledBy(s, c)
	if has && !is(&s.Spec.Blueprint) {
		return 0, errOther
	}
	p, t, missing := r.source(ctx, c)
	var halt *stop
	if missing != nil && !errors.As(missing, &halt) && !(has && errors.Is(missing, errOther)) {
		return 0, missing
	}
	var left time.Duration
	if l := c.Spec.Lifecycle; l != nil && l.ShutdownTime != nil {
		if left = time.Until(l.ShutdownTime.Time); left <= 0 {
			if !has {
				s = nil
			}
			return 0, r.expire(ctx, c, s)
		}
	}
	switch {
	case has && t != nil && checkMetadata(c, t) == nil:
		// What is said of pods follows the template and the claim.
		was := s.DeepCopy()
		if dress(s, c, t); !equality.Semantic.DeepEqual(was.ObjectMeta, s.ObjectMeta) || !equality.Semantic.DeepEqual(was.Spec, s.Spec) {
			if err := r.Patch(ctx, s, kube.MergeFrom(was)); err != nil {
				return 0, err
			}
		}
	case has:
	case missing != nil:
		return left, missing
	default:
		if err := checkClaim(c, t); err != nil {
			return left, err
		}
		// Whoever writes a claim also writes what it has chosen: it may be of this pool alone.
		if len(c.Spec.Env) > 0 || s == nil || !slices.Equal(controllerOf(s), []string{string(p.UID)}) || !s.DeletionTimestamp.IsZero() {
			if s, err = r.pick(ctx, c, p); err != nil {
				return 0, err
			}
		}
		if s, err = r.take(ctx, c, t, s); err != nil {
			return left, err
		}
	}
	c.Status.Sandbox.Name = s.Name
	ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if ready == nil || ready.ObservedGeneration != s.Generation || ready.Reason == agents.ReasonSuspended && s.Spec.OperatingMode == agents.Running {
		ready = &metav1.Condition{Status: metav1.ConditionFalse, Reason: agents.ReasonNotReady, Message: "the sandbox is coming up"}
	}
	claimReady(c, ready.Status, ready.Reason, ready.Message)
	return left, nil
}

// take makes a sandbox the claim's: one of the pool, or if there is none a new one.
func (r *Claims) take(ctx context.Context, c *agents.SandboxClaim, t *agents.SandboxTemplate, s *agents.Sandbox) (*agents.Sandbox, error) {
	name := c.Name
	if s != nil {
		name = s.Name
	}
	if c.Annotations[agents.SandboxNameAnnotation] != name {
		was := c.DeepCopy()
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, agents.SandboxNameAnnotation, name)
		if c.Annotations[agents.ObservedAnnotation] == "" {
			c.Annotations[agents.ObservedAnnotation] = time.Now().Format(time.RFC3339Nano)
		}
		status := c.Status
		if err := r.Patch(ctx, c, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{})); err != nil {
			return nil, err
		}
		c.Status = status
	}
	if s == nil {
		return r.make(ctx, c, t)
	}
	err := r.adopt(ctx, c, t, s)
	if err == nil && r.Events != nil {
		r.Events.Eventf(c, s, corev1.EventTypeNormal, "SandboxAdopted", "Adopt", "took the warm sandbox %s", s.Name)
	}
	return s, err
}

// chosen returns the sandbox that a claim has or has chosen; nil if there is none.
func (r *Claims) chosen(ctx context.Context, c *agents.SandboxClaim) (*agents.Sandbox, error) {
	name := c.Annotations[agents.SandboxNameAnnotation]
	if name == "" {
		return nil, nil
	}
	var s agents.Sandbox
	if err := r.Get(ctx, kube.ObjectKey{Namespace: c.Namespace, Name: name}, &s); err != nil {
		return nil, kube.IgnoreNotFound(err)
	}
	return &s, nil
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
func (r *Claims) adopt(ctx context.Context, c *agents.SandboxClaim, t *agents.SandboxTemplate, s *agents.Sandbox) error {
	was := s.DeepCopy()
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(c, agents.Extensions.WithKind("SandboxClaim"))}
	s.Spec.OperatingMode = agents.Running
	dress(s, c, t)
	return r.Patch(ctx, s, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{}))
}

// dress gives a claim's sandbox the metadata of the template and the claim. What its VM was made with stays.
func dress(s *agents.Sandbox, c *agents.SandboxClaim, t *agents.SandboxTemplate) {
	m := t.Spec.PodTemplate.PodMetadata.DeepCopy()
	delete(m.Annotations, AnnotationSpec)
	if text, is := s.Spec.PodTemplate.Annotations[AnnotationSpec]; is {
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		m.Annotations[AnnotationSpec] = text
	}
	mark(&m, c)
	s.Spec.PodTemplate.PodMetadata = m
	s.Labels = maps.Clone(s.Labels)
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	delete(s.Labels, agents.PoolLabel)
	s.Labels[agents.ClaimLabel], s.Labels[agents.TemplateHashLabel] = string(c.UID), agents.NameHash(t.Name)
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
	add(&m.Annotations, c.Spec.AdditionalPodMetadata.Annotations)
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
	dress(s, c, t)
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

// checkClaim returns a stop for what a claim or its template may not want.
func checkClaim(c *agents.SandboxClaim, t *agents.SandboxTemplate) error {
	for _, check := range []struct {
		reason string
		err    error
	}{
		{ReasonUnsupported, checkTemplate(t)}, {"EnvVarsInjectionRejected", checkEnv(c, t)}, {"InvalidMetadata", checkMetadata(c, t)},
	} {
		if check.err != nil {
			return &stop{check.reason, check.err.Error(), 0}
		}
	}
	if len(c.Spec.VolumeClaimTemplates) > 0 {
		return &stop{"VolumeClaimTemplatesError", fmt.Sprintf("%s volumeClaimTemplates", errUnsupported), 0}
	}
	return nil
}

// systemDomains are those of labels and annotations that a claim does not set, but for SafeToEvictAnnotation.
var systemDomains = []string{"kubernetes.io", "k8s.io", "x-k8s.io", strings.TrimSuffix(prefix, "/")}

// checkMetadata returns an error for labels and annotations that a claim may not add.
func checkMetadata(c *agents.SandboxClaim, t *agents.SandboxTemplate) error {
	check := func(what string, add, have map[string]string, value func(string) []string) error {
		for _, key := range slices.Sorted(maps.Keys(add)) {
			domain, _, _ := strings.Cut(strings.ToLower(key), "/")
			switch {
			case len(validation.IsQualifiedName(key))+len(value(add[key])) > 0:
				return fmt.Errorf("additionalPodMetadata: there is no %s %s=%s", what, key, add[key])
			case key != agents.SafeToEvictAnnotation && strings.Contains(key, "/") && slices.ContainsFunc(systemDomains, func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) }):
				return fmt.Errorf("additionalPodMetadata: the %s %s is the system's", what, key)
			}
			if v, is := have[key]; is && v != add[key] {
				return fmt.Errorf("additionalPodMetadata: template %s has the %s %s=%s: the claim may not replace it", t.Name, what, key, v)
			}
		}
		return nil
	}
	m, of := &c.Spec.AdditionalPodMetadata, &t.Spec.PodTemplate
	return cmp.Or(check("label", m.Labels, of.Labels, validation.IsValidLabelValue),
		check("annotation", m.Annotations, of.Annotations, func(string) []string { return nil }))
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

// expire ends a claim whose shutdownTime has come. s is its sandbox; nil if there is none.
func (r *Claims) expire(ctx context.Context, c *agents.SandboxClaim, s *agents.Sandbox) error {
	switch policy := c.Spec.Lifecycle.ShutdownPolicy; policy {
	case agents.Delete, agents.DeleteForeground:
		o := []kube.DeleteOption{kube.Preconditions{UID: ptr.To(c.UID)}}
		if policy == agents.DeleteForeground {
			o = append(o, kube.PropagationPolicy(metav1.DeletePropagationForeground))
		}
		return kube.IgnoreNotFound(r.Delete(ctx, c, o...))
	}
	if s == nil {
		c.Status.Sandbox = agents.ClaimedSandbox{}
	} else if s.DeletionTimestamp.IsZero() {
		if err := r.Delete(ctx, s, kube.Preconditions{UID: &s.UID}); kube.IgnoreNotFound(err) != nil {
			return err
		}
	}
	claimReady(c, metav1.ConditionFalse, agents.ReasonClaimExpired, "its shutdownTime has come")
	return nil
}
