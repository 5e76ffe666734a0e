// Package hosthooks runs the hooks of the host: executables that the operator puts into the directory hooks.d of a
// store, and functions of the program. It knows the events that it passes to them, and nothing of VMs.
package hosthooks
