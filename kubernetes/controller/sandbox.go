package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/drowse-vm/drowse/kubernetes/agents"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Options are those of the controllers.
type Options struct {
	// Durable means that the nodes share a store, so that any of them wakes what sleeps there.
	Durable bool
	// ClusterID tells the cluster's VMs from those of others at the same nodes: at most 53 bytes without spaces and
	// commas.
	ClusterID string
	// AllowPrivate lets sandboxes' policies open private addresses and the nodes'.
	AllowPrivate bool
	// PauseImage is the image of reservations.
	PauseImage string
	// CheckEvery is how often a VM that is to be awake is looked at; zero is a minute.
	CheckEvery time.Duration
	// CallTime bounds each start, sleep and removal by a node; zero is three minutes.
	CallTime time.Duration
}

func (o *Options) checkEvery() time.Duration {
	if o.CheckEvery > 0 {
		return o.CheckEvery
	}
	return time.Minute
}

func (o *Options) callTime() time.Duration {
	if o.CallTime > 0 {
		return o.CallTime
	}
	return 3 * time.Minute
}

// Reasons of conditions that upstream does not have. Others are the codes of drowse's errors, as ImageNotFound.
const (
	ReasonUnsupported = "Unsupported"
	ReasonUnreachable = "NodeUnreachable"
	ReasonLost        = "SandboxLost"
	ReasonElsewhere   = "OnAnotherNode"
	ReasonPodConflict = "PodConflict"
)

// Sandboxes reconciles Sandbox objects.
type Sandboxes struct {
	kube.Client
	// Live reads past the cache.
	Live  kube.Reader
	Fleet *Fleet
	// Events, if not nil, gets what goes wrong.
	Events events.EventRecorder
	Options

	awake sync.Map // UIDs of suspended sandboxes that a sweep has found awake, with the nodes
}

// stop is an error that ends a reconciliation with a condition. What is retried is retried after some time, which the
// queue does not wait for.
type stop struct {
	reason, message string
	retry           time.Duration // zero: when an object changes
}

func (s *stop) Error() string { return s.reason + ": " + s.message }

// soon and later are after how long the same is tried again. patience is for how long a sandbox that is to be gone
// waits for a node that is silent.
const (
	soon     = time.Second
	later    = 10 * time.Second
	patience = 15 * time.Minute
)

// Reconcile implements reconcile.Reconciler.
func (r *Sandboxes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	s := &agents.Sandbox{}
	switch err := r.Get(ctx, req.NamespacedName, s); {
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, r.orphan(ctx, req.NamespacedName, "")
	case err != nil:
		return ctrl.Result{}, err
	}
	if !is(&s.Spec.Blueprint) && !controllerutil.ContainsFinalizer(s, Finalizer) {
		return ctrl.Result{}, nil
	}
	was := s.DeepCopy()
	after, err := r.step(ctx, s)
	var halt *stop
	if errors.As(err, &halt) {
		after, err = halt.retry, nil
		set(s, agents.ConditionReady, false, halt.reason, halt.message)
	}
	if s.UID == "" { // it is gone
		return ctrl.Result{}, err
	}
	if errors.Is(err, errFresh) {
		c := meta.FindStatusCondition(was.Status.Conditions, agents.ConditionReady)
		if after, err = soon, nil; c != nil && c.Status == metav1.ConditionFalse {
			return ctrl.Result{RequeueAfter: after}, nil
		}
	}
	if !equality.Semantic.DeepEqual(was.Status, s.Status) {
		r.tell(was, s)
		was.ObjectMeta, was.Spec = s.ObjectMeta, s.Spec
		if perr := r.Status().Patch(ctx, s, kube.MergeFrom(was)); perr != nil && !apierrors.IsNotFound(perr) {
			err = errors.Join(err, perr)
		}
	}
	return ctrl.Result{RequeueAfter: after}, ignoreConflict(err)
}

// errFresh means that a pod is about to be bound, which is mostly a matter of milliseconds: that a sandbox which was
// not ready waits for it is not worth a request.
var errFresh = errors.New("the pod was made just now")

