//go:build kubernetes

package controller_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/kubernetes/controller"
)

// What agent-sandbox's own end-to-end tests assert of its controller, as far as a VM has it.
func TestKubernetes_does_what_upstreams_tests_assert(t *testing.T) {
	a := start(t, newWorld(t, true, "a", "b"))
	a.run()
	get := func(o kube.Object, name string) bool { return a.Get(t.Context(), key(name), o) == nil }
	pod := func(name string) *corev1.Pod {
		var p corev1.Pod
		if !get(&p, name) {
			return nil
		}
		return &p
	}
	// has waits until a Sandbox has conditions, each as Type=Status/Reason, of its generation.
	has := func(name string, want ...string) *agents.Sandbox {
		t.Helper()
		var s *agents.Sandbox
		eventually(t, name+" has "+strings.Join(want, ", "), func() bool {
			if s = a.sandbox(name); s == nil {
				return false
			}
			for _, w := range want {
				if !slices.ContainsFunc(s.Status.Conditions, func(c metav1.Condition) bool {
					return c.Type+"="+string(c.Status)+"/"+c.Reason == w && c.ObservedGeneration == s.Generation
				}) {
					return false
				}
			}
			return true
		})
		return s
	}
	const runs, ready = "Suspended=False/NotSuspended", "Ready=True/DependenciesReady"
	const sleeps, unready = "Suspended=True/PodTerminated", "Ready=False/SandboxSuspended"
	when := func(s *agents.Sandbox) time.Time {
		return meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended).LastTransitionTime.Time
	}

	// TestSimpleSandbox
	o := sandboxObject("my-sandbox")
	o.Spec.PodTemplate.Annotations, o.Spec.PodTemplate.Labels = map[string]string{"test-anno-key": "val-1"}, map[string]string{"test-label-key": "val-2"}
	must(t, a.Create(t.Context(), o))
	s := has("my-sandbox", runs, ready, "PodScheduled=True/PodScheduled")
	p := pod("my-sandbox")
	owner := metav1.OwnerReference{APIVersion: "agents.x-k8s.io/v1beta1", Kind: "Sandbox", Name: s.Name, UID: s.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}
	if s.Status.LabelSelector != "agents.x-k8s.io/sandbox-name-hash="+agents.NameHash("my-sandbox") ||
		p.Labels["agents.x-k8s.io/sandbox-name-hash"] != agents.NameHash("my-sandbox") || p.Labels["test-label-key"] != "val-2" || p.Annotations["test-anno-key"] != "val-1" ||
		len(p.OwnerReferences) != 1 || p.OwnerReferences[0].String() != owner.String() {
		t.Errorf("%+v, %+v", s.Status, p.ObjectMeta)
	}

	// TestSandboxSuspendResumeCycleWithOperatingMode
	last := when(s)
	for range 2 {
		for _, to := range []struct{ mode, suspended, ready string }{{agents.Suspended, sleeps, unready}, {agents.Running, runs, ready}} {
			time.Sleep(time.Second)
			a.mode("my-sandbox", to.mode)
			s = has("my-sandbox", to.suspended, to.ready)
			if !when(s).After(last) || (to.mode == agents.Suspended) != (pod("my-sandbox") == nil) || (to.mode == agents.Suspended) != (s.Status.NodeName == "") || s.Status.LabelSelector == "" {
				t.Errorf("%s: %s after %s, %+v", to.mode, when(s), last, s.Status)
			}
			last = when(s)
		}
	}

	// TestSandboxSuspensionWithTerminatingPod
	p = pod("my-sandbox")
	p.Finalizers = append(p.Finalizers, "agents.x-k8s.io/test-hold")
	must(t, a.Update(t.Context(), p))
	time.Sleep(time.Second)
	a.mode("my-sandbox", agents.Suspended)
	if s = has("my-sandbox", "Suspended=False/PodTerminating", unready); !when(s).Equal(last) || pod("my-sandbox").DeletionTimestamp == nil {
		t.Errorf("%s, %s", when(s), last)
	}
	must(t, a.Patch(t.Context(), p, kube.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	if s = has("my-sandbox", sleeps, unready); !when(s).After(last) {
		t.Error("the time of the transition is the same")
	}

	// TestSandboxPodDeletionKeepsSuspendedFalse
	a.mode("my-sandbox", agents.Running)
	last = when(has("my-sandbox", runs, ready))
	p = pod("my-sandbox")
	must(t, a.Delete(t.Context(), p))
	eventually(t, "another pod is made", func() bool { n := pod("my-sandbox"); return n != nil && n.UID != p.UID })
	if s = has("my-sandbox", runs, ready); !when(s).Equal(last) {
		t.Error("a pod that ends is no suspension")
	}

	// TestSandboxSuspensionBlockedByUnownedPodConflict
	foreign := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "conflict", Namespace: namespace}, Spec: *pod("my-sandbox").Spec.DeepCopy()}
	foreign.Spec.NodeName = ""
	must(t, a.Create(t.Context(), foreign))
	o = sandboxObject("conflict")
	o.Spec.OperatingMode = agents.Suspended
	must(t, a.Create(t.Context(), o))
	has("conflict", "Suspended=False/PodNotOwned", unready)
	if p := pod("conflict"); p == nil || p.UID != foreign.UID {
		t.Error("the pod is gone")
	}
	must(t, a.Delete(t.Context(), foreign))
	has("conflict", sleeps, unready)

	// TestSandboxShutdownTime, with both policies
	for _, policy := range []string{agents.Retain, agents.Delete} {
		o = sandboxObject("ends-" + strings.ToLower(policy))
		o.Spec.ShutdownTime, o.Spec.ShutdownPolicy = ptr.To(metav1.NewTime(time.Now().Add(4*time.Second))), policy
		must(t, a.Create(t.Context(), o))
		if s = has(o.Name, ready); policy == agents.Retain {
			s = has(o.Name, "Ready=False/SandboxExpired")
			if time.Now().Before(o.Spec.ShutdownTime.Time) || s.Status.NodeName+s.Status.LabelSelector != "" {
				t.Errorf("%+v", s.Status)
			}
		}
		eventually(t, "nothing runs of "+o.Name, func() bool {
			return pod(o.Name) == nil && len(a.phases(vmName(s))) == 0 && (policy == agents.Retain || a.sandbox(o.Name) == nil)
		})
	}

	// TestWarmPoolAvailableCondition, TestWarmPoolRollout*
	members := func(pool string) (names []string) {
		var p agents.SandboxWarmPool
		must(t, a.Get(t.Context(), key(pool), &p))
		for _, s := range a.all() {
			if s.DeletionTimestamp == nil && metav1.IsControlledBy(&s, &p) {
				names = append(names, s.Name)
			}
		}
		return names
	}
	template := func(name string, change func(*agents.SandboxTemplate)) {
		var tm agents.SandboxTemplate
		must(t, a.Get(t.Context(), key(name), &tm))
		change(&tm)
		must(t, a.Update(t.Context(), &tm))
	}
	env := func(tm *agents.SandboxTemplate) {
		c := &tm.Spec.PodTemplate.Spec.Containers[0]
		c.Command, c.Env = []string{"sleep"}, []corev1.EnvVar{{Name: "TEST_ENV", Value: "updated"}}
	}
	for _, name := range []string{"default", "onreplenish", "recreate", "other"} {
		a.pool(name, 1)
		var w agents.SandboxWarmPool
		must(t, a.Get(t.Context(), key(name), &w))
		was := w.DeepCopy()
		if w.Spec.UpdateStrategy = map[string]*agents.UpdateStrategy{"onreplenish": {Type: "OnReplenish"}, "recreate": {Type: agents.Recreate}, "other": {Type: agents.Recreate}}[name]; w.Spec.UpdateStrategy != nil {
			must(t, a.Patch(t.Context(), &w, kube.MergeFrom(was)))
		}
	}
	first := map[string]string{}
	for _, name := range []string{"default", "onreplenish", "recreate", "other"} {
		a.full(name, 1)
		first[name] = members(name)[0]
		eventually(t, name+" is available", func() bool {
			var w agents.SandboxWarmPool
			must(t, a.Get(t.Context(), key(name), &w))
			c := meta.FindStatusCondition(w.Status.Conditions, "Available")
			return c != nil && c.Status == metav1.ConditionTrue && c.Reason == "MinimumReplicasAvailable" && w.Status.ObservedGeneration == w.Generation && w.Status.Selector != ""
		})
	}
	template("recreate", func(tm *agents.SandboxTemplate) {
		tm.Spec.PodTemplate.Labels = map[string]string{"new-label": "new-value"}
	})
	template("default", env)
	template("onreplenish", env)
	time.Sleep(2 * time.Second)
	for name, was := range first {
		if got := members(name); !slices.Equal(got, []string{was}) {
			t.Errorf("%s has %v instead of %s", name, got, was)
		}
	}
	template("recreate", env)
	for _, name := range []string{"default", "onreplenish"} {
		must(t, a.Delete(t.Context(), a.sandbox(first[name])))
	}
	for _, name := range []string{"default", "onreplenish", "recreate"} {
		eventually(t, name+" has another sandbox, as the template is now", func() bool {
			all := members(name)
			return len(all) == 1 && all[0] != first[name] && len(a.sandbox(all[0]).Spec.PodTemplate.Spec.Containers[0].Env) == 1
		})
	}
	if got := members("other"); !slices.Equal(got, []string{first["other"]}) {
		t.Errorf("the other pool has %v", got)
	}
	same := &agents.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Name: "same", Namespace: namespace}, Spec: agents.TemplateSpec{Blueprint: blueprint()}}
	must(t, a.Create(t.Context(), same))
	var w agents.SandboxWarmPool
	must(t, a.Get(t.Context(), key("other"), &w))
	was := w.DeepCopy()
	w.Spec.TemplateRef.Name = "same"
	must(t, a.Patch(t.Context(), &w, kube.MergeFrom(was)))
	eventually(t, "the pool has a sandbox of the other template", func() bool {
		all := members("other")
		return len(all) == 1 && all[0] != first["other"] && a.sandbox(all[0]).Annotations[agents.TemplateAnnotation] == "same"
	})
	a.full("other", 1)

	// TestWarmPoolSandboxWatcher, TestSandboxClaimObservabilityAnnotation
	claim := func(name, reason string) (c *agents.SandboxClaim) {
		eventually(t, "claim "+name+": "+reason, func() bool {
			c = &agents.SandboxClaim{}
			return get(c, name) && meta.FindStatusCondition(c.Status.Conditions, "Ready") != nil && meta.FindStatusCondition(c.Status.Conditions, "Ready").Reason == reason
		})
		return c
	}
	begin := time.Now()
	a.claim("claim", "other")
	c := claim("claim", agents.ReasonReady)
	s = a.sandbox(c.Status.Sandbox.Name)
	p = pod(s.Name)
	if !metav1.IsControlledBy(s, c) || s.Labels[agents.LaunchLabel] != agents.LaunchWarm || s.Labels[agents.ClaimLabel] != string(c.UID) || p.Labels[agents.ClaimLabel] != string(c.UID) || s.Labels[agents.PoolLabel] != "" ||
		c.Annotations[agents.SandboxNameAnnotation] != s.Name {
		t.Errorf("%+v, %+v, %+v", c, s.ObjectMeta, p.ObjectMeta)
	}
	if at, err := time.Parse(time.RFC3339Nano, c.Annotations["agents.x-k8s.io/controller-first-observed-at"]); err != nil || at.Before(begin) {
		t.Errorf("observed at %s: %v", at, err)
	}
	unreadySeen := make(chan bool, 1)
	watch, err := a.Watch(t.Context(), &agents.SandboxList{}, kube.InNamespace(namespace), kube.MatchingFields{"metadata.name": s.Name})
	must(t, err)
	go func() {
		seen := false
		for e := range watch.ResultChan() {
			if s, ok := e.Object.(*agents.Sandbox); ok && !isTrue(s.Status.Conditions, "Ready") {
				seen = true
				break
			}
		}
		unreadySeen <- seen
	}()
	must(t, a.Delete(t.Context(), p))
	if !<-unreadySeen {
		t.Error("a sandbox whose pod is deleted stays ready")
	}
	watch.Stop()
	claim("claim", agents.ReasonReady)

	// TestCreateSandboxClaimVolumeClaimTemplates: none are; what a claim may not want; ttlSecondsAfterCreated
	for name, change := range map[string]func(c *agents.ClaimSpec){
		"VolumeClaimTemplatesError": func(c *agents.ClaimSpec) {
			c.VolumeClaimTemplates = []runtime.RawExtension{{Raw: []byte(`{"metadata":{"name":"x"}}`)}}
		},
		"WarmPoolNotFound":         func(c *agents.ClaimSpec) { c.WarmPoolRef.Name = "none" },
		"EnvVarsInjectionRejected": func(c *agents.ClaimSpec) { c.Env = []agents.ClaimEnv{{Name: "A", Value: "b"}} },
		"InvalidMetadata": func(c *agents.ClaimSpec) {
			c.AdditionalPodMetadata.Labels = map[string]string{"kubernetes.io/x": "y"}
		},
	} {
		o := &agents.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(name), Namespace: namespace}, Spec: agents.ClaimSpec{WarmPoolRef: agents.Ref{Name: "other"}}}
		change(&o.Spec)
		o.Spec.TTLAfterCreated = ptr.To[int32](6)
		must(t, a.Create(t.Context(), o))
		claim(o.Name, name)
		eventually(t, o.Name+" is old, and goes", func() bool { return !get(&agents.SandboxClaim{}, o.Name) })
	}
}

