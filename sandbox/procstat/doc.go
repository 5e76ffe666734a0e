// Package procstat reads what the processes of a VM use of the host: proc(5). A VM has its own process, whose id is in
// its record, and that process has children: the confined process that holds the guest, and hooks that run.
package procstat
