package controller_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/kubernetes/controller"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// The tenant of these tests may write all of a Sandbox, in his namespace alone.

func TestTenant_opens_nothing_of_the_node_and_of_others(t *testing.T) {
	policy := func(text string) string { return `{"network":"tap","policy":` + text + `}` }
	const allow = `"direction":"egress","verdict":"allow","protocols":["tcp"],"ports":[443]`
	for name, tt := range map[string]struct {
		spec, image, refused string // refused: a part of the condition's message; empty if it is served
	}{
		"an address of the node": {policy(`{"publish":[{"listen":"0.0.0.0:6443","port":80,"protocol":"tcp"}]}`), "", "publish"},
		"the node's services":    {policy(`{"rules":[{` + allow + `,"groups":["host"]}]}`), "", "rules[0]"},
		"other tenants' pods":    {policy(`{"rules":[{` + allow + `,"groups":["public"]},{` + allow + `,"groups":["private"]}]}`), "", "rules[1]"},
		"the API server":         {policy(`{"rules":[{` + allow + `,"cidrs":["10.96.0.1/32"]}]}`), "", "rules[0]"},
		"the Internet":           {policy(`{"rules":[{` + allow + `,"groups":["public"],"cidrs":["0.0.0.0/0"]}],"dns":{"upstreams":["10.96.0.10:53"]}}`), "", ""},
		"what it denies":         {policy(`{"rules":[{"direction":"egress","verdict":"deny","groups":["host","private"]}]}`), "", ""},
		"a port by DNS":          {policy(`{"dns":{"upstreams":["10.0.0.1:10250"]}}`), "", "port 53"},
		"a directory":            {`{"shares":[{"source":"/","path":"/host"}]}`, "", "it may have network"},
		"a kernel":               {`{"kernel":"/etc/shadow"}`, "", "it may have network"},
		"a volume of another":    {`{"volumes":[{"name":"db","path":"/db"}]}`, "", "it may have network"},
		"tags of policies":       {`{"tags":["db"]}`, "", "it may have network"},
		"forks of itself":        {`{"self":{"fork":true}}`, "", "annotation"},
		"another VM's name":      {`{"name":"k8s-00000000-0000-4000-8000-000000000001"}`, "", "it may have network"},
		"a file as image":        {"", "../../../etc/passwd", "-"},
		"a directory as image":   {"", "/", "-"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t, newWorld(t, false, "a"))
			s := sandboxObject("box")
			s.Spec.PodTemplate.Annotations = map[string]string{controller.AnnotationSpec: tt.spec}
			if tt.image != "" {
				s.Spec.PodTemplate.Spec.Containers[0].Image = tt.image
			}
			must(t, d.Create(t.Context(), s))
			d.reconcile("box")
			if d.pod("box") != nil {
				d.bind("box", "a")
				d.reconcile("box")
			}
			s = d.sandbox("box")
			if ready := isTrue(s.Status.Conditions, agents.ConditionReady); ready != (tt.refused == "") || !strings.Contains(fmt.Sprint(s.Status.Conditions), tt.refused) {
				t.Errorf("%+v", s.Status.Conditions)
			}
		})
	}
	d := newDesk(t, newWorld(t, false, "a"))
	d.s.AllowPrivate = true
	s := sandboxObject("box")
	s.Spec.PodTemplate.Annotations = map[string]string{controller.AnnotationSpec: policy(`{"rules":[{` + allow + `,"groups":["private"]}]}`)}
	must(t, d.Create(t.Context(), s))
	if d.reconcile("box"); d.pod("box") == nil {
		t.Errorf("%+v", d.sandbox("box").Status.Conditions)
	}
}

