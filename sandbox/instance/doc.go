// Package instance runs one VM in this process. It assembles the machine, devices, disks, network and memory for a
// boot, a restore or a fork, talks to the agent in the guest, and captures all of it. It knows nothing of names,
// records or other processes.
package instance
