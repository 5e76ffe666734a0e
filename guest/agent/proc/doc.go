// Package proc starts processes for the host and keeps account of them: who they run as, their terminal or pipes, what
// they write, signals, how they end.
//
// A [Table] has the processes by id. An [Output] holds what one has written until it is taken. A session is one
// connection attached to a process, which may live on without it. All statuses come through one reaper, which as PID 1
// collects orphans as well.
package proc
