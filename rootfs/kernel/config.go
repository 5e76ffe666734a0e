package kernel

import (
	"bufio"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

//go:embed config/guest.config
var guestConfig string

//go:embed patches/*.patch
var patchFiles embed.FS

// patch is a change to the kernel's source.
type patch struct {
	name string
	text string
}

// patches returns the patches in the order in which they apply: by name.
func patches() ([]patch, error) {
	names, err := fs.Glob(patchFiles, "patches/*.patch")
	if err != nil {
		return nil, err
	}
	var out []patch
	for _, n := range names {
		text, err := patchFiles.ReadFile(n)
		if err != nil {
			return nil, err
		}
		out = append(out, patch{strings.TrimPrefix(n, "patches/"), string(text)})
	}
	return out, nil
}

// kernelConfig maps the options of a .config to their values as written there. "n" and an option that is not set
// are the same, and are left out.
type kernelConfig map[string]string

// parseConfig reads a .config or a fragment of one. It refuses an option that is set twice to different values:
// readers differ in which of them holds. With keepUnset, it keeps options set to n, as "n".
func parseConfig(text string, keepUnset bool) (kernelConfig, error) {
	cfg, seen := kernelConfig{}, map[string]string{}
	s := bufio.NewScanner(strings.NewReader(text))
	for n := 1; s.Scan(); n++ {
		line := strings.TrimSpace(s.Text())
		var name, value string
		switch {
		case strings.HasPrefix(line, "CONFIG_"):
			var ok bool
			if name, value, ok = strings.Cut(line, "="); !ok || value == "" {
				return nil, fmt.Errorf("kernel configuration, line %d: %q has no value", n, line)
			}
		case strings.HasPrefix(line, "# CONFIG_") && strings.HasSuffix(line, " is not set"):
			name, value = strings.TrimSuffix(strings.TrimPrefix(line, "# "), " is not set"), "n"
		case line == "" || strings.HasPrefix(line, "#"):
			continue
		default:
			return nil, fmt.Errorf("kernel configuration, line %d: %q is neither an option nor a comment", n, line)
		}
		if old, ok := seen[name]; ok && old != value {
			return nil, fmt.Errorf("kernel configuration, line %d: %s is %s here and %s before", n, name, value, old)
		}
		seen[name] = value
		if value != "n" || keepUnset {
			cfg[name] = value
		}
	}
	return cfg, s.Err()
}

// vmmNeeds are options without which a built kernel does not reach its agent on one of its kinds of host, or does
// not survive a snapshot and restore correctly.
var vmmNeeds = []string{
	"64BIT", "SMP", "ACPI", "PNPACPI", "VMGENID", "PVPANIC_MMIO", "X86_MPPARSE", "PVH", "KVM_GUEST", "KVM_GUEST_SOFT", "SERIAL_8250_CONSOLE",
	"VIRTIO_MMIO", "VIRTIO_MMIO_CMDLINE_DEVICES", "VIRTIO_BLK", "VIRTIO_NET", "VIRTIO_VSOCKETS", "VIRTIO_BALLOON", "PAGE_REPORTING",
	"VIRTIO_CONSOLE", "HW_RANDOM_VIRTIO", "RANDOM_TRUST_BOOTLOADER", "EROFS_FS", "EXT4_FS", "OVERLAY_FS", "DEVTMPFS_MOUNT",
	"X86_IOPL_IOPERM", "FUSE_FS", "PROC_KCORE",
}

// vmmRefuses are options that must not be set, and why.
var vmmRefuses = map[string]string{
	"MODULES":            "nothing brings modules into the guest",
	"JUMP_LABEL":         "it patches code through int3, which a soft KVM does not know",
	"RANDOMIZE_BASE":     "addresses in System.map would not hold",
	"PCI":                "there is no PCI bus",
	"PTP_1588_CLOCK_KVM": "its vmcall hangs on a soft KVM",
	"UNWINDER_ORC":       "its tables are sorted at boot, 7 million instructions",
	"CMDLINE_OVERRIDE":   "the VMM's command line has to count",
}

// maxOwnConfig bounds BuildOptions.Config, in bytes.
const maxOwnConfig = 1 << 20

// withOwn returns the guest's configuration with the options of fragment in place of its own. The error wraps
// ErrUnsupported if a kernel with them could not run as a guest.
func withOwn(config, fragment string) (string, error) {
	if len(fragment) > maxOwnConfig {
		return "", fmt.Errorf("%w: own options of %d bytes, more than %d", ErrUnsupported, len(fragment), maxOwnConfig)
	}
	own, err := parseConfig(fragment, true)
	if err != nil {
		return "", fmt.Errorf("%w: own options: %w", ErrUnsupported, err)
	}
	if len(own) == 0 {
		return "", fmt.Errorf("%w: own options: there are none (use lines like CONFIG_VXLAN=y)", ErrUnsupported)
	}
	var wrong []string
	for name, value := range own {
		short := strings.TrimPrefix(name, "CONFIG_")
		switch why, refused := vmmRefuses[short]; {
		case value == "m":
			wrong = append(wrong, name+"=m: nothing brings modules into the guest, use y")
		case refused && value != "n":
			wrong = append(wrong, name+": "+why)
		case value != "y" && slices.Contains(vmmNeeds, short):
			wrong = append(wrong, name+" must be y: drowse needs it")
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return "", fmt.Errorf("%w: own options: %s", ErrUnsupported, strings.Join(wrong, "; "))
	}
	return mergeConfig(config, fragment)
}

// mergeConfig returns the text of base with the options of fragment in place of its own, as input for make
// olddefconfig.
func mergeConfig(base, fragment string) (string, error) {
	want, err := parseConfig(fragment, true)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for line := range strings.Lines(base) {
		name, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "# "), " is not set")
		name, _, _ = strings.Cut(name, "=")
		if _, ok := want[name]; !ok {
			out.WriteString(line)
		}
	}
	out.WriteString("\n")
	out.WriteString(fragment)
	return out.String(), nil
}

// checkConfig returns an error that names every option of fragment that does not hold in the finished
// configuration. Kconfig silently drops an option whose dependencies are not met; a kernel without, say, virtio
// would then fail only at boot.
func checkConfig(finished, fragment string) error {
	have, err := parseConfig(finished, false)
	if err != nil {
		return err
	}
	want, err := parseConfig(fragment, true)
	if err != nil {
		return err
	}
	var wrong []string
	for name, value := range want {
		got, ok := have[name]
		if !ok {
			got = "n"
		}
		if got != value {
			wrong = append(wrong, fmt.Sprintf("%s is %s, not %s", name, got, value))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	slices.Sort(wrong)
	return errors.New("the kernel's source does not take the options asked for (changed names or dependencies?): " + strings.Join(wrong, "; "))
}