func TestTenant_who_forges_annotations_keeps_no_VM_running(t *testing.T) {
	for _, durable := range []bool{false, true} {
		for _, forged := range []string{"b", "plain"} {
			for _, end := range []string{"suspended", "deleted", "deleted without finalizers"} {
				t.Run(fmt.Sprintf("%q,%s,durable=%v", forged, end, durable), func(t *testing.T) {
					d := newDesk(t, newWorld(t, durable, "a", "b"))
					must(t, d.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "plain"}}))
					s := d.running("box", "a")
					d.change("box", func(s *agents.Sandbox) {
						s.Annotations[controller.AnnotationNode], s.Annotations[controller.AnnotationBefore] = forged, forged
						s.Annotations[controller.AnnotationName], s.Annotations[controller.AnnotationStarted] = "k8s-other", "forged"
						switch end {
						case "suspended":
							s.Spec.OperatingMode = agents.Suspended
						case "deleted without finalizers":
							s.Finalizers = nil
						}
					})
					if end != "suspended" {
						must(t, d.Delete(t.Context(), d.sandbox("box")))
						if end != "deleted" {
							if p := d.pod("box"); p != nil { // the garbage collector
								must(t, d.Delete(t.Context(), p))
							}
						}
					}
					for range 3 {
						d.reconcile("box")
					}
					must(t, d.s.Sweep(t.Context(), true, func(s *agents.Sandbox) { d.reconcile(s.Name) }))
					if on := d.awake(vmName(s)); len(on) > 0 || d.pod("box") != nil {
						t.Errorf("awake on %v, with the pod %v", on, d.pod("box"))
					}
					if end != "suspended" {
						d.on(s, map[string]state.Phase{})
						if err := d.Get(t.Context(), key("box"), s); kube.IgnoreNotFound(err) != nil || err == nil {
							t.Errorf("the object: %v", err)
						}
					}
				})
			}
		}
	}
}

// vm makes a VM on a node, as whoever has a token there may.
func (d *desk) vm(node, name string, m spec.Metadata) {
	d.t.Helper()
	_, err := d.nodes[node].host.Create(d.t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &m})
	must(d.t, err)
}

func TestSweep_removes_VMs_without_a_Sandbox_and_nobody_elses(t *testing.T) {
	d := newDesk(t, newWorld(t, true, "a", "b"))
	d.s.ClusterID = "this"
	s := d.running("box", "a")
	const uid = "00000000-0000-4000-8000-999999999999"
	of := func(owner, purpose string, tags ...string) spec.Metadata {
		return spec.Metadata{Owner: owner, Purpose: purpose, Tags: tags}
	}
	d.vm("a", "k8s-"+uid, of("k8s/default", "Sandbox default/gone", "kubernetes:this"))
	// Of an earlier object of the name.
	d.vm("b", "k8s-1"+uid[1:], of("k8s/default", "Sandbox default/box", "kubernetes:this"))
	kept := map[string]spec.Metadata{
		"k8s-2" + uid[1:]: of("k8s/default", "Sandbox default/gone", "kubernetes:other"),
		"k8s-3" + uid[1:]: of("k8s/default", "Sandbox default/gone"),
		"k8s-4" + uid[1:]: of("k8s/other", "Sandbox default/gone", "kubernetes:this"),
		"k8s-5" + uid[1:]: of("k8s/default", "mine", "kubernetes:this"),
		"dev":             of("k8s/default", "Sandbox default/gone", "kubernetes:this"),
		"of-a-user":       of("alice", ""),
	}
	for name, m := range kept {
		d.vm("b", name, m)
	}
	must(t, d.s.Sweep(t.Context(), true, func(*agents.Sandbox) { t.Error("it is to sleep") }))
	if got := fmt.Sprint(d.phases("k8s-"+uid), d.phases("k8s-1"+uid[1:])); got != "map[] map[]" {
		t.Errorf("left: %s", got)
	}
	for name := range kept {
		if len(d.phases(name)) == 0 {
			t.Errorf("%s is gone", name)
		}
	}
	d.on(s, map[string]state.Phase{"a": state.Running})
}

func TestSuspended_sandbox_that_traffic_wakes_sleeps_again(t *testing.T) {
	d := newDesk(t, newWorld(t, true, "a", "b"))
	s := d.running("box", "a")
	d.change("box", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.Suspended })
	d.reconcile("box")
	d.reconcile("box")
	at := func(node string) *client.Client {
		return client.New(fmt.Sprintf("https://%s:%d", d.nodes[node].address, d.port), d.token, d.s.Fleet.HTTP)
	}
	eventually(t, "the other node lists it, unless asked for its own", func() bool {
		all, err := at("b").List(t.Context(), records.Filter{})
		must(t, err)
		own, err := at("b").Here().List(t.Context(), records.Filter{})
		must(t, err)
		if len(own.Sandboxes) > 0 {
			t.Fatalf("%+v", own.Sandboxes)
		}
		return len(all.Sandboxes) == 1
	})
	for _, node := range []string{"a", "b"} { // any node's gateway may be asked
		_, err := at(node).Here().Start(t.Context(), vmName(s))
		must(t, err)
		if on := d.awake(vmName(s)); len(on) != 1 {
			t.Fatalf("awake on %v", on)
		}
		n := 0
		must(t, d.s.Sweep(t.Context(), false, func(s *agents.Sandbox) { n++; d.reconcile(s.Name) }))
		if on := d.awake(vmName(s)); len(on) > 0 || n != 1 || !isTrue(d.sandbox("box").Status.Conditions, agents.ConditionSuspended) {
			t.Errorf("woken on %s: awake on %v, %d", node, on, n)
		}
	}
}

