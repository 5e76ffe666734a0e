package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	Options
}

// stop is an error that ends a reconciliation with a condition. What is retried is retried after some time, which the
// queue does not wait for.
type stop struct {
	reason, message string
	retry           time.Duration // zero: when an object changes
}

func (s *stop) Error() string { return s.reason + ": " + s.message }

// retries are after how long the same is tried again.
const (
	soon  = time.Second
	later = 10 * time.Second
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
	if !equality.Semantic.DeepEqual(was.Status, s.Status) {
		was.ObjectMeta, was.Spec = s.ObjectMeta, s.Spec
		if perr := r.Status().Patch(ctx, s, kube.MergeFrom(was)); perr != nil && !apierrors.IsNotFound(perr) {
			err = errors.Join(err, perr)
		}
	}
	return ctrl.Result{RequeueAfter: after}, ignoreConflict(err)
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
		if err := r.sleep(ctx, s, name); err != nil && !errors.Is(err, spec.ErrNotFound) { // the next start will tell
			return 0, err
		}
		set(s, agents.ConditionReady, false, agents.ReasonNotReady, "the pod is ending, and another one will follow: the VM sleeps meanwhile")
		return 0, r.release(ctx, pod)
	}
	req, err := request(s)
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
		set(s, agents.ConditionSuspended, false, agents.ReasonNotSuspended, "")
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
	return r.release(ctx, &p)
}

// suspend has a sandbox sleep, and then gives its room back.
func (r *Sandboxes) suspend(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); pod == nil && c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == s.Generation {
		return nil
	}
	err := r.sleep(ctx, s, name)
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
		set(s, agents.ConditionSuspended, false, agents.ReasonPodNotTerminated, "the VM sleeps, and its pod is ending")
		set(s, agents.ConditionReady, false, agents.ReasonSuspended, "the sandbox is being suspended")
		return nil
	}
	s.Status.NodeName, s.Status.LabelSelector = "", ""
	set(s, agents.ConditionSuspended, true, agents.ReasonPodTerminated, "the VM sleeps, and has no pod")
	set(s, agents.ConditionReady, false, agents.ReasonSuspended, "the sandbox is suspended")
	return nil
}

// lost says that a VM that was there is not.
func lost(s *agents.Sandbox, node, name string) error {
	return &stop{ReasonLost, fmt.Sprintf("node %s knows no VM %s, which was on %s: its memory and disk are lost: delete the Sandbox", node, name, s.Annotations[AnnotationNode]), later}
}

// sleep has a VM sleep where it is. One that is on another node than was thought is none of this node's. The error is
// spec.ErrNotFound if it was there and is not.
func (r *Sandboxes) sleep(ctx context.Context, s *agents.Sandbox, name string) error {
	node := s.Annotations[AnnotationNode]
	if node == "" {
		return nil
	}
	o := spec.SleepOptions{Durable: r.Durable}
	err := r.Fleet.call(ctx, node, r.callTime(), func(ctx context.Context, c *client.Client) error {
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
		return err
	case started && errors.Is(err, errNodeGone) && !r.Durable:
		return fmt.Errorf("%w: %w", spec.ErrNotFound, err)
	case err == nil, errors.Is(err, spec.ErrNotFound), errors.Is(err, spec.ErrElsewhere), errors.Is(err, errNodeGone):
		return nil
	}
	if r.Durable && errors.Is(err, errUnreachable) {
		// Its session with the store's ledger ends, and then others may wake what was last published.
		if ok, rerr := r.Fleet.ready(ctx, node); rerr == nil && !ok {
			return nil
		}
	}
	return halted(err)
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
	for word := range strings.SplitSeq(code, "-") {
		if word != "" {
			b.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return b.String()
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
	s.Status.LabelSelector = PodLabel + "=" + NodeLabelValue
	s.Status.NodeName = pod.Spec.NodeName
	if pod.Spec.NodeName == "" {
		message := "the pod has not been scheduled yet"
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Message != "" {
				message = c.Message
			}
		}
		set(s, agents.ConditionReady, false, agents.ReasonNotReady, message)
		return 0, nil
	}
	if s.Annotations[AnnotationStarted] == string(pod.UID) && s.Annotations[AnnotationNode] == pod.Spec.NodeName && meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionReady) {
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

func (r *Sandboxes) nextCheck() time.Duration {
	every := r.checkEvery()
	return every - every/5 + rand.N(every*2/5+1)
}

// look reports whether a VM that has been started still runs, or sleeps because it is idle.
func (r *Sandboxes) look(ctx context.Context, s *agents.Sandbox, name string) (fine bool, err error) {
	var row records.Sandbox
	err = r.Fleet.call(ctx, s.Annotations[AnnotationNode], probeTime, func(ctx context.Context, c *client.Client) (err error) {
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
	return row.Status.Live() || row.Status == records.Asleep, nil
}

// reserve makes the pod.
func (r *Sandboxes) reserve(ctx context.Context, s *agents.Sandbox, req records.Request) error {
	s.Status.NodeName = ""
	set(s, agents.ConditionReady, false, agents.ReasonNotReady, "the pod has not been scheduled yet")
	err := r.Create(ctx, r.reservation(s, req))
	switch {
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
		if err := r.sleep(ctx, s, name); err != nil && !errors.Is(err, spec.ErrNotFound) {
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
	err := r.Fleet.call(ctx, node, r.callTime(), func(ctx context.Context, c *client.Client) error {
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
	if s.Annotations[AnnotationStarted] == string(pod.UID) {
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

// forget removes the VM and the pod of a sandbox: first where it is, then what other nodes still have of it.
func (r *Sandboxes) forget(ctx context.Context, s *agents.Sandbox, pod *corev1.Pod, name string) error {
	gone := func(ctx context.Context, c *client.Client) error {
		_, err := c.Delete(ctx, name) // one that is not there is no error
		return err
	}
	node := s.Annotations[AnnotationNode]
	for _, at := range append([]string{node}, nodesBefore(s)...) {
		if at == "" {
			continue
		}
		err := r.Fleet.call(ctx, at, r.callTime(), gone)
		if errors.Is(err, errNodeGone) {
			err = nil // with all that it had
			if at == node && r.Durable {
				var other string
				if other, err = r.Fleet.other(ctx, at); err == nil {
					err = r.Fleet.call(ctx, other, r.callTime(), gone)
				}
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
	if err := r.forget(ctx, s, pod, name); err != nil {
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
		if err := r.forget(ctx, s, pod, name); err != nil {
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
	set(s, agents.ConditionReady, false, agents.ReasonExpired, "its shutdownTime has come")
	if s.Spec.ShutdownPolicy == agents.Delete {
		return kube.IgnoreNotFound(r.Delete(ctx, s, kube.Preconditions{UID: ptr.To(s.UID)}))
	}
	return nil
}
