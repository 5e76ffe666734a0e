package spec

import (
	"fmt"
)

// HookPolicy says what hooks in the guest mean for what they are run before.
type HookPolicy string

// The policies. The zero value is what the VM's Spec says, and there HooksRequire.
const (
	// HooksRequire: a hook that fails or is late refuses it, and so does a guest
	// whose agent does not answer, which could not be woken either.
	HooksRequire HookPolicy = "require"
	// HooksIgnore: hooks are run, and what fails is reported.
	HooksIgnore HookPolicy = "ignore"
	// HooksSkip: the guest is not asked.
	HooksSkip HookPolicy = "skip"
)

// Validate says what is wrong with it, by an ErrInvalid.
func (p HookPolicy) Validate() error {
	switch p {
	case "", HooksRequire, HooksIgnore, HooksSkip:
		return nil
	}
	return fmt.Errorf("%w: hooks %q: use %q, %q or %q", ErrInvalid, string(p), HooksRequire, HooksIgnore, HooksSkip)
}

// Hooks says how hooks in the guest (executables in /etc/drowse/hooks.d) are run.
type Hooks struct {
	Policy HookPolicy `json:"policy,omitempty"`
	// TimeoutSeconds is the time for one hook, and AllSeconds for all of one event
	// together: 1 to 300. Defaults: 10 and 30.
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
	for _, n := range []int{h.TimeoutSeconds, h.AllSeconds} {
		if n < 0 || n > MaxHookSeconds {
			return fmt.Errorf("%w: %d s for hooks: use 1 to %d", ErrInvalid, n, MaxHookSeconds)
		}
	}
	return h.Policy.Validate()
}

// Effective is what holds when over was asked for.
func (h Hooks) Effective(over HookPolicy) HookPolicy {
	switch {
	case over != "":
		return over
	case h.Policy != "":
		return h.Policy
	}
	return HooksRequire
}
