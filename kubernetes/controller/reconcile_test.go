package controller_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/kubernetes/controller"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// desk is an API server in memory with the controllers, whose reconciliations the test starts.
type desk struct {
	*world
	kube.Client
	s      *controller.Sandboxes
	pools  *controller.Pools
	claims *controller.Claims
}

var uids atomic.Int64

func newDesk(t *testing.T, w *world) *desk {
	t.Helper()
	scheme, err := controller.Scheme()
	must(t, err)
	var nodes []kube.Object
	for _, m := range w.nodes {
		nodes = append(nodes, nodeObject(m))
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(nodes...).
		WithIndex(&agents.Sandbox{}, ".metadata.controller", func(o kube.Object) []string {
			if c := metav1.GetControllerOf(o); c != nil {
				return []string{string(c.UID)}
			}
			return nil
		}).
		WithStatusSubresource(&agents.Sandbox{}, &agents.SandboxClaim{}, &agents.SandboxWarmPool{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: func(ctx context.Context, c kube.WithWatch, o kube.Object, opts ...kube.CreateOption) error {
			o.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", uids.Add(1)))) // as an API server does
			return c.Create(ctx, o, opts...)
		}}).Build()
	f := w.fleet()
	f.Nodes = c
	return &desk{
		w, c, &controller.Sandboxes{Client: c, Live: c, Fleet: f, Options: controller.Options{Durable: w.store != nil, PauseImage: "pause"}},
		&controller.Pools{Client: c}, &controller.Claims{Client: c, Live: c},
	}
}

// sandbox reads a Sandbox, and reconcile works on it once.
func (d *desk) sandbox(name string) *agents.Sandbox {
	d.t.Helper()
	var s agents.Sandbox
	must(d.t, d.Get(d.t.Context(), key(name), &s))
	return &s
}

func (d *desk) reconcile(name string) ctrl.Result {
	d.t.Helper()
	res, err := d.s.Reconcile(d.t.Context(), ctrl.Request{NamespacedName: key(name)})
	must(d.t, err)
	return res
}

func (d *desk) pod(name string) *corev1.Pod {
	d.t.Helper()
	var p corev1.Pod
	if err := d.Get(d.t.Context(), key(name), &p); err != nil {
		must(d.t, kube.IgnoreNotFound(err))
		return nil
	}
	return &p
}

// bind does a scheduler's work.
func (d *desk) bind(name, node string) {
	d.t.Helper()
	p := d.pod(name)
	p.Spec.NodeName = node
	must(d.t, d.Update(d.t.Context(), p))
}

func (d *desk) change(name string, do func(s *agents.Sandbox)) {
	d.t.Helper()
	s := d.sandbox(name)
	do(s)
	s.Generation++
	must(d.t, d.Update(d.t.Context(), s))
}

// running makes a sandbox that runs on a node.
func (d *desk) running(name, node string) *agents.Sandbox {
	d.t.Helper()
	must(d.t, d.Create(d.t.Context(), sandboxObject(name)))
	d.reconcile(name)
	d.bind(name, node)
	d.reconcile(name)
	s := d.sandbox(name)
	if !isTrue(s.Status.Conditions, agents.ConditionReady) {
		d.t.Fatalf("%+v", s.Status.Conditions)
	}
	return s
}

func (d *desk) ready(name, want string) {
	d.t.Helper()
	if s := d.sandbox(name); reason(s.Status.Conditions, agents.ConditionReady) != want {
		d.t.Errorf("%s: %+v, want the reason %s", name, s.Status.Conditions, want)
	}
}

func (d *desk) on(s *agents.Sandbox, want map[string]state.Phase) {
	d.t.Helper()
	if got := d.phases(vmName(s)); fmt.Sprint(got) != fmt.Sprint(want) {
		d.t.Errorf("%s is %v, want %v", s.Name, got, want)
	}
}

func TestSandbox_runs_where_its_pod_is_bound_sleeps_without_one_and_goes_with_its_object(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a", "b"))
	must(t, d.Create(t.Context(), sandboxObject("box")))
	d.reconcile("box")
	p := d.pod("box")
	if p == nil || p.Spec.NodeName != "" || !slices.Contains(p.Finalizers, controller.Finalizer) {
		t.Fatalf("%+v", p)
	}
	if got := p.Spec.Containers[0].Resources.Requests; got.Memory().String() != "96Mi" || got.Cpu().String() != "100m" {
		t.Errorf("it reserves %v", got)
	}
	if p.Spec.RuntimeClassName != nil || p.Spec.NodeSelector[controller.NodeLabel] == "" {
		t.Errorf("%+v", p.Spec)
	}
	s := d.sandbox("box")
	d.on(s, nil)
	d.ready("box", agents.ReasonNotReady)
	d.bind("box", "a")
	if d.reconcile("box").RequeueAfter == 0 {
		t.Error("it is not looked at again")
	}
	d.ready("box", agents.ReasonReady)
	d.on(s, map[string]state.Phase{"a": state.Running})
	if s = d.sandbox("box"); s.Status.NodeName != "a" || s.Annotations[controller.AnnotationName] != vmName(s) {
		t.Errorf("%+v", s)
	}
	row, err := d.nodes["a"].host.State.Metadata(vmName(s))
	if err != nil || row.Owner != "k8s/default" {
		t.Errorf("%+v, %v", row, err)
	}

	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	d.reconcile("box")
	if d.pod("box") != nil {
		t.Error("the pod is there still")
	}
	d.on(s, map[string]state.Phase{"a": state.Asleep})
	d.reconcile("box")
	if s = d.sandbox("box"); !isTrue(s.Status.Conditions, agents.ConditionSuspended) || s.Status.NodeName != "" {
		t.Errorf("%+v", s.Status)
	}
	d.ready("box", agents.ReasonSuspended)

	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Running })
	d.reconcile("box")
	terms := d.pod("box").Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(terms) != 1 || terms[0].MatchFields[0].Values[0] != "a" {
		t.Errorf("its pod may be bound to %+v", terms)
	}
	d.bind("box", "a")
	d.reconcile("box")
	d.on(s, map[string]state.Phase{"a": state.Running})
	if n := d.nodes["a"].creations.Load(); n != 1 {
		t.Errorf("it has booted %d times", n)
	}

	must(t, d.Delete(t.Context(), d.sandbox("box")))
	d.reconcile("box")
	d.on(s, nil)
	if err := d.Get(t.Context(), key("box"), s); kube.IgnoreNotFound(err) != nil || err == nil || d.pod("box") != nil {
		t.Errorf("what is left: %v, %v", err, d.pod("box"))
	}
}

