package controller

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Class is the runtimeClassName of sandboxes that this controller serves.
const Class = "drowse"

// Annotations, labels and finalizers. The prefix is the project's.
const (
	prefix = "drowse-vm.github.io/"

	// AnnotationSpec of a podTemplate is a spec.VM as JSON, for what pods do not have: network, policy, idle. The
	// podTemplate's own fields replace those in it.
	AnnotationSpec = prefix + "spec"
	// AnnotationName of a Sandbox is the name of its VM, for clients of drowse.
	AnnotationName = prefix + "name"
	// AnnotationNode of a Sandbox is the node that has its VM, or is about to.
	AnnotationNode = prefix + "node"
	// AnnotationBefore of a Sandbox are other nodes that have had its VM, with commas between them. They keep a copy of
	// what was published.
	AnnotationBefore = prefix + "nodes-before"
	// AnnotationStarted of a Sandbox is the UID of the pod that its VM was first started for.
	AnnotationStarted = prefix + "started"
	// AnnotationTemplate of a pool's Sandbox is a digest of what it was made from.
	AnnotationTemplate = prefix + "template"

	// Finalizer of a Sandbox is there until its VM is removed, and that of its pod until the VM sleeps.
	Finalizer = prefix + "vm"
	// PodLabel of a pod says that it is a reservation.
	PodLabel = prefix + "reservation"

	// NodeLabel and NodeLabelValue are the label of nodes that run drowse.
	NodeLabel      = prefix + "node"
	NodeLabelValue = "true"
)

// overhead is what a VM's process takes beside the guest's memory (density_awake in docs/SPECIFICATION.md).
var overhead = resource.MustParse("32Mi")

// errUnsupported means that a podTemplate asks for what a VM cannot have.
var errUnsupported = errors.New("drowse does not support")

// is reports whether a blueprint is of this class.
func is(b *agents.Blueprint) bool {
	c := b.PodTemplate.Spec.RuntimeClassName
	return c != nil && *c == Class
}

const (
	namePrefix    = "k8s-"
	ownerPrefix   = "k8s/"
	purposePrefix = "Sandbox "
)

// tag returns the tag of all VMs of this cluster: nodes may have those of others, and of users.
func (o *Options) tag() string { return "kubernetes:" + o.ClusterID }

// nameOf returns the name of a sandbox's VM. UIDs are unique among all objects at all times.
func nameOf(s *agents.Sandbox) (string, error) {
	name := namePrefix + string(s.UID)
	if !spec.ValidName(name) {
		return "", fmt.Errorf("%w a UID like %q", errUnsupported, s.UID)
	}
	return name, nil
}

// check returns errUnsupported for what would be missing in a VM without a word.
func check(b *agents.Blueprint) error {
	p := &b.PodTemplate.Spec
	var bad []string
	add := func(is bool, what string) {
		if is {
			bad = append(bad, what)
		}
	}
	add(len(b.VolumeClaimTemplates) > 0, "volumeClaimTemplates")
	add(b.Service != nil && *b.Service, "service")
	add(len(p.Containers) != 1, fmt.Sprintf("%d containers: use one", len(p.Containers)))
	add(len(p.InitContainers) > 0, "initContainers")
	add(len(p.Volumes) > 0, "volumes")
	add(p.HostNetwork || p.HostPID || p.HostIPC, "namespaces of the host")
	add(p.NodeName != "", "nodeName")
	add(len(p.ResourceClaims) > 0, "resourceClaims")
	for _, c := range p.Containers {
		add(len(c.VolumeMounts)+len(c.VolumeDevices) > 0, "volumeMounts")
		add(len(c.EnvFrom) > 0, "envFrom")
		add(c.Lifecycle != nil, "lifecycle")
		add(slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.ValueFrom != nil }), "env.valueFrom")
	}
	if len(bad) > 0 {
		return fmt.Errorf("%w, in podTemplate or beside it: %s", errUnsupported, strings.Join(bad, ", "))
	}
	return nil
}

