package agents

import (
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The groups of the objects.
var (
	Group      = schema.GroupVersion{Group: "agents.x-k8s.io", Version: "v1beta1"}
	Extensions = schema.GroupVersion{Group: "extensions.agents.x-k8s.io", Version: "v1beta1"}
)

// AddToScheme makes the objects known to clients.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(Group, &Sandbox{}, &SandboxList{})
	s.AddKnownTypes(Extensions, &SandboxTemplate{}, &SandboxTemplateList{}, &SandboxClaim{}, &SandboxClaimList{}, &SandboxWarmPool{}, &SandboxWarmPoolList{})
	metav1.AddToGroupVersion(s, Group)
	metav1.AddToGroupVersion(s, Extensions)
	return nil
}

// Words of the upstream API.
const (
	Running   = "Running"
	Suspended = "Suspended"

	Delete           = "Delete"
	DeleteForeground = "DeleteForeground"
	Retain           = "Retain"

	ConditionReady        = "Ready"
	ConditionSuspended    = "Suspended"
	ConditionPodScheduled = "PodScheduled"
	ConditionAvailable    = "Available" // of a pool

	ReasonReady          = "DependenciesReady"
	ReasonNotReady       = "DependenciesNotReady"
	ReasonSuspended      = "SandboxSuspended"
	ReasonExpired        = "SandboxExpired"
	ReasonClaimExpired   = "ClaimExpired"
	ReasonPodTerminated  = "PodTerminated"
	ReasonPodTerminating = "PodTerminating"
	ReasonPodNotOwned    = "PodNotOwned"
	ReasonNotSuspended   = "NotSuspended"

	// SandboxNameAnnotation of a claim is the name of its sandbox.
	SandboxNameAnnotation = "agents.x-k8s.io/sandbox-name"
	// TemplateAnnotation of a sandbox is the name of its template.
	TemplateAnnotation = "agents.x-k8s.io/sandbox-template-ref"
	// LaunchLabel of a sandbox is LaunchWarm if it was made by a pool, else LaunchCold.
	LaunchLabel = "agents.x-k8s.io/launch-type"
	LaunchWarm  = "warm"
	LaunchCold  = "cold"
	// SafeToEvictAnnotation of a pod is what cluster-autoscaler may do with it.
	SafeToEvictAnnotation = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	// ObservedAnnotation of a claim is when a controller has first seen it.
	ObservedAnnotation = "agents.x-k8s.io/controller-first-observed-at"

	// ClaimLabel of a sandbox and its pod is the UID of the claim that has it.
	ClaimLabel = "agents.x-k8s.io/claim-uid"
	// PoolLabel is the NameHash of the pool that has them, and TemplateHashLabel that of the template.
	PoolLabel         = "agents.x-k8s.io/warm-pool-sandbox"
	TemplateHashLabel = "agents.x-k8s.io/sandbox-template-ref-hash"
	// NameHashLabel of a pod is the NameHash of its sandbox.
	NameHashLabel = "agents.x-k8s.io/sandbox-name-hash"
	// PropagatedLabels and PropagatedAnnotations of a pod are the keys that it has from the podTemplate.
	PropagatedLabels      = "agents.x-k8s.io/propagated-labels"
	PropagatedAnnotations = "agents.x-k8s.io/propagated-annotations"
)

// NameHash is an object's name in labels: FNV-1a in hexadecimal digits.
func NameHash(name string) string {
	h := fnv.New32a()
	h.Write([]byte(name))
	return fmt.Sprintf("%08x", h.Sum32())
}

// PodMetadata are the labels and annotations of a pod.
type PodMetadata struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// PodTemplate is what the sandbox is like.
type PodTemplate struct {
	Spec        corev1.PodSpec `json:"spec"`
	PodMetadata `json:"metadata,omitzero"`
}

// Blueprint is what a Sandbox and a SandboxTemplate have in common.
type Blueprint struct {
	PodTemplate PodTemplate `json:"podTemplate"`
	// VolumeClaimTemplates are only counted.
	VolumeClaimTemplates []runtime.RawExtension `json:"volumeClaimTemplates,omitempty"`
	Service              *bool                  `json:"service,omitempty"`
}

// Sandbox is a sandbox.
type Sandbox struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SandboxSpec   `json:"spec"`
	Status SandboxStatus `json:"status,omitzero"`
}

// SandboxSpec is what a Sandbox is to be.
type SandboxSpec struct {
	Blueprint      `json:",inline"`
	ShutdownTime   *metav1.Time `json:"shutdownTime,omitempty"`
	ShutdownPolicy string       `json:"shutdownPolicy,omitempty"`
	OperatingMode  string       `json:"operatingMode,omitempty"`
}

