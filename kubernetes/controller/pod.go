package controller

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// reservation returns the pod of a sandbox.
func (o *Options) reservation(s *agents.Sandbox, r records.Request) *corev1.Pod {
	t := &s.Spec.PodTemplate
	spec := corev1.PodSpec{
		NodeSelector: maps.Clone(t.Spec.NodeSelector), Affinity: t.Spec.Affinity.DeepCopy(), Tolerations: t.Spec.Tolerations,
		TopologySpreadConstraints: t.Spec.TopologySpreadConstraints, SchedulerName: t.Spec.SchedulerName, SchedulingGates: t.Spec.SchedulingGates,
		PriorityClassName: t.Spec.PriorityClassName, PreemptionPolicy: t.Spec.PreemptionPolicy,
		RestartPolicy: corev1.RestartPolicyAlways, AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false),
		// Nothing runs in it that could end in an orderly way.
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](65535), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Containers: []corev1.Container{{
			Name: "reservation", Image: o.PauseImage, Resources: reserved(t.Spec.Containers[0].Resources, r),
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			},
		}},
	}
	if spec.NodeSelector == nil {
		spec.NodeSelector = map[string]string{}
	}
	spec.NodeSelector[NodeLabel] = NodeLabelValue
	if at := s.Annotations[AnnotationNode]; at != "" {
		o.near(&spec, at)
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.Name, Namespace: s.Namespace, Finalizers: []string{Finalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(s, agents.Group.WithKind("Sandbox"))},
		},
		Spec: spec,
	}
	describe(p, s)
	return p
}

// describe gives a pod the labels and annotations of its sandbox's template, and removes those that the template had.
// Others' stay. Whoever writes a Sandbox does not choose what controllers know pods by.
func describe(p *corev1.Pod, s *agents.Sandbox) {
	labels, notes := allowed(s.Spec.PodTemplate.Labels), allowed(s.Spec.PodTemplate.Annotations)
	keys := func(of map[string]string) string { return strings.Join(slices.Sorted(maps.Keys(of)), ",") }
	own := map[string]string{PodLabel: NodeLabelValue, agents.NameHashLabel: agents.NameHash(s.Name)}
	if c := metav1.GetControllerOf(s); c != nil && strings.HasPrefix(c.APIVersion, agents.Extensions.Group+"/") {
		for _, key := range []string{agents.ClaimLabel, agents.PoolLabel, agents.TemplateHashLabel} {
			if value := s.Labels[key]; value != "" {
				own[key] = value
			}
		}
	}
	merge := func(to *map[string]string, were string, more ...map[string]string) {
		all := map[string]string{}
		for key, value := range *to {
			if !reservedKey(key) && !slices.Contains(strings.Split(were, ","), key) {
				all[key] = value
			}
		}
		for _, m := range more {
			maps.Copy(all, m)
		}
		*to = all
	}
	merge(&p.Labels, p.Annotations[agents.PropagatedLabels], labels, own)
	merge(&p.Annotations, p.Annotations[agents.PropagatedAnnotations], notes,
		map[string]string{agents.PropagatedLabels: keys(labels), agents.PropagatedAnnotations: keys(notes)})
}

// allowed returns those of a template's labels or annotations that are not the controllers' own.
func allowed(all map[string]string) map[string]string {
	out := map[string]string{}
	for key, value := range all {
		if !reservedKey(key) {
			out[key] = value
		}
	}
	return out
}

func reservedKey(key string) bool {
	return strings.HasPrefix(key, prefix) || strings.HasPrefix(key, agents.Group.Group+"/") || strings.HasPrefix(key, agents.Extensions.Group+"/")
}

// reserved returns what the pod requests: what the template says, or else the VM's size, and the memory of its process.
func reserved(want corev1.ResourceRequirements, r records.Request) corev1.ResourceRequirements {
	out := *want.DeepCopy()
	out.Claims = nil
	if out.Requests == nil {
		out.Requests = corev1.ResourceList{}
	}
	full, _ := r.Spec.WithDefaults() // it was checked
	for name, size := range map[corev1.ResourceName]*resource.Quantity{
		corev1.ResourceCPU:    resource.NewQuantity(int64(full.VCPUs), resource.DecimalSI),
		corev1.ResourceMemory: resource.NewQuantity(int64(full.MemoryMiB)<<20, resource.BinarySI),
	} {
		if _, ok := out.Requests[name]; !ok {
			out.Requests[name] = *size
		}
	}
	for _, list := range []corev1.ResourceList{out.Requests, out.Limits} {
		if q, ok := list[corev1.ResourceMemory]; ok {
			q.Add(overhead)
			list[corev1.ResourceMemory] = q
		}
	}
	return out
}

// near has a pod bound to the node that has the VM's memory: if possible, where nodes share a store, else at any rate.
func (o *Options) near(spec *corev1.PodSpec, node string) {
	here := corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
	if spec.Affinity == nil {
		spec.Affinity = &corev1.Affinity{}
	}
	if spec.Affinity.NodeAffinity == nil {
		spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	a := spec.Affinity.NodeAffinity
	if o.Durable {
		a.PreferredDuringSchedulingIgnoredDuringExecution = append(a.PreferredDuringSchedulingIgnoredDuringExecution,
			corev1.PreferredSchedulingTerm{Weight: 100, Preference: corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{here}}})
		return
	}
	must := a.RequiredDuringSchedulingIgnoredDuringExecution
	if must == nil {
		must = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{}}}
		a.RequiredDuringSchedulingIgnoredDuringExecution = must
	}
	for i := range must.NodeSelectorTerms { // any of them suffices
		t := &must.NodeSelectorTerms[i]
		t.MatchFields = append(t.MatchFields, here)
	}
}
