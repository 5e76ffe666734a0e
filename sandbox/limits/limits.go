// Package limits sets what the awake VMs of a store may use of the host together, and what the sandboxes of one owner
// may use, and enforces it. That needs no permanent process.
package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Limits are what the awake VMs of a store may use of the host together, and the sandboxes of each owner. New limits
// apply to later starts and creations; what runs already is left alone.
type Limits struct {
	// MemoryOvercommit is the ratio of the RAM of all awake VMs to the host's memory. It may exceed 1, since few
	// guests use all of their RAM. At least MinOvercommit.
	MemoryOvercommit float64 `json:"memory_overcommit"`
	// WakeReservePercent of that is reserved for VMs that wake. VMs that boot, are cloned or forked leave it free.
	WakeReservePercent int `json:"wake_reserve_percent"`
	// MemoryWaitSeconds is how long a start waits for other VMs to end or sleep before it fails.
	MemoryWaitSeconds int `json:"memory_wait_seconds"`
	// Owners are limits by the owner in the sandboxes' metadata; "" is that of sandboxes without one. DefaultOwner
	// are those of each owner that is not named. An owner that is named has nothing of DefaultOwner.
	Owners       map[string]Owner `json:"owners,omitempty"`
	DefaultOwner Owner            `json:"default_owner,omitzero"`
	// Classes limit each sandbox of a class. DefaultSandbox limits each one of the other classes.
	Classes        map[lifetime.Class]Sandbox `json:"classes,omitempty"`
	DefaultSandbox Sandbox                    `json:"default_sandbox,omitzero"`
}

// Bounds of Limits.
const (
	MinOvercommit         = 0.1
	MaxOvercommit         = 1000
	MaxWakeReservePercent = 90
	MaxMemoryWaitSeconds  = 3600
)

// ErrLimits means that limits are invalid.
var ErrLimits = errors.New("impossible limits")

// Default applies to a store without a file of limits.
var Default = Limits{MemoryOvercommit: 4, WakeReservePercent: 10, MemoryWaitSeconds: 30}

const limitsFile = "limits.json"

// Read returns the limits of the store in a directory.
func Read(dir string) (Limits, error) {
	path := filepath.Join(dir, limitsFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Default, nil
	}
	l := Default
	if err == nil {
		err = json.Unmarshal(b, &l)
	}
	if err == nil {
		err = l.validate()
	}
	if err != nil {
		return l, fmt.Errorf("reading the limits of the host in %s: %w: mend or remove the file", path, err)
	}
	return l, nil
}

// Write replaces the limits of the store in a directory.
func (l Limits) Write(dir string) error {
	if err := l.validate(); err != nil {
		return err
	}
	b, err := json.MarshalIndent(l, "", "\t")
	if err != nil {
		return err
	}
	return osfile.WriteFile(filepath.Join(dir, limitsFile), append(b, '\n'), 0o600)
}

func (l Limits) validate() error {
	switch {
	case !(l.MemoryOvercommit >= MinOvercommit && l.MemoryOvercommit <= MaxOvercommit):
		return fmt.Errorf("%w: memory overcommit of %g: %g to %d", ErrLimits, l.MemoryOvercommit, MinOvercommit, MaxOvercommit)
	case l.WakeReservePercent < 0 || l.WakeReservePercent > MaxWakeReservePercent:
		return fmt.Errorf("%w: %d%% of the memory for wakes: 0 to %d", ErrLimits, l.WakeReservePercent, MaxWakeReservePercent)
	case l.MemoryWaitSeconds < 0 || l.MemoryWaitSeconds > MaxMemoryWaitSeconds:
		return fmt.Errorf("%w: %d s of waiting for memory: 0 to %d", ErrLimits, l.MemoryWaitSeconds, MaxMemoryWaitSeconds)
	}
	for owner, o := range l.Owners {
		if err := o.validate(ownerName(owner)); err != nil {
			return err
		}
	}
	for class, s := range l.Classes {
		if err := class.Check(); err != nil {
			return fmt.Errorf("%w: %w", ErrLimits, err)
		}
		if err := s.validate("class " + string(class)); err != nil {
			return err
		}
	}
	return errors.Join(l.DefaultOwner.validate("default_owner"), l.DefaultSandbox.validate("default_sandbox"))
}
