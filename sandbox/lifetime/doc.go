// Package lifetime decides how long sandboxes and their snapshots last. It is a pure function of what there is and what
// time it is: it reads no file, asks no clock and removes nothing, so what it decides can be tested for any
// moment, and shown before it is done.
package lifetime
