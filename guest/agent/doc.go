// Package agent is the service inside a VM: at the host's request it starts
// processes, moves files, and brings a restored guest up to date.
//
// One idea shapes it: the guest's kernel may be slow, up to a thousand times
// slower than its user code. So the number of system calls, context switches,
// page faults and processes counts, not the work in between. The agent
// therefore polls without waking the scheduler's monitor thread, starts no
// thread and no timer for an idle connection, and grows its buffers from one
// page.
package agent
