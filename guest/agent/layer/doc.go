// Package layer makes a layer of a container image from what has been written in a VM.
//
// The one idea of this folder: the upper directory of the VM's overlay is that layer already, in another notation. Pack
// writes it as the OCI image specification does ("Layer Filesystem Changeset"). Before that, Serve brings the machine
// to rest: it ends all processes but the agent, and empties what is in memory alone, so that the next command finds
// what it would find in a VM from the layer.
//
// It runs in a process of the agent, as root: "drowse-agent layer".
package layer
