//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
)

// resizes tells of changes of the terminal's size, until stop is called.
func resizes() (changed <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}

// drawn makes the terminal obey escape sequences, until the returned function is called: here it always does.
func drawn(*os.File) (restore func()) { return func() {} }
