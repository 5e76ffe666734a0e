package spec

import (
	"fmt"
)

// HookPolicy says what a failed hook in the guest means for the operation that it runs before.
type HookPolicy string

// The policies. The zero value means the policy in the VM's Spec; there it means HooksRequire.
const (
	// HooksRequire: a hook that fails or is late refuses the operation. So does a guest whose agent does not
	// answer: that guest could not be woken either.
	HooksRequire HookPolicy = "require"
	// HooksIgnore: the hooks run, and their failures are reported.
	HooksIgnore HookPolicy = "ignore"
	// HooksSkip: the guest is not asked to run hooks.
	HooksSkip HookPolicy = "skip"
)

// Validate returns an ErrInvalid for an unknown policy.
func (p HookPolicy) Validate() error {
	switch p {
	case "", HooksRequire, HooksIgnore, HooksSkip:
		return nil
	}
	return fmt.Errorf("%w: hooks %q: use %q, %q or %q", ErrInvalid, string(p), HooksRequire, HooksIgnore, HooksSkip)
}

// Hooks says how hooks in the guest (executables in /etc/drowse/hooks.d) run.
type Hooks struct {
	Policy HookPolicy `json:"policy,omitempty"`
	// TimeoutSeconds is the time for one hook. AllSeconds is the time for all hooks of one event together. Both
	// are 1 to 300. Defaults: 10 and 30.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
	AllSeconds     int `json:"all_seconds,omitempty"`
}

// Defaults and limit of a Hooks.
const (
	DefaultHookSeconds = 10
	DefaultAllSeconds  = 30
	MaxHookSeconds     = 300
)

func (h Hooks) check() error {
	for field, n := range map[string]int{"timeout_seconds": h.TimeoutSeconds, "all_seconds": h.AllSeconds} {
		if n < 0 || n > MaxHookSeconds {
			return InField(field, fmt.Errorf("%w: %d s for hooks: use 1 to %d", ErrInvalid, n, MaxHookSeconds))
		}
	}
	return InField("policy", h.Policy.Validate())
}

// Effective returns the policy that applies to a request for over.
func (h Hooks) Effective(over HookPolicy) HookPolicy {
	switch {
	case over != "":
		return over
	case h.Policy != "":
		return h.Policy
	}
	return HooksRequire
}