func TestTenant_who_has_many_slow_sandboxes_leaves_room_for_others(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	const slow = 20
	for i := range slow {
		must(t, d.Create(t.Context(), sandboxObject(fmt.Sprint("s", i))))
		d.reconcile(fmt.Sprint("s", i))
		d.bind(fmt.Sprint("s", i), "a")
	}
	d.running("first", "a") // the server has answered
	hold := make(chan struct{})
	d.nodes["a"].vms.Fail = func(string, string) error { <-hold; return nil }
	done := make(chan struct{}, slow)
	for i := range slow {
		go func() { d.reconcile(fmt.Sprint("s", i)); done <- struct{}{} }()
	}
	for range slow - 16 { // the others are told to come again
		<-done
	}
	other := sandboxObject("box")
	other.Namespace = "other"
	must(t, d.Create(t.Context(), other))
	asked := d.s.Fleet.Ask(t.Context(), "a", "other", time.Second)
	again := d.s.Fleet.Ask(t.Context(), "a", namespace, time.Second)
	close(hold)
	for range 16 {
		<-done
	}
	if asked != nil || again == nil {
		t.Errorf("the other namespace: %v; this one: %v", asked, again)
	}
}

func TestTenant_chooses_none_of_the_labels_that_controllers_know_pods_by(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a"))
	s := sandboxObject("box")
	forged := map[string]string{
		agents.NameHashLabel: "x", agents.ClaimLabel: "x", "extensions.agents.x-k8s.io/y": "x", controller.PodLabel: "x", controller.Finalizer: "x", "team": "x",
	}
	s.Spec.PodTemplate.Labels, s.Spec.PodTemplate.Annotations, s.Labels = forged, forged, forged
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "u", Controller: ptr.To(true)}}
	must(t, d.Create(t.Context(), s))
	d.reconcile("box")
	p := d.pod("box")
	want := map[string]string{"team": "x", controller.PodLabel: "true", agents.NameHashLabel: agents.NameHash("box")}
	if fmt.Sprint(p.Labels) != fmt.Sprint(want) {
		t.Errorf("labels %v", p.Labels)
	}
	delete(p.Annotations, agents.PropagatedLabels)
	delete(p.Annotations, agents.PropagatedAnnotations)
	if fmt.Sprint(p.Annotations) != "map[team:x]" {
		t.Errorf("annotations %v", p.Annotations)
	}
	// What a template loses its pod loses, and others' stays.
	p = d.pod("box")
	p.Labels["injected"] = "y"
	must(t, d.Update(t.Context(), p))
	d.change("box", func(s *agents.Sandbox) { s.Spec.PodTemplate.Labels = map[string]string{"new": "z"} })
	d.reconcile("box")
	delete(want, "team")
	want["injected"], want["new"] = "y", "z"
	if p := d.pod("box"); fmt.Sprint(p.Labels) != fmt.Sprint(want) {
		t.Errorf("labels %v", p.Labels)
	}
}

func TestSandbox_that_is_deleted_does_not_wait_for_a_dead_node(t *testing.T) {
	d := newDesk(t, newWorld(t, false, "a", "b"))
	s := d.running("box", "a")
	d.nodes["a"].silent.Store(true)
	d.s.CallTime = time.Second
	must(t, d.Delete(t.Context(), d.sandbox("box")))
	d.reconcile("box")
	d.ready("box", controller.ReasonUnreachable) // its kubelet says that it is well
	var n corev1.Node
	must(t, d.Get(t.Context(), kube.ObjectKey{Name: "a"}, &n))
	n.Status.Conditions[0].Status = corev1.ConditionUnknown
	must(t, d.Status().Update(t.Context(), &n))
	d.reconcile("box")
	if err := d.Get(t.Context(), key("box"), s); err == nil || d.pod("box") != nil {
		t.Errorf("the object and the pod are there still: %v", d.pod("box"))
	}
	d.nodes["a"].silent.Store(false)
	eventually(t, "the sweep removes it", func() bool {
		must(t, d.s.Sweep(t.Context(), true, nil))
		return len(d.phases(vmName(s))) == 0
	})
}
