package main

import (
	"os"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// The program of these tests is drowse and the process of a VM as well: see guesttest.Main.
func init() {
	vmmCommand = func() ([]string, error) {
		self, err := os.Executable()
		return guesttest.VMCommand(self), err
	}
}
