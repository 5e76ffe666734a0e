package jail

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// Calls of the keeper. The child serves each of them.
const (
	callPrepare     = "prepare"      // prepareOrder -> nothing: the child has confined itself
	callPass        = "pass"         // []string with as many descriptors, more than fit a start -> nothing
	callStart       = "start"        // startOrder with descriptors -> started
	callInfo        = "info"         // nothing -> info
	callDial        = "dial"         // port, with a descriptor -> nothing
	callFail        = "fail"         // text -> nothing
	callHooksBefore = "hooks-before" // hooksOrder -> hooked
	callHooksAfter  = "hooks-after"  // nothing -> hooked
	callIdentity    = "identity"     // nothing -> nothing
	callServices    = "services"     // nothing -> nothing
	callServe       = "serve-secrets"
	callSetSecret   = "set-secret"    // secretOrder -> nothing
	callDropSecret  = "remove-secret" // name -> bool
	callSecrets     = "list-secrets"  // nothing -> []secrets.State
	callKeep        = "keep-running"  // nothing -> nothing
	callRelease     = "release"       // nothing -> nothing
	callCapture     = "capture"       // captureOrder -> instance.CaptureCosts
	callSealFrozen  = "seal-frozen"   // sealOrder -> sealResult
	callGiveUp      = "give-up"       // number of a capture or seal -> nothing
	callFlush       = "flush"         // nothing -> nothing
	callData        = "data"          // nothing -> bytes
	callSubstitute  = "substitute"    // substitution -> nothing
	callRoom        = "disk-room"     // bytes -> nothing
	callContinue    = "continue"      // nothing -> nothing
	callMissed      = "missed"        // nothing -> []uint64
	callArrived     = "arrived"       // nothing -> nothing
	callClose       = "close"         // nothing -> nothing
)

// Calls of the child. The keeper judges each of them: see [grants].
const (
	callFile       = "file"       // fileOrder -> fileInfo, with a descriptor after an open
	callConnect    = "connect"    // port -> own, with a descriptor
	callWritten    = "written"    // index of a volume -> nothing
	callStill      = "still"      // nothing -> nothing
	callSealed     = "sealed"     // nothing -> nothing
	callForked     = "forked"     // instance.CaptureCosts, with a descriptor -> nothing
	callPrioritize = "prioritize" // nothing -> nothing
	callResumed    = "resumed"    // nothing -> nothing
	callSymbolize  = "symbolize"  // address -> symbol
	callLinkReady  = "link-ready" // nothing -> nothing, when the policy is in force
	callEnsure     = "ensure"     // ensureOrder -> nothing, when so much of a file is there
	postCalm       = "calm"
	postService    = "service" // guest.ServiceEvent
	postQuota      = "quota"   // nothing
	postEnded      = "ended"   // ended
)

// prepareOrder says what the child prepares for before it confines itself.
type prepareOrder struct {
	// Shape is what it makes ahead, if not nil.
	Shape *spec.Shape `json:"shape,omitempty"`
	// Shares are the sources of the VM's shares. Their directories are the descriptors behind the socket.
	Shares     []string `json:"shares,omitempty"`
	NoDirtyLog bool     `json:"no_dirty_log,omitempty"`
}

// Names of passed descriptors that are no files of the VM by path.
const (
	passTAP      = "tap"
	passListener = "listener"
	passConsole  = "console"
	passRAM      = "ram"
	passVolume   = "volume:" // and its index
)

// startOrder is instance.Parts without what is passed as descriptors or stays with the keeper.
type startOrder struct {
	Spec       spec.VM                 `json:"spec"`
	Kernel     string                  `json:"kernel,omitempty"`
	Initramfs  string                  `json:"initramfs,omitempty"`
	SystemDisk string                  `json:"system_disk,omitempty"`
	Cmdline    string                  `json:"cmdline,omitempty"`
	Image      string                  `json:"image"`
	Disk       disk.Stack              `json:"disk"`
	Volumes    []volumeOrder           `json:"volumes,omitempty"`
	VM         string                  `json:"vm"`
	DiskRoom   int64                   `json:"disk_room,omitempty"`
	Secrets    []spec.SecretFile       `json:"secrets,omitempty"`
	PageCache  string                  `json:"page_cache,omitempty"`
	NoDirtyLog bool                    `json:"no_dirty_log,omitempty"`
	Symbols    bool                    `json:"symbols,omitempty"`
	Services   bool                    `json:"services,omitempty"`
	Fork       bool                    `json:"fork,omitempty"`
	Arriving   bool                    `json:"arriving,omitempty"`
	Coming     map[string]int64        `json:"coming,omitempty"` // instance.Arriving.Layers
	Snapshot   string                  `json:"snapshot,omitempty"`
	Options    instance.RestoreOptions `json:"options"`
	// Passed are the names of the descriptors that come with the order.
	Passed []string `json:"passed"`
	// Known is what the child would ask for next, by name; nil if there is no such file.
	Known map[string]*fileInfo `json:"known,omitempty"`
}

