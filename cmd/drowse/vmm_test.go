package main

import "os"

// The program of these tests is drowse and the process of a VM as well: see guesttest.Main.
func init() {
	vmmCommand = func() ([]string, error) {
		self, err := os.Executable()
		return []string{self, "vmm"}, err
	}
}
