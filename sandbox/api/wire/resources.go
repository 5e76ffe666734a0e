package wire

import (
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// SetSecret is PUT /v1/sandboxes/NAME/secrets/SECRET. No answer, log or audit trail has the value.
type SetSecret struct {
	// Value is base64, and at most 64 KiB.
	Value []byte `json:"value,omitzero"`
	// From, in the place of Value, is the name of one of SecretSources: the value comes from there at each wake.
	From string `json:"from,omitempty"`
	Mode uint16 `json:"mode,omitempty"`
	UID  uint32 `json:"uid,omitempty"`
	GID  uint32 `json:"gid,omitempty"`
	// Proxy keeps it from the guest: the proxy puts it into requests.
	Proxy bool `json:"proxy,omitempty"`
	// Transient means that the sandbox does not wait for it after a wake.
	Transient bool `json:"transient,omitempty"`
}

// Secrets is GET /v1/sandboxes/NAME/secrets.
type Secrets struct {
	Secrets []spec.SecretState `json:"secrets"`
}

// SecretSources is GET /v1/secret-sources.
type SecretSources struct {
	Sources []SecretSource `json:"sources"`
}

// SecretSource is where the operator of the host lets secrets come from.
type SecretSource struct {
	Name string `json:"name"`
	// Kind is one of SecretSourceKinds.
	Kind string `json:"kind"`
	// Owners own the sandboxes that may have it, beside those without an owner; with AllOwners all may. A caller with an
	// owner gets neither.
	Owners    []string `json:"owners,omitempty"`
	AllOwners bool     `json:"all_owners,omitempty"`
}

// SecretSourceKinds are the values of SecretSource.Kind.
var SecretSourceKinds = []string{"file", "command", "env", "credential"}

// Services is GET /v1/sandboxes/NAME/services.
type Services struct {
	Services []records.Service `json:"services"`
}

// SetService is PUT /v1/sandboxes/NAME/services/SERVICE: a spec.Service without its name.
type SetService struct {
	spec.Service
	// ImageConfig takes the user, directory and variables that are not given from the sandbox's image, as for a command.
	ImageConfig bool `json:"image_config,omitempty"`
}

// Volume is a disk that outlives the sandboxes that use it.
type Volume struct {
	Name      string    `json:"name"`
	ID        string    `json:"id"`
	SizeBytes int64     `json:"size_bytes"`
	Allocated int64     `json:"allocated_bytes"` // of the host's disk
	Created   time.Time `json:"created"`
	UsedBy    []string  `json:"used_by"` // names of sandboxes
	// Users says more of them.
	Users []VolumeUser `json:"users"`
	// Generation changes with the content. Settled is the sleep whose memory belongs to the content, if one does.
	Generation uint64         `json:"generation"`
	Settled    *VolumeSettled `json:"settled,omitempty"`
}

// VolumeUser is a sandbox that names a volume.
type VolumeUser struct {
	VM       string `json:"vm"`
	Phase    string `json:"phase"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"read_only"`
}

// VolumeSettled names a snapshot and the sandbox that sleeps in it.
type VolumeSettled struct {
	Snapshot string `json:"snapshot"`
	VM       string `json:"vm"`
}

// Volumes is GET /v1/volumes.
type Volumes struct {
	Volumes []Volume `json:"volumes"`
}

// MakeVolume is POST /v1/volumes.
type MakeVolume struct {
	Name    string `json:"name"`
	SizeMiB int64  `json:"size_mib"`
}

// ResizeVolume is POST /v1/volumes/VOLUME/resize: volumes grow, and do not shrink.
type ResizeVolume struct {
	SizeMiB int64 `json:"size_mib"`
}

// Clone is POST /v1/snapshots/ID/clone: a new sandbox with the memory, processes and files of a snapshot.
type Clone struct {
	Name     string            `json:"name,omitempty"`
	Metadata spec.Metadata     `json:"metadata,omitzero"`
	Idle     *spec.Idle        `json:"idle,omitempty"`
	Policy   *netpolicy.Policy `json:"policy,omitempty"` // the snapshot's by default
}

// Imported is the answer to POST /v1/snapshots/import. Dropped names what the stream said and the host does not take
// from a stranger.
type Imported struct {
	spec.SnapshotInfo
	Dropped []string `json:"dropped"`
}

// Pull is POST /v1/images/pull.
type Pull struct {
	// From is docker://REFERENCE or debian:SUITE.
	From string `json:"from"`
	Tag  string `json:"tag,omitempty"`
	// Include are additional Debian packages.
	Include  []string `json:"include,omitempty"`
	Platform string   `json:"platform,omitempty"` // OS/ARCH
	NoCache  bool     `json:"no_cache,omitempty"`
}

// ImageRemoved is the answer to DELETE /v1/images/REF.
type ImageRemoved struct {
	ID       string   `json:"id"`
	Untagged []string `json:"untagged"`
	Deleted  bool     `json:"deleted"` // it had no other tag
}

// TemplateSpec is what a template is for: the fields of spec.VM that a boot depends on.
type TemplateSpec struct {
	Image     string `json:"image"`
	Kernel    string `json:"kernel,omitempty"`
	VCPUs     int    `json:"vcpus,omitempty"`
	MemoryMiB int    `json:"memory_mib,omitempty"`
	DiskMiB   int    `json:"disk_mib,omitempty"`
	Network   string `json:"network,omitempty"`
	IPv6      bool   `json:"ipv6,omitempty"`
	Cmdline   string `json:"cmdline,omitempty"`
	NoACPI    bool   `json:"no_acpi,omitempty"`
}

// VM returns the spec of a VM that starts from the template.
func (t TemplateSpec) VM() spec.VM {
	return spec.VM{
		Image: t.Image, Kernel: t.Kernel, VCPUs: t.VCPUs, MemoryMiB: t.MemoryMiB, DiskMiB: t.DiskMiB, Network: t.Network, IPv6: t.IPv6, Cmdline: t.Cmdline, NoACPI: t.NoACPI,
	}
}

// Template is a first boot from which sandboxes start.
type Template struct {
	Key string `json:"key"`
	TemplateSpec
	// State is one of TemplateStates. A sandbox has asked for one that is wanted; Problem is why one could not be made.
	State    string     `json:"state"`
	Problem  string     `json:"problem,omitempty"`
	Snapshot string     `json:"snapshot,omitempty"`
	Stored   int64      `json:"stored_bytes"`
	Created  *time.Time `json:"created,omitempty"`
	Used     time.Time  `json:"used"`
}

// TemplateStates are the values of Template.State.
var TemplateStates = []string{"ready", "wanted", "failed"}

// Templates is GET /v1/templates.
type Templates struct {
	Templates []Template `json:"templates"`
	// Problems are unreadable templates.
	Problems []string `json:"problems,omitempty"`
}

// Operation is work that goes on after its request. The server keeps it in memory, the last 100 of all callers.
type Operation struct {
	ID    string `json:"id"`
	Kind  string `json:"kind"`
	State string `json:"state"`
	// Stage, Done and Total are its progress, in bytes where the stage has any; Total is 0 if it is not known.
	Stage string     `json:"stage,omitempty"`
	Done  int64      `json:"done"`
	Total int64      `json:"total"`
	Begun time.Time  `json:"begun"`
	Ended *time.Time `json:"ended,omitempty"`
	// Image is the id of the image that it has made, Template the key of the template.
	Image    string `json:"image,omitempty"`
	Template string `json:"template,omitempty"`
	Error    *Error `json:"error,omitempty"`
}

// OperationStates are the values of Operation.State.
var OperationStates = []string{"running", "done", "failed", "canceled"}

// Operations is GET /v1/operations.
type Operations struct {
	Operations []Operation `json:"operations"`
}

// Diff is a line of GET /v1/sandboxes/NAME/diff: a path that differs from the image, or the end of the list.
type Diff struct {
	// Op is added, changed or removed.
	Op   string `json:"op,omitempty"`
	Path string `json:"path,omitempty"`
	Kind string `json:"kind,omitempty"`
	Mode string `json:"mode,omitempty"`
	// Before is kind and mode in the image, of a changed path, if they differ.
	Before string `json:"before,omitempty"`
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	Size   int64  `json:"size"`
	From   string `json:"from,omitempty"` // of a directory that was moved
	// End is set on the last line alone: More says that there are more, Partial what is not known.
	End     bool   `json:"end,omitempty"`
	More    bool   `json:"more,omitempty"`
	Partial string `json:"partial,omitempty"`
}
