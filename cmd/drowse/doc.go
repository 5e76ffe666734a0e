// Command drowse runs sandboxes: real Linux VMs that sleep when nobody uses them and
// wake with memory, processes and files as they were. It is wiring: what it does is
// in the packages of this module, above all in sandbox.
package main
