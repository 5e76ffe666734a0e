package main

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// sysFinitModule is the number of finit_module(2) on x86-64; package syscall is older than it.
const sysFinitModule = 313

// finitModule inserts the module in f with the given parameters.
func finitModule(f *os.File, params string) error {
	p, err := syscall.BytePtrFromString(params)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(sysFinitModule, f.Fd(), uintptr(unsafe.Pointer(p)), 0)
	runtime.KeepAlive(f)
	if errno != 0 {
		return errno
	}
	return nil
}
