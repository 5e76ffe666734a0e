// Package process runs the process of one VM. [ServeProcess] takes an order, boots or restores the guest in an
// instance.Instance, answers on the control socket, and returns when the guest has ended or sleeps. The process
// holds the lock of the VM's record as long as it lives.
package process