// freshTime is for how long an object is fresh.
const freshTime = 2 * time.Second

// fresh reports whether an object was made just now, if the API server's clock and this one agree.
func fresh(o kube.Object) bool {
	age := time.Since(o.GetCreationTimestamp().Time)
	return age > -freshTime && age < freshTime
}

func reasonOf(s *agents.Sandbox) string {
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c != nil {
		return c.Reason
	}
	return ""
}

// ordinary are reasons of a condition that is not true which no event is made of.
var ordinary = []string{agents.ReasonNotReady, agents.ReasonSuspended}

// tell makes an event of a sandbox's new reason for not being ready.
func (r *Sandboxes) tell(was, s *agents.Sandbox) {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if r.Events == nil || c == nil || c.Status == metav1.ConditionTrue || c.Reason == reasonOf(was) || slices.Contains(ordinary, c.Reason) {
		return
	}
	kind := corev1.EventTypeWarning
	if c.Reason == agents.ReasonExpired {
		kind = corev1.EventTypeNormal
	}
	r.Events.Eventf(s, nil, kind, c.Reason, "Reconcile", "%s", c.Message)
}

// ignoreConflict leaves out what another writer caused: its change comes as an event.
func ignoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}

func set(s *agents.Sandbox, condition string, is bool, reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	if len(message) > 1024 {
		message = message[:1024]
	}
	meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{
		Type: condition, Status: status, Reason: reason, Message: strings.ToValidUTF8(message, "?"), ObservedGeneration: s.Generation,
	})
}

// step does the next thing for a sandbox. s has its new status afterwards, and no UID if it is gone.
func (r *Sandboxes) step(ctx context.Context, s *agents.Sandbox) (after time.Duration, err error) {
	name, err := nameOf(s)
	if err != nil {
		return 0, &stop{ReasonUnsupported, err.Error(), 0}
	}
	pod, err := r.pod(ctx, s)
	if err != nil {
		return 0, err
	}
	left, expires := untilShutdown(s.Spec.ShutdownTime)
	switch {
	case !s.DeletionTimestamp.IsZero():
		return 0, r.remove(ctx, s, pod, name)
	case expires && left <= 0:
		return 0, r.expire(ctx, s, pod, name)
	}
	known, suspended := controllerutil.ContainsFinalizer(s, Finalizer), s.Spec.OperatingMode == agents.Suspended
	// A template that was changed keeps nothing from sleeping.
	if pod != nil && !suspended && (!pod.DeletionTimestamp.IsZero() || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded) {
		if err := r.sleep(ctx, s, pod, name); err != nil && !errors.Is(err, spec.ErrNotFound) { // the next start will tell
			return 0, err
		}
		set(s, agents.ConditionReady, false, agents.ReasonNotReady, "the pod is ending, and another one will follow: the VM sleeps meanwhile")
		return 0, r.release(ctx, pod)
	}
	req, err := r.request(s)
	if err != nil && !(known && suspended) {
		return 0, &stop{ReasonUnsupported, err.Error(), 0}
	}
	if !known || s.Annotations[AnnotationName] != name {
		if err := r.patch(ctx, s, func() {
			controllerutil.AddFinalizer(s, Finalizer)
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, AnnotationName, name)
		}); err != nil {
			return 0, err
		}
	}
	if suspended {
		err = r.suspend(ctx, s, pod, name)
	} else {
		set(s, agents.ConditionSuspended, false, agents.ReasonNotSuspended, "the sandbox is to run")
		after, err = r.run(ctx, s, pod, req)
	}
	if expires && (after == 0 || left < after) {
		after = left
	}
	var halt *stop
	if errors.As(err, &halt) && expires && (halt.retry == 0 || left < halt.retry) {
		halt.retry = left
	}
	return after, err
}

func untilShutdown(t *metav1.Time) (left time.Duration, expires bool) {
	if t == nil {
		return 0, false
	}
	return time.Until(t.Time), true
}

