package sandbox

import (
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// ErrNoKVM and ErrNoPermission are why a host cannot run VMs.
var (
	ErrNoKVM        = kvm.ErrNoKVM
	ErrNoPermission = kvm.ErrNoPermission
)
