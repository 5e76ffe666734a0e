package reset

// Kind is what the guest has done.
type Kind int

// What a guest can do to itself.
const (
	// Reset is a reboot.
	Reset Kind = iota + 1
	// PowerOff is a clean shutdown.
	PowerOff
	// Panicked is a kernel that has given up.
	Panicked
	// CrashLoaded is a kernel that has failed and now runs a crash kernel,
	// which is going to reset the machine itself.
	CrashLoaded
)

// String is a word for messages.
func (k Kind) String() string {
	switch k {
	case Reset:
		return "reset"
	case PowerOff:
		return "power off"
	case Panicked:
		return "panic"
	case CrashLoaded:
		return "crash kernel loaded"
	}
	return "unknown"
}

// Event is one such report.
type Event struct {
	Kind Kind
	// Via names the register that the guest used.
	Via string
}

// Report receives events. It is called on the vCPU's thread, as often as the
// guest likes, and must not block.
type Report func(Event)
