package kernel

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Has is whether a kernel has an option or a feature.
type Has string

const (
	// Yes: it is built in, or in modules that are loaded before the guest's first program starts.
	Yes Has = "yes"
	// Module: all or part of it is in modules that nothing loads: see FetchOptions.ExtraModules.
	Module Has = "module"
	// No: all or part of it is missing.
	No Has = "no"
)

// Feature is something that a guest may need of its kernel.
type Feature struct {
	Name    string         `json:"name"`    // as images and users name it
	Purpose string         `json:"purpose"` // what it is for
	Has     Has            `json:"has"`     // the least of its options
	Options map[string]Has `json:"options"` // the options that it needs, with CONFIG_
}

// Lacks returns the options that the kernel lacks or nothing loads, sorted.
func (f *Feature) Lacks() []string {
	var out []string
	for name, has := range f.Options {
		if has != Yes {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Modules returns the modules to load for the feature, sorted. It returns nil if the kernel has the feature, or if
// loading modules would not suffice.
func (f *Feature) Modules() []string {
	if f.Has != Module {
		return nil
	}
	var out []string
	for name, has := range f.Options {
		if has == Module {
			out = append(out, modulesOf(strings.TrimPrefix(name, "CONFIG_"))...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// wanted is a known feature, before a kernel is checked for it. It needs all of options, without CONFIG_.
type wanted struct {
	name, purpose string
	options       string // separated by spaces
}

// wants are the known features, in the order in which they are shown. docs/reference/KERNELS.md has the same
// table, and a test compares the two.
var wants = []wanted{
	{"guest", "disks, the agent's socket, the root file system", "VIRTIO_MMIO VIRTIO_BLK VIRTIO_VSOCKETS EROFS_FS EXT4_FS OVERLAY_FS DEVTMPFS PROC_FS SYSFS TMPFS"},
	{"soft-kvm", "boots on a KVM without VMX or SVM", "KVM_GUEST KVM_GUEST_SOFT"},
	{"network", "a network behind a policy", "VIRTIO_NET INET"},
	{"give-back", "gives free memory back to the host", "VIRTIO_BALLOON PAGE_REPORTING"},
	{"free-pages", "tells snapshots which pages are free", "PROC_KCORE"},
	{"standby", "the agent stands by during captures, and takes secrets", "X86_IOPL_IOPERM"},
	{"clone-identity", "learns by itself that it is a clone, with new random numbers at once", "VMGENID"},
	{"panic-report", "tells the host of a panic", "PVPANIC_MMIO"},
	{"secrets", "files of `drowse secret`", "FUSE_FS X86_IOPL_IOPERM"},
	{"shares", "directories of the host: `drowse run --share`", "FUSE_FS VIRTIO_FS"},
	{"namespaces", "containers: what they see", "NAMESPACES UTS_NS IPC_NS PID_NS NET_NS USER_NS"},
	{"cgroups", "containers: cgroup v2, what they may use", "CGROUPS MEMCG CGROUP_PIDS CGROUP_SCHED FAIR_GROUP_SCHED CFS_BANDWIDTH CPUSETS CGROUP_FREEZER CGROUP_DEVICE CGROUP_BPF BLK_CGROUP"},
	{"seccomp", "containers: which system calls they may make", "SECCOMP SECCOMP_FILTER"},
	{"overlay", "containers: layers on each other", "OVERLAY_FS"},
	{"container-network", "containers: bridges, link pairs, translated addresses", "VETH BRIDGE BRIDGE_NETFILTER NF_CONNTRACK NF_NAT NETFILTER_XTABLES NETFILTER_XT_MARK NETFILTER_XT_NAT NETFILTER_XT_MATCH_ADDRTYPE NETFILTER_XT_MATCH_COMMENT NETFILTER_XT_MATCH_CONNTRACK NETFILTER_XT_MATCH_MULTIPORT NETFILTER_XT_TARGET_MASQUERADE NETFILTER_XT_TARGET_REDIRECT"},
	{"nftables", "`nft`", "NF_TABLES NF_TABLES_INET NF_TABLES_IPV4 NF_TABLES_IPV6 NFT_CT NFT_NAT NFT_MASQ NFT_REDIR NFT_REJECT NFT_REJECT_INET NFT_LOG NFT_LIMIT NFT_HASH NFT_FIB_INET"},
	{"iptables-nft", "`iptables` of today's distributions", "NF_TABLES NF_TABLES_IPV4 NF_TABLES_IPV6 NFT_COMPAT NFT_NAT NFT_MASQ NFT_CT NETFILTER_XTABLES"},
	{"iptables-legacy", "`iptables-legacy`", "IP_NF_IPTABLES IP_NF_FILTER IP_NF_NAT IP_NF_MANGLE IP_NF_RAW IP6_NF_IPTABLES IP6_NF_FILTER IP6_NF_NAT IP6_NF_MANGLE IP6_NF_RAW"},
	{"fuse", "file systems in programs: sshfs, rclone, fuse-overlayfs", "FUSE_FS"},
	{"tun", "VPNs, user-mode networks of containers", "TUN"},
	{"loop", "files as disks", "BLK_DEV_LOOP"},
	{"squashfs", "AppImages, snaps", "SQUASHFS"},
	{"io-uring", "io_uring(7)", "IO_URING"},
	{"userfaultfd", "userfaultfd(2)", "USERFAULTFD"},
	{"bpf", "bpf(2)", "BPF_SYSCALL"},
	{"bpf-jit", "BPF as machine code, else interpreted", "BPF_JIT"},
	{"modules", "modules can be loaded", "MODULES"},
	{"swap", "swap", "SWAP"},
	{"huge-pages", "transparent huge pages", "TRANSPARENT_HUGEPAGE"},
	{"io-limits", "containers: bytes and requests a second (io.max)", "BLK_DEV_THROTTLING"},
	{"landlock", "programs that drop rights", "SECURITY_LANDLOCK"},
	{"apparmor", "AppArmor profiles", "SECURITY_APPARMOR"},
	{"tracing", "ftrace, perf with kernel functions' names", "FTRACE KALLSYMS"},
	{"checkpoint", "CRIU", "CHECKPOINT_RESTORE"},
	{"32-bit", "programs of 32 bits", "IA32_EMULATION"},
	{"mitigations", "keeps the guest's programs from reading its kernel by speculation", "PAGE_TABLE_ISOLATION"},
	{"vxlan", "networks across hosts: docker swarm, kubernetes", "VXLAN IP_VS"},
	{"wireguard", "WireGuard", "WIREGUARD"},
	{"binfmt", "other architectures' programs, emulated", "BINFMT_MISC"},
}

// optionModules has the modules of options for which moduleOf would be wrong.
var optionModules = map[string][]string{
	"VIRTIO_FS":                      {"virtiofs"},
	"VIRTIO_VSOCKETS":                {"vmw_vsock_virtio_transport"},
	"BRIDGE_NETFILTER":               {"br_netfilter"},
	"BLK_DEV_LOOP":                   {"loop"},
	"IP_NF_IPTABLES":                 {"ip_tables"},
	"IP_NF_FILTER":                   {"iptable_filter"},
	"IP_NF_NAT":                      {"iptable_nat"},
	"IP_NF_MANGLE":                   {"iptable_mangle"},
	"IP_NF_RAW":                      {"iptable_raw"},
	"IP6_NF_IPTABLES":                {"ip6_tables"},
	"IP6_NF_FILTER":                  {"ip6table_filter"},
	"IP6_NF_NAT":                     {"ip6table_nat"},
	"IP6_NF_MANGLE":                  {"ip6table_mangle"},
	"IP6_NF_RAW":                     {"ip6table_raw"},
	"NFT_NAT":                        {"nft_nat", "nft_chain_nat"},
	"NETFILTER_XTABLES":              {"x_tables"},
	"NETFILTER_XT_TARGET_MASQUERADE": {"xt_MASQUERADE"},
	"NETFILTER_XT_TARGET_REDIRECT":   {"xt_REDIRECT"},
}

// modulesOf returns the modules of an option that can be a module, without CONFIG_.
func modulesOf(option string) []string {
	if names, ok := optionModules[option]; ok {
		return names
	}
	name := strings.ToLower(option)
	if rest, ok := strings.CutPrefix(name, "netfilter_xt_"); ok {
		return []string{"xt_" + strings.TrimPrefix(rest, "match_")}
	}
	return []string{strings.TrimSuffix(name, "_fs")}
}

// maxConfig bounds a kernel's configuration, in bytes; Debian's have 250 KiB.
const maxConfig = 4 << 20

// readConfig reads a kernel's configuration.
func readConfig(path string) (kernelConfig, error) {
	text, err := artifact.ReadFile(path, maxConfig)
	if err != nil {
		return nil, err
	}
	return parseConfig(string(text), false)
}

// Features returns all known features with what the kernel has of each, in a fixed order. It reads the kernel's
// configuration; the error wraps ErrDamaged if it cannot.
func (k *Kernel) Features() ([]Feature, error) {
	cfg, err := readConfig(k.Config)
	if err != nil {
		return nil, fmt.Errorf("%w %s: its configuration: %w (remove the folder and make the kernel again)", ErrDamaged, k.ID, err)
	}
	loaded := map[string]bool{}
	for _, path := range k.Modules {
		loaded[moduleName(filepath.Base(path))] = true
	}
	return featuresOf(cfg, loaded), nil
}

func featuresOf(cfg kernelConfig, loaded map[string]bool) []Feature {
	out := make([]Feature, 0, len(wants))
	for _, w := range wants {
		f := Feature{Name: w.name, Purpose: w.purpose, Has: Yes, Options: map[string]Has{}}
		for option := range strings.FieldsSeq(w.options) {
			has := No
			switch cfg["CONFIG_"+option] {
			case "y":
				has = Yes
			case "m":
				has = Module
				if !slices.ContainsFunc(modulesOf(option), func(m string) bool { return !loaded[m] }) {
					has = Yes
				}
			}
			f.Options["CONFIG_"+option] = has
			f.Has = least(f.Has, has)
		}
		out = append(out, f)
	}
	return out
}

func least(a, b Has) Has {
	switch {
	case a == No || b == No:
		return No
	case a == Module || b == Module:
		return Module
	}
	return Yes
}

// Hosts returns the kinds of KVM that the kernel runs on.
func (k *Kernel) Hosts() []Host {
	var out []Host
	for _, h := range []Host{Hardware, Soft} {
		if _, err := DefaultParams(k.Kind, h); err == nil {
			out = append(out, h)
		}
	}
	return out
}

// Own reports whether the kernel was built with options of its maker: BuildOptions.Config.
func (k *Kernel) Own() bool { return k.Inputs[ownConfigInput] != "" }

// ownConfigInput is the name of the hash of BuildOptions.Config among a kernel's inputs.
const ownConfigInput = "own options"

// NeedsLabel is the label of an image that names the kernel features that its programs need, separated by commas
// or spaces.
const NeedsLabel = "drowse.kernel.needs"

// maxNeeds bounds the features that an image can require.
const maxNeeds = 64

// ErrFeature means that no usable kernel has the required features, or that one of them is unknown.
var ErrFeature = errors.New("no kernel has what is needed")

// ParseNeeds reads the value of NeedsLabel. For an unknown feature the error wraps ErrFeature and names the known.
func ParseNeeds(value string) ([]string, error) {
	var out []string
	for _, name := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' }) {
		if !slices.ContainsFunc(wants, func(w wanted) bool { return w.name == name }) {
			var known []string
			for _, w := range wants {
				known = append(known, w.name)
			}
			return nil, fmt.Errorf("%w: feature %.40q is not known (known are %s)", ErrFeature, name, strings.Join(known, ", "))
		}
		if out = append(out, name); len(out) > maxNeeds {
			return nil, fmt.Errorf("%w: more than %d features are asked for", ErrFeature, maxNeeds)
		}
	}
	return out, nil
}

// missing returns those of needs that the kernel lacks, or has in modules that nothing loads.
func (k *Kernel) missing(needs []string) ([]Feature, error) {
	if len(needs) == 0 {
		return nil, nil
	}
	all, err := k.Features()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(f Feature) bool { return f.Has == Yes || !slices.Contains(needs, f.Name) }), nil
}

// Need fails with ErrFeature, and with the remedy, if the kernel lacks some of the named features.
func (k *Kernel) Need(names []string) error {
	lacks, err := k.missing(names)
	if err == nil && len(lacks) > 0 {
		err = fmt.Errorf("%w: %s lacks %s", ErrFeature, k.ID, remedies(lacks, k.Kind))
	}
	return err
}

// Choose returns the kernel of the cache for a VM that names none. It must run on this kind of host and have all
// features of needs. Of those kernels Choose takes the newest built one; else the newest built with options of its
// maker; else the newest of Debian's. Without needs it takes a kernel with own options only if there is no other.
// The error wraps ErrNotFound if the cache has none that the host could run, and ErrFeature if none has what is
// needed.
func Choose(cacheDir string, host Host, needs []string) (*Kernel, error) {
	all, err := List(cacheDir) // newest first
	if err != nil {
		return nil, err
	}
	rank := func(k *Kernel) int {
		switch {
		case k.Kind == Built && !k.Own():
			return 0
		case k.Kind == Built && len(needs) > 0:
			return 1
		case k.Kind == Debian:
			return 2
		}
		return 3
	}
	slices.SortStableFunc(all, func(a, b *Kernel) int { return rank(a) - rank(b) })
	var closest *Kernel
	var lacks []Feature
	for _, k := range all {
		if !slices.Contains(k.Hosts(), host) {
			continue
		}
		missing, err := k.missing(needs)
		if err != nil {
			return nil, err
		}
		if len(missing) == 0 {
			return k, nil
		}
		if closest == nil || len(missing) < len(lacks) {
			closest, lacks = k, missing
		}
	}
	if closest != nil {
		return nil, fmt.Errorf("%w: %s, which comes closest, lacks %s", ErrFeature, closest.ID, remedies(lacks, closest.Kind))
	}
	if len(all) > 0 {
		return nil, fmt.Errorf("%w for this host: Debian's kernel does not run on a KVM without hardware virtualisation (make one with kernel.Build)", ErrNotFound)
	}
	return nil, fmt.Errorf("%w: make one with kernel.Build, or on hardware take Debian's with kernel.Fetch", ErrNotFound)
}

// remedies says what a kernel lacks, and how to get it.
func remedies(missing []Feature, kind Kind) string {
	var names, options, modules []string
	for _, f := range missing {
		names = append(names, f.Name)
		options = append(options, f.Lacks()...)
		modules = append(modules, f.Modules()...)
	}
	slices.Sort(options)
	slices.Sort(modules)
	text := strings.Join(names, ", ")
	if kind == Debian && len(modules) > 0 {
		return fmt.Sprintf("%s (have its modules loaded: drowse kernel fetch --module %s; or name a kernel with --kernel)", text, strings.Join(slices.Compact(modules), ","))
	}
	return fmt.Sprintf("%s (build one with these options set to y: drowse kernel build --config FILE with %s; or name a kernel with --kernel)", text, strings.Join(slices.Compact(options), " "))
}
