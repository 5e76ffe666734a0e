package process

import (
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The limits of package spec must equal those of the packages that make machines: others do not compile.
var (
	_ = [1]int{}[spec.MaxVCPUs-boot.MaxVCPUs]
	_ = [1]int{}[spec.MinMemoryMiB<<20-guestmem.MinSize]
	_ = [1]int{}[spec.MaxMemoryMiB<<20-guestmem.MaxSize]
	_ = [1]int{}[spec.MaxMounts-(vmm.MaxDevices-7)]
	_ = [1]int{}[spec.MaxSecrets-secrets.MaxSecrets]
	_ = [1]int{}[spec.MaxSecretName-secrets.MaxName]
	_ = [1]int{}[spec.MaxSecret-secrets.MaxValue]
)

// allowance limits how often a guest can make this process act: a burst in a row, and then once per interval. The
// zero value has a whole burst left.
type allowance struct {
	left  int
	since time.Time // when left last grew; zero before the first take
}

// take reports whether the action is allowed now, and counts it if so.
func (a *allowance) take(now time.Time, burst int, every time.Duration) bool {
	if a.since.IsZero() {
		a.left, a.since = burst, now
	}
	if n := int(min(now.Sub(a.since)/every, time.Duration(burst))); n > 0 {
		a.left, a.since = min(a.left+n, burst), now
	}
	if a.left == 0 {
		return false
	}
	a.left--
	return true
}
