// Package proc starts processes for the host and keeps account of them: their user, their terminal or pipes, their
// output, their signals and their end.
//
// A [Table] has the processes by id. An [Output] holds a process's output until the host takes it. A session is one
// connection attached to a process, which may outlive it. All statuses come through one reaper, which as PID 1
// collects orphans as well.
package proc
