package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/records"
)

const (
	// probeTime is how long a server may take to say that it is there, and trustTime for how long that holds.
	probeTime = 3 * time.Second
	trustTime = 10 * time.Second
	// silence is for how long a server that did not answer is not asked again.
	silence = 5 * time.Second
	// maxCalls is how many requests a node has at once, and slotTime how long one more waits. callsOfOne are those of
	// one namespace at a node, and workersOfOne those at all nodes: the rest is for others, also while nodes are slow.
	maxCalls     = 24
	slotTime     = 50 * time.Millisecond
	callsOfOne   = 16
	workersOfOne = Workers * 3 / 4
)

// Fleet are the drowse servers of a cluster's nodes. Its methods may be called from any goroutine.
type Fleet struct {
	// Nodes reads Node objects.
	Nodes kube.Reader
	// Port is that of each server, at the node's internal address.
	Port int
	// HTTP is how servers are asked; nil is without TLS. Token returns what a node's server is shown.
	HTTP  *http.Client
	Token func(node string) (string, error)

	mu    sync.Mutex // guards what follows, and the fields of nodes
	nodes map[string]*node
	of    map[string]int // requests under way by namespace
}

// node is what is known of a node's server.
type node struct {
	calls   chan struct{}
	of      map[string]int // requests under way by namespace
	heard   time.Time      // when it last answered
	silent  time.Time      // until when it is not asked
	because error          // why
}

// Errors of nodes.
var (
	errNodeGone    = errors.New("the node is not there any more")
	errUnreachable = errors.New("the node's drowse server does not answer")
	errBusy        = errors.New("the node has as many requests as it may")
)

// call asks the server of a node on behalf of a namespace. It waits no longer than limit, and little longer than
// probeTime for a server that is silent. Errors are errNodeGone, errUnreachable, errBusy, and those of the server.
func (f *Fleet) call(ctx context.Context, name, namespace string, limit time.Duration, ask func(context.Context, *client.Client) error) error {
	base, err := f.base(ctx, name)
	if errors.Is(err, errNodeGone) {
		f.mu.Lock()
		delete(f.nodes, name)
		f.mu.Unlock()
	}
	if err != nil {
		return err
	}
	token, err := f.Token(name)
	if err != nil {
		return fmt.Errorf("reading the token for the drowse server of %s: %w", name, err)
	}
	f.mu.Lock()
	n := f.nodes[name]
	if n == nil {
		n = &node{calls: make(chan struct{}, maxCalls), of: map[string]int{}}
		if f.nodes == nil {
			f.nodes, f.of = map[string]*node{}, map[string]int{}
		}
		f.nodes[name] = n
	}
	silent, because, heard := n.silent, n.because, n.heard
	full := n.of[namespace] >= callsOfOne || f.of[namespace] >= workersOfOne
	if !full {
		n.of[namespace]++
		f.of[namespace]++
		defer f.done(n, namespace)
	}
	f.mu.Unlock()
	if time.Now().Before(silent) {
		return because
	}
	if full {
		return fmt.Errorf("asking node %s for namespace %s: %w", name, namespace, errBusy)
	}
	wait := time.NewTimer(slotTime)
	defer wait.Stop()
	select {
	case n.calls <- struct{}{}:
		defer func() { <-n.calls }()
	case <-wait.C:
		return fmt.Errorf("asking node %s: %w", name, errBusy)
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answered := false
	c := client.New(base, token, f.client(&answered))
	if time.Since(heard) > trustTime {
		short, cancel := context.WithTimeout(ctx, probeTime)
		_, err = c.Version(short)
		cancel()
	}
	if err == nil {
		answered = false
		err = ask(ctx, c)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err != nil && (!answered || ctx.Err() != nil) && !errors.Is(err, context.Canceled):
		n.because = fmt.Errorf("%w: %s at %s: %w", errUnreachable, name, base, err)
		n.silent, n.heard = time.Now().Add(silence), time.Time{}
		return n.because
	case answered:
		n.heard = time.Now()
	}
	return err
}

func (f *Fleet) done(n *node, namespace string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, of := range []map[string]int{n.of, f.of} {
		if of[namespace]--; of[namespace] == 0 {
			delete(of, namespace)
		}
	}
}

// client returns how to ask, and sets answered once a server has.
func (f *Fleet) client(answered *bool) *http.Client {
	h := http.Client{Transport: http.DefaultTransport}
	if f.HTTP != nil {
		h = *f.HTTP
	}
	h.Transport = notes{h.Transport, answered}
	return &h
}

type notes struct {
	http.RoundTripper
	answered *bool
}

// RoundTrip implements http.RoundTripper.
func (n notes) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := n.RoundTripper.RoundTrip(r)
	*n.answered = err == nil
	return resp, err
}

// base returns the URL of a node's server.
func (f *Fleet) base(ctx context.Context, name string) (string, error) {
	var n corev1.Node
	switch err := f.Nodes.Get(ctx, kube.ObjectKey{Name: name}, &n); {
	case apierrors.IsNotFound(err):
		return "", fmt.Errorf("%w: %s", errNodeGone, name)
	case err != nil:
		return "", err
	}
	if n.Labels[NodeLabel] != NodeLabelValue { // what listens there may be anybody's, and would be shown the token
		return "", fmt.Errorf("%w: %s has no label %s=%s", errUnreachable, name, NodeLabel, NodeLabelValue)
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return f.scheme() + net.JoinHostPort(a.Address, strconv.Itoa(f.Port)), nil
		}
	}
	return "", fmt.Errorf("%w: %s has no internal address yet", errUnreachable, name)
}

func (f *Fleet) scheme() string {
	if f.HTTP == nil {
		return "http://"
	}
	return "https://"
}

// ready reports whether a node is there, is drowse's, and its kubelet says that it is well.
func (f *Fleet) ready(ctx context.Context, name string) (bool, error) {
	var n corev1.Node
	switch err := f.Nodes.Get(ctx, kube.ObjectKey{Name: name}, &n); {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, err
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue && n.Labels[NodeLabel] == NodeLabelValue, nil
		}
	}
	return false, nil
}

// exists reports whether a node is there.
func (f *Fleet) exists(ctx context.Context, name string) (bool, error) {
	err := f.Nodes.Get(ctx, kube.ObjectKey{Name: name}, &corev1.Node{})
	return err == nil, kube.IgnoreNotFound(err)
}

// other returns a node that is ready and may have a server.
func (f *Fleet) other(ctx context.Context, not string) (string, error) {
	var all corev1.NodeList
	if err := f.Nodes.List(ctx, &all, kube.MatchingLabels{NodeLabel: NodeLabelValue}); err != nil {
		return "", err
	}
	for _, n := range all.Items {
		if ok, err := f.ready(ctx, n.Name); err != nil || ok && n.Name != not {
			return n.Name, err
		}
	}
	return "", fmt.Errorf("%w, and no other node is ready", errNodeGone)
}

// code returns the code of a server's error; empty for others.
func code(err error) records.Code {
	var e *records.Error
	if errors.As(err, &e) && !errors.Is(err, errUnreachable) {
		return e.Code
	}
	return ""
}
