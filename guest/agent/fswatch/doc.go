// Package fswatch reports changes in directories, by inotify(7): also below them, where the kernel
// watches single directories only. It is part of the guest's agent. Its memory is bounded, and it
// reports what it could not see.
package fswatch
