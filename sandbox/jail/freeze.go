package jail

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// A VM is frozen, with its whole process, while it may not run but is to go on: a thread that waits for memory cannot
// be paused, and its guest must not go on when that comes. Guests see a time in which their machine stood still.

// freezeTime is how long a process may take to stand still.
const freezeTime = time.Second

// errFrozen is the error of what is asked while a VM is frozen.
var errFrozen = errors.New("the VM is frozen")

// waitsForMemory is why a VM is frozen whose guest waits for memory for long.
const waitsForMemory = "frozen: the store does not give memory or disk that its guest needs: it goes on when the store does, and ends after some minutes"

// Freeze stops the VM, and returns when nothing of its guest runs. After an error that may not be so. Each call needs
// one of Thaw with the same reason, whatever it returns. Only Fail and Close end it before.
func (v *VM) Freeze(why string) error {
	v.freezing.Lock()
	defer v.freezing.Unlock()
	v.mu.Lock()
	v.frozen = append(v.frozen, why)
	first := len(v.frozen) == 1
	v.mu.Unlock()
	if !first && v.still {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), freezeTime)
	defer cancel()
	err := v.jail.proc.Freeze(ctx)
	v.still = err == nil
	if err != nil {
		return fmt.Errorf("freezing the VM: %w", err)
	}
	v.log.Warn("the VM stands still", "why", why)
	return nil
}

// Thaw undoes a Freeze.
func (v *VM) Thaw(why string) {
	v.freezing.Lock()
	defer v.freezing.Unlock()
	v.mu.Lock()
	if i := slices.Index(v.frozen, why); i >= 0 {
		v.frozen = slices.Delete(v.frozen, i, i+1)
	}
	left := len(v.frozen)
	v.mu.Unlock()
	if left > 0 {
		return
	}
	v.still = false
	if err := v.jail.proc.Thaw(); err != nil {
		v.log.Error("letting the VM go on", "error", err)
	}
	v.log.Info("the VM goes on")
}

// Frozen returns why the VM is frozen; it is empty if it is not.
func (v *VM) Frozen() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.frozen) == 0 {
		return ""
	}
	return v.frozen[0]
}

// waits freezes the VM while its guest has waited for memory for a while, until done is called.
func (v *VM) waits() (done func()) {
	frozen := make(chan struct{})
	late := time.AfterFunc(v.times.patience, func() {
		defer close(frozen)
		if err := v.Freeze(waitsForMemory); err != nil {
			v.log.Warn("its guest waits for memory", "error", err)
		}
	})
	return func() {
		if !late.Stop() {
			<-frozen
			v.Thaw(waitsForMemory)
		}
	}
}
