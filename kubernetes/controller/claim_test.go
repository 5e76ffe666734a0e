package controller_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/kubernetes/controller"
)

// pool makes a template and a pool of it, with sandboxes that sleep.
func (d *desk) pool(replicas int32, change func(*agents.SandboxTemplate)) {
	d.t.Helper()
	t := &agents.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: namespace}, Spec: agents.TemplateSpec{Blueprint: blueprint()}}
	if change != nil {
		change(t)
	}
	must(d.t, d.Create(d.t.Context(), t))
	must(d.t, d.Create(d.t.Context(), &agents.SandboxWarmPool{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: namespace}, Spec: agents.WarmPoolSpec{Replicas: replicas, TemplateRef: agents.Ref{Name: "p"}},
	}))
	d.fill()
}

// fill reconciles a pool and its sandboxes.
func (d *desk) fill() {
	d.t.Helper()
	for range 4 {
		_, err := d.pools.Reconcile(d.t.Context(), ctrl.Request{NamespacedName: key("p")})
		must(d.t, err)
		for _, s := range d.list() {
			d.reconcile(s.Name)
			if p := d.pod(s.Name); p != nil && p.Spec.NodeName == "" {
				d.bind(s.Name, "a")
				d.reconcile(s.Name)
			}
		}
	}
}

func (d *desk) list() []agents.Sandbox {
	d.t.Helper()
	var l agents.SandboxList
	must(d.t, d.List(d.t.Context(), &l))
	return l.Items
}

func (d *desk) claim(name string, change func(*agents.SandboxClaim)) *agents.SandboxClaim {
	d.t.Helper()
	c := &agents.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Spec: agents.ClaimSpec{WarmPoolRef: agents.Ref{Name: "p"}}}
	if change != nil {
		change(c)
	}
	must(d.t, d.Create(d.t.Context(), c))
	return d.settleClaim(name)
}

// settleClaim reconciles a claim once, and reads it.
func (d *desk) settleClaim(name string) *agents.SandboxClaim {
	d.t.Helper()
	_, err := d.claims.Reconcile(d.t.Context(), ctrl.Request{NamespacedName: key(name)})
	must(d.t, err)
	var c agents.SandboxClaim
	must(d.t, kube.IgnoreNotFound(d.Get(d.t.Context(), key(name), &c)))
	return &c
}

func TestPool_has_sandboxes_that_sleep_and_take_no_room(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	d.pool(3, nil)
	var pods corev1.PodList
	must(t, d.List(t.Context(), &pods))
	if all := d.list(); len(all) != 3 || len(pods.Items) > 0 {
		t.Fatalf("%d sandboxes and %d pods", len(all), len(pods.Items))
	}
	var p agents.SandboxWarmPool
	must(t, d.Get(t.Context(), key("p"), &p))
	if p.Status.Replicas != 3 || p.Status.ReadyReplicas != 3 || !isTrue(p.Status.Conditions, agents.ConditionAvailable) {
		t.Errorf("%+v", p.Status)
	}
	p.Spec.Replicas = 1
	must(t, d.Update(t.Context(), &p))
	d.fill()
	if all := d.list(); len(all) != 1 {
		t.Errorf("%d sandboxes", len(all))
	}
	l, err := d.nodes["a"].host.State.List()
	if must(t, err); len(l) != 1 {
		t.Errorf("%d VMs", len(l))
	}
}

func TestPool_that_recreates_replaces_what_its_template_has_changed(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	d.pool(1, nil)
	var p agents.SandboxWarmPool
	must(t, d.Get(t.Context(), key("p"), &p))
	p.Spec.UpdateStrategy = &agents.UpdateStrategy{Type: agents.Recreate}
	must(t, d.Update(t.Context(), &p))
	d.fill()
	was := d.list()[0].Name
	var tm agents.SandboxTemplate
	must(t, d.Get(t.Context(), key("p"), &tm))
	tm.Spec.PodTemplate.Spec.Containers[0].Command = []string{"sleep"}
	must(t, d.Update(t.Context(), &tm))
	d.fill()
	d.fill()
	if all := d.list(); len(all) != 1 || all[0].Name == was || len(all[0].Spec.PodTemplate.Spec.Containers[0].Command) == 0 {
		t.Errorf("%d sandboxes, %s and before %s", len(all), all[0].Name, was)
	}
}

