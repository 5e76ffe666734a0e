package controller

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/drowse-vm/drowse/kubernetes/agents"
)

// Workers is how many objects of a kind are worked on at once.
const Workers = 64

// Scheme knows all objects that the controllers use.
func Scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	if err := clientscheme.AddToScheme(s); err != nil {
		return nil, err
	}
	return s, agents.AddToScheme(s)
}

// Cache returns the options of a manager's cache: of pods it has reservations alone.
func Cache() cache.Options {
	return cache.Options{ByObject: map[kube.Object]cache.ByObject{
		&corev1.Pod{}: {Label: labels.SelectorFromSet(labels.Set{PodLabel: NodeLabelValue})},
	}}
}

// Setup adds the controllers to a manager. f needs no Nodes.
func Setup(ctx context.Context, m ctrl.Manager, f *Fleet, o Options) error {
	f.Nodes = m.GetClient()
	if err := m.GetFieldIndexer().IndexField(ctx, &agents.Sandbox{}, byController, controllerOf); err != nil {
		return err
	}
	options := func() controller.Options {
		return controller.Options{
			MaxConcurrentReconciles: Workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](100*time.Millisecond, time.Minute),
		}
	}
	c := m.GetClient()
	again := make(chan event.GenericEvent)
	r := &Sandboxes{Client: c, Live: m.GetAPIReader(), Fleet: f, Events: m.GetEventRecorder("drowse"), Options: o}
	if err := ctrl.NewControllerManagedBy(m).Named("sandbox").For(&agents.Sandbox{}).Owns(&corev1.Pod{}).WithOptions(options()).
		WatchesRawSource(source.Channel(again, &handler.EnqueueRequestForObject{})).Complete(r); err != nil {
		return err
	}
	if err := m.Add(manager.RunnableFunc(func(ctx context.Context) error { return r.sweep(ctx, again) })); err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(m).Named("pool").For(&agents.SandboxWarmPool{}).Owns(&agents.Sandbox{}).WithOptions(options()).
		Watches(&agents.SandboxTemplate{}, handler.EnqueueRequestsFromMapFunc(poolsOf(c))).Complete(&Pools{Client: c}); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).Named("claim").For(&agents.SandboxClaim{}).Owns(&agents.Sandbox{}).WithOptions(options()).
		Watches(&agents.SandboxWarmPool{}, handler.EnqueueRequestsFromMapFunc(claimsOf(c))).
		Watches(&agents.SandboxTemplate{}, handler.EnqueueRequestsFromMapFunc(claimsOf(c))).
		Complete(&Claims{Client: c, Live: m.GetAPIReader(), Events: r.Events})
}

// poolsOf returns the pools of a template.
func poolsOf(c kube.Reader) handler.MapFunc {
	return func(ctx context.Context, o kube.Object) (out []reconcile.Request) {
		var all agents.SandboxWarmPoolList
		if err := c.List(ctx, &all, kube.InNamespace(o.GetNamespace())); err != nil {
			return nil
		}
		for _, p := range all.Items {
			if p.Spec.TemplateRef.Name == o.GetName() {
				out = append(out, reconcile.Request{NamespacedName: kube.ObjectKeyFromObject(&p)})
			}
		}
		return out
	}
}

// claimsOf returns the claims that a template says something of, or that wait for a pool: those that have no sandbox
// yet.
func claimsOf(c kube.Reader) handler.MapFunc {
	return func(ctx context.Context, o kube.Object) (out []reconcile.Request) {
		var all agents.SandboxClaimList
		if err := c.List(ctx, &all, kube.InNamespace(o.GetNamespace())); err != nil {
			return nil
		}
		for _, claim := range all.Items {
			_, template := o.(*agents.SandboxTemplate)
			if template || claim.Status.Sandbox.Name == "" && claim.Spec.WarmPoolRef.Name == o.GetName() {
				out = append(out, reconcile.Request{NamespacedName: kube.ObjectKeyFromObject(&claim)})
			}
		}
		return out
	}
}
