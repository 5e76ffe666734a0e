package spec

import (
	"fmt"
	"time"
)

// Idle says when a VM that nobody uses goes to sleep by itself. It is used while
//
//   - a command, a session, a copy or a forwarded connection has a connection to it, or the guest has one to a
//     program of the host's, through vsock; or somebody holds it (Sandbox.WakeLock), or it itself does ([Self]).
//     What the guest tells the VM's own process, of its services and hooks, does not count, nor does Watch;
//   - a packet passes on its network, either way; those that its policy denies do not count;
//   - its processors work, but for bursts that take less than CPUPercent of the time until it sleeps, and MaxIdleBurst: what a kernel
//     and programs that wait do now and then. It does not go to sleep in the middle of one;
//   - a snapshot or a fork of it is being made.
//
// What a guest merely waits for is no use: a program that sleeps for an hour goes on sleeping when the VM is woken.
// A hook in the guest before the sleep can refuse it (ErrHooks); it is asked again after as long as before. A VM
// that sleeps is woken by the next command.
type Idle struct {
	// SleepSeconds is how long nobody must have used it: 1 to MaxIdleSeconds; 0 is for ever.
	SleepSeconds int `json:"sleep_seconds,omitempty"`
	// CPUPercent is how much of one CPU the VM's process uses at most, that of its vCPUs included, while
	// the guest does nothing: 1 to 100. Default: 10.
	CPUPercent int `json:"cpu_percent,omitempty"`
}

// Default and limits of an Idle.
const (
	DefaultIdleCPUPercent = 10
	MaxIdleSeconds        = 30 * 24 * 60 * 60
	// MaxIdleBurst is the most processor time of bursts in the time until a VM sleeps that is no use of it.
	MaxIdleBurst = 2 * time.Second
)

// Validate says what is wrong with it, by an ErrInvalid.
func (i Idle) Validate() error {
	if i.SleepSeconds < 0 || i.SleepSeconds > MaxIdleSeconds {
		return fmt.Errorf("%w: sleep after %d s: use 1 to %d, or 0 for never", ErrInvalid, i.SleepSeconds, MaxIdleSeconds)
	}
	if i.CPUPercent < 0 || i.CPUPercent > 100 {
		return fmt.Errorf("%w: idle below %d%% of a CPU: use 1 to 100", ErrInvalid, i.CPUPercent)
	}
	return nil
}

// After is how long it has to be unused; 0 is never.
func (i Idle) After() time.Duration { return time.Duration(i.SleepSeconds) * time.Second }
