package reset

// Kind is the kind of an event.
type Kind int

// The kinds of events.
const (
	// Reset means that the guest reboots.
	Reset Kind = iota + 1
	// PowerOff means that the guest has shut down cleanly.
	PowerOff
	// Panicked means that the guest's kernel has given up.
	Panicked
	// CrashLoaded means that the kernel has failed and now runs a crash kernel, which will reset the machine
	// itself.
	CrashLoaded
)

// String returns a word for messages.
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

// Event is one report of the guest.
type Event struct {
	Kind Kind
	// Via names the register that the guest used.
	Via string
}

// Report receives events. It runs on the vCPU's thread, as often as the guest likes, and must not block.
type Report func(Event)
