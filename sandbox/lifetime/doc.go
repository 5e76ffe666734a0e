// Package lifetime decides how long sandboxes and their snapshots last. It is a pure function of the state and the
// time: it reads no file, asks no clock and removes nothing. So its decisions can be tested for any moment, and
// shown before they are carried out.
package lifetime