// patch changes metadata or spec of a sandbox. It fails if someone else has changed it since it was read.
func (r *Sandboxes) patch(ctx context.Context, s *agents.Sandbox, change func()) error {
	was := s.DeepCopy()
	change()
	status := s.Status
	err := r.Patch(ctx, s, kube.MergeFromWithOptions(was, kube.MergeFromWithOptimisticLock{}))
	s.Status = status // what is new in it is not written yet
	return err
}

// pod returns the reservation of a sandbox; nil if there is none.
func (r *Sandboxes) pod(ctx context.Context, s *agents.Sandbox) (*corev1.Pod, error) {
	var p corev1.Pod
	if err := r.Get(ctx, kube.ObjectKeyFromObject(s), &p); err != nil {
		return nil, kube.IgnoreNotFound(err)
	}
	if !metav1.IsControlledBy(&p, s) { // of an earlier object of the name, or someone else's: a creation will tell
		return nil, r.orphan(ctx, kube.ObjectKeyFromObject(s), s.UID)
	}
	return &p, nil
}

// orphan lets go of a reservation whose sandbox is not there any more: one that the cache had not shown yet when the
// sandbox was removed. now is the UID of the sandbox that has the name, empty if none has.
func (r *Sandboxes) orphan(ctx context.Context, key kube.ObjectKey, now types.UID) error {
	var p corev1.Pod
	if err := r.Get(ctx, key, &p); err != nil {
		return kube.IgnoreNotFound(err)
	}
	owner := metav1.GetControllerOf(&p)
	if owner == nil || owner.Kind != "Sandbox" || owner.UID == now || !controllerutil.ContainsFinalizer(&p, Finalizer) {
		return nil
	}
	var s agents.Sandbox
	switch err := r.Live.Get(ctx, key, &s); {
	case err == nil && s.UID == owner.UID:
		return nil
	case kube.IgnoreNotFound(err) != nil:
		return err
	}
	// Whoever removed the finalizer of the sandbox has left its VM behind. If its node is silent the sweep finds it.
	if node := p.Spec.NodeName; node != "" {
		name := namePrefix + string(owner.UID)
		err := r.Fleet.call(ctx, node, key.Namespace, r.callTime(), func(ctx context.Context, c *client.Client) error {
			row, err := c.Here().Get(ctx, name)
			if err == nil && r.ours(&row) == key {
				_, err = c.Delete(ctx, name)
			}
			return err
		})
		if err != nil && !errors.Is(err, spec.ErrNotFound) && !errors.Is(err, errNodeGone) && !errors.Is(err, errUnreachable) {
			return err
		}
	}
	return r.release(ctx, &p)
}

// suspend has a sandbox sleep, and then gives its room back.
func (r *Sandboxes) suspend(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	at, awake := r.awake.LoadAndDelete(s.UID)
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); pod == nil && !awake && c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == s.Generation {
		return nil
	}
	err := r.sleep(ctx, s, pod, name)
	if awake && err == nil {
		_, err = r.sleepAt(ctx, s, at.(string), name)
	}
	gone := errors.Is(err, spec.ErrNotFound)
	if gone || err == nil {
		if err = nil; pod != nil {
			err = r.release(ctx, pod)
		}
		if gone && err == nil {
			err = lost(s, s.Annotations[AnnotationNode], name)
		}
	}
	var halt *stop
	switch {
	case errors.As(err, &halt):
		set(s, agents.ConditionSuspended, false, halt.reason, halt.message)
		return err
	case err != nil:
		return err
	case pod != nil:
		set(s, agents.ConditionSuspended, false, agents.ReasonPodTerminating, "the VM sleeps, and its pod is ending")
		set(s, agents.ConditionReady, false, agents.ReasonSuspended, "the sandbox is being suspended")
		return nil
	}
	s.Status.NodeName = ""
	meta.RemoveStatusCondition(&s.Status.Conditions, agents.ConditionPodScheduled)
	there := &metav1.PartialObjectMetadata{TypeMeta: podType} // the cache has reservations only
	switch err := r.Live.Get(ctx, kube.ObjectKeyFromObject(s), there); {
	case err == nil && metav1.IsControlledBy(there, s): // and not all of them yet
		return &stop{agents.ReasonSuspended, "the sandbox is being suspended", soon}
	case err == nil:
		set(s, agents.ConditionReady, false, agents.ReasonSuspended, "the sandbox is being suspended")
		set(s, agents.ConditionSuspended, false, agents.ReasonPodNotOwned, fmt.Sprintf("the VM sleeps, and there is a pod %s that is not this sandbox's: remove it", s.Name))
		return &stop{agents.ReasonSuspended, "the sandbox is being suspended", later}
	case !apierrors.IsNotFound(err):
		return err
	}
	set(s, agents.ConditionSuspended, true, agents.ReasonPodTerminated, "the VM sleeps, and has no pod")
	set(s, agents.ConditionReady, false, agents.ReasonSuspended, "the sandbox is suspended")
	return nil
}

