// Package agents has the parts of kubernetes-sigs/agent-sandbox's objects that the controller reads and writes:
// agents.x-k8s.io/v1beta1 and extensions.agents.x-k8s.io/v1beta1.
//
// They are not the whole objects. Change them by patches alone: an update would remove the fields that are not here.
package agents