func TestEvicted_pod_waits_until_its_sandbox_sleeps_which_then_wakes_on_the_next_node(t *testing.T) {
	d := newDesk(t, newWorld(t, true, "a", "b"))
	s := d.running("box", "a")
	must(t, d.Delete(t.Context(), d.pod("box"))) // as an eviction does
	if d.pod("box") == nil {
		t.Fatal("the pod did not wait")
	}
	d.on(s, map[string]state.Phase{"a": state.Running})
	d.reconcile("box")
	if d.pod("box") != nil || len(d.awake(vmName(s))) > 0 {
		t.Errorf("%v on %v", d.pod("box"), d.awake(vmName(s)))
	}
	d.ready("box", agents.ReasonNotReady)
	d.reconcile("box")
	d.bind("box", "b")
	d.reconcile("box")
	d.ready("box", agents.ReasonReady)
	if on := d.awake(vmName(s)); !slices.Equal(on, []string{"b"}) {
		t.Errorf("it is awake on %v", on)
	}
	if d.nodes["b"].creations.Load() != 0 {
		t.Error("it has booted there")
	}
	must(t, d.Delete(t.Context(), d.sandbox("box")))
	d.reconcile("box")
	if on := d.awake(vmName(s)); len(on) > 0 {
		t.Errorf("it is awake on %v", on)
	}
}