func TestClaim_takes_a_warm_sandbox_or_has_one_made(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	d.pool(1, nil)
	warm := d.list()[0].Name
	one := d.claim("one", func(c *agents.SandboxClaim) {
		c.Spec.SafeToEvict = ptr.To("false")
		c.Spec.AdditionalPodMetadata = agents.PodMetadata{Labels: map[string]string{"team": "x"}, Annotations: map[string]string{"note": "y"}}
	})
	two := d.claim("two", nil)
	if one.Status.Sandbox.Name != warm || two.Status.Sandbox.Name != "two" {
		t.Fatalf("%+v, %+v", one.Status, two.Status)
	}
	for c, launch := range map[*agents.SandboxClaim]string{one: agents.LaunchWarm, two: agents.LaunchCold} {
		s := d.sandbox(c.Status.Sandbox.Name)
		if !metav1.IsControlledBy(s, c) || s.Spec.OperatingMode != agents.Running || s.Labels[agents.LaunchLabel] != launch {
			t.Errorf("%+v", s)
		}
		d.reconcile(s.Name)
		if p := d.pod(s.Name); p == nil || p.Labels[agents.ClaimLabel] != string(c.UID) || p.Labels["team"] != map[string]string{agents.LaunchWarm: "x"}[launch] || (p.Annotations["note"] == "y") != (c == one) || (p.Annotations[agents.SafeToEvictAnnotation] == "false") != (c == one) {
			t.Errorf("its pod is %+v", p)
		}
		d.bind(s.Name, "a")
		d.reconcile(s.Name)
		if c := d.settleClaim(c.Name); !isTrue(c.Status.Conditions, agents.ConditionReady) {
			t.Errorf("%+v", c.Status)
		}
	}
	d.fill() // the pool has another one, and lets those be
	if s := d.sandbox(warm); s.Spec.OperatingMode != agents.Running || len(d.list()) != 3 {
		t.Errorf("%+v of %d", s, len(d.list()))
	}
	if n := d.nodes["a"].creations.Load(); n != 3 {
		t.Errorf("%d VMs were made", n)
	}
}

// Each request is time that a claim waits, and room that others have not.
func TestClaim_of_a_warm_sandbox_takes_five_requests(t *testing.T) {
	d := newDesk(t, newWorld(t, true, "a"))
	d.pool(1, nil)
	s := d.list()[0]
	var asked []string
	note := func(what string, o kube.Object) { asked = append(asked, fmt.Sprintf("%s %T", what, o)) }
	c := interceptor.NewClient(d.Client.(kube.WithWatch), interceptor.Funcs{
		Create: func(ctx context.Context, c kube.WithWatch, o kube.Object, opts ...kube.CreateOption) error {
			note("create", o)
			o.SetCreationTimestamp(metav1.Now()) // as an API server does
			return c.Create(ctx, o, opts...)
		},
		Patch: func(ctx context.Context, c kube.WithWatch, o kube.Object, p kube.Patch, opts ...kube.PatchOption) error {
			note("patch", o)
			return c.Patch(ctx, o, p, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c kube.Client, sub string, o kube.Object, p kube.Patch, opts ...kube.SubResourcePatchOption) error {
			note(sub, o)
			return c.SubResource(sub).Patch(ctx, o, p, opts...)
		},
	})
	d.s.Client, d.claims.Client = c, c
	must(t, d.Create(t.Context(), &agents.SandboxClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: namespace, CreationTimestamp: metav1.Now()}, Spec: agents.ClaimSpec{WarmPoolRef: agents.Ref{Name: "p"}},
	}))
	d.settleClaim("c")
	d.settleClaim("c")
	d.reconcile(s.Name)
	d.reconcile(s.Name) // the pod has come
	d.bind(s.Name, "a")
	d.reconcile(s.Name)
	if c := d.settleClaim("c"); !isTrue(c.Status.Conditions, agents.ConditionReady) || c.Status.Sandbox.Name != s.Name {
		t.Errorf("%+v", c.Status)
	}
	want := []string{"patch *agents.SandboxClaim", "patch *agents.Sandbox", "create *v1.Pod", "status *agents.Sandbox", "status *agents.SandboxClaim"}
	if !slices.Equal(asked, want) {
		t.Errorf("asked for %s", strings.Join(asked, ", "))
	}
}

