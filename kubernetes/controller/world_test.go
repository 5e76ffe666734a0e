package controller_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/kubernetes/controller"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.FromSlogHandler(slog.DiscardHandler))
	before := goleak.IgnoreCurrent()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(before, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is the drowse side: nodes whose servers are real, above VMs in memory.
type world struct {
	t     testing.TB
	store blob.Store // nil: nodes share none
	nodes map[string]*machine
	port  int
	known *tokens.Store
	token string
}

// machine is a node. Its API listens at an address of its own, at the port that all have.
type machine struct {
	name, address string
	vms           *sandboxtest.VMs
	host          *sandbox.Host
	silent        atomic.Bool // requests hang
	creations     atomic.Int32
	passed        chan http.Handler // what other machines ask
	stop          func()
}

const ttl = 3 * time.Second

func newWorld(t testing.TB, durable bool, names ...string) *world {
	t.Helper()
	w := &world{t: t, nodes: map[string]*machine{}, known: tokens.Open(filepath.Join(t.TempDir(), tokens.File))}
	var err error
	w.token, err = w.known.Create(tokens.Token{Name: "controller", Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeCreate}})
	must(t, err)
	if durable {
		d, err := blob.OpenDir(t.TempDir())
		must(t, err)
		w.store = d
	}
	for i, name := range names {
		w.add(name, fmt.Sprintf("127.0.1.%d", i+1))
	}
	return w
}

var factsOnce sync.Once

func (w *world) add(name, address string) {
	t := w.t
	t.Helper()
	m := &machine{name: name, address: address}
	w.nodes[name] = m
	m.vms = &sandboxtest.VMs{Fail: func(op, _ string) error {
		if op == "boot" {
			m.creations.Add(1)
		}
		return nil
	}}
	m.host = m.vms.Host(t)
	factsOnce.Do(func() { // what sleeps on one machine of this process wakes on the others
		b, err := m.host.Create(t.Context(), sandbox.Spec{Name: "facts", Image: sandboxtest.Image}, sandbox.CreateOptions{})
		must(t, err)
		res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
		must(t, err)
		f, err := m.host.State.Manifest(res.Snapshot)
		must(t, err)
		instance.NoteGoodFacts(f.Host[instance.FactsKey])
		must(t, b.Delete(t.Context(), sandbox.DeleteOptions{}))
		m.creations.Store(0)
	})
	o := api.Options{Host: m.host, Tokens: w.known}
	end := func() {}
	if w.store != nil {
		end = w.join(m, &o)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(address, fmt.Sprint(w.port)))
	must(t, err)
	w.port = l.Addr().(*net.TCPAddr).Port
	handler := api.New(o)
	if m.passed != nil {
		m.passed <- handler
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if m.silent.Load() {
			_, _ = io.Copy(io.Discard, r.Body) // or the server does not see its client go
			<-r.Context().Done()
			return
		}
		handler.ServeHTTP(rw, r)
	}))
	s.Listener.Close()
	s.Listener = l
	s.StartTLS()
	m.stop = sync.OnceFunc(func() {
		s.CloseClientConnections()
		s.Close()
		end()
	})
	t.Cleanup(m.stop)
}

// join makes a machine one of those that share the store.
func (w *world) join(m *machine, o *api.Options) (leave func()) {
	w.t.Helper()
	id, err := peer.NewIdentity(m.name)
	must(w.t, err)
	at, address, err := peer.Listen("127.0.0.1:0")
	must(w.t, err)
	n, err := cluster.Join(context.Background(), m.host, cluster.Options{Store: w.store, Name: m.name, Address: address, Key: id.Key(), TTL: ttl})
	must(w.t, err)
	with := *m.host
	with.Cluster = n
	m.host = &with
	peers := peer.New(peer.Options{Identity: id, Directory: n})
	o.Host, o.Peers, o.Cluster = m.host, peers, n.Catalog(peers)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { _ = n.Run(ctx) })
	handlers := n.PeerHandlers()
	later := make(chan http.Handler, 1)
	handlers[api.PeerService] = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		h := <-later
		later <- h
		h.ServeHTTP(rw, r)
	})
	m.passed = later
	all.Go(func() { _ = peers.Serve(ctx, at, handlers) })
	return func() {
		cancel()
		all.Wait()
		peers.Close()
	}
}

// fleet returns how a controller asks the nodes, and what closes its connections.
func (w *world) fleet() *controller.Fleet {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, MaxIdleConnsPerHost: 16}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &controller.Fleet{Port: w.port, HTTP: &http.Client{Transport: tr}, Token: func(string) (string, error) { return w.token, nil }}
}

// phases returns the machines that have a VM, and what it does there.
func (w *world) phases(name string) map[string]state.Phase {
	out := map[string]state.Phase{}
	for _, m := range w.nodes {
		if r, err := m.host.State.Get(name); err == nil {
			out[m.name] = r.Phase
		} else if !errors.Is(err, sandbox.ErrNotFound) {
			w.t.Error(err)
		}
	}
	return out
}

// awake returns the machines that run a VM.
func (w *world) awake(name string) (on []string) {
	for m, p := range w.phases(name) {
		if p == state.Running || p == state.Starting {
			on = append(on, m)
		}
	}
	return on
}

// objects of tests.

const namespace = "default"

func nodeObject(m *machine) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.name, Labels: map[string]string{controller.NodeLabel: controller.NodeLabelValue}},
		Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: m.address}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
}

func blueprint() agents.Blueprint {
	return agents.Blueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
		RuntimeClassName: ptr.To(controller.Class),
		Containers: []corev1.Container{{Name: "main", Image: sandboxtest.Image, Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
		}}},
	}}}
}

func sandboxObject(name string) *agents.Sandbox {
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec:       agents.SandboxSpec{Blueprint: blueprint(), OperatingMode: agents.Running},
	}
}

func vmName(s *agents.Sandbox) string { return "k8s-" + string(s.UID) }

func isTrue(all []metav1.Condition, condition string) bool {
	return meta.IsStatusConditionTrue(all, condition)
}

func reason(all []metav1.Condition, condition string) string {
	if c := meta.FindStatusCondition(all, condition); c != nil {
		return c.Reason
	}
	return ""
}

func key(name string) kube.ObjectKey { return kube.ObjectKey{Namespace: namespace, Name: name} }

// eventually waits for a condition.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so after two minutes:", what)
		}
	}
}