func TestController_that_is_killed_between_two_requests_makes_no_second_VM_and_forgets_none(t *testing.T) {
	// Each write to the API server in turn is what a controller does not come to do any more, and each request to a
	// node what it does not hear the answer of.
	for fails := 1; ; fails++ {
		d := newDesk(t, newWorld(t, true, "a", "b"))
		left := fails
		dead := fmt.Errorf("killed")
		inner := d.Client.(kube.WithWatch)
		die := func() error {
			if left--; left < 0 {
				return dead
			}
			return nil
		}
		killed := interceptor.NewClient(inner, interceptor.Funcs{
			Create: func(ctx context.Context, c kube.WithWatch, o kube.Object, opts ...kube.CreateOption) error {
				if err := die(); err != nil {
					return err
				}
				return c.Create(ctx, o, opts...)
			},
			Patch: func(ctx context.Context, c kube.WithWatch, o kube.Object, p kube.Patch, opts ...kube.PatchOption) error {
				if err := die(); err != nil {
					return err
				}
				return c.Patch(ctx, o, p, opts...)
			},
			Delete: func(ctx context.Context, c kube.WithWatch, o kube.Object, opts ...kube.DeleteOption) error {
				if err := die(); err != nil {
					return err
				}
				return c.Delete(ctx, o, opts...)
			},
			SubResourcePatch: func(ctx context.Context, c kube.Client, sub string, o kube.Object, p kube.Patch, opts ...kube.SubResourcePatchOption) error {
				if err := die(); err != nil {
					return err
				}
				return c.SubResource(sub).Patch(ctx, o, p, opts...)
			},
		})
		deaf := d.fleet()
		deaf.Nodes, deaf.HTTP.Transport = d.Client, unheard{deaf.HTTP.Transport, die}
		first := controller.Sandboxes{Client: killed, Live: d.s.Live, Fleet: deaf, Options: d.s.Options}
		sure := d.s
		ever := false
		reconcile := func() {
			if !ever {
				if _, err := first.Reconcile(t.Context(), ctrl.Request{NamespacedName: key("box")}); err == nil && left >= 0 {
					return
				}
				ever = true // the next one goes on
			}
			_, err := sure.Reconcile(t.Context(), ctrl.Request{NamespacedName: key("box")})
			must(t, err)
		}
		settle := func(node string) {
			for range 6 {
				reconcile()
				if p := d.pod("box"); p != nil && p.Spec.NodeName == "" && p.DeletionTimestamp.IsZero() {
					d.bind("box", node)
				}
			}
		}
		must(t, d.Create(t.Context(), sandboxObject("box")))
		settle("a")
		s := d.sandbox("box")
		name := vmName(s)
		if on := d.awake(name); !slices.Equal(on, []string{"a"}) {
			t.Fatalf("killed at %d: awake on %v", fails, on)
		}
		must(t, d.Delete(t.Context(), d.pod("box")))
		settle("b")
		if on := d.awake(name); !slices.Equal(on, []string{"b"}) {
			t.Fatalf("killed at %d: awake on %v after a drain", fails, on)
		}
		d.ready("box", agents.ReasonReady)
		d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
		settle("b")
		if on := d.awake(name); len(on) > 0 || d.pod("box") != nil || !isTrue(d.sandbox("box").Status.Conditions, agents.ConditionSuspended) {
			t.Fatalf("killed at %d: awake on %v, suspended", fails, on)
		}
		must(t, d.Delete(t.Context(), d.sandbox("box")))
		for range 3 {
			reconcile()
		}
		if err := d.Get(t.Context(), key("box"), s); err == nil {
			t.Fatalf("killed at %d: the object is there still", fails)
		}
		if n := d.nodes["a"].creations.Load() + d.nodes["b"].creations.Load(); n != 1 {
			t.Fatalf("killed at %d: %d VMs were made", fails, n)
		}
		for _, m := range d.nodes {
			l, err := m.host.State.List()
			if must(t, err); len(l) > 0 {
				t.Fatalf("killed at %d: %s has %v", fails, m.name, l)
			}
		}
		if !ever {
			t.Logf("%d writes and requests in a life", fails-1)
			return
		}
	}
}

// unheard are requests whose answer is lost when the controller dies.
type unheard struct {
	http.RoundTripper
	die func() error
}

func (u unheard) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := u.RoundTripper.RoundTrip(r)
	if dead := u.die(); err == nil && dead != nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return nil, dead
	}
	return resp, err
}