var podType = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}

// lost says that a VM that was there is not.
func lost(s *agents.Sandbox, node, name string) error {
	return &stop{ReasonLost, fmt.Sprintf("node %s knows no VM %s, which was on %s: its memory and disk are lost: delete the Sandbox", node, name, s.Annotations[AnnotationNode]), later}
}

// sleep has a VM sleep where it is: on its pod's node, or on that of the annotation, which whoever may write a Sandbox
// may write as well. The error is spec.ErrNotFound if it was there and is not.
func (r *Sandboxes) sleep(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	node := s.Annotations[AnnotationNode]
	if pod != nil && pod.Spec.NodeName != "" && pod.Spec.NodeName != node {
		if slept, err := r.sleepAt(ctx, s, pod.Spec.NodeName, name); slept || err != nil && !errors.Is(err, spec.ErrNotFound) {
			return err
		}
	}
	_, err := r.sleepAt(ctx, s, node, name)
	return err
}

// sleepAt is sleep at one node. A VM that is on another node than was thought is none of this node's.
func (r *Sandboxes) sleepAt(ctx context.Context, s *agents.Sandbox, node, name string) (slept bool, err error) {
	if node == "" {
		return false, nil
	}
	o := spec.SleepOptions{Durable: r.Durable}
	err = r.Fleet.call(ctx, node, s.Namespace, r.callTime(), func(ctx context.Context, c *client.Client) error {
		_, err := c.Here().Sleep(ctx, name, o)
		if ended := errors.Is(err, spec.ErrNotRunning) || errors.Is(err, spec.ErrCrashed); ended && !r.Durable {
			return nil // it boots from its disk, here
		} else if ended {
			// It has ended by itself: with its disk it can still go elsewhere.
			if _, err = c.Here().Start(ctx, name); err == nil {
				_, err = c.Here().Sleep(ctx, name, o)
			}
		}
		return err
	})
	switch started := s.Annotations[AnnotationStarted] != ""; {
	case started && errors.Is(err, spec.ErrNotFound):
		return false, err
	case started && errors.Is(err, errNodeGone) && !r.Durable:
		return false, fmt.Errorf("%w: %w", spec.ErrNotFound, err)
	case err == nil:
		return true, nil
	case errors.Is(err, spec.ErrNotFound), errors.Is(err, spec.ErrElsewhere), errors.Is(err, errNodeGone):
		return false, nil
	}
	if r.Durable && errors.Is(err, errUnreachable) {
		// Its session with the store's ledger ends, and then others may wake what was last published.
		if ok, rerr := r.Fleet.ready(ctx, node); rerr == nil && !ok {
			return false, nil
		}
	}
	return false, halted(err)
}

// halted makes a condition of a node's error.
func halted(err error) error {
	switch {
	case errors.Is(err, errBusy):
		return &stop{agents.ReasonNotReady, err.Error(), soon/2 + rand.N(soon)}
	case errors.Is(err, errUnreachable), errors.Is(err, errNodeGone):
		return &stop{ReasonUnreachable, err.Error(), later/2 + rand.N(later)}
	case errors.Is(err, spec.ErrElsewhere), errors.Is(err, spec.ErrUnreachable), errors.Is(err, spec.ErrUnclaimed):
		return &stop{ReasonElsewhere, err.Error(), later/2 + rand.N(later)}
	}
	if c := code(err); c != "" {
		return &stop{camel(string(c)), err.Error(), later/2 + rand.N(later)}
	}
	return err
}

