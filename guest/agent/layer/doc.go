// Package layer gives what has been written in a VM, as a layer of a container image.
//
// The one idea of this folder: the upper directory of the VM's overlay is that layer already, spelled otherwise. Pack
// spells it as the OCI image specification does ("Layer Filesystem Changeset"), and Serve brings the machine to rest
// before: nothing but the agent runs on, and what is in memory alone is emptied, so that the next command finds what a
// VM from the layer would have.
//
// It runs as a process of the agent's own, as root: "drowse-agent layer".
package layer