func TestNode_that_does_not_answer_is_a_condition_and_holds_nobody_up(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a", "b"))
	s := d.running("box", "a")
	d.nodes["a"].silent.Store(true)
	d.s.CallTime = time.Second
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	begin := time.Now()
	if d.reconcile("box").RequeueAfter == 0 {
		t.Error("it is not tried again")
	}
	d.ready("box", controller.ReasonUnreachable)
	if c := reason(d.sandbox("box").Status.Conditions, agents.ConditionSuspended); c != controller.ReasonUnreachable || d.pod("box") == nil {
		t.Errorf("suspended: %s, with the pod %v", c, d.pod("box"))
	}
	took := time.Since(begin)
	begin = time.Now()
	d.reconcile("box")
	if again := time.Since(begin); again > took/2 {
		t.Errorf("it was asked again at once: %s and %s", took, again)
	}
	d.running("other", "b")
	d.nodes["a"].silent.Store(false)
	eventually(t, "it sleeps", func() bool { d.reconcile("box"); return d.pod("box") == nil })
	d.on(s, map[string]state.Phase{"a": state.Asleep})
}

func TestNode_that_dies_gives_its_sandboxes_up_when_its_lease_ends(t *testing.T) {
	d := newDesk(t, newWorld(t, true, "a", "b"))
	s := d.running("box", "a")
	// It is published once; what comes later dies with the node.
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	d.reconcile("box")
	d.reconcile("box")
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Running })
	d.reconcile("box")
	d.bind("box", "a")
	d.reconcile("box")
	d.ready("box", agents.ReasonReady)

	m := d.nodes["a"]
	m.stop()
	m.vms.Close()
	var n corev1.Node
	must(t, d.Get(t.Context(), kube.ObjectKey{Name: "a"}, &n))
	n.Status.Conditions[0].Status = corev1.ConditionUnknown
	must(t, d.Status().Update(t.Context(), &n))
	must(t, d.Delete(t.Context(), d.pod("box")))
	eventually(t, "the pod goes", func() bool { d.reconcile("box"); return d.pod("box") == nil || d.pod("box").Spec.NodeName == "" })
	d.reconcile("box")
	d.bind("box", "b")
	eventually(t, "it runs on b", func() bool {
		d.reconcile("box")
		return isTrue(d.sandbox("box").Status.Conditions, agents.ConditionReady)
	})
	if got := d.phases(vmName(s))["b"]; got != state.Running {
		t.Errorf("on b it is %q", got)
	}
}

func TestSandbox_whose_VM_is_gone_says_so_and_is_not_replaced_by_an_empty_one(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := d.running("box", "a")
	must(t, d.nodes["a"].host.Sandbox(vmName(s)).Delete(t.Context(), sandbox.DeleteOptions{Force: true}))
	d.reconcile("box")
	d.ready("box", controller.ReasonLost)
	d.on(s, nil)
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	d.reconcile("box")
	d.reconcile("box")
	d.ready("box", controller.ReasonLost)
	if s = d.sandbox("box"); isTrue(s.Status.Conditions, agents.ConditionSuspended) || d.pod("box") != nil {
		t.Errorf("it is said to sleep: %+v, and has the pod %v", s.Status, d.pod("box"))
	}
	must(t, d.Delete(t.Context(), s))
	d.reconcile("box")
	if err := d.Get(t.Context(), key("box"), s); err == nil {
		t.Error("the object is there still")
	}
}

func TestSandbox_that_has_crashed_is_started_again(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := d.running("box", "a")
	d.nodes["a"].vms.Kill(vmName(s))
	d.on(s, map[string]state.Phase{"a": state.Crashed})
	d.reconcile("box")
	d.on(s, map[string]state.Phase{"a": state.Running})
}

func TestSandbox_that_sleeps_wakes_again_unless_it_is_idle(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	idle := sandboxObject("idle")
	idle.Spec.PodTemplate.Annotations = map[string]string{controller.AnnotationSpec: `{"idle":{"sleep_seconds":600}}`}
	must(t, d.Create(t.Context(), idle))
	d.reconcile("idle")
	d.bind("idle", "a")
	d.reconcile("idle")
	d.running("box", "a")
	for name, want := range map[string]state.Phase{"box": state.Running, "idle": state.Asleep} {
		s := d.sandbox(name)
		b, err := d.nodes["a"].host.Get(vmName(s))
		must(t, err)
		_, err = b.Sleep(t.Context(), sandbox.SleepOptions{}) // as serve --on-exit sleep does
		must(t, err)
		d.reconcile(name)
		d.on(s, map[string]state.Phase{"a": want})
		d.ready(name, agents.ReasonReady)
	}
}

