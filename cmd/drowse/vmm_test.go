//go:build linux

package main

import (
	"os"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// The test binary is both drowse and the process of a VM. See guesttest.Main.
func init() {
	vmmCommand = func() ([]string, error) {
		self, err := os.Executable()
		return guesttest.VMCommand(self), err
	}
}
