// Package controller serves kubernetes-sigs/agent-sandbox's objects on nodes that run `drowse serve`: a Sandbox is a
// VM that sleeps with its memory when it is Suspended.
//
// # Class
//
// It serves sandboxes whose podTemplate has runtimeClassName "drowse" (Class), and no others. Templates have that field
// too, so pools and claims need no other mark. It is the one that fails closed: where this controller is missing, no
// RuntimeClass has the name, and the API server refuses the pod that another controller makes. An annotation would be
// overlooked, and the code would run in a common container.
//
// # Who knows what
//
// The API server says who owns what, drowse what runs where. The controller has no state: it may be killed between any
// two lines. The VM's name is made from the Sandbox's UID, so a request that is repeated finds the same VM, and an
// object of the same name that comes later finds another. Before a node gets to know a VM, the Sandbox has a finalizer
// and an annotation with the node (AnnotationNode), so no VM is forgotten. When it has started,
// AnnotationStarted says so: a VM that was there once is never replaced by an empty one of its name.
//
// Whoever may write a Sandbox may write its annotations, finalizers and owners too. They are hints: a VM also sleeps
// and goes where its pod is bound, which he may not write, and a sweep of the nodes' lists removes VMs without a
// Sandbox. It knows this cluster's by a tag with Options.ClusterID, and their Sandboxes by what they were made with.
//
// # Reservations
//
// For a VM that is to be awake there is a pod, with the Sandbox's name, that does nothing but have the CPU and memory
// of the podTemplate: kube-scheduler, quotas, priorities and autoscalers work on it. Once it is bound to a node the VM
// is made or woken there. It has a finalizer: who evicts or deletes the pod, as in a drain, waits until the VM sleeps.
// Then a new pod is made, and the VM wakes where that is bound.
//
// With Options.Durable, nodes share a store (`serve --cluster`): a VM sleeps in it, and any node wakes it. Whether two
// run it is not up to this controller but to the ledger there. Without, a new pod is bound to the node that has the
// VM's memory. If a node is gone, or not ready while its server is silent, its VMs go on elsewhere as they were last
// published, or are lost, and say so.
//
// What runs without a reservation is put to sleep again by the sweep: operatingMode decides, not traffic.
//
// A pool's sandboxes run once, and are suspended as soon as they are ready: they take no room on nodes. A claim makes
// one its own, by a patch that fails if another was first, and has it run.
//
// # Time
//
// Every request to a node has a deadline, and a node few at once. One that does not answer is asked again after some
// seconds; meanwhile its sandboxes have a condition that says so, and others do not wait for it.
package controller
