package spec

import (
	"fmt"
	"time"
)

// Idle says when an unused VM goes to sleep by itself. The VM is in use while
//
//   - a command, a session, a copy or a forwarded connection has a connection to it, or the guest has one to a
//     program of the host's, through vsock; or a caller (Sandbox.WakeLock) or the VM itself ([Self]) holds it.
//     What the guest tells the VM's own process, of its services and hooks, does not count, nor does Watch;
//   - a packet passes on its network, either way; packets that its policy denies do not count;
//   - its processors work. Bursts of less than CPUPercent of the time until it sleeps, and of less than MaxIdleBurst,
//     do not count: a kernel and waiting programs have them now and then. The VM never sleeps during a burst;
//   - a snapshot or a fork of it is being made.
//
// Waiting in the guest is not use: a program that sleeps for an hour continues its sleep when the VM wakes. A hook in
// the guest before the sleep can refuse it (ErrHooks); the guest is asked again after the same time. The next command
// wakes a sleeping VM.
type Idle struct {
	// SleepSeconds is how long the VM must be unused: 1 to MaxIdleSeconds; 0 means that it never sleeps by itself.
	SleepSeconds int `json:"sleep_seconds,omitempty"`
	// CPUPercent is the most of one CPU that the VM's process, with its vCPUs, uses while the guest is idle: 1 to
	// 100. Default: 10.
	CPUPercent int `json:"cpu_percent,omitempty"`
}

// Default and limits of an Idle.
const (
	DefaultIdleCPUPercent = 10
	MaxIdleSeconds        = 30 * 24 * 60 * 60
	// MaxIdleBurst is the most processor time of bursts that do not count as use, in the time until a VM sleeps.
	MaxIdleBurst = 2 * time.Second
)

// Validate returns an ErrInvalid for values that are out of range.
func (i Idle) Validate() error {
	if i.SleepSeconds < 0 || i.SleepSeconds > MaxIdleSeconds {
		return InField("sleep_seconds", fmt.Errorf("%w: sleep after %d s: use 1 to %d, or 0 for never", ErrInvalid, i.SleepSeconds, MaxIdleSeconds))
	}
	if i.CPUPercent < 0 || i.CPUPercent > 100 {
		return InField("cpu_percent", fmt.Errorf("%w: idle below %d%% of a CPU: use 1 to 100", ErrInvalid, i.CPUPercent))
	}
	return nil
}

// After returns how long the VM must be unused; 0 means never.
func (i Idle) After() time.Duration { return time.Duration(i.SleepSeconds) * time.Second }
