// Command guestinit is PID 1 of the virtual machine: it loads modules, makes the host's file system the root, runs one
// command, sends its output and its status to the host, and turns the machine off. Called by the name modprobe it is
// the kernel's module loader. It is static and uses the standard library alone; package hwkvm embeds its source and
// builds it.
package main