func TestClaims_of_one_warm_sandbox_have_one_each(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	d.pool(1, nil)
	warm := d.list()[0].Name
	// Both have chosen it, and the controller has ended before they had it.
	for _, name := range []string{"one", "two"} {
		must(t, d.Create(t.Context(), &agents.SandboxClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Annotations: map[string]string{agents.SandboxNameAnnotation: warm}},
			Spec:       agents.ClaimSpec{WarmPoolRef: agents.Ref{Name: "p"}},
		}))
	}
	got := []string{d.settleClaim("one").Status.Sandbox.Name, d.settleClaim("two").Status.Sandbox.Name, d.settleClaim("one").Status.Sandbox.Name, d.settleClaim("two").Status.Sandbox.Name}
	if want := []string{warm, "two", warm, "two"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestClaim_that_may_not_be_served_says_why(t *testing.T) {
	env := func(c *agents.SandboxClaim) { c.Spec.Env = []agents.ClaimEnv{{Name: "A", Value: "b"}} }
	runs := func(t *agents.SandboxTemplate) {
		t.Spec.PodTemplate.Spec.Containers[0].Command = []string{"sleep"}
		t.Spec.PodTemplate.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "a"}}
	}
	for name, tt := range map[string]struct {
		template func(*agents.SandboxTemplate)
		claim    func(*agents.SandboxClaim)
		says     string // of the reason and message; empty: it is served, with A=b if it has variables
	}{
		"variables that nobody allows":        {nil, env, "EnvVarsInjectionRejected"},
		"variables that must not be replaced": {func(t *agents.SandboxTemplate) { runs(t); t.Spec.EnvVarsInjectionPolicy = "Allowed" }, env, "may not replace"},
		"variables that may be replaced":      {func(t *agents.SandboxTemplate) { runs(t); t.Spec.EnvVarsInjectionPolicy = "Overrides" }, env, ""},
		"variables of another container": {func(t *agents.SandboxTemplate) { runs(t); t.Spec.EnvVarsInjectionPolicy = "Overrides" }, func(c *agents.SandboxClaim) {
			env(c)
			c.Spec.Env[0].ContainerName = "other"
		}, "one container"},
		"a network policy that nobody would enforce": {func(t *agents.SandboxTemplate) { t.Spec.NetworkPolicy = &runtime.RawExtension{Raw: []byte("{}")} }, nil, "networkPolicy"},
		"one that another enforces": {func(t *agents.SandboxTemplate) {
			t.Spec.NetworkPolicy, t.Spec.NetworkPolicyManagement = &runtime.RawExtension{Raw: []byte("{}")}, "Unmanaged"
		}, nil, ""},
		"what the template says of VMs": {nil, func(c *agents.SandboxClaim) {
			c.Spec.AdditionalPodMetadata.Annotations = map[string]string{controller.AnnotationSpec: `{"network":"tap"}`}
		}, "InvalidMetadata"},
		"a label of the system": {nil, func(c *agents.SandboxClaim) {
			c.Spec.AdditionalPodMetadata.Labels = map[string]string{agents.NameHashLabel: "x"}
		}, "InvalidMetadata"},
		"a label that the template has": {func(t *agents.SandboxTemplate) { t.Spec.PodTemplate.Labels = map[string]string{"a": "b"} }, func(c *agents.SandboxClaim) {
			c.Spec.AdditionalPodMetadata.Labels = map[string]string{"a": "c"}
		}, "InvalidMetadata"},
		"volumes": {nil, func(c *agents.SandboxClaim) {
			c.Spec.VolumeClaimTemplates = []runtime.RawExtension{{Raw: []byte("{}")}}
		}, "VolumeClaimTemplatesError"},
		"a pool that is not there":  {nil, func(c *agents.SandboxClaim) { c.Spec.WarmPoolRef.Name = "none" }, "WarmPoolNotFound"},
		"secrets that nobody makes": {func(t *agents.SandboxTemplate) { t.Spec.GeneratedSecrets = []runtime.RawExtension{{Raw: []byte("{}")}} }, nil, "generatedSecrets"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t, newWorld(t, false, "a"))
			d.pool(0, tt.template)
			c := d.claim("c", tt.claim)
			if tt.says != "" {
				if len(c.Status.Conditions) != 1 || !strings.Contains(c.Status.Conditions[0].Reason+": "+c.Status.Conditions[0].Message, tt.says) || len(d.list()) > 0 {
					t.Errorf("%+v, and %d sandboxes", c.Status, len(d.list()))
				}
				return
			}
			if s := d.sandbox("c"); len(c.Spec.Env) > 0 && fmt.Sprint(s.Spec.PodTemplate.Spec.Containers[0].Env) != fmt.Sprint([]corev1.EnvVar{{Name: "A", Value: "b"}}) {
				t.Errorf("%+v", s.Spec.PodTemplate.Spec.Containers[0].Env)
			}
		})
	}
}

func TestClaim_expires_at_its_shutdownTime(t *testing.T) {
	for _, policy := range []string{"", agents.Retain, agents.Delete, agents.DeleteForeground} {
		t.Run(policy, func(t *testing.T) {
			d := newDesk(t, newWorld(t, false, "a"))
			d.pool(0, nil)
			c := d.claim("c", func(c *agents.SandboxClaim) {
				c.Spec.Lifecycle = &agents.ClaimLifecycle{ShutdownTime: ptr.To(metav1.NewTime(time.Now().Add(time.Hour))), ShutdownPolicy: policy}
			})
			if len(d.list()) != 1 {
				t.Fatal("no sandbox")
			}
			c.Spec.Lifecycle.ShutdownTime = ptr.To(metav1.NewTime(time.Now().Add(-time.Second)))
			must(t, d.Update(t.Context(), c))
			c = d.settleClaim("c")
			if policy == agents.Delete || policy == agents.DeleteForeground {
				if c.Name != "" {
					t.Error("the claim is there still") // a cluster's garbage collector removes its sandbox
				}
				return
			}
			if c = d.settleClaim("c"); reason(c.Status.Conditions, agents.ConditionReady) != agents.ReasonClaimExpired || len(d.list()) > 0 {
				t.Errorf("%+v, and %d sandboxes", c.Status, len(d.list()))
			}
		})
	}
}
