// Package hosthooks runs the hooks of the host: executables that the operator has put into the directory hooks.d of a
// store, and functions of the program. It knows the events that they are told of, and nothing of VMs.
package hosthooks
