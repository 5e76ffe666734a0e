package agents

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// DeepCopy copies it.
func (m PodMetadata) DeepCopy() PodMetadata {
	return PodMetadata{Labels: maps.Clone(m.Labels), Annotations: maps.Clone(m.Annotations)}
}

// DeepCopy copies it.
func (b Blueprint) DeepCopy() Blueprint {
	return Blueprint{
		PodTemplate:          PodTemplate{Spec: *b.PodTemplate.Spec.DeepCopy(), PodMetadata: b.PodTemplate.PodMetadata.DeepCopy()},
		VolumeClaimTemplates: raws(b.VolumeClaimTemplates), Service: ptr(b.Service, same),
	}
}

func instant(t metav1.Time) metav1.Time { return *t.DeepCopy() }

// DeepCopy copies it.
func (s *Sandbox) DeepCopy() *Sandbox {
	c := *s
	c.ObjectMeta = *s.ObjectMeta.DeepCopy()
	c.Spec.Blueprint = s.Spec.Blueprint.DeepCopy()
	c.Spec.ShutdownTime = ptr(s.Spec.ShutdownTime, instant)
	c.Status.Conditions = conditions(s.Status.Conditions)
	return &c
}

// DeepCopy copies it.
func (s *SandboxTemplate) DeepCopy() *SandboxTemplate {
	c := *s
	c.ObjectMeta = *s.ObjectMeta.DeepCopy()
	c.Spec.Blueprint = s.Spec.Blueprint.DeepCopy()
	c.Spec.NetworkPolicy = ptr(s.Spec.NetworkPolicy, raw)
	c.Spec.GeneratedSecrets = raws(s.Spec.GeneratedSecrets)
	return &c
}

// DeepCopy copies it.
func (s *SandboxClaim) DeepCopy() *SandboxClaim {
	c := *s
	c.ObjectMeta = *s.ObjectMeta.DeepCopy()
	c.Spec.Lifecycle = ptr(s.Spec.Lifecycle, func(l ClaimLifecycle) ClaimLifecycle {
		l.ShutdownTime = ptr(l.ShutdownTime, instant)
		return l
	})
	c.Spec.AdditionalPodMetadata = s.Spec.AdditionalPodMetadata.DeepCopy()
	c.Spec.Env = slices.Clone(s.Spec.Env)
	c.Spec.SafeToEvict = ptr(s.Spec.SafeToEvict, same)
	c.Spec.TTLAfterCreated = ptr(s.Spec.TTLAfterCreated, same)
	c.Spec.VolumeClaimTemplates = raws(s.Spec.VolumeClaimTemplates)
	c.Status.Conditions = conditions(s.Status.Conditions)
	return &c
}

// DeepCopy copies it.
func (s *SandboxWarmPool) DeepCopy() *SandboxWarmPool {
	c := *s
	c.ObjectMeta = *s.ObjectMeta.DeepCopy()
	c.Spec.UpdateStrategy = ptr(s.Spec.UpdateStrategy, same)
	c.Spec.TTLAfterCreated = ptr(s.Spec.TTLAfterCreated, same)
	c.Status.Conditions = conditions(s.Status.Conditions)
	return &c
}

// DeepCopyObject implements runtime.Object.
func (s *Sandbox) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (s *SandboxTemplate) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (s *SandboxClaim) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (s *SandboxWarmPool) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (l *SandboxList) DeepCopyObject() runtime.Object {
	return &SandboxList{l.TypeMeta, *l.ListMeta.DeepCopy(), items(l.Items, (*Sandbox).DeepCopy)}
}

// DeepCopyObject implements runtime.Object.
func (l *SandboxTemplateList) DeepCopyObject() runtime.Object {
	return &SandboxTemplateList{l.TypeMeta, *l.ListMeta.DeepCopy(), items(l.Items, (*SandboxTemplate).DeepCopy)}
}

// DeepCopyObject implements runtime.Object.
func (l *SandboxClaimList) DeepCopyObject() runtime.Object {
	return &SandboxClaimList{l.TypeMeta, *l.ListMeta.DeepCopy(), items(l.Items, (*SandboxClaim).DeepCopy)}
}

// DeepCopyObject implements runtime.Object.
func (l *SandboxWarmPoolList) DeepCopyObject() runtime.Object {
	return &SandboxWarmPoolList{l.TypeMeta, *l.ListMeta.DeepCopy(), items(l.Items, (*SandboxWarmPool).DeepCopy)}
}

// ptr returns a copy of what a pointer leads to, made by a DeepCopy.
func ptr[T any](p *T, clone func(T) T) *T {
	if p == nil {
		return nil
	}
	c := clone(*p)
	return &c
}

func same[T any](v T) T { return v }

func raw(r runtime.RawExtension) runtime.RawExtension { return *r.DeepCopy() }

func raws(all []runtime.RawExtension) []runtime.RawExtension {
	all = slices.Clone(all)
	for i := range all {
		all[i] = raw(all[i])
	}
	return all
}

func conditions(all []metav1.Condition) []metav1.Condition { return slices.Clone(all) }

func items[T any](all []T, clone func(*T) *T) []T {
	all = slices.Clone(all)
	for i := range all {
		all[i] = *clone(&all[i])
	}
	return all
}