// kubectl returns what kubectl says, by its client configuration of a user; empty is the administrator.
func (a *apiserver) kubectl(user string) func(args ...string) (string, error) {
	a.t.Helper()
	bin, err := exec.LookPath("kubectl")
	if err != nil {
		a.t.Skip("kubectl is not in $PATH: install it, such as by Debian's kubernetes-client")
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: a.cfg.Host, CertificateAuthorityData: a.cfg.CAData}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: a.cfg.CertData, ClientKeyData: a.cfg.KeyData, Impersonate: user}
	c.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u", Namespace: namespace}
	c.CurrentContext = "x"
	file := filepath.Join(a.t.TempDir(), "config")
	must(a.t, clientcmd.WriteToFile(*c, file))
	home := a.t.TempDir()
	return func(args ...string) (string, error) {
		cmd := exec.CommandContext(a.t.Context(), bin, args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+file, "HOME="+home)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
}

func TestKubernetes_kubectl_sees_waits_scales_and_deletes(t *testing.T) {
	a := start(t, newWorld(t, true, "a"))
	k := a.kubectl("")
	a.run()
	says := func(want string, args ...string) {
		t.Helper()
		out, err := k(args...)
		if err != nil || !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	must(t, a.Create(t.Context(), sandboxObject("box")))
	says("condition met", "wait", "--for=condition=Ready", "--timeout=60s", "sandboxes/box")
	says("NAME READY REASON AGE box True DependenciesReady", "get", "sandboxes", "box")
	says("sandbox.agents.x-k8s.io/box patched", "patch", "sandboxes.agents.x-k8s.io", "box", "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
	says("condition met", "wait", "--for=condition=Suspended", "--timeout=60s", "sandboxes/box")
	says("box False SandboxSuspended", "get", "sandboxes", "box")
	bad := sandboxObject("bad")
	bad.Spec.PodTemplate.Spec.Containers[0].Image = "none"
	must(t, a.Create(t.Context(), bad))
	says("condition met", "wait", "--for=jsonpath={.status.conditions[?(@.type==\"Ready\")].reason}=ImageNotFound", "--timeout=60s", "sandboxes/bad")
	eventually(t, "describe has an event", func() bool {
		out, err := k("describe", "sandboxes", "bad")
		return err == nil && strings.Contains(out, "Warning") && strings.Contains(out, "ImageNotFound") && strings.Contains(out, "drowse")
	})
	a.pool("warm", 1)
	says("condition met", "wait", "--for=condition=Available", "--timeout=60s", "sandboxwarmpools/warm")
	says("scaled", "scale", "--replicas=3", "sandboxwarmpools/warm")
	says("condition met", "wait", "--for=jsonpath={.status.readyReplicas}=3", "--timeout=60s", "sandboxwarmpools/warm")
	says("warm 3", "get", "sandboxwarmpools", "warm")
	a.claim("c", "warm")
	says("condition met", "wait", "--for=condition=Ready", "--timeout=60s", "sandboxclaims/c")
	eventually(t, "describe has an event", func() bool {
		out, err := k("describe", "sandboxclaims", "c")
		return err == nil && strings.Contains(out, "SandboxAdopted")
	})
	says("deleted", "delete", "sandboxclaims,sandboxwarmpools", "--all", "--timeout=60s")
	says("deleted", "delete", "sandboxes", "--all", "--timeout=60s")
	a.gone()
}

// The tenant has the rights to write Sandboxes in his namespace, and no others.
func TestKubernetes_tenant_reaches_nothing_beyond_his_sandboxes(t *testing.T) {
	a := start(t, newWorld(t, true, "a", "b"))
	a.run()
	must(t, a.Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "tenant", Namespace: namespace}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"agents.x-k8s.io"}, Resources: []string{"sandboxes"}, Verbs: []string{"*"}},
	}}))
	must(t, a.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "tenant", Namespace: namespace}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "tenant"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "tenant"}},
	}))
	must(t, a.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "victim"}}))
	victim := sandboxObject("box")
	victim.Namespace = "victim"
	must(t, a.Create(t.Context(), victim))
	a.settle("the victim runs")
	cfg := rest.CopyConfig(a.cfg)
	cfg.Impersonate.UserName = "tenant"
	as, err := kube.New(cfg, kube.Options{Scheme: a.Scheme()})
	must(t, err)

	// A UID, a state, owners and a finalizer of his choice.
	o := sandboxObject("box")
	o.UID = victim.UID
	o.Finalizers = []string{controller.Finalizer}
	o.Annotations = map[string]string{controller.AnnotationNode: "b", controller.AnnotationName: vmName(victim), controller.AnnotationStarted: ""}
	o.OwnerReferences = []metav1.OwnerReference{{APIVersion: agents.Group.String(), Kind: "Sandbox", Name: "box", UID: victim.UID}}
	o.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Forged", LastTransitionTime: metav1.Now()}}
	must(t, as.Create(t.Context(), o))
	if o.UID == victim.UID || len(o.Status.Conditions) > 0 {
		t.Errorf("%+v", o)
	}
	o.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Forged", LastTransitionTime: metav1.Now()}}
	if err := as.Status().Update(t.Context(), o); !apierrors.IsForbidden(err) {
		t.Errorf("writing the state: %v", err)
	}
	a.settle("his runs as well")
	mine := a.sandbox("box")
	if mine.Annotations[controller.AnnotationName] != vmName(mine) || len(a.awake(vmName(mine))) != 1 {
		t.Errorf("%+v, awake on %v", mine, a.awake(vmName(mine)))
	}
	// It goes, with all that it claims, while its finalizers are removed again and again.
	must(t, as.Delete(t.Context(), mine))
	for range 20 {
		_ = as.Patch(t.Context(), mine, kube.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null,"annotations":{"`+controller.AnnotationNode+`":"b"}}}`)))
	}
	eventually(t, "no VM of his is left", func() bool { return len(a.phases(vmName(mine))) == 0 })
	for i := range 10 {
		name := "short-" + string(rune('a'+i))
		o := sandboxObject(name)
		must(t, as.Create(t.Context(), o))
		time.Sleep(time.Duration(i) * 60 * time.Millisecond)
		must(t, as.Patch(t.Context(), o, kube.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
		must(t, as.Delete(t.Context(), o))
		_ = as.Patch(t.Context(), o, kube.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`)))
	}
	eventually(t, "the victim's VM is the only one", func() bool {
		n := 0
		for _, m := range a.nodes {
			l, err := m.host.State.List()
			must(t, err)
			n += len(l)
		}
		return n == 1 && len(a.awake(vmName(victim))) == 1
	})
	must(t, a.Get(t.Context(), kube.ObjectKeyFromObject(victim), victim))
	if !isTrue(victim.Status.Conditions, agents.ConditionReady) {
		t.Errorf("%+v", victim.Status)
	}
}
