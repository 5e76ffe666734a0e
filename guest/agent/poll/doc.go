// Package poll reads and writes pipes, terminals and sockets on the runtime's poller without waking the scheduler's
// monitor thread, which costs a guest with a slow kernel several milliseconds each time.
package poll
