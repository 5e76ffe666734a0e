// Package process is the life of a VM's process: [ServeProcess] takes an order, boots or restores the guest in an
// instance.Instance, answers on the control socket, and ends when the guest has ended or sleeps. It holds the lock of
// the VM's record as long as it lives.
package process