// request returns what to ask a node for.
func (o *Options) request(s *agents.Sandbox) (r records.Request, err error) {
	name, err := nameOf(s)
	if err == nil {
		err = check(&s.Spec.Blueprint)
	}
	if err != nil {
		return r, err
	}
	t := &s.Spec.PodTemplate
	if text := t.Annotations[AnnotationSpec]; text != "" {
		want, err := spec.Parse(strings.NewReader(text))
		if err != nil {
			return r, fmt.Errorf("%w the annotation %s: %w", errUnsupported, AnnotationSpec, err)
		}
		// Whoever may make a Sandbox in one namespace must not reach what belongs to nodes or to other owners: volumes,
		// shares, tags of policies. What a guest may ask its host for could make VMs without a reservation.
		r.Spec = spec.VM{
			Network: want.Network, IPv6: want.IPv6, Policy: want.Policy, DiskMiB: want.DiskMiB, DiskQuotaMiB: want.DiskQuotaMiB,
			Hooks: want.Hooks, Idle: want.Idle, Services: want.Services,
		}
		if !reflect.DeepEqual(want, r.Spec) {
			return r, fmt.Errorf("%w the annotation %s: it may have network, ipv6, policy, disk_mib, disk_quota_mib, hooks, idle and services", errUnsupported, AnnotationSpec)
		}
		// A pod that opens what belongs to its node needs a hostPort, or meets NetworkPolicies, which do not see a VM's
		// packets: they leave with the node's address.
		if err := want.Policy.CheckTenant(o.AllowPrivate); err != nil {
			return r, fmt.Errorf("%w the policy in the annotation %s: %w (see the controller's --allow-private)", errUnsupported, AnnotationSpec, err)
		}
	}
	c := &t.Spec.Containers[0]
	r.Spec.Name, r.Spec.Image = name, c.Image
	r.Spec.Hostname = hostname(s)
	if q := sizeOf(c, corev1.ResourceCPU); !q.IsZero() {
		r.Spec.VCPUs = int(q.Value()) // rounded up
	}
	if q := sizeOf(c, corev1.ResourceMemory); !q.IsZero() {
		r.Spec.MemoryMiB = int((q.Value() + 1<<20 - 1) >> 20)
	}
	if argv := slices.Concat(c.Command, c.Args); len(argv) > 0 {
		run := spec.Service{Name: c.Name, Argv: argv, Dir: c.WorkingDir, Restart: restarts[t.Spec.RestartPolicy]}
		for _, e := range c.Env {
			run.Env = append(run.Env, e.Name+"="+e.Value)
		}
		r.Spec.Services = append(r.Spec.Services, run)
	} else if len(c.Env) > 0 {
		return r, fmt.Errorf("%w env without command or args", errUnsupported)
	}
	r.Metadata = spec.Metadata{Owner: ownerPrefix + s.Namespace, Purpose: purposePrefix + s.Namespace + "/" + s.Name, Tags: []string{o.tag()}}
	if _, err := r.Spec.WithDefaults(); err != nil {
		return r, fmt.Errorf("%w such a VM: %w", errUnsupported, err)
	}
	return r, nil
}

// restarts are what a pod's restartPolicy is for a service.
var restarts = map[corev1.RestartPolicy]string{corev1.RestartPolicyNever: "never", corev1.RestartPolicyOnFailure: "on-failure"}

// hostname returns a sandbox's name if a host can have it, else none: then it is the VM's.
func hostname(s *agents.Sandbox) string {
	if spec.ValidName(s.Name) {
		return s.Name
	}
	return ""
}

// sizeOf returns how much of a resource a VM has: its limit, or else what it requests.
func sizeOf(c *corev1.Container, of corev1.ResourceName) resource.Quantity {
	if q, ok := c.Resources.Limits[of]; ok {
		return q
	}
	return c.Resources.Requests[of]
}