// camel makes the reason of a condition from an error's code.
func camel(code string) string {
	var b strings.Builder
	letter := func(c rune) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' }
	for word := range strings.FieldsFuncSeq(cut(code, 64), func(c rune) bool { return !letter(c) }) {
		b.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	return cmp.Or(b.String(), "NodeError") // the API server refuses a reason that is no word
}

// release lets go of a pod whose VM does not run. The pod is deleted first: if this ends in between, it is one that
// somebody deletes.
func (r *Sandboxes) release(ctx context.Context, pod *corev1.Pod) error {
	if pod.DeletionTimestamp.IsZero() {
		if err := r.Delete(ctx, pod, kube.Preconditions{UID: &pod.UID}); err != nil {
			return kube.IgnoreNotFound(err)
		}
	}
	was := pod.DeepCopy()
	if controllerutil.RemoveFinalizer(pod, Finalizer) {
		if err := r.Patch(ctx, pod, kube.MergeFrom(was)); kube.IgnoreNotFound(err) != nil {
			return err
		}
	}
	// The kubelet of a dead node never confirms that a pod has ended.
	if node := pod.Spec.NodeName; node != "" {
		if ok, err := r.Fleet.ready(ctx, node); err != nil || ok {
			return err
		}
		return kube.IgnoreNotFound(r.Delete(ctx, pod, kube.GracePeriodSeconds(0), kube.Preconditions{UID: &pod.UID}))
	}
	return nil
}

// run has a sandbox run where its pod is bound.
func (r *Sandboxes) run(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, req records.Request) (time.Duration, error) {
	if pod == nil {
		return 0, r.reserve(ctx, s, req)
	}
	was := pod.DeepCopy()
	if describe(pod, s); !maps.Equal(was.Labels, pod.Labels) || !maps.Equal(was.Annotations, pod.Annotations) {
		if err := r.Patch(ctx, pod, kube.MergeFrom(was)); err != nil {
			return 0, kube.IgnoreNotFound(err)
		}
	}
	scheduled(s, pod)
	if at, awake := r.awake.LoadAndDelete(s.UID); awake && pod.Spec.NodeName != "" && at != pod.Spec.NodeName {
		if _, err := r.sleepAt(ctx, s, at.(string), req.Spec.Name); err != nil && !errors.Is(err, spec.ErrNotFound) {
			return 0, err
		}
	}
	s.Status.NodeName = pod.Spec.NodeName
	if pod.Spec.NodeName == "" {
		message := "the pod has not been scheduled yet"
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Message != "" {
				message = c.Message
			}
		}
		set(s, agents.ConditionReady, false, agents.ReasonNotReady, message)
		if len(pod.Status.Conditions) == 0 && fresh(pod) {
			return 0, errFresh
		}
		return 0, nil
	}
	if s.Annotations[AnnotationStarted] != "" && s.Annotations[AnnotationNode] == pod.Spec.NodeName && meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionReady) {
		if fine, err := r.look(ctx, s, req.Spec.Name); err != nil || fine {
			return r.nextCheck(), err
		}
	}
	if err := r.start(ctx, s, pod, req); err != nil {
		return 0, err
	}
	set(s, agents.ConditionReady, true, agents.ReasonReady, "the VM "+req.Spec.Name+" runs on node "+pod.Spec.NodeName)
	return r.nextCheck(), nil
}

// scheduled says of a sandbox what its pod says.
func scheduled(s *agents.Sandbox, pod *corev1.Pod) {
	s.Status.LabelSelector = agents.NameHashLabel + "=" + agents.NameHash(s.Name)
	is := metav1.Condition{
		Type: agents.ConditionPodScheduled, Status: metav1.ConditionUnknown, Reason: "PodSchedulingUnknown",
		Message: "the scheduler has not said anything of the pod yet", ObservedGeneration: s.Generation,
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			is.Status, is.Reason, is.Message = metav1.ConditionStatus(c.Status), c.Reason, c.Message
			if is.Reason == "" && c.Status == corev1.ConditionTrue {
				is.Reason = "PodScheduled"
			}
			is.Reason = cmp.Or(is.Reason, "PodSchedulingUnknown")
		}
	}
	meta.SetStatusCondition(&s.Status.Conditions, is)
}

