package spec

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/netpolicy"
)

// VM describes a VM. The zero value of a field means its default.
type VM struct {
	// Name is the VM's name: NamePattern. If empty, the store chooses one.
	Name string `json:"name,omitempty"`
	// Image is a tag or id of the image store.
	Image string `json:"image"`
	// Kernel is "built", "debian", an id of the kernel cache, or the path of a vmlinux or bzImage that boots like
	// the built one. Default: kernel.Choose, for the host and the image's label kernel.NeedsLabel: "built" if the
	// cache has one that fits, else "debian".
	Kernel string `json:"kernel,omitempty"`
	// VCPUs is 1 to 8. Default: 1.
	VCPUs int `json:"vcpus,omitempty"`
	// MemoryMiB is 64 to 16384. Default: 256.
	MemoryMiB int `json:"memory_mib,omitempty"`
	// DiskMiB is the size of the writable disk. The disk takes only as much space as was written to it. Default:
	// 8192.
	DiskMiB int `json:"disk_mib,omitempty"`
	// DiskQuotaMiB is the most that the VM may make the host store: layers of its disk, memory and disks of its
	// snapshots, decompressed pages, logs, promotions; not what it writes to shares. At least MinDiskQuota. Default: no
	// quota. With one, the default of DiskMiB is MaxDisk.
	DiskQuotaMiB int `json:"disk_quota_mib,omitempty"`
	// Hostname is the host name inside the guest. Default: the name.
	Hostname string `json:"hostname,omitempty"`
	// Network is "none" or "tap". With "tap" the VM gets a link to the host, behind its Policy. Default: "none".
	Network string `json:"network,omitempty"`
	// IPv6 gives the VM an IPv6 address and IPv6 routes as well.
	IPv6 bool `json:"ipv6,omitempty"`
	// Policy is what the network may do to and for the VM. Nil denies everything. It
	// does not change once it is in a VM.
	Policy *netpolicy.Policy `json:"policy,omitempty"`
	// Tags are the names by which rules of other VMs' policies refer to this VM: at most netpolicy.MaxOwnTags.
	// Forks and clones get the same tags. Sandbox.SetTags changes them.
	Tags []string `json:"tags,omitempty"`
	// Cmdline is added to the kernel's command line.
	Cmdline string `json:"cmdline,omitempty"`
	// NoACPI names the devices on the command line, for kernels without ACPI.
	NoACPI bool `json:"no_acpi,omitempty"`
	// Hooks says how hooks in the guest run. Default: they are required.
	Hooks Hooks `json:"hooks,omitzero"`
	// Idle says when the VM goes to sleep by itself. Default: never.
	Idle Idle `json:"idle,omitzero"`
	// Volumes are disks of the store that are mounted in the VM.
	Volumes []VolumeMount `json:"volumes,omitempty"`
	// Shares are directories of the host that are mounted in the VM. Forks and clones have the same.
	Shares []Share `json:"shares,omitempty"`
	// Services are programs that the VM's agent keeps running.
	Services []Service `json:"services,omitempty"`
	// Self is what programs in the VM may ask the host for. Default: nothing.
	Self Self `json:"self,omitzero"`
}

// Values of Spec.Network.
const (
	NetworkNone = "none"
	NetworkTAP  = "tap"
)

// Defaults of a VM.
const (
	DefaultVCPUs     = 1
	DefaultMemoryMiB = 256
	DefaultDiskMiB   = 8192
	MinDiskMiB       = 64
	MaxDiskMiB       = 1 << 20
)

// Limits of a VM's shape: those of packages vmm/boot and vmm/guestmem.
const (
	MaxVCPUs     = 8
	MinMemoryMiB = 64
	MaxMemoryMiB = 16 << 10
)

// NamePattern is the pattern of a VM's name. A name is a valid host name, and short enough for a Unix socket's
// path.
const NamePattern = `^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`

var nameRE = lazyregexp.New(NamePattern)

// ValidName reports whether name can be the name of a VM.
func ValidName(name string) bool { return nameRE.MatchString(name) }

// ErrInvalid means that no VM can be like that.
var ErrInvalid = errors.New("invalid VM")

// maxSpec is the most bytes of a VM as JSON.
const maxSpec = 1 << 20

// Parse reads a VM from JSON. An unknown field is an error: it is a misspelling of a known one.
func Parse(r io.Reader) (VM, error) {
	var s VM
	d := json.NewDecoder(io.LimitReader(r, maxSpec))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("reading the VM's config: %w: %s: the fields are those of spec.VM", ErrInvalid, strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return s, fmt.Errorf("reading the VM's config: %w: there is more after the JSON object", ErrInvalid)
	}
	return s, nil
}

