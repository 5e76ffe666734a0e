// Package instance runs one VM in this process: it puts the machine, its devices, disks, network and memory together
// for a boot, a restore or a fork, speaks with the agent in the guest, and captures all of it. It knows neither names,
// records nor other processes.
package instance