func (r *Sandboxes) nextCheck() time.Duration {
	every := r.checkEvery()
	return every - every/5 + rand.N(every*2/5+1)
}

// look reports whether a VM that has been started still runs, or sleeps because it is idle.
func (r *Sandboxes) look(ctx context.Context, s *agents.Sandbox, name string) (fine bool, err error) {
	var row records.Sandbox
	err = r.Fleet.call(ctx, s.Annotations[AnnotationNode], s.Namespace, probeTime, func(ctx context.Context, c *client.Client) (err error) {
		row, err = c.Here().Get(ctx, name)
		return err
	})
	if errors.Is(err, errBusy) {
		return true, nil // the next look will tell
	}
	if errors.Is(err, spec.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, halted(err)
	}
	// One that sleeps for another reason than that it is idle, as with its node's server, is to run.
	return row.Status.Live() || row.Status == records.Asleep && row.IdleSeconds > 0, nil
}

// reserve makes the pod.
func (r *Sandboxes) reserve(ctx context.Context, s *agents.Sandbox, req records.Request) error {
	s.Status.NodeName = ""
	pod := r.reservation(s, req)
	err := r.Create(ctx, pod)
	if err == nil {
		scheduled(s, pod)
	} else {
		meta.RemoveStatusCondition(&s.Status.Conditions, agents.ConditionPodScheduled)
	}
	set(s, agents.ConditionReady, false, agents.ReasonNotReady, "the pod has not been scheduled yet")
	switch {
	case err == nil:
		return errFresh
	case apierrors.IsAlreadyExists(err):
		var p corev1.Pod
		if err := r.Live.Get(ctx, kube.ObjectKeyFromObject(s), &p); err != nil {
			return kube.IgnoreNotFound(err)
		}
		if metav1.IsControlledBy(&p, s) {
			return &stop{agents.ReasonNotReady, "the pod has not been scheduled yet", soon} // the cache has not seen it yet
		}
		return &stop{ReasonPodConflict, fmt.Sprintf("there is a pod %s that is not this sandbox's: remove it", s.Name), later}
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		// A quota, or what admission refuses.
		return &stop{agents.ReasonNotReady, err.Error(), later}
	}
	return err
}

// start has the VM run on the node of its pod.
func (r *Sandboxes) start(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, req records.Request) error {
	node, last, name := pod.Spec.NodeName, s.Annotations[AnnotationNode], req.Spec.Name
	made := s.Annotations[AnnotationStarted] != ""
	if last != node {
		if last != "" && !r.Durable {
			if there, err := r.Fleet.exists(ctx, last); err != nil || there || made {
				return cmp.Or[error](err, &stop{ReasonElsewhere, fmt.Sprintf("the pod is on node %s, and the VM on %s: nodes share no store", node, last), 0})
			}
		}
		// It has left there, or its node is given up. If not, it must sleep first.
		if _, err := r.sleepAt(ctx, s, last, name); err != nil && !errors.Is(err, spec.ErrNotFound) {
			return err
		}
		before := slices.DeleteFunc(append(nodesBefore(s), last), func(n string) bool { return n == node || n == "" })
		slices.Sort(before)
		if err := r.patch(ctx, s, func() {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, AnnotationNode, node)
			if len(before) > 0 {
				metav1.SetMetaDataAnnotation(&s.ObjectMeta, AnnotationBefore, strings.Join(slices.Compact(before), ","))
			}
		}); err != nil {
			return err
		}
	}
	err := r.Fleet.call(ctx, node, s.Namespace, r.callTime(), func(ctx context.Context, c *client.Client) error {
		c = c.Here()
		if last != "" { // it may be there, here or in the store
			if _, err := c.Start(ctx, name); made || !errors.Is(err, spec.ErrNotFound) {
				return err
			}
		}
		row, _, err := c.GetOrCreate(ctx, req)
		if err == nil && row.Status != records.Running {
			_, err = c.Start(ctx, name)
		}
		return err
	})
	if made && errors.Is(err, spec.ErrNotFound) {
		return lost(s, node, name)
	}
	if err != nil {
		return halted(err)
	}
	if made {
		return nil
	}
	return r.patch(ctx, s, func() { metav1.SetMetaDataAnnotation(&s.ObjectMeta, AnnotationStarted, string(pod.UID)) })
}

