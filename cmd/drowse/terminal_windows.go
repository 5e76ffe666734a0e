package main

import (
	"os"
	"time"

	"golang.org/x/sys/windows"
)

// resizePoll is how often the console's size is looked at: Windows has no signal for it.
const resizePoll = 250 * time.Millisecond

// resizes tells when to look at the console's size, until stop is called.
func resizes() (changed <-chan time.Time, stop func()) {
	t := time.NewTicker(resizePoll)
	return t.C, t.Stop
}

// drawn makes the console obey escape sequences, until the returned function is called.
func drawn(f *os.File) (restore func()) {
	h, was := windows.Handle(f.Fd()), uint32(0)
	if windows.GetConsoleMode(h, &was) != nil || windows.SetConsoleMode(h, was|windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING) != nil {
		return func() {} // it is none, or an old one
	}
	return func() { _ = windows.SetConsoleMode(h, was) }
}
