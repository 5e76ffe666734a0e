// Package limits says what the awake VMs of a store may have of the host together, and holds them to it. No process has
// to be alive for that.
package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Limits are what the awake VMs of a store may have of the host together. They hold for starts from the next on.
type Limits struct {
	// MemoryOvercommit is how many times the host's memory the RAM of all awake VMs may add up to: few guests use all
	// of theirs. At least MinOvercommit.
	MemoryOvercommit float64 `json:"memory_overcommit"`
	// WakeReservePercent of that is for VMs that wake; those that boot, are cloned or forked leave it free.
	WakeReservePercent int `json:"wake_reserve_percent"`
	// MemoryWaitSeconds is how long a start waits for others to end or sleep before it fails.
	MemoryWaitSeconds int `json:"memory_wait_seconds"`
}

// Bounds of Limits.
const (
	MinOvercommit         = 0.1
	MaxOvercommit         = 1000
	MaxWakeReservePercent = 90
	MaxMemoryWaitSeconds  = 3600
)

// ErrLimits says that limits cannot be like that.
var ErrLimits = errors.New("impossible limits")

// Default holds for a store without a file of limits.
var Default = Limits{MemoryOvercommit: 4, WakeReservePercent: 10, MemoryWaitSeconds: 30}

const limitsFile = "limits.json"

// Read returns those of the store in a directory.
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

// Write replaces those of the store in a directory.
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
	return nil
}