type volumeOrder struct {
	Record   volume.Record `json:"record"`
	ReadOnly bool          `json:"read_only,omitempty"`
}

// started describes a VM that runs.
type started struct {
	// EntryAfter and ReadyAfter count from the order to start.
	EntryAfter time.Duration `json:"entry"`
	ReadyAfter time.Duration `json:"ready"`
	// Took is the time from the order to this answer.
	Took     time.Duration            `json:"took"`
	Stages   map[string]time.Duration `json:"stages"`
	Facts    vmm.HostFacts            `json:"facts"`
	Failures []guest.HookFailure      `json:"failures,omitempty"`
	Restored bool                     `json:"restored,omitempty"`
	Caches   bool                     `json:"caches,omitempty"`
	DiskSize int64                    `json:"disk_size"`
	Info     info                     `json:"info"`
}

// maxStages is how many stages of a start the keeper takes over.
const maxStages = 64

// bound bounds what a child may say anything in.
func (s *started) bound() {
	s.EntryAfter, s.ReadyAfter, s.DiskSize = timeBy(s.EntryAfter), timeBy(s.ReadyAfter), bytesBy(s.DiskSize)
	s.Failures, s.Facts.Arch = failures(s.Failures), text(s.Facts.Arch)
	if len(s.Stages) > maxStages {
		s.Stages = nil
	}
	stages := make(map[string]time.Duration, len(s.Stages))
	for name, d := range s.Stages {
		stages[text(name)] = timeBy(d)
	}
	s.Stages = stages
	s.Info.bound()
}

func (i *info) bound() {
	i.Full, i.Health.Detail = text(i.Full), text(i.Health.Detail)
	i.Open, i.Ever = countBy(i.Open), countBy(i.Ever)
	for _, n := range []*uint64{&i.Faults.Read, &i.Faults.Write, &i.Faults.Ensured, &i.Faults.Prefetched,
		&i.Faults.Copied, &i.Faults.Frames, &i.Faults.Cached} {
		*n = countBy(*n)
	}
}

// info is what changes while a VM runs.
type info struct {
	Open   uint64     `json:"open"`
	Ever   uint64     `json:"ever"`
	Health vmm.Health `json:"health"`
	Full   string     `json:"full,omitempty"`
	Faults faults     `json:"faults"`
}

// faults are pager.Stats.
type faults struct {
	Read, Write, Ensured, Prefetched, Copied, Frames, Cached uint64
}

type hooksOrder struct {
	Event guest.HookEvent `json:"event"`
	Over  spec.HookPolicy `json:"over"`
}

type hooked struct {
	Failures []guest.HookFailure `json:"failures,omitempty"`
	// Refused reports that hooks have refused, and Failures says which.
	Refused bool `json:"refused,omitempty"`
	Due     bool `json:"due,omitempty"`
}

type secretOrder struct {
	Secret secrets.Secret `json:"secret"`
	Value  []byte         `json:"value"`
}

// captureOrder is instance.CaptureOptions with flags in place of functions.
type captureOrder struct {
	Number     uint64            `json:"number"` // for callGiveUp
	Dir        string            `json:"dir"`
	ID         string            `json:"id"`
	Live       bool              `json:"live,omitempty"`
	NewTop     string            `json:"new_top"`
	Names      []string          `json:"names"`
	Labels     map[string]string `json:"labels,omitempty"`
	Image      string            `json:"image,omitempty"`
	Kernel     string            `json:"kernel,omitempty"`
	Still      bool              `json:"still,omitempty"`
	Resumed    bool              `json:"resumed,omitempty"`
	Fork       bool              `json:"fork,omitempty"`
	Prioritize bool              `json:"prioritize,omitempty"`
}

