// Package confine confines a child process that a hostile guest may take over.
//
// The keeper calls [Start]. The child is in new namespaces and in a cgroup, and has a user id that no other child has.
// When it has opened what it needs, it calls [Enter], which takes its files, rights and user id away, and then
// [Lock], which leaves it the system calls of docs/JAIL.md. Neither can be undone. [Probe] says which of these walls a
// host has.
//
// The child of a keeper that is not root keeps the keeper's user id, in a namespace of users. It has a cgroup only
// where the keeper may make one.
//
// A child consists of threads of Go without cgo: each wall must stand for all threads.
package confine
