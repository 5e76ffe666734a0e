package process

import (
	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The limits of package spec are those of the packages that make machines: neither difference is anything but 0.
var (
	_ = [1]int{}[spec.MaxVCPUs-boot.MaxVCPUs]
	_ = [1]int{}[spec.MinMemoryMiB<<20-guestmem.MinSize]
	_ = [1]int{}[spec.MaxMemoryMiB<<20-guestmem.MaxSize]
	_ = [1]int{}[spec.MaxMounts-(vmm.MaxDevices-7)]
	_ = [1]int{}[spec.MaxSecrets-secrets.MaxSecrets]
	_ = [1]int{}[spec.MaxSecretName-secrets.MaxName]
	_ = [1]int{}[spec.MaxSecret-secrets.MaxValue]
)