func TestSandbox_expires_at_its_shutdownTime(t *testing.T) {
	for _, policy := range []string{agents.Retain, agents.Delete} {
		t.Run(policy, func(t *testing.T) {
			d := newDesk(t, newWorld(t, false, "a"))
			s := d.running("box", "a")
			d.change("box", func(s *agents.Sandbox) {
				s.Spec.ShutdownTime, s.Spec.ShutdownPolicy = ptr.To(metav1.NewTime(time.Now().Add(time.Hour))), policy
			})
			if after := d.reconcile("box").RequeueAfter; after <= 0 || after > time.Hour {
				t.Errorf("it is looked at in %s", after)
			}
			d.on(s, map[string]state.Phase{"a": state.Running})
			d.change("box", func(s *agents.Sandbox) { s.Spec.ShutdownTime = ptr.To(metav1.NewTime(time.Now().Add(-time.Second))) })
			for range 3 {
				d.reconcile("box")
			}
			d.on(s, nil)
			if d.pod("box") != nil {
				t.Error("the pod is there still")
			}
			if policy == agents.Retain {
				d.ready("box", agents.ReasonExpired)
			} else if err := d.Get(t.Context(), key("box"), s); err == nil {
				t.Error("the object is there still")
			}
		})
	}
}

func TestSandbox_of_another_class_is_left_alone(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	for name, class := range map[string]*string{"none": nil, "gvisor": ptr.To("gvisor")} {
		s := sandboxObject(name)
		s.Spec.PodTemplate.Spec.RuntimeClassName = class
		must(t, d.Create(t.Context(), s))
		d.reconcile(name)
		if s = d.sandbox(name); d.pod(name) != nil || len(s.Finalizers)+len(s.Status.Conditions) > 0 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

func TestSandbox_that_wants_what_a_VM_cannot_have_is_refused(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	i := 0
	for what, change := range map[string]func(b *agents.Blueprint, p *corev1.PodSpec, c *corev1.Container){
		"volumes": func(_ *agents.Blueprint, p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "v"}}
		},
		"initContainers": func(_ *agents.Blueprint, p *corev1.PodSpec, _ *corev1.Container) {
			p.InitContainers = []corev1.Container{{Name: "i"}}
		},
		"2 containers": func(_ *agents.Blueprint, p *corev1.PodSpec, c *corev1.Container) {
			p.Containers = append(p.Containers, *c)
		},
		"volumeClaimTemplates": func(b *agents.Blueprint, _ *corev1.PodSpec, _ *corev1.Container) {
			b.VolumeClaimTemplates = []runtime.RawExtension{{Raw: []byte("{}")}}
		},
		"service": func(b *agents.Blueprint, _ *corev1.PodSpec, _ *corev1.Container) { b.Service = ptr.To(true) },
		"valueFrom": func(_ *agents.Blueprint, _ *corev1.PodSpec, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{}}}
		},
		"without command": func(_ *agents.Blueprint, _ *corev1.PodSpec, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", Value: "b"}}
		},
		"vCPUs": func(_ *agents.Blueprint, _ *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Requests[corev1.ResourceCPU] = resource.MustParse("9")
		},
		"it may have network": func(b *agents.Blueprint, _ *corev1.PodSpec, _ *corev1.Container) {
			b.PodTemplate.Annotations = map[string]string{controller.AnnotationSpec: `{"image":"x","volumes":[{"name":"of-another","path":"/x"}]}`}
		},
		"unknown field": func(b *agents.Blueprint, _ *corev1.PodSpec, _ *corev1.Container) {
			b.PodTemplate.Annotations = map[string]string{controller.AnnotationSpec: `{"netwrk":"tap"}`}
		},
	} {
		i++
		s := sandboxObject(fmt.Sprint("box", i))
		change(&s.Spec.Blueprint, &s.Spec.PodTemplate.Spec, &s.Spec.PodTemplate.Spec.Containers[0])
		must(t, d.Create(t.Context(), s))
		d.reconcile(s.Name)
		s = d.sandbox(s.Name)
		if reason(s.Status.Conditions, agents.ConditionReady) != controller.ReasonUnsupported || !strings.Contains(s.Status.Conditions[0].Message, what) || d.pod(s.Name) != nil {
			t.Errorf("%s: %+v", what, s.Status.Conditions)
		}
	}
}