// SandboxStatus is what a Sandbox is.
type SandboxStatus struct {
	Conditions    []metav1.Condition `json:"conditions,omitempty"`
	LabelSelector string             `json:"selector,omitempty"`
	NodeName      string             `json:"nodeName,omitempty"`
}

// SandboxTemplate is what sandboxes of a pool are made from.
type SandboxTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec TemplateSpec `json:"spec"`
}

// TemplateSpec is the content of a SandboxTemplate.
type TemplateSpec struct {
	Blueprint `json:",inline"`
	// NetworkPolicy and GeneratedSecrets are only there or not.
	NetworkPolicy           *runtime.RawExtension  `json:"networkPolicy,omitempty"`
	NetworkPolicyManagement string                 `json:"networkPolicyManagement,omitempty"`
	EnvVarsInjectionPolicy  string                 `json:"envVarsInjectionPolicy,omitempty"`
	GeneratedSecrets        []runtime.RawExtension `json:"generatedSecrets,omitempty"`
}

// SandboxClaim asks for a sandbox of a pool.
type SandboxClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ClaimSpec   `json:"spec"`
	Status ClaimStatus `json:"status,omitzero"`
}

// ClaimSpec is what a SandboxClaim asks for.
type ClaimSpec struct {
	WarmPoolRef           Ref             `json:"warmPoolRef"`
	TTLAfterCreated       *int32          `json:"ttlSecondsAfterCreated,omitempty"`
	Lifecycle             *ClaimLifecycle `json:"lifecycle,omitempty"`
	AdditionalPodMetadata PodMetadata     `json:"additionalPodMetadata,omitzero"`
	Env                   []ClaimEnv      `json:"env,omitempty"`
	// VolumeClaimTemplates are only there or not.
	VolumeClaimTemplates []runtime.RawExtension `json:"volumeClaimTemplates,omitempty"`
	// SafeToEvict replaces the pod's annotation of SafeToEvictAnnotation.
	SafeToEvict *string `json:"safeToEvict,omitempty"`
}

// ClaimLifecycle is when a claim expires, and what becomes of it then.
type ClaimLifecycle struct {
	ShutdownTime   *metav1.Time `json:"shutdownTime,omitempty"`
	ShutdownPolicy string       `json:"shutdownPolicy,omitempty"`
}

// ClaimEnv is a variable of a container, by default the first.
type ClaimEnv struct {
	Name          string `json:"name"`
	Value         string `json:"value"`
	ContainerName string `json:"containerName,omitempty"`
}

// Ref is the name of an object in the same namespace.
type Ref struct {
	Name string `json:"name"`
}

// ClaimStatus is what a SandboxClaim has.
type ClaimStatus struct {
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	Sandbox    ClaimedSandbox     `json:"sandbox,omitzero"`
}

// ClaimedSandbox is the sandbox of a claim.
type ClaimedSandbox struct {
	Name string `json:"name,omitempty"`
}

// SandboxWarmPool keeps sandboxes ready for claims.
type SandboxWarmPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   WarmPoolSpec   `json:"spec"`
	Status WarmPoolStatus `json:"status,omitzero"`
}

// WarmPoolSpec is how many sandboxes of which template a pool keeps.
type WarmPoolSpec struct {
	Replicas        int32           `json:"replicas"`
	TemplateRef     Ref             `json:"sandboxTemplateRef"`
	TTLAfterCreated *int32          `json:"ttlSecondsAfterCreated,omitempty"`
	UpdateStrategy  *UpdateStrategy `json:"updateStrategy,omitempty"`
}

// UpdateStrategy says what becomes of a pool's sandboxes when their template changes: Recreate or OnReplenish.
type UpdateStrategy struct {
	Type string `json:"type,omitempty"`
}

// Recreate replaces a pool's sandboxes when their template changes.
const Recreate = "Recreate"

// WarmPoolStatus is what a pool has.
type WarmPoolStatus struct {
	Replicas           int32              `json:"replicas,omitempty"`
	ReadyReplicas      int32              `json:"readyReplicas,omitempty"`
	Selector           string             `json:"selector,omitempty"`
	ObservedGeneration int64              `json:"observedGeneration,omitempty"`
	Conditions         []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxList is a list.
type SandboxList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Sandbox `json:"items"`
}

// SandboxTemplateList is a list.
type SandboxTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxTemplate `json:"items"`
}

// SandboxClaimList is a list.
type SandboxClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxClaim `json:"items"`
}

// SandboxWarmPoolList is a list.
type SandboxWarmPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxWarmPool `json:"items"`
}
