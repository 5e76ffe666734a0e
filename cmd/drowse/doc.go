// Command drowse runs sandboxes: real Linux VMs that sleep while idle and wake with memory, processes and files as
// they were. It is wiring: the work is in the packages of this module, above all in sandbox.
package main