func TestSandbox_whose_template_was_broken_still_sleeps_and_goes(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := d.running("box", "a")
	d.change("box", func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Volumes = []corev1.Volume{{Name: "v"}} })
	d.reconcile("box")
	d.ready("box", controller.ReasonUnsupported)
	d.on(s, map[string]state.Phase{"a": state.Running})
	must(t, d.Delete(t.Context(), d.pod("box"))) // a drain does not wait for ever
	d.reconcile("box")
	d.on(s, map[string]state.Phase{"a": state.Asleep})
	if d.pod("box") != nil {
		t.Error("the pod is there still")
	}
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	d.reconcile("box")
	d.reconcile("box")
	d.ready("box", agents.ReasonSuspended)
	must(t, d.Delete(t.Context(), d.sandbox("box")))
	d.reconcile("box")
	d.on(s, nil)
}

func TestPod_template_becomes_the_VM(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := sandboxObject("box")
	p := &s.Spec.PodTemplate
	p.Annotations = map[string]string{controller.AnnotationSpec: `{"network":"tap","disk_mib":512,"idle":{"sleep_seconds":600}}`}
	c := &p.Spec.Containers[0]
	p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	c.Command, c.Args, c.WorkingDir, c.Env = []string{"sleep"}, []string{"9"}, "/srv", []corev1.EnvVar{{Name: "A", Value: "b"}}
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m"), corev1.ResourceMemory: resource.MustParse("100Mi")}
	must(t, d.Create(t.Context(), s))
	d.reconcile("box")
	if got := d.pod("box").Spec.Containers[0].Resources; got.Requests.Memory().String() != "96Mi" || got.Limits.Memory().String() != "132Mi" {
		t.Errorf("the pod has %+v", got)
	}
	d.bind("box", "a")
	d.reconcile("box")
	d.ready("box", agents.ReasonReady)
	r, err := d.nodes["a"].host.State.Get(vmName(d.sandbox("box")))
	must(t, err)
	v := r.Spec
	if v.VCPUs != 2 || v.MemoryMiB != 100 || v.DiskMiB != 512 || v.Network != "tap" || v.Hostname != "box" || len(v.Services) != 1 ||
		fmt.Sprint(v.Services[0].Argv, v.Services[0].Env)+v.Services[0].Dir+v.Services[0].Restart != "[sleep 9] [A=b]/srvon-failure" {
		t.Errorf("%+v", v)
	}
}

func TestPod_of_another_with_the_sandboxs_name_is_left_alone(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	must(t, d.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "box", Namespace: namespace}}))
	must(t, d.Create(t.Context(), sandboxObject("box")))
	d.reconcile("box")
	d.ready("box", controller.ReasonPodConflict)
	must(t, d.Delete(t.Context(), d.sandbox("box")))
	d.reconcile("box")
	if d.pod("box") == nil {
		t.Error("it was removed")
	}
}

func TestReservation_without_a_sandbox_is_let_go(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := d.running("box", "a")
	p := d.pod("box")
	must(t, d.Delete(t.Context(), s))
	d.reconcile("box")
	// A reservation that the cache had not shown yet.
	p.ResourceVersion = ""
	must(t, d.Create(t.Context(), p.DeepCopy()))
	d.reconcile("box")
	if p := d.pod("box"); p != nil {
		t.Errorf("%+v", p)
	}
	// One of the object before, and the next object of the name.
	must(t, d.Create(t.Context(), p.DeepCopy()))
	must(t, d.Create(t.Context(), sandboxObject("box")))
	for range 3 {
		d.reconcile("box")
	}
	if p := d.pod("box"); p == nil || !metav1.IsControlledBy(p, d.sandbox("box")) {
		t.Errorf("%+v", p)
	}
}