// WithDefaults returns the VM with its defaults filled in, and checks the rest.
func (s VM) WithDefaults() (VM, error) {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&s.VCPUs, DefaultVCPUs)
	def(&s.MemoryMiB, DefaultMemoryMiB)
	if s.DiskQuotaMiB > 0 {
		def(&s.DiskMiB, min(DefaultDiskMiB, s.MaxDisk(s.DiskQuotaMiB)))
	}
	def(&s.DiskMiB, DefaultDiskMiB)
	if s.Hostname == "" {
		s.Hostname = s.Name
	}
	if s.Network == "" {
		s.Network = NetworkNone
	}
	bad := func(field, format string, args ...any) (VM, error) {
		return s, InField(field, fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...)))
	}
	switch {
	case !ValidName(s.Name):
		return bad("name", "name %q: use 1 to 40 lower-case letters, digits and inner hyphens", s.Name)
	case !ValidName(s.Hostname):
		return bad("hostname", "host name %q: use 1 to 40 lower-case letters, digits and inner hyphens", s.Hostname)
	case s.Image == "":
		return bad("image", "no image: name an image of the store, or build one (builder.Build)")
	case s.DiskMiB < MinDiskMiB || s.DiskMiB > MaxDiskMiB:
		return bad("disk_mib", "a disk of %d MiB: use %d to %d", s.DiskMiB, MinDiskMiB, MaxDiskMiB)
	case s.Network != NetworkNone && s.Network != NetworkTAP:
		return bad("network", "network %q: use %q or %q", s.Network, NetworkNone, NetworkTAP)
	}
	if err := s.checkDiskQuota(); err != nil {
		return s, err
	}
	if s.IPv6 && s.Network != NetworkTAP {
		return bad("ipv6", "it has IPv6 and no network: add the network %q", NetworkTAP)
	}
	if err := s.Shape().Validate(); err != nil {
		return s, err
	}
	for _, part := range []struct {
		field string
		check func() error
	}{
		{"policy", s.ValidatePolicy}, {"tags", s.checkTags}, {"hooks", s.Hooks.check}, {"idle", s.Idle.Validate}, {"self", s.Self.Validate},
		{"volumes", func() error { return checkMounts(s.Volumes) }},
		{"shares", func() error { return ValidateShares(s.Shares, s.Volumes) }},
		{"services", func() error { return ValidateServices(s.Services) }},
	} {
		if err := part.check(); err != nil {
			return s, InField(part.field, err)
		}
	}
	return s, nil
}

// sleepSlackMiB is what a sleep may take beside RAM: manifest, index, tables of the layers, logs.
const sleepSlackMiB = 48

// SleepReserve is what a disk quota keeps free for the VM's next sleep, in MiB: a VM that cannot sleep is worse than
// one that may write less. It has RAM that does not compress.
func (s VM) SleepReserve() int { return s.MemoryMiB + s.MemoryMiB/32 + sleepSlackMiB }

// QuotaRoomMiB is the least that the disk of a VM with a disk quota may take when it starts, in MiB.
const QuotaRoomMiB = 64

// MaxDisk returns how large the writable disk may be with a disk quota, in MiB. The quota has the disk three times: as
// of the last sleep, what the guest has written since, and once more while the layers of both are joined; and RAM
// twice, as of the last sleep and the next. So a VM without other snapshots never uses its quota up: its guest's own
// file system is full first.
func (s VM) MaxDisk(quotaMiB int) int { return (quotaMiB - 2*s.SleepReserve() - QuotaRoomMiB) / 3 }

// MinDiskQuota returns the least disk quota in MiB.
func (s VM) MinDiskQuota() int { return s.quotaOf(MinDiskMiB) }

func (s VM) quotaOf(disk int) int { return 3*disk + 2*s.SleepReserve() + QuotaRoomMiB }

func (s VM) checkDiskQuota() error {
	switch {
	case s.DiskQuotaMiB == 0:
		return nil
	case s.DiskQuotaMiB < 0 || s.DiskQuotaMiB > 4*MaxDiskMiB:
		return InField("disk_quota_mib", fmt.Errorf("%w: a disk quota of %d MiB: use %d to %d", ErrInvalid, s.DiskQuotaMiB, s.MinDiskQuota(), 4*MaxDiskMiB))
	case s.DiskMiB > s.MaxDisk(s.DiskQuotaMiB):
		return fmt.Errorf("%w: a disk of %d MiB and a quota of %d: with %d MiB of memory the disk may have %d, and the quota must be %d at least",
			ErrInvalid, s.DiskMiB, s.DiskQuotaMiB, s.MemoryMiB, max(s.MaxDisk(s.DiskQuotaMiB), 0), s.quotaOf(max(s.DiskMiB, MinDiskMiB)))
	}
	return nil
}

// Memory returns the size of its RAM in bytes.
func (s VM) Memory() uint64 { return uint64(s.MemoryMiB) << 20 }

// Features returns the kernel features that the VM needs to come up.
func (s VM) Features() []string {
	if len(s.Shares) > 0 {
		return []string{featureShares}
	}
	return nil
}

// featureShares is the kernel feature that shares need: package kernel.
const featureShares = "shares"

// Shape is the part of a VM that KVM needs before anything else. Its limits are those of a VM.
type Shape struct {
	MemoryMiB int `json:"memory_mib"`
	VCPUs     int `json:"vcpus"`
	// Network reports whether the VM has a link to the host.
	Network bool `json:"network,omitempty"`
}

// Shape returns what KVM needs to know of the VM first.
func (s VM) Shape() Shape {
	return Shape{MemoryMiB: s.MemoryMiB, VCPUs: s.VCPUs, Network: s.Network == NetworkTAP}
}

// Machine returns the shape without the network: the part that concerns KVM.
func (s Shape) Machine() Shape { return Shape{MemoryMiB: s.MemoryMiB, VCPUs: s.VCPUs} }

// Validate returns an ErrInvalid for a shape that no VM can have.
func (s Shape) Validate() error {
	switch {
	case s.VCPUs < 1 || s.VCPUs > MaxVCPUs:
		return InField("vcpus", fmt.Errorf("%w: %d vCPUs: use 1 to %d", ErrInvalid, s.VCPUs, MaxVCPUs))
	case s.MemoryMiB < MinMemoryMiB || s.MemoryMiB > MaxMemoryMiB:
		return InField("memory_mib", fmt.Errorf("%w: %d MiB of memory: use %d to %d", ErrInvalid, s.MemoryMiB, MinMemoryMiB, MaxMemoryMiB))
	}
	return nil
}

// NewID returns a random id of 32 hex digits.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