// nodesBefore returns the nodes that have had a VM before the one that has it.
func nodesBefore(s *agents.Sandbox) (out []string) {
	for name := range strings.SplitSeq(s.Annotations[AnnotationBefore], ",") {
		if name != "" {
			out = append(out, name)
		}
	}
	return out
}

// forget removes the VM and the pod of a sandbox: first where it is, then what other nodes still have of it. since is
// when it was to be gone: what silent nodes have is left to the sweep then, so that nothing waits for ever.
func (r *Sandboxes) forget(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string, since time.Time) error {
	gone := func(ctx context.Context, c *client.Client) error {
		_, err := c.Delete(ctx, name) // one that is not there is no error
		return err
	}
	node := s.Annotations[AnnotationNode]
	nodes := append([]string{node}, nodesBefore(s)...)
	if pod != nil && !slices.Contains(nodes, pod.Spec.NodeName) {
		nodes = append(nodes, pod.Spec.NodeName)
	}
	for _, at := range nodes {
		if at == "" {
			continue
		}
		err := r.Fleet.call(ctx, at, s.Namespace, r.callTime(), gone)
		dead := errors.Is(err, errNodeGone)
		if errors.Is(err, errUnreachable) {
			ready, rerr := r.Fleet.ready(ctx, at)
			dead = rerr == nil && !ready || time.Since(since) > patience
		}
		if dead {
			if err = nil; at == node && r.Durable {
				var other string
				if other, err = r.Fleet.other(ctx, at); err == nil {
					err = r.Fleet.call(ctx, other, s.Namespace, r.callTime(), gone)
				}
			}
			if time.Since(since) > patience {
				err = nil
			}
		}
		if err != nil {
			return halted(err)
		}
	}
	if pod != nil {
		return r.release(ctx, pod)
	}
	return nil
}

// remove ends a sandbox that is deleted.
func (r *Sandboxes) remove(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	if !controllerutil.ContainsFinalizer(s, Finalizer) {
		s.UID = ""
		return nil
	}
	if err := r.forget(ctx, s, pod, name, s.DeletionTimestamp.Time); err != nil {
		return err
	}
	err := r.patch(ctx, s, func() { controllerutil.RemoveFinalizer(s, Finalizer) })
	if kube.IgnoreNotFound(err) == nil {
		s.UID = ""
		return nil
	}
	return err
}

// expire ends a sandbox whose shutdownTime has come.
func (r *Sandboxes) expire(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c == nil || c.Reason != agents.ReasonExpired || pod != nil || s.Annotations[AnnotationNode] != "" {
		if err := r.forget(ctx, s, pod, name, s.Spec.ShutdownTime.Time); err != nil {
			return err
		}
		if s.Annotations[AnnotationNode] != "" {
			if err := r.patch(ctx, s, func() {
				delete(s.Annotations, AnnotationNode)
				delete(s.Annotations, AnnotationBefore)
				delete(s.Annotations, AnnotationStarted)
			}); err != nil {
				return err
			}
		}
	}
	s.Status.NodeName, s.Status.LabelSelector = "", ""
	meta.RemoveStatusCondition(&s.Status.Conditions, agents.ConditionPodScheduled)
	set(s, agents.ConditionReady, false, agents.ReasonExpired, "its shutdownTime has come")
	if s.Spec.ShutdownPolicy == agents.Delete {
		return kube.IgnoreNotFound(r.Delete(ctx, s, kube.Preconditions{UID: ptr.To(s.UID)}))
	}
	return nil
}
