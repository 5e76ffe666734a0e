package doctor

import (
	"fmt"
	"strings"
)

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	OK       Status = "ok"
	Missing  Status = "missing"  // it does not exist
	Degraded Status = "degraded" // it exists, but not as it should be
	Unknown  Status = "unknown"  // this process cannot find out
)

// Check is one examined property.
type Check struct {
	Group  string `json:"group"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Detail is the finding.
	Detail string `json:"detail"`
	// Consequence is the consequence and the remedy. It is empty if all is well.
	Consequence string `json:"consequence"`
	// Required means that VMs run only if the status is ok or degraded.
	Required bool `json:"required"`
}

// Kind is the kind of KVM of a host.
type Kind string

// The kinds of KVM.
const (
	HardwareVMX  Kind = "hardware-vmx" // Intel VT-x
	HardwareSVM  Kind = "hardware-svm" // AMD-V
	Hardware     Kind = "hardware"     // one of them, unknown which
	Soft         Kind = "soft"         // none: guest kernels are interpreted
	NoKVM        Kind = "none"
	NoPermission Kind = "no-permission"
	Broken       Kind = "broken" // /dev/kvm exists, but no VM can be made
)

// KVM describes the KVM of a host.
type KVM struct {
	Kind Kind `json:"kind"`
	// VendorModule is the kernel module that does the work. It is empty if unknown, as when it is built in.
	VendorModule string `json:"vendor_module"`
	// Nested means that the host is a virtual machine itself, so that its KVM is slower than on bare metal. Nil
	// means unknown or meaningless.
	Nested *bool `json:"nested"`
	// CreateVMMs and CreateVMMaxMs are the median and the longest time to make an empty VM over a few tries, in
	// milliseconds. Zero if none could be made.
	CreateVMMs    float64 `json:"create_vm_ms"`
	CreateVMMaxMs float64 `json:"create_vm_max_ms"`
}

// Report describes a host.
type Report struct {
	KVM    KVM     `json:"kvm"`
	Checks []Check `json:"checks"`
	// CanRun means that VMs can run here: nothing required is missing.
	CanRun bool `json:"can_run"`
}

// canRun decides from the checks. Unknown counts as missing.
func canRun(checks []Check) bool {
	for _, c := range checks {
		if c.Required && c.Status != OK && c.Status != Degraded {
			return false
		}
	}
	return true
}

// group collects the checks of one subject.
type group struct {
	name   string
	checks []Check
}

func (g *group) add(name string, s Status, detail, consequence string) {
	g.put(Check{Name: name, Status: s, Detail: detail, Consequence: consequence})
}

func (g *group) require(name string, s Status, detail, consequence string) {
	g.put(Check{Name: name, Status: s, Detail: detail, Consequence: consequence, Required: true})
}

func (g *group) put(c Check) {
	c.Group = g.name
	if c.Status == OK {
		c.Consequence = ""
	}
	g.checks = append(g.checks, c)
}

// unless returns s if something is wrong, and OK otherwise.
func unless(wrong bool, s Status) Status {
	if wrong {
		return s
	}
	return OK
}

// bytesText formats a size for people.
func bytesText(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
}

// oneLine makes a detail fit on one line of a table.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
