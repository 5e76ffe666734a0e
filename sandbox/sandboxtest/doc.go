// Package sandboxtest has VMs in memory, for tests of programs that embed package sandbox: without /dev/kvm, without
// root, without a network, and without running anything on the host.
//
// What stands in for the real thing is one VM (process.VM), below its process: an embedder's possible mistakes lie
// above it. So specs, records, locks, metadata, phases, events, hooks of the host, idle times, wake locks, sleeps,
// forks, sweeps, orders and errors are those of packages sandbox, state, pool, control and process. They run in
// this process, a goroutine for each VM. Snapshots and disks are real files of packages snapshot and rootfs/disk.
// RAM is one empty page; the guest's memory is a part of the machine's state.
//
// A guest is one of package fakeguest: commands are Go functions. Files below /run, /tmp and /dev/shm are in its
// memory, all others on its disk, so a VM whose process was killed boots with the latter. Commands do not survive
// a sleep: the caller loses the connection, as with any sleep, and the command is killed. A network policy is
// checked, compiled and kept, but there are no packets. The processor time of a VM is that of the test.
package sandboxtest
