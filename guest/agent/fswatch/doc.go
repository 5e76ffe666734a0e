// Package fswatch tells what changes in directories, by inotify(7): also below them, where the kernel
// watches single directories only. It is part of the guest's agent. All that it keeps is bounded, and
// what it could not see it says.
package fswatch