// boundCosts returns what a child says of a capture, with numbers in their bounds.
func boundCosts(c instance.CaptureCosts) instance.CaptureCosts {
	return instance.CaptureCosts{
		Raw: countBy(c.Raw), Stored: bytesBy(c.Stored), Shared: bytesBy(c.Shared),
		Changed: countBy(c.Changed), Free: countBy(c.Free), Shareable: countBy(c.Shareable),
		Ahead: timeBy(c.Ahead), Fill: timeBy(c.Fill), Pause: timeBy(c.Pause), Save: timeBy(c.Save),
	}
}

type sealOrder struct {
	Number uint64           `json:"number"` // for callGiveUp
	NewTop string           `json:"new_top"`
	Limits guest.HookLimits `json:"limits"`
}

type sealResult struct {
	Frozen   time.Duration       `json:"frozen"`
	Failures []guest.HookFailure `json:"failures,omitempty"`
	// Refused reports that hooks have refused.
	Refused bool `json:"refused,omitempty"`
	// Problem is why it failed, if not nil.
	Problem *problem `json:"problem,omitempty"`
}

// problem is an error beside a result.
type problem struct {
	Text string `json:"text"`
	Code string `json:"code,omitempty"`
}

type substitution struct {
	Layers []string `json:"layers"`
	By     string   `json:"by"`
}

// ended is how a machine has ended.
type ended struct {
	Reason vmm.ExitReason `json:"reason"`
	VCPU   int            `json:"vcpu"`
	RIP    uint64         `json:"rip"`
	Detail string         `json:"detail"`
	Error  string         `json:"error,omitempty"`
}

// What a child may ask of a file: a method of osfile.FS.
const (
	fileOpen      = "open"
	fileRename    = "rename"
	fileRenameNew = "rename-new"
	fileLink      = "link"
	fileMkdir     = "mkdir"
	fileRemove    = "remove"
	fileRemoveAll = "remove-all"
	fileStat      = "stat"
	fileSyncDir   = "sync-dir"
	fileLock      = "lock"
	fileFree      = "free"
)

type fileOrder struct {
	Op   string `json:"op"`
	Name string `json:"name"`
	// To is the second name of a link or rename.
	To    string `json:"to,omitempty"`
	Flags int    `json:"flags,omitempty"`
}

// ensureOrder asks for a part of a memory file or layer of the snapshot that the VM comes from.
type ensureOrder struct {
	File string `json:"file"`
	Off  int64  `json:"off"`
	Len  int64  `json:"len"` // bytes, at most maxEnsure
}

type fileInfo struct {
	Size    int64     `json:"size,omitempty"`
	Dir     bool      `json:"dir,omitempty"`
	ModTime time.Time `json:"mod_time"`
	// Device and Inode tell files apart.
	Device uint64 `json:"device,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`
	Free   uint64 `json:"free,omitempty"`
}

type symbol struct {
	Name   string `json:"name"`
	Offset uint64 `json:"offset"`
	Known  bool   `json:"known"`
}

// WarmUp does, with made-up data, what a process does for the first time when a VM starts: package json analyzes the
// types of messages. Both ends call it before there is a VM.
func WarmUp() error {
	now := time.Now().UTC()
	return errors.Join(
		exchange([]string{passTAP}),
		exchange(startOrder{
			Spec:   spec.VM{Name: "warm-up", Network: spec.NetworkTAP, Idle: spec.Idle{SleepSeconds: 1}},
			Disk:   disk.Stack{Layers: []string{"a"}},
			Passed: []string{passTAP}, Known: map[string]*fileInfo{"a": {ModTime: now}},
			Volumes: []volumeOrder{{}}, Secrets: []spec.SecretFile{{}},
		}),
		exchange(started{Stages: map[string]time.Duration{"resume_ready": 1}, Failures: []guest.HookFailure{{}}}),
		exchange(fileOrder{Op: fileOpen, Name: "a"}),
		exchange(fileInfo{ModTime: now}),
	)
}

// exchange encodes a message and decodes it.
func exchange[T any](m T) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var read T
	return json.Unmarshal(body, &read)
}
