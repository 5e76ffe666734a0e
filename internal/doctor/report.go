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
	Missing  Status = "missing"  // it is not there
	Degraded Status = "degraded" // it is there, but not as it should be
	Unknown  Status = "unknown"  // this process cannot find out
)

// Check is one thing that was looked at.
type Check struct {
	Group  string `json:"group"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Detail is what was found.
	Detail string `json:"detail"`
	// Consequence is what follows and what to do; empty if all is well.
	Consequence string `json:"consequence"`
	// Required says that no VM runs unless the status is ok or degraded.
	Required bool `json:"required"`
}

// Kind is the kind of KVM of a host.
type Kind string

// The kinds of KVM.
const (
	HardwareVMX  Kind = "hardware-vmx" // Intel VT-x
	HardwareSVM  Kind = "hardware-svm" // AMD-V
	Hardware     Kind = "hardware"     // one of them, it is not known which
	Soft         Kind = "soft"         // none: guest kernels are interpreted
	NoKVM        Kind = "none"
	NoPermission Kind = "no-permission"
	Broken       Kind = "broken" // there is a /dev/kvm, and no VM can be made
)

// KVM describes the KVM of a host.
type KVM struct {
	Kind Kind `json:"kind"`
	// VendorModule is the kernel module that does the work, or empty if it is not
	// known, as when it is built in.
	VendorModule string `json:"vendor_module"`
	// Nested says that the host is a virtual machine itself, so that its KVM is
	// slower than one on bare metal. nil if that is not known, or means nothing.
	Nested *bool `json:"nested"`
	// CreateVMMs is how long it takes to make an empty VM: the middle and the worst
	// of a few tries, in milliseconds. Zero if none could be made.
	CreateVMMs    float64 `json:"create_vm_ms"`
	CreateVMMaxMs float64 `json:"create_vm_max_ms"`
}

// Report is what is known of a host.
type Report struct {
	KVM    KVM     `json:"kvm"`
	Checks []Check `json:"checks"`
	// CanRun says that VMs can run here: nothing that is required is missing.
	CanRun bool `json:"can_run"`
}

// canRun decides from the checks. What is unknown does not count as there.
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

// unless is OK, or what a status is if something is wrong.
func unless(wrong bool, s Status) Status {
	if wrong {
		return s
	}
	return OK
}

// bytesText is a size for people.
func bytesText(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
}

// oneLine keeps a detail from spoiling a table.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
